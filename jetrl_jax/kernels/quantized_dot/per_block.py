"""`fp8_block`: groups of 128 values, blocks of 128 x 128 weights.

    FProp  Y  = X W^T     X 1 x 128 along I      W 128 x 128
    DGrad  dX = dY W      dY 1 x 128 along O     W on the same grid
    WGrad  dW = dY^T X    dY 128 x 1 and X 128 x 1 along the tokens

Every operand has scales that change along the contraction, so each product is
a sum over groups of 128, scaled one by one and added in order
(`kernels/block_scaled_dot`). That wants its operands contraction-minor, so
DGrad transposes W, and WGrad both of its operands
(`kernels/quantize_transpose`).

The input is kept for the backward in FP8, as the forward had it. WGrad wants
it in groups along the tokens: its values are restored and quantised once more.
With powers of two for scales that loses nothing but values below 2^-13 of
their group's amax: a value keeps its four significant bits on any such scale.

References:
  Jet-RL, arXiv:2601.14243, the GEMM table; group sizes and the float32 sum over
  groups as in DeepSeek-V3, arXiv:2412.19437, section 3.3.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jetrl_jax.core.typing import Array
from jetrl_jax.fp8 import formats, health
from jetrl_jax.fp8.quantization import QTensor, quantize_groups
from jetrl_jax.fp8.recipes import BLOCK, Recipe
from jetrl_jax.kernels.block_scaled_dot import block_dot
from jetrl_jax.kernels.quantize_transpose import (
    quantize_both_ways,
    regroup_and_transpose,
    transpose,
)


def _check(shape: tuple[int, ...], rows: int, columns: int) -> None:
  """Refuses an operand that has no whole groups.

  Raises:
    ValueError: a dim is no multiple of 128.
  """
  for size, step in zip(shape, (rows, columns), strict=True):
    if size % step:
      raise ValueError(
          f'recipe fp8_block groups {BLOCK} values, but a dot has an operand of'
          f' shape {tuple(shape)}: {size} is no multiple. Use fp8_token, or'
          ' name the dot in precision.high_precision_layers'
      )


def quantize_input(recipe: Recipe, x_MI: Array) -> QTensor:
  """Returns the rows in groups of 128."""
  _check(x_MI.shape, 1, BLOCK)
  return quantize_groups(x_MI, formats.E4M3, (1, BLOCK), **recipe.scaling)


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
  _check(dy_MO.shape, 1, BLOCK)
  row_major, transposed, seen = quantize_both_ways(
      dy_MO, row_mask_M, recipe.grad_dtype, **recipe.scaling
  )
  return OutputGrad(row_major=row_major, transposed=transposed), seen


def _product(recipe: Recipe, a: QTensor, b: QTensor, out_dtype) -> Array:
  """Returns a . b^T of operands [M, K] and [N, K] in groups along K."""
  return block_dot(
      a.values,
      a.scale,
      b.values,
      b.scale,
      out_dtype,
      power_of_two=recipe.power_of_two_scales,
  )


def _transposed(x: QTensor) -> QTensor:
  """Returns the transpose, with its scales."""
  return QTensor(values=transpose(x.values), scale=x.scale.T)


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
    x_dtype: the dtype of dX.
  """
  dx_MI = _product(recipe, dy8.row_major, _transposed(weight), x_dtype)
  x_IM = regroup_and_transpose(x8, x_dtype, **recipe.scaling)
  return dx_MI, _product(recipe, dy8.transposed, x_IM, jnp.float32)
