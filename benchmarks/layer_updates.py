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
round to other values. `clipped_gradient` says what PPO's clip makes of it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jetrl_jax.core.typing import PyTree

# PPO's bounds, that of the dual clip last, and what is called a rare token.
_LOW, _HIGH, _DUAL = 0.8, 1.2, 3.0
_RARE = 0.01


@dataclasses.dataclass(frozen=True)
class Scored:
  """What a policy makes of the answers.

  Attributes:
    logprobs_N: of the answers' tokens.
    weights: those in 8 bits.
    next_NV: log-probs of all tokens at each of these places.
  """

  logprobs_N: np.ndarray
  weights: list[jax.Array]
  next_NV: np.ndarray


# Of masters.
Score: TypeAlias = Callable[[PyTree], Scored]


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
      old, new = first[arm], score(moved)
      gap = np.float64(new.logprobs_N) - np.float64(old.logprobs_N)
      row = {
          'part': 'updates',
          'arm': arm,
          'size': size,
          'half_mean_square': float((gap**2).mean() / 2),
          'mean_absolute': float(np.abs(gap).mean()),
          'clipped': float((np.abs(np.exp(gap) - 1) > 0.2).mean()),
          **clipped_gradient(old.next_NV, new.next_NV),
      }
      if new.weights:
        row['weights_changed'] = _changed(old.weights, new.weights)
      found.append(row)
  return found


def clipped_gradient(
    old_NV: np.ndarray, new_NV: np.ndarray
) -> dict[str, float]:
  """Returns which shares of a gradient PPO's clip drops, in expectation.

  A token that `old` samples with p_old, and whose ratio is r = p / p_old, adds
  r (1 - p) |A| to the derivative by its own logit. The clip drops it above 1.2
  where A > 0, and where A < 0 below 0.8 and, by the dual clip, above 3. The
  expectation over the next token is a sum over the vocabulary, so no sampling
  is in it.

  Args:
    old_NV: log-probs of all tokens, before the update.
    new_NV: the same, after it.

  Returns:
    The shares for A > 0 and A < 0, of all tokens and of those whose p_old is
    below 0.01.
  """
  total = dict.fromkeys(('all', 'rare'), 0.0)
  dropped = {
      (sign, of): 0.0 for sign in ('positive', 'negative') for of in total
  }
  # A place at a time: whole arrays of a vocabulary's size take much memory.
  for old_V, new_V in zip(old_NV, new_NV, strict=True):
    p_V = np.exp(np.float64(new_V))
    ratio_V = np.exp(np.float64(new_V) - np.float64(old_V))
    # p_old r = p.
    part_V = p_V * (1 - p_V)
    drops = {
        'positive': ratio_V > _HIGH,
        'negative': (ratio_V < _LOW) | (ratio_V > _DUAL),
    }
    for of, among in (('all', slice(None)), ('rare', np.exp(old_V) < _RARE)):
      total[of] += float(part_V[among].sum())
      for sign, drop_V in drops.items():
        dropped[sign, of] += float((part_V * drop_V)[among].sum())
  return {
      f'clipped_{sign}_{of}': value / total[of] if total[of] else 0.0
      for (sign, of), value in dropped.items()
  }


def _changed(before: list[jax.Array], after: list[jax.Array]) -> float:
  """Returns the share of 8-bit weights with another value."""
  changed = total = 0
  for one, other in zip(before, after, strict=True):
    # As numbers: 0 and -0 are one.
    pair = (x.astype(jnp.bfloat16) for x in (one, other))
    changed += int(jnp.not_equal(*pair).sum())
    total += one.size
  return changed / total
