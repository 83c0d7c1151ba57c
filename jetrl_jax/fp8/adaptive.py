"""Adaptive precision: which dots are worth their 8 bits.

    SQNR = 10 log10(sum x^2 / sum (x - dequantised x)^2)     in dB

of a dot's input, over real tokens, and of its kernel. A dot of which either
lies below the threshold computes in the compute dtype, in rollout and training
alike. The choice is made once, at a cold start, and kept with the run: a dot
that changed sides later would change the policy between two steps.

The output gradient takes no part: no log-prob depends on it.
"""

from collections.abc import Mapping

from jetrl_jax.fp8.recipes import Recipe

# What the forward quantises.
_OPERANDS = ('input', 'kernel')


def choose(
    summary: Mapping[str, Mapping[str, Mapping[str, float]]], recipe: Recipe
) -> dict[str, float]:
  """Returns the dots below the recipe's threshold, and their dB.

  Args:
    summary: `health.summarize` of a calibrated state.
    recipe: its `min_sqnr_db`.

  Raises:
    ValueError: every dot lies below it: that is the recipe 'bf16'.
  """
  ratios = {path: _worst(operands) for path, operands in summary.items()}
  chosen = {
      path: ratio
      for path, ratio in ratios.items()
      if ratio < recipe.min_sqnr_db
  }
  if ratios and len(chosen) == len(ratios):
    raise ValueError(
        f'precision.min_sqnr_db is {recipe.min_sqnr_db}, and no dot keeps that'
        f' much with recipe {recipe.name} (the best has'
        f' {max(ratios.values()):.1f} dB): lower it, or use recipe bf16'
    )
  return chosen


def _worst(operands: Mapping[str, Mapping[str, float]]) -> float:
  # Absent where nothing was lost.
  ratios = [operands[name] for name in _OPERANDS]
  return min((r['sqnr_db'] for r in ratios if 'sqnr_db' in r), default=1e9)
