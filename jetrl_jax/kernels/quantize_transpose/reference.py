"""Quantised matrices and their transposes, in plain JAX."""

import dataclasses

import jax
import jax.numpy as jnp

from jetrl_jax.core.typing import Array
from jetrl_jax.fp8 import health
from jetrl_jax.fp8.quantization import (
    QTensor,
    dequantize,
    quantize,
    quantize_groups,
)
from jetrl_jax.fp8.recipes import BLOCK


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedPair:
  """A quantised matrix, its transpose, and what quantising it lost.

  Attributes:
    row_major_MN: 8-bit values; None if only the transpose was asked for.
    transposed_NM: the transpose of these values.
    amax: float32 [], amax of the matrix before it was quantised.
    quantization_error: float32 [4], see `health.SUMS` from the second on.
  """

  row_major_MN: Array | None
  transposed_NM: Array
  amax: Array
  quantization_error: Array


def quantize_and_transpose(
    x_MN: Array, scale: Array, row_mask_M: Array, dtype, *, row_major: bool
) -> QuantizedPair:
  """See the package's `quantize_and_transpose`."""
  x_MN = jnp.where(row_mask_M[:, None] > 0, x_MN, 0)
  values = quantize(x_MN, scale, dtype)
  quantized = QTensor(values=values, scale=scale)
  amax, sums = health.measure(x_MN, quantized, row_mask_M)
  return QuantizedPair(
      row_major_MN=values if row_major else None,
      transposed_NM=values.T,
      amax=amax,
      quantization_error=sums[1:],
  )


def quantize_both_ways(
    x_MN: Array, row_mask_M: Array, dtype, **scaling
) -> tuple[QTensor, QTensor, health.OperandStats]:
  """See the package's `quantize_both_ways`; M is any number."""
  row_major = quantize_groups(x_MN, dtype, (1, BLOCK), **scaling)
  transposed = along_rows(x_MN, dtype, **scaling)
  return row_major, transposed, health.measure(x_MN, row_major, row_mask_M)


def regroup_and_transpose(x8: QTensor, dtype, **scaling) -> QTensor:
  """See the package's `regroup_and_transpose`; M is any number."""
  return along_rows(dequantize(x8, dtype), x8.values.dtype, **scaling)


def along_rows(x_MN: Array, dtype, **scaling) -> QTensor:
  """Returns the columns as rows [N, M], in groups of 128 of the M.

  Rows of zeros fill the last group up; they add nothing to a product.
  """
  missing = -x_MN.shape[0] % BLOCK
  x_MN = jnp.pad(x_MN, ((0, missing), (0, 0)))
  x8 = quantize_groups(x_MN, dtype, (BLOCK, 1), **scaling)
  return QTensor(values=x8.values.T, scale=x8.scale.T)
