"""`fp8_delayed`: one scale per tensor, known before the values are.

    FProp  Y_MO  = X_MI W_OI^T       E4M3 x E4M3
    DGrad  dX_MI = dY_MO W_OI        grad_format x E4M3 (the same FP8 weights)
    WGrad  dW_OI = dY_MO^T X_MI      grad_format x E4M3, in the master's dtype

No amax is taken on the way: the only recipe whose quantiser can be fused with
whatever produces its operand. Where `kernels/quantize_transpose` has a kernel
the backward reads X, dY and W transposed, so that each of its GEMMs contracts
the last dims.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jetrl_jax.core.typing import Array, PyTree
from jetrl_jax.fp8 import formats, health
from jetrl_jax.fp8.products import (
    BATCHED_NT,
    NN,
    NT,
    TN,
    DeferredScale,
    scaled_dot,
)
from jetrl_jax.fp8.quantization import QTensor, quantize
from jetrl_jax.fp8.recipes import Recipe
from jetrl_jax.kernels import quantize_transpose, stands_for


def quantize_input(
    x_MI: Array, fp8_MI: Array | None, dot_state: PyTree
) -> QTensor:
  """Returns the rows on the dot's scale; their values may be known."""
  scale = dot_state['input']['scale']
  if fp8_MI is None:
    fp8_MI = quantize(x_MI, scale, formats.E4M3)
  return QTensor(values=fp8_MI, scale=scale)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputGrad:
  """An output gradient on one scale.

  Attributes:
    row_major: [M, O], for DGrad.
    transposed_OM: 8-bit values for WGrad, transposed.
  """

  row_major: QTensor
  transposed_OM: Array | None


def _transposes(rows: int, weight: QTensor) -> bool:
  """Whether the backward reads its operands transposed."""
  return quantize_transpose.fits((rows, *weight.values.shape))


def keep_input(
    x_MI: Array, x8: QTensor, weight: QTensor, row_mask_M: Array
) -> tuple[QTensor, health.OperandStats]:
  """Returns the rows as WGrad reads them, and what they show."""
  if not _transposes(x_MI.shape[0], weight):
    return x8, health.measure(x_MI, x8, row_mask_M)
  return transpose_input(x_MI, x8.scale, row_mask_M)


def transpose_input(
    x_MI: Array, scale: Array, row_mask_M: Array
) -> tuple[QTensor, health.OperandStats]:
  """`keep_input`, with the rows transposed."""
  out = quantize_transpose.quantize_and_transpose(
      x_MI, scale, row_mask_M, formats.E4M3, row_major=False
  )
  return as_input(out, scale, row_mask_M)


def as_input(
    out: quantize_transpose.QuantizedPair, scale: Array, row_mask_M: Array
) -> tuple[QTensor, health.OperandStats]:
  """Returns what `keep_input` does, of rows that a kernel transposed."""
  columns = out.transposed_NM.shape[0]
  seen = out.amax, health.with_elements(
      out.quantization_error, columns, row_mask_M
  )
  return QTensor(values=out.transposed_NM, scale=scale), seen


def quantize_grad(
    recipe: Recipe,
    dy_MO: Array,
    weight: QTensor,
    dot_state: PyTree,
    row_mask_M: Array,
) -> tuple[OutputGrad, health.OperandStats]:
  """Returns the output gradient on the dot's scale, and what it shows."""
  scale = dot_state['output_grad']['scale']
  dtype = recipe.grad_dtype
  if not _transposes(dy_MO.shape[0], weight):
    dy8 = QTensor(values=quantize(dy_MO, scale, dtype), scale=scale)
    seen = health.measure(dy_MO, dy8, row_mask_M)
    return OutputGrad(row_major=dy8, transposed_OM=None), seen
  out = quantize_transpose.quantize_and_transpose(
      dy_MO, scale, row_mask_M, dtype, row_major=True
  )
  return as_grad(out, scale, row_mask_M)


def as_grad(
    out: quantize_transpose.QuantizedPair, scale: Array, row_mask_M: Array
) -> tuple[OutputGrad, health.OperandStats]:
  """Returns what `quantize_grad` does, of what a kernel transposed."""
  assert out.row_major_MN is not None
  transposed, seen = as_input(out, scale, row_mask_M)
  row_major = QTensor(values=out.row_major_MN, scale=scale)
  return OutputGrad(row_major=row_major, transposed_OM=transposed.values), seen


def _scales(a: QTensor, b: QTensor, *, are_late: bool) -> tuple[Array, ...]:
  """Returns the numbers by which the product of a and b is multiplied.

  A GEMM takes one. An operation after it takes both, and then XLA starts no
  kernel to multiply them.
  """
  return (a.scale, b.scale) if are_late else (a.scale * b.scale,)


def forward(
    recipe: Recipe, x8: QTensor, weight: QTensor, out_dtype, *, late_scale: bool
) -> Array:
  """Returns FProp's result; for `late_scale` see `scaled_dot`."""
  are_late = late_scale and recipe.power_of_two_scales
  return scaled_dot(
      x8.values,
      weight.values,
      NT,
      _scales(x8, weight, are_late=are_late),
      out_dtype,
      power_of_two=recipe.power_of_two_scales,
      late_scale=late_scale,
  )


def unscaled(
    x8: QTensor, weight: QTensor, dtype, *, late_scale: bool = True
) -> DeferredScale:
  """Returns FProp's product before its scales, which are powers of two.

  Args:
    x8: rows [M, I], or n copies [n, M, I] for a product in n parts of the
      kernel's rows, [n, M, O / n]: the same values, from a GEMM that for few
      rows may be tiled better.
    weight: [O, I].
    dtype: dtype that `forward` gives.
    late_scale: as for `forward`. False for a product that the next kernel only
      adds to the residual stream: it is then float32, as inside a GEMM that
      adds a residual.
  """

  def dot(x8, weight):
    x, w, dims = x8.values, weight.values, NT
    if x.ndim == 3:
      w, dims = w.reshape(x.shape[0], -1, w.shape[1]), BATCHED_NT
    made = dtype if late_scale else jnp.float32
    values = lax.dot_general(x, w, dims, preferred_element_type=made)
    return DeferredScale(values=values, scales=(x8.scale, weight.scale))

  def scaled(x8, weight):
    values = scaled_dot(
        x8.values,
        weight.values,
        NT,
        _scales(x8, weight, are_late=late_scale),
        dtype,
        power_of_two=True,
        late_scale=late_scale,
    )
    return DeferredScale(values=values, scales=(x8.scale, weight.scale))

  shapes = jax.tree.map(stands_for.shape, (x8, weight))
  rows = stands_for.shape(x8.values, *x8.values.shape[-2:])
  finished = dataclasses.replace(shapes[0], values=rows), shapes[1]
  return stands_for.deferred(dot, scaled, x8, weight, finished=finished)


def dgrad(recipe: Recipe, dy8: OutputGrad, weight: QTensor, x_dtype) -> Array:
  """Returns dX in `x_dtype`.

  Args:
    recipe: `fp8_delayed`.
    dy8: the result of `quantize_grad`.
    weight: the forward's.
    x_dtype: the dtype of dX.
  """
  operands = dy8.row_major.values, weight.values, NN
  if dy8.transposed_OM is not None:
    transposed_IO = quantize_transpose.transpose(weight.values)
    operands = dy8.row_major.values, transposed_IO, NT
  return scaled_dot(
      *operands,
      (dy8.row_major.scale * weight.scale,),
      x_dtype,
      power_of_two=recipe.power_of_two_scales,
  )


def wgrad(recipe: Recipe, dy8: OutputGrad, x8: QTensor, w_dtype) -> Array:
  """Returns dW in the master's dtype; `x8` is the result of `keep_input`."""
  operands = dy8.row_major.values, x8.values, TN
  if dy8.transposed_OM is not None:
    operands = dy8.transposed_OM, x8.values, NT
  return scaled_dot(
      *operands,
      (dy8.row_major.scale * x8.scale,),
      w_dtype,
      power_of_two=recipe.power_of_two_scales,
  )


def backward(
    recipe: Recipe,
    dy8: OutputGrad,
    x8: QTensor,
    weight: QTensor,
    x_dtype,
    w_dtype,
) -> tuple[Array, Array]:
  """Returns (dX, dW), see `dgrad` and `wgrad`."""
  dx_MI = dgrad(recipe, dy8, weight, x_dtype)
  return dx_MI, wgrad(recipe, dy8, x8, w_dtype)
