"""Kernels that transpose 8-bit matrices (Pallas, Triton backend).

An FP8 GEMM on Hopper reads both operands contraction-minor, so DGrad wants the
kernel transposed, and WGrad both of its operands. XLA's own transposes of bytes
reach a fifth of the memory's speed, and XLA reads a quantised array again to
transpose it, to find its amax and to measure what was lost.
`quantize_and_transpose` does all of this in one pass over the bfloat16 values.

A word of the transposed matrix holds the bytes of one column in four
neighbouring rows. Four loads of rows make it in registers, so whole words pass
through shared memory. The forward does not use these kernels: no log-prob
depends on them.

A program that quantises has a tile of 128 x 64 and four warps, one that
transposes bytes a tile of 128 x 128 and two. Values and words are in registers;
the words are transposed through shared memory.

Order of the sums: of what was lost, over a tile in a tree, in float32, and over
the tiles by XLA.

Lower bound of the time: the bytes. 28% to 51% of it was reached on an H200,
since four statistics of each value are many instructions
(docs/performance_log.md).
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jetrl_jax.core.typing import Array
from jetrl_jax.kernels.calls import lowered_once
from jetrl_jax.kernels.quantize_transpose.grid import (
    NUMBERS,
    TILE,
    Grid,
    join_tiles,
)
from jetrl_jax.kernels.quantize_transpose.reference import QuantizedPair
from jetrl_jax.kernels.triton_tools import kernel_options, row_slices

WORDS = TILE // 4
# Columns of a program that quantises, and warps: the fastest of five shapes.
_WIDTH = 64
_WARPS = 4


def join(parts: Sequence[QuantizedPair]) -> QuantizedPair:
  """Returns what was made of a matrix's rows in parts, as of all of them."""
  if len(parts) == 1:
    return parts[0]
  row_major = [p.row_major_MN for p in parts if p.row_major_MN is not None]
  return QuantizedPair(
      row_major_MN=jnp.concatenate(row_major) if row_major else None,
      transposed_NM=jnp.concatenate(
          [part.transposed_NM for part in parts], axis=1
      ),
      amax=jnp.max(jnp.stack([part.amax for part in parts])),
      quantization_error=jnp.sum(
          jnp.stack([part.quantization_error for part in parts]), axis=0
      ),
  )


def byte(values: Array) -> Array:
  """8-bit values as words with the byte at the bottom."""
  return lax.bitcast_convert_type(values, jnp.uint8).astype(jnp.uint32)


def as_values(words_NR: Array, dtype) -> Array:
  """[N, M/4] words to [N, M] values."""
  columns, words = words_NR.shape
  values = lax.bitcast_convert_type(words_NR, jnp.uint8)
  return lax.bitcast_convert_type(values.reshape(columns, 4 * words), dtype)


def _transpose_kernel(x_ref, out_ref):
  rows = [x_ref[:, k, :] for k in range(4)]
  for c in range(4):
    # Byte c of four consecutive rows, as one word.
    word = (rows[0] >> (8 * c)) & 0xFF
    for k in range(1, 4):
      word |= ((rows[k] >> (8 * c)) & 0xFF) << (8 * k)
    out_ref[:, c, :] = word.T


@lowered_once('interpret')
def transpose(x_MN: Array, *, interpret: bool = False) -> Array:
  """Returns the transpose of an 8-bit matrix whose shape `fits`."""
  rows, columns = x_MN.shape
  bytes_MN = lax.bitcast_convert_type(x_MN, jnp.uint8)
  words = lax.bitcast_convert_type(
      bytes_MN.reshape(rows // 4, 4, columns // 4, 4), jnp.uint32
  )
  out = pl.pallas_call(
      _transpose_kernel,
      grid=(columns // TILE, rows // TILE),
      in_specs=[pl.BlockSpec((WORDS, 4, WORDS), lambda j, i: (i, 0, j))],
      out_specs=pl.BlockSpec((WORDS, 4, WORDS), lambda j, i: (j, 0, i)),
      out_shape=jax.ShapeDtypeStruct((columns // 4, 4, rows // 4), jnp.uint32),
      name='turn',
      **kernel_options(interpret, num_warps=2),
  )(words)
  return as_values(out.reshape(columns, rows // 4), x_MN.dtype)


# How tiles join each of the four numbers of `Grid.look`.
_REDUCE = (jnp.max, jnp.sum, jnp.sum, jnp.sum)
_JOIN = (jnp.maximum, jnp.add, jnp.add, jnp.add)


def no_sums(shape: tuple[int, ...], kinds=NUMBERS) -> list[Array]:
  """Returns what `gather` starts with."""
  return [jnp.zeros(shape, kind) for kind in kinds]


def gather(sums: list[Array], seen: tuple[Array, ...]) -> list[Array]:
  """Adds what `Grid.look` saw; a sum is of one value, or of a run of a row."""
  rows, columns = sums[0].shape
  return [
      join(total, _fold(reduce, part, (rows, columns)))
      for total, part, reduce, join in zip(
          sums, seen, _REDUCE, _JOIN, strict=True
      )
  ]


def _fold(reduce, part: Array, shape: tuple[int, int]) -> Array:
  if part.shape == shape:
    return part
  return reduce(part.reshape(*shape, part.shape[1] // shape[1]), axis=2)


def write_sums(refs, sums: list[Array]) -> None:
  """Writes a tile's four numbers."""
  for ref, reduce, total in zip(refs, _REDUCE, sums, strict=True):
    ref[...] = reduce(total.astype(ref.dtype))


def _quantize_kernel(x_ref, mask_ref, scale_ref, *outs, dtype, row_major: bool):
  """Writes a tile's 8-bit values, their transpose, and four sums over it."""
  row_major_ref, *outs = outs if row_major else (None, *outs)
  transposed_ref, *sums_refs = outs
  shape = (WORDS, x_ref.shape[2])
  word, sums = jnp.zeros(shape, jnp.uint32), no_sums(shape)
  grid = Grid.of(scale_ref[0], dtype)
  for k in range(4):
    x = x_ref[:, k, :].astype(jnp.float32)
    x = jnp.where(mask_ref[:, k][:, None] > 0, x, 0.0)
    low, seen = grid.look(x)
    if row_major_ref is not None:
      row_major_ref[:, k, :] = low
    word |= byte(low) << (8 * k)
    sums = gather(sums, seen)
  transposed_ref[...] = word.T
  write_sums(sums_refs, sums)


@lowered_once('dtype', 'row_major', 'interpret')
def quantize_and_transpose(
    x_MN: Array,
    scale: Array,
    row_mask_M: Array,
    dtype,
    *,
    row_major: bool,
    interpret: bool = False,
) -> QuantizedPair:
  """Quantises a matrix, transposes it and sums what was lost, in one pass.

  Rows that do not count are quantised as zeros: padding, whose gradients are
  zeros as well.

  Args:
    x_MN: bfloat16 or float32; its shape `fits`.
    scale: float32 scalar.
    row_mask_M: float32, 0 on rows that do not count.
    dtype: the 8-bit format, a float.
    row_major: also return the values as they came.
    interpret: run on a CPU, for tests.
  """
  run = functools.partial(
      _quantized_rows,
      dtype=dtype,
      row_major=row_major,
      interpret=interpret,
  )
  slices = row_slices(*x_MN.shape, multiple=TILE)
  return join([run(x_MN[at], scale, row_mask_M[at]) for at in slices])


def _quantized_rows(
    x_MN,
    scale,
    row_mask_M,
    *,
    dtype,
    row_major: bool,
    interpret: bool,
) -> QuantizedPair:
  rows, columns = x_MN.shape
  grid = columns // _WIDTH, rows // TILE
  rows_spec = pl.BlockSpec((WORDS, 4, _WIDTH), lambda j, i: (i, 0, j))
  number = pl.BlockSpec((None, None), lambda j, i: (i, j))
  numbers = [jax.ShapeDtypeStruct(grid[::-1], kind) for kind in NUMBERS]
  quarters = rows // 4, 4, columns
  out = pl.pallas_call(
      functools.partial(_quantize_kernel, dtype=dtype, row_major=row_major),
      grid=grid,
      in_specs=[
          rows_spec,
          pl.BlockSpec((WORDS, 4), lambda j, i: (i, 0)),
          pl.BlockSpec((1,), lambda j, i: (0,)),
      ],
      out_specs=[
          *[rows_spec] * row_major,
          pl.BlockSpec((_WIDTH, WORDS), lambda j, i: (j, i)),
          *[number] * 4,
      ],
      out_shape=[
          *[jax.ShapeDtypeStruct(quarters, dtype)] * row_major,
          jax.ShapeDtypeStruct((columns, rows // 4), jnp.uint32),
          *numbers,
      ],
      name='quantize_and_turn',
      **kernel_options(interpret, _WARPS),
  )(
      x_MN.reshape(quarters),
      row_mask_M.reshape(rows // 4, 4),
      scale.reshape(1),
  )
  values = out[0].reshape(rows, columns) if row_major else None
  transposed_NR, *numbers = out[row_major:]
  amax, quantization_error = join_tiles(*numbers)
  return QuantizedPair(
      row_major_MN=values,
      transposed_NM=as_values(transposed_NR, dtype),
      amax=amax,
      quantization_error=quantization_error,
  )
