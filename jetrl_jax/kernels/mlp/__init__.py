"""The feed-forward block: gate_up's dot, SwiGLU and down's dot.

    y_MG = x_MD W1_GD^T,  h_MF = silu(gate) * up,  z_MD = h_MF W2_DF^T

Everything is rounded as the three operations round it (`kernels/quantized_dot`,
`kernels/swiglu`), whichever implementation runs: the forward's bits are theirs.
The reference is their composition, with their derivatives. As one operation,
h exists in 8 bits only, and the backward has a derivative of its own
(`triton.py`).
"""

from jetrl_jax.core.typing import Array
from jetrl_jax.fp8.products import DeferredScale
from jetrl_jax.fp8.quantization import QTensor
from jetrl_jax.fp8.recipes import Recipe
from jetrl_jax.kernels import dispatch
from jetrl_jax.kernels.mlp import reference
from jetrl_jax.kernels.mlp.reference import Operands

__all__ = ['Operands', 'fits', 'mlp', 'unscaled_mlp']


def fits(recipe: Recipe, dims: tuple[int, ...]) -> bool:
  """Whether two quantised dots and SwiGLU are one; for all numbers of rows.

  Args:
    recipe: how they compute.
    dims: (D, F), of both kernels.
  """
  match dispatch.implementation('mlp'):
    case 'triton':
      from jetrl_jax.kernels.mlp import triton

      return triton.fits(recipe, dims)
    case _:
      return False


def mlp(
    recipe: Recipe,
    x_MD: Array,
    low_MD: Array | None,
    gate_up: Operands,
    down: Operands,
    row_mask_M: Array,
) -> Array:
  """Returns down(silu(gate) * up), [M, D] in the compute dtype.

  Args:
    recipe: how the dots compute.
    x_MD: rows in the compute dtype.
    low_MD: x quantised already, as in `linear.dot`.
    gate_up: of the first dot; gate's rows come before up's.
    down: of the second dot; both have masters, or none and no derivative.
    row_mask_M: float32, 0 on padding rows.
  """
  operands = recipe, x_MD, low_MD, gate_up, down, row_mask_M
  match gate_up[1], down[1]:
    case QTensor(), QTensor(values=values) if fits(recipe, values.shape):
      from jetrl_jax.kernels.mlp import triton

      return triton.mlp(*operands)
    case _:
      return reference.mlp(*operands)


def unscaled_mlp(
    x_MD: Array, low_MD: Array | None, gate_up: Operands, down: Operands
) -> DeferredScale:
  """Returns `mlp` before its last scales, in float32; without a derivative.

  A decode step's, where `fits` says so.

  Args:
    x_MD: as for `mlp`.
    low_MD: as for `mlp`; of two copies [2, M, D] the first dot is in two parts.
    gate_up: as for `mlp`.
    down: as for `mlp`.
  """
  assert dispatch.has_kernel('mlp')
  from jetrl_jax.kernels.mlp import triton

  return triton.unscaled_mlp(x_MD, low_MD, gate_up, down)
