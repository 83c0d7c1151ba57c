"""`fp8_block`: groups of 128 values, blocks of 128 x 128 weights.

    FProp  Y  = X W^T     X 1 x 128 along I      W 128 x 128
    DGrad  dX = dY W      dY 1 x 128 along O     W on the same grid
    WGrad  dW = dY^T X    dY 128 x 1 and X 128 x 1 along the tokens

Every operand has scales that change along the contraction, so each product is
a sum over groups of 128, scaled one by one and added in order:
`products.grouped_dot`, on a GPU `kernels/block_scaled_dot/triton.py`. Both want
their operands contraction-minor, so DGrad turns W round, and WGrad both of its
operands (`kernels/quantize_transpose/per_block.py`).

The input is kept for the backward in FP8, as the forward had it. WGrad wants
it in groups along the tokens: its values are restored and quantised once more.
With powers of two for scales that loses nothing but values below 2^-13 of
their group's amax: a value keeps its four significant bits on any such scale.

References:
  Jet-RL, arXiv:2601.14243, the GEMM table; group sizes and the float32 sum over
  groups as in DeepSeek-V3, arXiv:2412.19437, section 3.3.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from jetrl_jax.core.typing import Array
from jetrl_jax.fp8 import formats, health
from jetrl_jax.fp8.products import grouped_dot
from jetrl_jax.fp8.quantization import QTensor, dequantize, quantize_groups
from jetrl_jax.fp8.recipes import BLOCK, Recipe
from jetrl_jax.kernels import dispatch
from jetrl_jax.kernels.block_scaled_dot import triton as block_scaled_dot
from jetrl_jax.kernels.pallas import MOST_VALUES
from jetrl_jax.kernels.quantize_transpose import per_block as transpose_blocks
from jetrl_jax.kernels.quantize_transpose import transpose


def _quantize(recipe: Recipe, x, dtype, rows: int, columns: int) -> QTensor:
  for size, step in zip(x.shape, (rows, columns), strict=True):
    if size % step:
      raise ValueError(
          f'recipe fp8_block groups {BLOCK} values, but a dot has an operand of'
          f' shape {tuple(x.shape)}: {size} is no multiple. Use fp8_token, or'
          ' name the dot in precision.high_precision_layers'
      )
  return quantize_groups(x, dtype, (rows, columns), **recipe.scaling)


def quantize_input(recipe: Recipe, x_MI: Array) -> QTensor:
  """Returns the rows in groups of 128."""
  return _quantize(recipe, x_MI, formats.E4M3, 1, BLOCK)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputGrad:
  """An output gradient in both groupings.

  Attributes:
    row_major: [M, O] in groups along the channels, for DGrad.
    transposed: [O, M] in groups along the tokens, for WGrad.
  """

  row_major: QTensor
  transposed: QTensor


def quantize_grad(
    recipe: Recipe, dy_MO: Array, row_mask_M: Array
) -> tuple[OutputGrad, health.OperandStats]:
  """Returns the output gradient as the backward reads it, what it shows."""
  dtype = recipe.grad_dtype
  if _has_kernels(dy_MO.shape):
    row_major, transposed, amax, quantization_error = (
        transpose_blocks.quantize_both_ways(
            dy_MO, row_mask_M, dtype, **recipe.scaling
        )
    )
    seen = amax, health.with_elements(
        quantization_error, dy_MO.shape[1], row_mask_M
    )
  else:
    row_major = _quantize(recipe, dy_MO, dtype, 1, BLOCK)
    transposed = _along_tokens(recipe, dy_MO, dtype)
    seen = health.measure(dy_MO, row_major, row_mask_M)
  return OutputGrad(row_major=row_major, transposed=transposed), seen


def _has_kernels(shape: tuple[int, ...]) -> bool:
  """Whether an operand of the backward is made by a kernel."""
  size = math.prod(shape)
  has_kernel = dispatch.has_kernel('quantize_transpose')
  return has_kernel and transpose.fits(shape) and size <= MOST_VALUES


def _product(recipe: Recipe, a: QTensor, b: QTensor, out_dtype) -> Array:
  """Returns a . b^T of operands [M, K] and [N, K] in groups along K."""
  has_kernel = dispatch.has_kernel('block_scaled_dot')
  multiply = block_scaled_dot.block_dot if has_kernel else grouped_dot
  return multiply(
      a.values,
      a.scale,
      b.values,
      b.scale,
      out_dtype,
      power_of_two=recipe.power_of_two_scales,
  )


def _transposed(x: QTensor) -> QTensor:
  """Returns the transpose, with its scales."""
  has_kernel = dispatch.has_kernel('quantize_transpose')
  values = transpose.transpose(x.values) if has_kernel else x.values.T
  return QTensor(values=values, scale=x.scale.T)


def forward(recipe: Recipe, x8: QTensor, weight: QTensor, out_dtype) -> Array:
  """FProp."""
  return _product(recipe, x8, weight, out_dtype)


def backward(
    recipe: Recipe, dy8: OutputGrad, x8: QTensor, weight: QTensor, x_dtype
) -> tuple[Array, Array]:
  """DGrad and WGrad: dX in `x_dtype`, dW in float32.

  Args:
    recipe: `fp8_block`.
    dy8: what `quantize_grad` made of the output gradient.
    x8: the forward's input.
    weight: the forward's weight.
    x_dtype: of dX.
  """
  dx_MI = _product(recipe, dy8.row_major, _transposed(weight), x_dtype)
  if _has_kernels(x8.values.shape):
    x_IM = transpose_blocks.regroup_and_transpose(x8, **recipe.scaling)
  else:
    x_IM = _along_tokens(recipe, dequantize(x8, x_dtype), formats.E4M3)
  return dx_MI, _product(recipe, dy8.transposed, x_IM, jnp.float32)


def _along_tokens(recipe: Recipe, x_MN: Array, dtype) -> QTensor:
  """Returns the columns as rows [N, M], in groups of 128 tokens.

  Rows of zeros fill the last group up; they add nothing to a product.
  """
  missing = -x_MN.shape[0] % BLOCK
  x_MN = jnp.pad(x_MN, ((0, missing), (0, 0)))
  return _transposed(_quantize(recipe, x_MN, dtype, BLOCK, 1))
