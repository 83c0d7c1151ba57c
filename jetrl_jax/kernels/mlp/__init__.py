"""The feed-forward block: gate_up's dot, SwiGLU and down's dot.

    y_MG = x_MD W1_GD^T,  h_MF = silu(gate) * up,  z_MD = h_MF W2_DF^T

Every implementation rounds as the three separate operations do
(`kernels/quantized_dot`, `kernels/swiglu`), so the forward has their bits. The
reference is their composition, with their derivatives. In the fused form
(`fused.py`) h exists only in 8 bits, and the backward is one derivative for
both dots. Devices that share the two dots gather h between them.
"""

import dataclasses
from collections.abc import Callable

from jetrl_jax.core.collectives import ALONE, Axes
from jetrl_jax.core.typing import Array
from jetrl_jax.fp8.products import DeferredScale, RowFormat, Rows
from jetrl_jax.fp8.quantization import QTensor
from jetrl_jax.fp8.recipes import Recipe
from jetrl_jax.kernels import dispatch, gate_up, swiglu
from jetrl_jax.kernels.mlp import fused, reference
from jetrl_jax.kernels.mlp.reference import Operands

__all__ = ['Operands', 'is_fused', 'mlp', 'row_format']


def is_fused(recipe: Recipe, dims: tuple[int, int]) -> bool:
  """Whether two quantised dots and SwiGLU run in the fused form.

  The answer is the same for every number of rows, so it is the same in rollout
  and training.

  Args:
    recipe: how the dots compute.
    dims: (D, F) of a device: outputs of down, columns of h.
  """
  return dispatch.has_kernel('mlp') and fused.fits(recipe, dims)


def row_format(
    of_dot: RowFormat, num_rows: int, dims: tuple[int, int], fused: bool
) -> RowFormat:
  """Returns the form in which gate_up's dot wants the rows of a decode step.

  With two copies of its rows the dot computes gate and up as two parts, which
  is faster for few rows. A kernel that computes both at once is faster still
  and wants one.

  Args:
    of_dot: the form for any number of rows.
    num_rows: rows of the decode step.
    dims: (D, F) of a device.
    fused: see `is_fused`.
  """
  if of_dot.scale is None:
    return of_dot
  if fused:
    copies = 1 if gate_up.fits(num_rows, dims) else 2
  else:
    # SwiGLU's kernel reads the two parts, so training must run it as well.
    copies = 2 if swiglu.has_kernel(dims[1]) else 1
  return dataclasses.replace(of_dot, copies=copies)


def mlp(
    recipe: Recipe,
    rows: Rows,
    gate_up: Operands,
    down: Operands,
    row_mask_M: Array,
    axes: Axes = ALONE,
    *,
    defer: bool = False,
    gather: Callable[[Array], Array] | None = None,
) -> Array | DeferredScale:
  """Returns down(silu(gate) * up), [M, D] in the compute dtype.

  Devices along `tensor` each compute some columns of h and of the result, whose
  dtype is that of `linear.added_dtype`.

  Args:
    recipe: how the dots compute.
    rows: rows of the first dot.
    gate_up: operands of the first dot; gate's rows come before up's.
    down: operands of the second dot. Either both dots have masters, or neither
      has and there is no derivative.
    row_mask_M: float32, 0 on padding rows.
    axes: devices.
    defer: in the fused form without a derivative, leave the last scales to the
      operation that reads the result; the product is then float32.
    gather: without a derivative, what makes h whole in place of `axes`.
  """
  x_MD, q_MD = rows.values, rows.fp8
  gather = gather or axes.gather_inputs
  operands = recipe, x_MD, q_MD, gate_up, down, row_mask_M, axes, gather
  match gate_up[1], down[1]:
    case QTensor(values=first), QTensor(values=second) if is_fused(
        recipe, (second.shape[0], first.shape[0] // 2)
    ):
      if defer:
        return fused.unscaled_mlp(x_MD, q_MD, gate_up, down, gather)
      return fused.mlp(*operands)
    case _:
      return reference.mlp(*operands)
