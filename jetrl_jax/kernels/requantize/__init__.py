"""Quantises updated masters again, in place, and measures what was lost.

    q_OI = E4M3(clip(w_OI / scale)),    changed = share of q that differs

It runs after an optimiser step, for every quantised weight of a parameter
group; all other leaves are cast. The values are those of `fp8.quantize` bit for
bit. The sums over what was lost are float32, in another order.
"""

from jetrl_jax.core.collectives import Axes
from jetrl_jax.core.typing import PyTree
from jetrl_jax.fp8.recipes import Recipe
from jetrl_jax.kernels import dispatch
from jetrl_jax.kernels.requantize import groups, reference
from jetrl_jax.kernels.requantize.reference import changed_share

__all__ = ['changed_share', 'requantize']


def requantize(
    params: PyTree,
    fp8_state: PyTree,
    weights: PyTree,
    recipe: Recipe,
    axes: Axes,
) -> tuple[PyTree, PyTree, PyTree]:
  """Makes compute weights again.

  Args:
    params: nested dict of masters, those of a parameter group.
    fp8_state: their dot states, with the scales to use.
    weights: their compute weights until now. A leaf that is a `QTensor` there
      becomes one again.
    recipe: the recipe of `weights`.
    axes: the axes of the mesh.

  Returns:
    (the weights, with the paths of `params`; the dot states with the weights'
    health; the share of 8-bit values that changed, by weight)
  """
  operands = params, fp8_state, weights, recipe, axes
  has_kernel = dispatch.has_kernel('requantize')
  if not (has_kernel and groups.fits(params, weights, recipe)):
    return reference.requantize(*operands)
  from jetrl_jax.kernels.requantize import mosaic_sm90

  return groups.requantize(mosaic_sm90.requantize_kernel, *operands)
