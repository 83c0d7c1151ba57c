"""The MLP of a block as one operation, where its two dots are one."""

from jetrl_jax.core.typing import Array
from jetrl_jax.fp8.products import DeferredScale, Rows
from jetrl_jax.fp8.recipes import Recipe
from jetrl_jax.kernels.mlp import fused_mlp
from jetrl_jax.kernels.mlp import gate_up as gate_up_kernel
from jetrl_jax.kernels.mlp.fused_mlp import Operands, fits
from jetrl_jax.kernels.swiglu import forward as swiglu

__all__ = ['fits', 'mlp', 'parts']


def parts(rows: int, dims: tuple[int, int], is_one: bool) -> int:
  """Returns in how many parts a decode step computes gate_up's dot.

  A dot of few rows is faster in two parts, gate and up, and a kernel that makes
  both at once is faster still.

  Args:
    rows: of the step.
    dims: (D, F).
    is_one: whether `mlp` computes it.
  """
  if is_one:
    return 1 if gate_up_kernel.fits(rows, dims) else 2
  # Two parts have SwiGLU's kernel; training must have it as well.
  return 2 if swiglu.has_kernel(dims[1]) else 1


def mlp(
    recipe: Recipe,
    rows: Rows,
    gate_up: Operands,
    down: Operands,
    row_mask_M: Array,
    *,
    defer: bool,
) -> Array | DeferredScale:
  """Returns down(silu(gate) * up), [M, D].

  Args:
    recipe: `fp8_delayed`; `fits`.
    rows: of the first dot.
    gate_up: of the first dot; gate's rows come before up's.
    down: of the second dot; both have masters, or none and no derivative.
    row_mask_M: float32, 0 on padding rows.
    defer: without a derivative, leave the last scales to who reads the result.
  """
  if defer:
    return fused_mlp.unscaled_mlp(rows.values, rows.fp8, gate_up, down)
  return fused_mlp.mlp(recipe, rows.values, rows.fp8, gate_up, down, row_mask_M)
