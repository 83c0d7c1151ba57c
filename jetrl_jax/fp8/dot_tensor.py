"""`fp8_delayed`: one scale per tensor, known before the values are.

    FProp  Y_MO  = X_MI W_OI^T       E4M3 x E4M3
    DGrad  dX_MI = dY_MO W_OI        grad_format x E4M3 (the same FP8 weights)
    WGrad  dW_OI = dY_MO^T X_MI      grad_format x E4M3, written in float32

No amax is taken on the way: the only recipe whose quantiser can be fused with
whatever produces its operand.
"""

import jax.numpy as jnp

from jetrl_jax.fp8 import formats
from jetrl_jax.fp8.products import NN, NT, TN, scaled_dot
from jetrl_jax.fp8.quantization import QTensor, quantize
from jetrl_jax.fp8.recipes import Recipe
from jetrl_jax.typing import Array, PyTree


def quantize_input(x_MI: Array, slot: PyTree) -> QTensor:
  """Returns the rows on the slot's scale."""
  scale = slot['input']['scale']
  return QTensor(values=quantize(x_MI, scale, formats.E4M3), scale=scale)


def quantize_grad(recipe: Recipe, dy_MO: Array, slot: PyTree) -> QTensor:
  """Returns the output gradient on the slot's scale."""
  scale = slot['output_grad']['scale']
  dtype = formats.format_named(recipe.grad_format)
  return QTensor(values=quantize(dy_MO, scale, dtype), scale=scale)


def forward(recipe: Recipe, x8: QTensor, weight: QTensor, out_dtype) -> Array:
  """FProp."""
  return scaled_dot(
      x8.values,
      weight.values,
      NT,
      (x8.scale * weight.scale,),
      out_dtype,
      power_of_two=recipe.power_of_two_scales,
  )


def backward(
    recipe: Recipe, dy8: QTensor, x8: QTensor, weight: QTensor, x_dtype
) -> tuple[Array, Array]:
  """DGrad and WGrad: dX in `x_dtype`, dW in float32."""
  power_of_two = recipe.power_of_two_scales
  dx_MI = scaled_dot(
      dy8.values,
      weight.values,
      NN,
      (dy8.scale * weight.scale,),
      x_dtype,
      power_of_two=power_of_two,
  )
  dw_OI = scaled_dot(
      dy8.values,
      x8.values,
      TN,
      (dy8.scale * x8.scale,),
      jnp.float32,
      power_of_two=power_of_two,
  )
  return dx_MI, dw_OI
