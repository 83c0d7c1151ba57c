"""How far updates of all sizes move a policy, by what is in 8 bits.

Used by `layer_health.py`, for `--arms=updates`. Masters are spread in their
rounding cells, as a run of an 8-bit recipe has them. They move by minus the
sign of BF16's gradient times a size: Adam's first step at that rate. Then the
log-probs of one step's answers are compared with those before, in BF16, with
8-bit weights alone, and with 8-bit weights and inputs. Half of the mean squared
difference is k3 to second order. The share of 8-bit weights that changed says
how much of an update reached the dots, the share of ratios outside 0.8 to 1.2
what a second mini-batch would clip of it.

What falls with the size is the update. What stays however small it is comes
from rounding inputs: a change in the last bits of one layer makes the next ones
round to other values.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jetrl_jax.core.typing import PyTree

# Masters to (log-probs of answers [N], 8-bit weights).
Score: TypeAlias = Callable[[PyTree], tuple[np.ndarray, list[jax.Array]]]


def rows(
    scores: dict[str, Score], params: PyTree, signs: PyTree, sizes: list[float]
) -> list[dict[str, Any]]:
  """Returns a record for each size and arm.

  Args:
    scores: arm -> how it scores masters.
    params: masters.
    signs: of the gradient, a leaf for each master.
    sizes: of the updates.
  """
  first = {arm: score(params) for arm, score in scores.items()}
  found = []
  for size in sizes:
    moved = jax.tree.map(lambda p, s, size=size: p - size * s, params, signs)
    for arm, score in scores.items():
      (old, old_weights), (new, new_weights) = first[arm], score(moved)
      gap = np.float64(new) - np.float64(old)
      row = {
          'part': 'updates',
          'arm': arm,
          'size': size,
          'half_mean_square': float((gap**2).mean() / 2),
          'mean_absolute': float(np.abs(gap).mean()),
          'clipped': float((np.abs(np.exp(gap) - 1) > 0.2).mean()),
      }
      if new_weights:
        row['weights_changed'] = _changed(old_weights, new_weights)
      found.append(row)
  return found


def _changed(before: list[jax.Array], after: list[jax.Array]) -> float:
  """Returns the share of 8-bit weights with another value."""
  changed = total = 0
  for one, other in zip(before, after, strict=True):
    # As numbers: 0 and -0 are one.
    pair = (x.astype(jnp.bfloat16) for x in (one, other))
    changed += int(jnp.not_equal(*pair).sum())
    total += one.size
  return changed / total
