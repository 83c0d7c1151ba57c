"""Quantises a matrix and its transpose in one pass, for the backward's dots.

An FP8 GEMM on Hopper reads both operands contraction-minor, so DGrad wants the
weight transposed, and WGrad both of its operands.

    per tensor   q_MN = E4M3|E5M2(clip(x / scale)), and q^T
    per block    q_MN in groups of 128 along N with a scale each, and the
                 transpose in groups of 128 along M

The values are those of `quantize` and `quantize_groups` in
`fp8/quantization.py`. With them come float32 sums over what was lost, which a
kernel adds in another order than XLA. No log-prob depends on any of this,
because the forward does not use it.

If no kernel runs, `fits` is False, and a dot reads its operands as they are. So
a caller asks `fits` before it chooses which dims a dot contracts.
"""

import math

from jetrl_jax.core.typing import Array
from jetrl_jax.fp8 import health
from jetrl_jax.fp8.quantization import QTensor
from jetrl_jax.kernels import dispatch
from jetrl_jax.kernels.quantize_transpose import grid, reference
from jetrl_jax.kernels.quantize_transpose.reference import QuantizedPair

__all__ = [
    'QuantizedPair',
    'fits',
    'quantize_and_transpose',
    'quantize_both_ways',
    'regroup_and_transpose',
    'transpose',
]


def fits(dims: tuple[int, ...]) -> bool:
  """Whether a kernel transposes matrices of these dims."""
  return dispatch.has_kernel('quantize_transpose') and grid.fits(dims)


def _quantises(x: Array) -> bool:
  """Whether a kernel quantises this matrix; Hopper transposes 16 bits."""
  return fits(x.shape) and x.dtype.itemsize == 2


def transpose(x_MN: Array) -> Array:
  """Returns the transpose of an 8-bit matrix."""
  if not fits(x_MN.shape):
    return x_MN.T
  from jetrl_jax.kernels.quantize_transpose import mosaic_sm90

  return mosaic_sm90.transpose(x_MN)


def quantize_and_transpose(
    x_MN: Array, scale: Array, row_mask_M: Array, dtype, *, row_major: bool
) -> QuantizedPair:
  """Quantises a matrix on one scale, and returns it and its transpose.

  Rows that do not count are quantised as zeros: padding, whose gradients are
  zeros as well.

  Args:
    x_MN: bfloat16 or float32.
    scale: float32 scalar.
    row_mask_M: float32, 0 on rows that do not count.
    dtype: the 8-bit format, a float.
    row_major: also return the values that are not transposed.
  """
  operands = x_MN, scale, row_mask_M, dtype
  if not _quantises(x_MN):
    return reference.quantize_and_transpose(*operands, row_major=row_major)
  from jetrl_jax.kernels.quantize_transpose import mosaic_sm90

  return mosaic_sm90.quantize_and_transpose(*operands, row_major=row_major)


def _is_addressed(x: Array) -> bool:
  """Whether kernels that quantise in groups can address all values."""
  return math.prod(x.shape) <= dispatch.MOST_VALUES


def quantize_both_ways(
    x_MN: Array, row_mask_M: Array, dtype, *, margin: int, power_of_two: bool
) -> tuple[QTensor, QTensor, health.OperandStats]:
  """Quantises a matrix in groups of 128 along its rows and along its columns.

  Args:
    x_MN: bfloat16 or float32, zeros on rows that do not count; N is a multiple
      of 128.
    row_mask_M: float32, 0 on rows that do not count.
    dtype: the 8-bit format, a float.
    margin: see `scale_from_amax`.
    power_of_two: see `scale_from_amax`.

  Returns:
    (the rows [M, N], the columns as rows [N, M], M up to a multiple of 128, and
    what the rows show)
  """
  scaling = dict(margin=margin, power_of_two=power_of_two)
  if not (_quantises(x_MN) and _is_addressed(x_MN)):
    return reference.quantize_both_ways(x_MN, row_mask_M, dtype, **scaling)
  from jetrl_jax.kernels.quantize_transpose import mosaic_per_block_sm90

  kernel = mosaic_per_block_sm90.quantize_both_ways
  row_major, transposed, amax, lost = kernel(x_MN, row_mask_M, dtype, **scaling)
  sums = health.with_elements(lost, x_MN.shape[1], row_mask_M)
  return row_major, transposed, (amax, sums)


def regroup_and_transpose(
    x8: QTensor, dtype, *, margin: int, power_of_two: bool
) -> QTensor:
  """Returns a matrix in groups along its rows in groups along its columns.

  Args:
    x8: [M, N] with scales [M, N / 128].
    dtype: what the values are restored in; the kernel does it in float32, which
      with powers of two for scales is the same.
    margin: see `scale_from_amax`.
    power_of_two: see `scale_from_amax`.

  Returns:
    The transpose, [N, M] with scales [N, M / 128], M up to a multiple of 128.
  """
  scaling = dict(margin=margin, power_of_two=power_of_two)
  if not (fits(x8.values.shape) and _is_addressed(x8.values)):
    return reference.regroup_and_transpose(x8, dtype, **scaling)
  from jetrl_jax.kernels.quantize_transpose import mosaic_per_block_sm90

  return mosaic_per_block_sm90.regroup_and_transpose(x8, **scaling)
