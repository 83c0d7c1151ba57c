"""Adaptive precision: which dots are worth their 8 bits.

    SQNR = 10 log10(sum x^2 / sum (x - dequantised x)^2)     in dB

of a dot's input, over real tokens, and of its kernel. A dot of which either
lies below the threshold computes in the compute dtype, in rollout and training
alike. In a mixed flow both sides are asked that quantise at all, and the worse
answer counts: a dot in 8 bits on one side alone would be another mixed flow.
The choice is made once, at a cold start, and kept with the run: a dot that
changed sides later would change the policy between two steps.

The output gradient takes no part: no log-prob depends on it.
"""

import math
from collections.abc import Mapping
from typing import TypeAlias

# What `health.summarize` returns of a calibrated state.
Summary: TypeAlias = Mapping[str, Mapping[str, Mapping[str, float]]]

# What the forward quantises.
_OPERANDS = ('input', 'kernel')


def choose(
    summaries: Mapping[str, Summary], min_sqnr_db: float
) -> dict[str, float]:
  """Returns the dots below a threshold, and the fewest dB they keep.

  Args:
    summaries: of each side of the flow that quantises, by its recipe's name.
    min_sqnr_db: the threshold.

  Raises:
    ValueError: every dot lies below it: that is the recipe 'bf16'.
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
  # Absent where nothing was lost.
  ratios = [operands[name] for name in _OPERANDS]
  return min((r['sqnr_db'] for r in ratios if 'sqnr_db' in r), default=1e9)
