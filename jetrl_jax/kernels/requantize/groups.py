"""What the kernels share: the weights they take, and the walk over a group."""

import math
from typing import Protocol

import jax.numpy as jnp

from jetrl_jax.core.collectives import Axes
from jetrl_jax.core.typing import Array, PyTree
from jetrl_jax.fp8.quantization import QTensor
from jetrl_jax.fp8.recipes import Recipe

# A weight has whole blocks of so many values, which a program goes over.
_BLOCK = 1024


class Kernel(Protocol):
  """Quantises a kernel to E4M3 and overwrites its old values."""

  def __call__(
      self, master_OI: Array, old_OI: Array, scale: Array, /
  ) -> tuple[Array, Array]:
    """Returns (the values, float32 [5] sums over them).

    The sums are those of `health.SUMS` after the number of elements, and the
    number of values that changed.

    Args:
      master_OI: float32 or bfloat16, of a shape that `fits`.
      old_OI: float8_e4m3fn.
      scale: float32 scalar.
    """
    ...


def fits(params: PyTree, weights: PyTree, recipe: Recipe) -> bool:
  """Whether the kernels take all quantised weights of a parameter group.

  Args:
    params: nested dict of masters.
    weights: their compute weights until now.
    recipe: the recipe of `weights`.
  """
  if not recipe.is_delayed:
    return False

  def walk(node, old) -> bool:
    if isinstance(node, dict):
      return all(walk(child, old[key]) for key, child in node.items())
    size = math.prod(node.shape)
    return not isinstance(old, QTensor) or (
        0 < size < 2**31 and size % _BLOCK == 0
    )

  return walk(params, weights)


def requantize(
    kernel: Kernel,
    params: PyTree,
    fp8_state: PyTree,
    weights: PyTree,
    recipe: Recipe,
    axes: Axes,
) -> tuple[PyTree, PyTree, PyTree]:
  """Does the package's `requantize` with a kernel, for a group that `fits`."""

  def walk(node, state, old):
    if not isinstance(node, dict):
      return node.astype(recipe.dtype), state, None
    if isinstance(old.get('kernel'), QTensor):
      return dot(node, state, old)
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

  def dot(node, state, old):
    scale = state['kernel']['scale']
    values, sums = kernel(node['kernel'], old['kernel'].values, scale)
    elements = jnp.full((1,), values.size, jnp.float32)
    health, changed = jnp.concatenate([elements, sums[:4]]), sums[4]
    made = {
        key: walk(child, {}, old[key])[0]
        for key, child in node.items()
        if key != 'kernel'
    }
    share = axes.psum_all(changed / values.size) / axes.devices
    entry = state['kernel'] | {'health': axes.psum_all(health)}
    return (
        made | {'kernel': QTensor(values=values, scale=scale)},
        state | {'kernel': entry},
        {'kernel': share},
    )

  weights, fp8_state, changed = walk(params, fp8_state, weights)
  return weights, fp8_state, changed or {}
