"""Adaptive precision: chooses the dots that stay in high precision.

    SQNR = 10 log10(sum x^2 / sum (x - dequantised x)^2)     in dB

is measured for a dot's input, over real tokens, and for its kernel. If either
is below the threshold, the dot computes in the compute dtype, in rollout and
training alike. In a mixed flow the worse of the two sides counts, because a dot
that is quantised on one side only would be another mixed flow. The choice is
made once, at a cold start, and the run keeps it: a later change would change
the policy between two steps.

Output gradients do not count, because no log-prob depends on them.
"""

import math
from collections.abc import Mapping
from typing import TypeAlias

# The result of `health.summarize` on a calibrated state.
Summary: TypeAlias = Mapping[str, Mapping[str, Mapping[str, float]]]

# Operands that the forward quantises.
_OPERANDS = ('input', 'kernel')


def choose(
    summaries: Mapping[str, Summary], min_sqnr_db: float
) -> dict[str, float]:
  """Returns dot -> SQNR in dB, for the dots below a threshold.

  Args:
    summaries: recipe's name -> health, for each side that quantises.
    min_sqnr_db: the threshold, dB.

  Raises:
    ValueError: every dot is below it, which would be the recipe 'bf16'.
  """
  ratios: dict[str, float] = {}
  for summary in summaries.values():
    for path, operands in summary.items():
      ratios[path] = min(_worst(operands), ratios.get(path, math.inf))
  chosen = {
      path: ratio for path, ratio in ratios.items() if ratio < min_sqnr_db
  }
  if ratios and len(chosen) == len(ratios):
    raise ValueError(
        f'precision.min_sqnr_db is {min_sqnr_db}, and no dot keeps that'
        f' much with recipe {" and ".join(summaries)} (the best has'
        f' {max(ratios.values()):.1f} dB): lower it, or use recipe bf16'
    )
  return chosen


def _worst(operands: Mapping[str, Mapping[str, float]]) -> float:
  # 'sqnr_db' is absent if nothing was lost.
  ratios = [operands[name] for name in _OPERANDS]
  return min((r['sqnr_db'] for r in ratios if 'sqnr_db' in r), default=1e9)
