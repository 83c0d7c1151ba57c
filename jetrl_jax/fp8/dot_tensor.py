"""`fp8_delayed`: one scale per tensor, known before the values are.

    FProp  Y_MO  = X_MI W_OI^T       E4M3 x E4M3
    DGrad  dX_MI = dY_MO W_OI        grad_format x E4M3 (the same FP8 weights)
    WGrad  dW_OI = dY_MO^T X_MI      grad_format x E4M3, written in float32

No amax is taken on the way: the only recipe whose quantiser can be fused with
whatever produces its operand. The backward reads X, dY and W turned round, so
that each of its GEMMs contracts the last dims (`turning.py`).
"""

import dataclasses

import jax
import jax.numpy as jnp

from jetrl_jax.compilation import on_gpu
from jetrl_jax.fp8 import formats, health, turning
from jetrl_jax.fp8.products import NT, scaled_dot
from jetrl_jax.fp8.quantization import QTensor, quantize
from jetrl_jax.fp8.recipes import Recipe
from jetrl_jax.typing import Array, PyTree


def quantize_input(x_MI: Array, slot: PyTree) -> QTensor:
  """Returns the rows on the slot's scale."""
  scale = slot['input']['scale']
  return QTensor(values=quantize(x_MI, scale, formats.E4M3), scale=scale)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class BothWays:
  """An output gradient on one scale: [M, O] for DGrad, [O, M] for WGrad."""

  straight: QTensor
  turned: QTensor


def _turn(x: Array) -> Array:
  """Returns the transpose of an 8-bit matrix."""
  if on_gpu() and turning.fits(x.shape):
    return turning.turn(x)
  return x.T


def turn_input(
    x_MI: Array, x8: QTensor, row_mask_M: Array
) -> tuple[QTensor, health.Seen]:
  """Returns the forward's rows turned round [I, M], and what they show."""
  if not (on_gpu() and turning.fits(x_MI.shape)):
    turned = QTensor(values=x8.values.T, scale=x8.scale)
    return turned, health.measure(x_MI, x8, row_mask_M)
  out = turning.quantize_and_turn(
      x_MI, x8.scale, row_mask_M, formats.E4M3, straight=False
  )
  seen = out.amax, health.with_elements(out.lost, x_MI, row_mask_M)
  return QTensor(values=out.turned_NM, scale=x8.scale), seen


def quantize_grad(
    recipe: Recipe, dy_MO: Array, slot: PyTree, row_mask_M: Array
) -> tuple[BothWays, health.Seen]:
  """Returns the output gradient on the slot's scale, and what it shows."""
  scale = slot['output_grad']['scale']
  dtype = formats.format_named(recipe.grad_format)
  if not (on_gpu() and turning.fits(dy_MO.shape)):
    dy8 = QTensor(values=quantize(dy_MO, scale, dtype), scale=scale)
    turned = QTensor(values=dy8.values.T, scale=scale)
    seen = health.measure(dy_MO, dy8, row_mask_M)
    return BothWays(straight=dy8, turned=turned), seen
  out = turning.quantize_and_turn(
      dy_MO, scale, row_mask_M, dtype, straight=True
  )
  assert out.straight_MN is not None
  straight = QTensor(values=out.straight_MN, scale=scale)
  turned = QTensor(values=out.turned_NM, scale=scale)
  both = BothWays(straight=straight, turned=turned)
  return both, (out.amax, health.with_elements(out.lost, dy_MO, row_mask_M))


def forward(
    recipe: Recipe, x8: QTensor, weight: QTensor, out_dtype, *, late: bool
) -> Array:
  """FProp; for `late` see `scaled_dot`."""
  return scaled_dot(
      x8.values,
      weight.values,
      NT,
      (x8.scale * weight.scale,),
      out_dtype,
      power_of_two=recipe.power_of_two_scales,
      late=late,
  )


def backward(
    recipe: Recipe, dy8: BothWays, x8_IM: QTensor, weight: QTensor, x_dtype
) -> tuple[Array, Array]:
  """DGrad and WGrad: dX in `x_dtype`, dW in float32."""
  power_of_two = recipe.power_of_two_scales
  dx_MI = scaled_dot(
      dy8.straight.values,
      _turn(weight.values),
      NT,
      (dy8.straight.scale * weight.scale,),
      x_dtype,
      power_of_two=power_of_two,
  )
  dw_OI = scaled_dot(
      dy8.turned.values,
      x8_IM.values,
      NT,
      (dy8.turned.scale * x8_IM.scale,),
      jnp.float32,
      power_of_two=power_of_two,
  )
  return dx_MI, dw_OI
