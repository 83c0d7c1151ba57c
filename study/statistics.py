"""What is concluded from curves: fixed here before any arm was run.

The endpoint on a real model is the mean of a run's evaluations after step 50.
Final accuracy, the toy's endpoint, is that of the last three. A run has
collapsed where three evaluations in a row lie below 80% of the best one so far.
Arms are compared seed by seed: paired runs share start, prompts and keys. That
was meant to take noise out; where rounding differs it does not (docs/study.md).
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

from scipy import stats

Key = TypeVar('Key')

AFTER = 50
LAST = 3
COLLAPSE_SHARE, COLLAPSE_COUNT = 0.8, 3
# Differences of final accuracy that are called none, in [0, 1].
MARGIN = 0.03
# The same on a real model, for one FP8 flow against BF16.
NON_INFERIORITY = 0.01


def endpoint(points: Sequence[tuple[int, float]]) -> float | None:
  """Returns the mean accuracy of the evaluations after step 50.

  Args:
    points: (step, accuracy).

  Returns:
    None if there is none.
  """
  values = [value for step, value in points if step > AFTER]
  return sum(values) / len(values) if values else None


def carried(
    points: Sequence[tuple[int, float]], planned: Sequence[int]
) -> list[tuple[int, float]]:
  """Lets the last evaluation of a run that failed stand for all later ones.

  Args:
    points: (step, accuracy), at least one.
    planned: the steps at which the design evaluates.
  """
  last_step, last = points[-1]
  return [*points, *((step, last) for step in planned if step > last_step)]


def final(values: Sequence[float]) -> float:
  """Returns the mean of the last three evaluations, or of all if fewer."""
  last = values[-LAST:]
  return sum(last) / len(last)


def collapse(values: Sequence[float]) -> int | None:
  """Returns the index of the evaluation at which a run has collapsed.

  That is the third in a row below 80% of the best so far; None if none is.
  """
  best, below = 0.0, 0
  for i, value in enumerate(values):
    best = max(best, value)
    below = below + 1 if value < COLLAPSE_SHARE * best else 0
    if below == COLLAPSE_COUNT:
      return i
  return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Paired:
  """A difference of two arms, seed by seed.

  Attributes:
    differences: by seed.
    mean: of them.
    half_width: of the 95% interval; infinite for one pair.
    p_value: two-sided, that the mean is 0; 1 for one pair.
  """

  differences: tuple[float, ...]
  mean: float
  half_width: float
  p_value: float

  @property
  def interval(self) -> tuple[float, float]:
    """The 95% confidence interval of the mean."""
    return self.mean - self.half_width, self.mean + self.half_width


def paired(ours: dict[int, float], others: dict[int, float]) -> Paired:
  """Compares two arms on the seeds that both have.

      mean(d) +- t(n - 1) * std(d) / sqrt(n),    std with n - 1

  Student's interval. With three pairs t is 4.3 and std rests on two degrees of
  freedom: the interval is wide, can be wide or narrow by chance, and supposes
  differences that are normal, which a run that collapses among two that do not
  is not. A bootstrap would look better and be worse: three values have ten
  different resamples, and it never leaves their range.

  Args:
    ours: final accuracy by seed.
    others: the same of what it is compared with.

  Raises:
    ValueError: no seed in common.
  """
  seeds = sorted(set(ours) & set(others))
  if not seeds:
    raise ValueError(
        f'no pair: one arm has the seeds {sorted(ours)}, the other'
        f' {sorted(others)}'
    )
  found = tuple(ours[seed] - others[seed] for seed in seeds)
  n, mean = len(found), sum(found) / len(found)
  if n == 1:
    return Paired(
        differences=found, mean=mean, half_width=math.inf, p_value=1.0
    )
  variance = sum((d - mean) ** 2 for d in found) / (n - 1)
  error = math.sqrt(variance / n)
  half = float(stats.t.ppf(0.975, n - 1)) * error
  t = abs(mean) / error if error else math.inf if mean else 0.0
  return Paired(
      differences=found,
      mean=mean,
      half_width=half,
      p_value=2 * float(stats.t.sf(t, n - 1)),
  )


def holm(p_values: Mapping[Key, float]) -> dict[Key, float]:
  """Returns p-values adjusted for their number, by Holm's step-down method.

  The smallest of m is multiplied by m, the next by m - 1, and so on; none is
  smaller than the one before it, nor above 1. Pass all questions of the design,
  with 1 for those that have no runs yet: fewer would be corrected for less.
  """
  adjusted, largest = {}, 0.0
  for i, key in enumerate(sorted(p_values, key=lambda k: p_values[k])):
    largest = max(largest, (len(p_values) - i) * p_values[key])
    adjusted[key] = min(1.0, largest)
  return adjusted


def is_as_good(difference: Paired, planned: int) -> str:
  """Answers the primary question: is one FP8 flow as good as BF16?

  Args:
    difference: of the pairs that have run.
    planned: pairs of the design; an answer from fewer would be a look before
      the end.

  Returns:
    'yes' if the interval lies above -1 point; 'no' if it lies below 0 and its
    mean below -1 point; else 'not decided', and always with fewer pairs than
    planned.
  """
  low, high = difference.interval
  if len(difference.differences) < planned:
    return 'not decided'
  if low > -NON_INFERIORITY:
    return 'yes'
  if high < 0 and difference.mean < -NON_INFERIORITY:
    return 'no'
  return 'not decided'


def verdict(difference: Paired) -> str:
  """Says what an interval allows to say, with the margin fixed beforehand.

  Returns:
    'worse' or 'better' if the interval lies beyond 0 and its mean beyond the
    margin; 'no difference' if it lies within the margin; 'inconclusive'
    otherwise, and always with fewer than three pairs.
  """
  low, high = difference.interval
  if len(difference.differences) < 3:
    return 'inconclusive'
  if high < 0 and difference.mean < -MARGIN:
    return 'worse'
  if low > 0 and difference.mean > MARGIN:
    return 'better'
  if -MARGIN < low and high < MARGIN:
    return 'no difference'
  return 'inconclusive'
