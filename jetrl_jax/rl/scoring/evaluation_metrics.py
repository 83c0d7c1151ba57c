"""Accuracy on a held-out set from n sampled answers per problem.

mean@k, best@k and maj@k answer: how good is one answer, is a right one among
k, and does a vote of k find it. Confidence intervals are normal ones over
problems (1.96 standard errors of the per-problem values): problems are the
independent unit, the samples of one problem are not, and a formula needs no
random numbers to be reproduced. They are too narrow for a handful of problems.
"""

import math
from collections.abc import Sequence

import numpy as np

from jetrl_jax.core.typing import Array, Float, NpArray, Shaped

# 97.5% quantile of the normal distribution: a two-sided 95% interval.
Z_95 = 1.96

# One answer per sample as extracted and normalised; None if there was none.
Answers = Sequence[Sequence[str | None]]


def mean_at_k(
    scores_PG: Shaped[Array | NpArray, 'P G'], k: int
) -> Float[NpArray, ' P']:
  """Returns the mean score of the first k samples of each problem.

  Args:
    scores_PG: scores, usually 1 for right and 0 for wrong.
    k: samples used, in [1, G].

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

  The mean of max(scores) over all subsets of k of the G samples:

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
  # Python integers: C(256, 128) does not fit a float64 exactly.
  weights_G = np.array(
      [math.comb(i, k - 1) / math.comb(n, k) for i in range(n)]
  )
  return sorted_PG @ weights_G


def maj_at_k(
    scores_PG: Shaped[Array | NpArray, 'P G'], answers: Answers, k: int
) -> Float[NpArray, ' P']:
  """Returns the score of the majority answer among the first k samples.

  Of equally frequent answers the one given first wins. Samples without an
  extracted answer do not vote; if no sample votes the score is 0. The score is
  that of the first sample that gave the winning answer.

  Args:
    scores_PG: scores, usually 1 for right and 0 for wrong.
    answers: P rows of G answers, compared as strings.
    k: samples that vote, in [1, G].

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
      # A dict keeps the order of first insertion and max the first maximum.
      winner = max(votes, key=lambda answer: votes[answer])
      voted_P[p] = scores_PG[p, list(row).index(winner)]
  return voted_P


def any_votes(answers: Answers) -> bool:
  """Says whether there is anything to vote with.

  A reward that reads no answer out of a response leaves none, and a majority
  of nothing was not measured: it is not 0.
  """
  return any(answer is not None for row in answers for answer in row)


def half_width_95(values_P: Float[NpArray, ' P']) -> float:
  """Returns half the width of the normal 95% interval of a mean over problems.

      1.96 std(values, ddof=1) / sqrt(P)

  Args:
    values_P: one value per problem.

  Returns:
    The half-width in the unit of the values; NaN for a single problem.
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

  For values 0 and 1 n is P, and the interval is Wilson's own. Values between,
  such as a mean over the samples of a problem, vary less than that, and n says
  how many 0s and 1s would know the mean as well. Never empty: it says what
  seeing 0 of 20 or 20 of 20 leaves open.

  Args:
    values_P: one value in [0, 1] per problem.
    samples: samples behind each value.

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
  """Names mean@G, best@G and maj@G of one data source, with their intervals.

  Args:
    scores_PG: scores of G samples for each of P problems.
    answers: P rows of G extracted answers, None where there was none.
    source: name of the data set, e.g. 'gsm8k'.

  Returns:
    'val-core/<source>/acc/mean@G' and so on, each with a second entry
    '<name>/ci95', see `half_width_95`; that one is left out for one problem,
    and maj@G where no sample has an answer.

  Raises:
    ValueError: no problems, or shapes that do not fit.
  """
  n = np.shape(scores_PG)[1]
  found = {'mean': mean_at_k(scores_PG, n), 'best': best_at_k(scores_PG, n)}
  if any_votes(answers):
    found['maj'] = maj_at_k(scores_PG, answers, n)
  metrics = {}
  for name, values_P in found.items():
    key = f'val-core/{source}/acc/{name}@{n}'
    metrics[key] = float(values_P.mean())
    if len(values_P) > 1:
      metrics[f'{key}/ci95'] = half_width_95(values_P)
  return metrics


def reward_metrics(
    rewards_PG: Shaped[Array | NpArray, 'P G'], *, source: str
) -> dict[str, float]:
  """Names the mean reward of one data source, and its interval.

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
