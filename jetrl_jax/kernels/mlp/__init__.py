"""The feed-forward block: gate_up's dot, SwiGLU and down's dot.

    y_MG = x_MD W1_GD^T,  h_MF = silu(gate) * up,  z_MD = h_MF W2_DF^T

Everything is rounded as the three operations round it (`kernels/quantized_dot`,
`kernels/swiglu`), whichever implementation runs: the forward's bits are theirs.
The reference is their composition, with their derivatives. As one operation,
h exists in 8 bits only, and the backward has a derivative of its own
(`triton.py`). Devices that share the two dots gather h between them.
"""

from jetrl_jax.core.sharding import ALONE, Axes
from jetrl_jax.core.typing import Array
from jetrl_jax.fp8.products import DeferredScale, Rows
from jetrl_jax.fp8.quantization import QTensor
from jetrl_jax.fp8.recipes import Recipe
from jetrl_jax.kernels import dispatch, gate_up, swiglu
from jetrl_jax.kernels.mlp import reference
from jetrl_jax.kernels.mlp.reference import Operands

__all__ = ['Operands', 'fits', 'mlp', 'parts']


def fits(recipe: Recipe, dims: tuple[int, ...]) -> bool:
  """Whether two quantised dots and SwiGLU are one; for all numbers of rows.

  Args:
    recipe: how they compute.
    dims: of both kernels on a device.
  """
  match dispatch.implementation('mlp'):
    case 'triton':
      from jetrl_jax.kernels.mlp import triton

      return triton.fits(recipe, dims)
    case _:
      return False


def parts(rows: int, dims: tuple[int, int], is_one: bool) -> int:
  """Returns in how many parts a decode step computes gate_up's dot.

  A dot of few rows is faster in two parts, gate and up, and a kernel that makes
  both at once is faster still.

  Args:
    rows: of the step.
    dims: (D, F) of a device.
    is_one: whether both dots are one operation, see `fits`.
  """
  if is_one:
    return 1 if gate_up.fits(rows, dims) else 2
  # Two parts have SwiGLU's kernel; training must have it as well.
  return 2 if swiglu.has_kernel(dims[1]) else 1


def mlp(
    recipe: Recipe,
    rows: Rows,
    gate_up: Operands,
    down: Operands,
    row_mask_M: Array,
    axes: Axes = ALONE,
    *,
    defer: bool = False,
) -> Array | DeferredScale:
  """Returns down(silu(gate) * up), [M, D] in the compute dtype.

  Devices along `tensor` each compute some columns of h and of the result, whose
  dtype is that of `linear.added_dtype`.

  Args:
    recipe: how the dots compute.
    rows: of the first dot.
    gate_up: of the first dot; gate's rows come before up's.
    down: of the second dot; both have masters, or none and no derivative.
    row_mask_M: float32, 0 on padding rows.
    axes: devices.
    defer: where `fits`, without a derivative: leave the last scales to who
      reads the result, which is then float32.
  """
  x_MD, q_MD = rows.values, rows.fp8
  operands = recipe, x_MD, q_MD, gate_up, down, row_mask_M, axes
  match gate_up[1], down[1]:
    case QTensor(values=first), QTensor(values=second) if fits(
        recipe, (second.shape[0], first.shape[0] // 2)
    ):
      from jetrl_jax.kernels.mlp import triton

      if defer:
        return triton.unscaled_mlp(x_MD, q_MD, gate_up, down, axes)
      return triton.mlp(*operands)
    case _:
      return reference.mlp(*operands)
