"""What the kernels share: the weights they take, and the walk over a group."""

import math
from collections.abc import Callable

from jetrl_jax.core.sharding import Axes
from jetrl_jax.core.typing import Array, PyTree
from jetrl_jax.fp8.quantization import QTensor
from jetrl_jax.fp8.recipes import Recipe

# Values that one program quantises.
_LEAST, _MOST = 1024, 4096


def tile_of(size: int) -> int:
  """Returns how many values of a weight a program has."""
  return min(size & -size, _MOST)


def fits(params: PyTree, weights: PyTree, recipe: Recipe) -> bool:
  """Whether all quantised kernels of a part of the model can be renewed here.

  Args:
    params: nested dict of masters.
    weights: theirs until now.
    recipe: the recipe of `weights`.
  """
  if not recipe.is_delayed:
    return False

  def walk(node, old) -> bool:
    if isinstance(node, dict):
      return all(walk(child, old[key]) for key, child in node.items())
    size = math.prod(node.shape)
    return not isinstance(old, QTensor) or (
        0 < size < 2**31 and tile_of(size) >= _LEAST
    )

  return walk(params, weights)


def renew(
    one: Callable[[Array, Array, Array], tuple[Array, Array, Array]],
    params: PyTree,
    fp8_state: PyTree,
    weights: PyTree,
    recipe: Recipe,
    axes: Axes,
) -> tuple[PyTree, PyTree, PyTree]:
  """Returns `requantize` of a group that `fits`, see the package.

  Args:
    one: function of (master, old values, scale) of a kernel to (new values,
      float32 [5] sums as in `health.SUMS`, number of values that changed).
    params: see the package, as all that follow.
    fp8_state: dot states.
    weights: until now.
    recipe: of `weights`.
    axes: of the mesh.
  """

  def walk(node, state, old):
    if not isinstance(node, dict):
      return node.astype(recipe.dtype), state, None
    if isinstance(old.get('kernel'), QTensor):
      return slot(node, state, old)
    walked = {
        key: walk(child, state.get(key, {}), old[key])
        for key, child in node.items()
    }
    return (
        {key: weight for key, (weight, _, _) in walked.items()},
        state | {key: walked[key][1] for key in state if key in walked},
        {k: share for k, (_, _, share) in walked.items() if share is not None}
        or None,
    )

  def slot(node, state, old):
    scale = state['kernel']['scale']
    values, sums, changed = one(node['kernel'], old['kernel'].values, scale)
    made = {
        key: walk(child, {}, old[key])[0]
        for key, child in node.items()
        if key != 'kernel'
    }
    share = axes.psum_all(changed / values.size) / axes.devices
    entry = state['kernel'] | {'health': axes.psum_all(sums)}
    return (
        made | {'kernel': QTensor(values=values, scale=scale)},
        state | {'kernel': entry},
        {'kernel': share},
    )

  weights, fp8_state, changed = walk(params, fp8_state, weights)
  return weights, fp8_state, changed or {}
