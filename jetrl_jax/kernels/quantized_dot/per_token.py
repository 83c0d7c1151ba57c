"""`fp8_token` and `int8`: a scale per row of X and per output channel of W.

Both scales stand outside of the forward's contraction, so they are applied to
its result:

    Y_mo = (sum_i x8_mi w8_oi) * sx_m * sw_o

E4M3 products are added by the backend's FP8 dot. INT8 products are added in
int32, exactly (I * 127^2 < 2^31 up to I = 133144), so that dot has the same
bits in any order of addition.

Backward of `fp8_token`. In DGrad W's scales, and in WGrad X's, lie along the
contraction, where no GEMM can apply them. They are folded into dY before it
is quantised, once per direction; powers of two fold exactly:

    DGrad  dX_mi = (sum_o q(dY_mo sw_o) w8_oi) * s_m      s: per row
    WGrad  dW_oi = (sum_m q(dY_mo sx_m) x8_mi) * s_o      s: per column

so DGrad and WGrad read the 8-bit weight and input of the forward, and nothing
is quantised twice. WGrad's scales see all tokens of a micro-batch, or of one of
the head's chunks: gradients depend on the split, within the format's rounding;
the forward does not.

Backward of `int8`: in the compute dtype, from the dequantised operands.
"""

import jax.numpy as jnp
from jax import lax

from jetrl_jax.core.typing import Array
from jetrl_jax.fp8 import formats, health
from jetrl_jax.fp8.products import (
    NN,
    NT,
    TN,
    fence,
    high_backward,
    scaled_dot,
    times,
)
from jetrl_jax.fp8.quantization import QTensor, dequantize, quantize_groups
from jetrl_jax.fp8.recipes import Recipe

# Longest contraction whose INT8 products cannot overflow int32.
MAX_INT8_INNER = (2**31 - 1) // 127**2


def quantize_rows(recipe: Recipe, x_MI: Array) -> QTensor:
  """Returns the rows, each on a scale of its own.

  Args:
    recipe: `fp8_token` or `int8`.
    x_MI: rows of the input, or the output channels of a kernel.
  """
  dtype = formats.INT8 if recipe.name == 'int8' else formats.E4M3
  return quantize_groups(x_MI, dtype, (1, x_MI.shape[1]), **recipe.scaling)


def forward(recipe: Recipe, x8: QTensor, weight: QTensor, out_dtype) -> Array:
  """FProp in E4M3."""
  return scaled_dot(
      x8.values,
      weight.values,
      NT,
      (x8.scale, weight.scale.reshape(1, -1)),
      out_dtype,
      power_of_two=recipe.power_of_two_scales,
  )


def forward_int8(x8: QTensor, weight: QTensor, out_dtype) -> Array:
  """FProp in INT8."""
  inner = x8.values.shape[1]
  if inner > MAX_INT8_INNER:
    raise ValueError(
        f'recipe int8 adds {inner} products in int32, which holds at most'
        f' {MAX_INT8_INNER}; use fp8_token'
    )
  product = lax.dot_general(
      x8.values, weight.values, NT, preferred_element_type=jnp.int32
  )
  product = times(
      product.astype(jnp.float32), (x8.scale, weight.scale.reshape(1, -1))
  )
  return fence(product).astype(out_dtype)


def quantize_grad(
    recipe: Recipe, dy_MO: Array, weight: QTensor, row_mask_M: Array
) -> tuple[QTensor, health.OperandStats]:
  """Returns dY with W's scales folded in, as DGrad reads it; what it shows.

  The amax is that of dY itself.
  """
  folded = dy_MO.astype(jnp.float32) * weight.scale.reshape(1, -1)
  group = 1, folded.shape[1]
  dy8 = quantize_groups(folded, recipe.grad_dtype, group, **recipe.scaling)
  _, sums = health.measure(folded, dy8, row_mask_M)
  return dy8, (health.amax_of_rows(dy_MO, row_mask_M), sums)


def backward(
    recipe: Recipe,
    dy_MO: Array,
    dy8: QTensor,
    x8: QTensor,
    weight: QTensor,
    x_dtype,
) -> tuple[Array, Array]:
  """DGrad and WGrad in FP8: dX in `x_dtype`, dW in float32.

  Args:
    recipe: `fp8_token`.
    dy_MO: output gradient.
    dy8: what `quantize_grad` made of it.
    x8: the forward's input.
    weight: the forward's weight.
    x_dtype: the dtype of dX.
  """
  power_of_two = recipe.power_of_two_scales
  dx_MI = scaled_dot(
      dy8.values,
      weight.values,
      NN,
      (dy8.scale,),
      x_dtype,
      power_of_two=power_of_two,
  )
  folded = dy_MO.astype(jnp.float32) * x8.scale
  by_column = quantize_groups(
      folded, recipe.grad_dtype, (folded.shape[0], 1), **recipe.scaling
  )
  dw_OI = scaled_dot(
      by_column.values,
      x8.values,
      TN,
      (by_column.scale.reshape(-1, 1),),
      jnp.float32,
      power_of_two=power_of_two,
  )
  return dx_MI, dw_OI


def backward_dequantized(
    dy_MO: Array, x8: QTensor, weight: QTensor, x_dtype
) -> tuple[Array, Array]:
  """DGrad and WGrad in dY's dtype, from the dequantised operands."""
  x_MI = dequantize(x8, dy_MO.dtype)
  kernel_OI = dequantize(weight, dy_MO.dtype)
  return high_backward(dy_MO, x_MI, kernel_OI, x_dtype)
