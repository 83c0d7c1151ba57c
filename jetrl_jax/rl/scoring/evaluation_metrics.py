"""Accuracy on a held-out set from n sampled answers per problem.

mean@k is the accuracy of one answer. best@k says whether one of k answers is
right, and maj@k whether a majority vote of k finds the right one. Confidence
intervals are normal intervals over problems (1.96 standard errors of the
per-problem values), because problems are independent and the samples of one
problem are not. They need no random numbers. For a handful of problems they are
too narrow.
"""

import math
from collections.abc import Sequence

import numpy as np

from jetrl_jax.core.typing import Array, Float, NpArray, Shaped

# 97.5% quantile of the normal distribution: a two-sided 95% interval.
Z_95 = 1.96

# One extracted and normalised answer per sample; None if there was none.
Answers = Sequence[Sequence[str | None]]


def mean_at_k(
    scores_PG: Shaped[Array | NpArray, 'P G'], k: int
) -> Float[NpArray, ' P']:
  """Returns the mean score of the first k samples of each problem.

  Args:
    scores_PG: scores, usually 1 for right and 0 for wrong.
    k: number of samples to use, in [1, G].

  Returns:
    float64, one value per problem.

  Raises:
    ValueError: k is outside [1, G].
  """
  return _checked(scores_PG, k)[:, :k].mean(axis=1)


def best_at_k(
    scores_PG: Shaped[Array | NpArray, 'P G'], k: int
) -> Float[NpArray, ' P']:
  """Estimates the expected best score of k samples, without bias, from all G.

  It is the mean of max(scores) over all subsets of k of the G samples:

      sum_i s_(i) C(i - 1, k - 1) / C(G, k),   s_(1) <= ... <= s_(G)

  For scores 0 and 1 with c right answers it is pass@k, that is
  1 - C(G - c, k) / C(G, k).

  Args:
    scores_PG: scores, usually 1 for right and 0 for wrong.
    k: samples drawn without replacement, in [1, G].

  Returns:
    float64, one value per problem.

  Raises:
    ValueError: k is outside [1, G].

  References:
    pass@k: Chen et al. 2021, arXiv:2107.03374, eq. 1.
  """
  sorted_PG = np.sort(_checked(scores_PG, k), axis=1)
  n = sorted_PG.shape[1]
  # Python integers, because a float64 cannot hold C(256, 128) exactly.
  weights_G = np.array(
      [math.comb(i, k - 1) / math.comb(n, k) for i in range(n)]
  )
  return sorted_PG @ weights_G


def maj_at_k(
    scores_PG: Shaped[Array | NpArray, 'P G'], answers: Answers, k: int
) -> Float[NpArray, ' P']:
  """Returns the score of the majority answer among the first k samples.

  Among equally frequent answers the first one wins. Samples without an answer
  do not vote; if no sample votes, the score is 0. The result is the score of
  the first sample with the winning answer.

  Args:
    scores_PG: scores, usually 1 for right and 0 for wrong.
    answers: P rows of G answers, compared as strings.
    k: number of samples that vote, in [1, G].

  Returns:
    float64, one value per problem.

  Raises:
    ValueError: k is outside [1, G], or answers and scores differ in shape.
  """
  scores_PG = _checked(scores_PG, k)
  if [len(row) for row in answers] != [scores_PG.shape[1]] * len(scores_PG):
    raise ValueError(
        f'answers has rows of lengths {sorted({len(row) for row in answers})}'
        f' in {len(answers)} rows; scores has shape {scores_PG.shape}.'
    )
  voted_P = np.zeros(len(scores_PG))
  for p, row in enumerate(answers):
    votes: dict[str, int] = {}
    for answer in row[:k]:
      if answer is not None:
        votes[answer] = votes.get(answer, 0) + 1
    if votes:
      # A dict keeps insertion order, and max returns the first maximum.
      winner = max(votes, key=lambda answer: votes[answer])
      voted_P[p] = scores_PG[p, list(row).index(winner)]
  return voted_P


def by_problem(
    scores_PG: Shaped[Array | NpArray, 'P G'], answers: Answers
) -> dict[str, Float[NpArray, ' _']]:
  """Returns mean@G, best@G and maj@G of each problem that has a score.

  Args:
    scores_PG: scores, NaN where a sample has none: it is left out, and with
      it a problem whose samples all are.
    answers: P rows of G answers.

  Returns:
    'mean', 'best' and 'maj' of the problems, without 'maj' where no sample has
    an answer; empty where none has a score.
  """
  scores_PG = np.asarray(scores_PG, np.float64)
  n = scores_PG.shape[1]
  votes = any_votes(answers)
  if not np.isnan(scores_PG).any():
    found = {'mean': mean_at_k(scores_PG, n), 'best': best_at_k(scores_PG, n)}
    return found | ({'maj': maj_at_k(scores_PG, answers, n)} if votes else {})
  rows = []
  for scores_G, row in zip(scores_PG, answers, strict=True):
    kept = np.flatnonzero(~np.isnan(scores_G))
    if len(kept):
      row = [row[int(g)] for g in kept]
      rows.append(by_problem(scores_G[None, kept], [row]))
  if not rows:
    return {}
  names = ('mean', 'best', 'maj') if votes else ('mean', 'best')
  # Without a vote the score of a majority is 0.
  return {
      name: np.concatenate([row.get(name, np.zeros(1)) for row in rows])
      for name in names
  }


def any_votes(answers: Answers) -> bool:
  """Returns whether any sample has an answer to vote with.

  Some reward functions extract no answers. Then a majority was not measured,
  which is not the same as 0.
  """
  return any(answer is not None for row in answers for answer in row)


def half_width_95(values_P: Float[NpArray, ' P']) -> float:
  """Returns half the width of the normal 95% interval of a mean over problems.

      1.96 std(values, ddof=1) / sqrt(P)

  Args:
    values_P: one value per problem.

  Returns:
    The half-width in the values' unit; NaN for a single problem.
  """
  if len(values_P) < 2:
    return math.nan
  return float(Z_95 * values_P.std(ddof=1) / math.sqrt(len(values_P)))


def wilson_interval_95(
    values_P: Float[NpArray, ' P'], samples: int
) -> tuple[float, float]:
  """Returns Wilson's 95% interval of a mean over problems.

      n = P p (1 - p) / var(values),   at most P * samples
      (p + z^2 / 2n -+ z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)

  For values 0 and 1, n is P and this is Wilson's own interval. Values between 0
  and 1, such as a mean over a problem's samples, vary less; n is then the
  number of 0s and 1s that would give the mean with the same precision. The
  interval is never empty, not even for 0 of 20 or 20 of 20.

  Args:
    values_P: one value in [0, 1] per problem.
    samples: number of samples per problem.

  Returns:
    (low, high), within [0, 1].

  References:
    Wilson 1927, JASA 22:209; the effective n: Korn and Graubard 1998, Survey
    Methodology 24:193.
  """
  p, variance = float(values_P.mean()), float(values_P.var())
  n = float(len(values_P))
  if 0 < p < 1:
    most = n * samples
    n = min(n * p * (1 - p) / variance, most) if variance else most
  z2 = Z_95**2
  half = Z_95 * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
  centre, width = p + z2 / (2 * n), 1 + z2 / n
  low, high = (centre - half) / width, (centre + half) / width
  return max(0.0, low), min(1.0, high)


def evaluation_metrics(
    scores_PG: Shaped[Array | NpArray, 'P G'],
    answers: Answers,
    *,
    source: str,
) -> dict[str, float]:
  """Returns mean@G, best@G and maj@G of one data source, with intervals.

  Args:
    scores_PG: scores of G samples for each of P problems; NaN where a sample
      has none, see `by_problem`.
    answers: P rows of G extracted answers, None where there was none.
    source: name of the data set, e.g. 'gsm8k'.

  Returns:
    'val-core/<source>/acc/mean@G' and so on, each with a second entry
    '<name>/ci95', see `half_width_95`. A single problem has no '/ci95', and
    there is no maj@G if no sample has an answer.

  Raises:
    ValueError: there are no problems, or the shapes do not match.
  """
  n = np.shape(scores_PG)[1]
  metrics = {}
  for name, values_P in by_problem(scores_PG, answers).items():
    key = f'val-core/{source}/acc/{name}@{n}'
    metrics[key] = float(values_P.mean())
    if len(values_P) > 1:
      metrics[f'{key}/ci95'] = half_width_95(values_P)
  return metrics


def reward_metrics(
    rewards_PG: Shaped[Array | NpArray, 'P G'], *, source: str
) -> dict[str, float]:
  """Returns the mean reward of one data source, with its interval.

  Args:
    rewards_PG: rewards of G episodes for each of P problems.
    source: name of the data set.

  Returns:
    'val-core/<source>/reward/mean@G' and, for more than one problem, the same
    with '/ci95', see `half_width_95`.
  """
  n = np.shape(rewards_PG)[1]
  values_P = mean_at_k(rewards_PG, n)
  key = f'val-core/{source}/reward/mean@{n}'
  metrics = {key: float(values_P.mean())}
  if len(values_P) > 1:
    metrics[f'{key}/ci95'] = half_width_95(values_P)
  return metrics


def _checked(
    scores_PG: Shaped[Array | NpArray, 'P G'], k: int
) -> Float[NpArray, 'P G']:
  scores_PG = np.asarray(scores_PG, np.float64)
  if not len(scores_PG):
    raise ValueError('There are no problems to evaluate: scores has no rows.')
  if not 1 <= k <= scores_PG.shape[1]:
    raise ValueError(
        f'k is {k}; with {scores_PG.shape[1]} samples per problem it must be'
        f' in [1, {scores_PG.shape[1]}].'
    )
  return scores_PG
