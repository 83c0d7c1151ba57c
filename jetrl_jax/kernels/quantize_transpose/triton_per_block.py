"""The operands of `fp8_block`'s backward, as kernels (Pallas, Triton backend).

DGrad wants an output gradient in groups of 128 along its rows. WGrad wants it
transposed, in groups along its columns. The dot state wants to know what was
lost. One pass over tiles of 128 x 128 gives all three. Another pass restores
the input that the forward kept in 8 bits, groups it the other way and
transposes it. The layout is that of `triton.py`, and again no log-prob depends
on these kernels.

A program has one tile and eight warps. A tile fills the registers, so it is
read twice, the second time from a cache; its words are transposed through
shared memory. The order of the sums of what was lost is a tree over a tile, in
float32, then XLA's over the tiles.

Lower bound of the time: the bytes once, 2 read and 2 written for a value, or 1
and 1 where an input is restored.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jetrl_jax.core.typing import Array
from jetrl_jax.fp8.quantization import QTensor, scale_from_amax
from jetrl_jax.fp8.recipes import BLOCK
from jetrl_jax.kernels.calls import lowered_once
from jetrl_jax.kernels.quantize_transpose import triton as transpose
from jetrl_jax.kernels.quantize_transpose.grid import (
    NUMBERS,
    Grid,
    join_tiles,
)
from jetrl_jax.kernels.quantize_transpose.triton import WORDS
from jetrl_jax.kernels.triton_tools import kernel_options

# Warps of a program, and the sums that its threads keep per row.
_WARPS, _RUNS = 8, 8


def _transpose(slab, top, transposed_ref, scale_ref, dtype, scale_of) -> None:
  """Writes the transpose of a tile, with a scale for each column.

  Args:
    slab: function from k to every fourth row from row k, float32 [32, 128].
    top: amax of each column.
    transposed_ref: words [128, 32].
    scale_ref: [128].
    dtype: the 8-bit format.
    scale_of: function from amax to scale.
  """
  scale = scale_of(top)
  scale_ref[...] = scale
  grid = Grid.of(scale[None, :], dtype)
  word = jnp.zeros((WORDS, BLOCK), jnp.uint32)
  for k in range(4):
    word |= transpose.byte(grid.cast(slab(k) * grid.inverse)) << (8 * k)
  transposed_ref[...] = word.T


def _both_kernel(x_ref, mask_ref, *outs, dtype, scale_of):
  """Writes a tile, its transpose, the scales of both, and four sums over it."""
  row_major_ref, rows_ref, transposed_ref, columns_ref, *sums_refs = outs
  top = jnp.zeros((BLOCK,), jnp.float32)
  sums = transpose.no_sums((WORDS, _RUNS))

  def slab(k: int):
    # The tile is read twice, the second time from a cache, because it fills the
    # registers.
    x = x_ref[:, k, :].astype(jnp.float32)
    return jnp.where(mask_ref[:, k][:, None] > 0, x, 0.0)

  for k in range(4):
    x = slab(k)
    top = jnp.maximum(top, jnp.max(jnp.abs(x), axis=0))
    scale = scale_of(jnp.max(jnp.abs(x), axis=1))
    rows_ref[:, k] = scale
    low, seen = Grid.of(scale[:, None], dtype).look(x)
    row_major_ref[:, k, :] = low
    sums = transpose.gather(sums, seen)
  _transpose(slab, top, transposed_ref, columns_ref, dtype, scale_of)
  transpose.write_sums(sums_refs, sums)


def _regroup_kernel(x_ref, rows_ref, transposed_ref, columns_ref, *, scale_of):
  """Writes the transpose of a tile, quantised in groups along its columns."""

  def slab(k: int):
    return x_ref[:, k, :].astype(jnp.float32) * rows_ref[:, k][:, None]

  tops = [jnp.max(jnp.abs(slab(k)), axis=0) for k in range(4)]
  top = functools.reduce(jnp.maximum, tops)
  _transpose(slab, top, transposed_ref, columns_ref, x_ref.dtype, scale_of)


def _specs(rows: int, columns: int):
  """Returns (grid, and by name shape and block of what passes by tiles)."""
  tiles = rows // BLOCK, columns // BLOCK
  return tiles[::-1], {
      'matrix': (
          (rows // 4, 4, columns),
          pl.BlockSpec((WORDS, 4, BLOCK), lambda j, i: (i, 0, j)),
      ),
      'turned': (
          (columns, rows // 4),
          pl.BlockSpec((BLOCK, WORDS), lambda j, i: (j, i)),
      ),
      'rows': (
          (tiles[1], rows // 4, 4),
          pl.BlockSpec((None, WORDS, 4), lambda j, i: (j, i, 0)),
      ),
      'columns': (
          (tiles[0], columns),
          pl.BlockSpec((None, BLOCK), lambda j, i: (i, j)),
      ),
      'mask': (
          (rows // 4, 4),
          pl.BlockSpec((WORDS, 4), lambda j, i: (i, 0)),
      ),
      'number': (tiles, pl.BlockSpec((None, None), lambda j, i: (i, j))),
  }


@lowered_once('dtype', 'margin', 'power_of_two', 'interpret')
def quantize_both_ways(
    x_MN: Array,
    row_mask_M: Array,
    dtype,
    *,
    margin: int,
    power_of_two: bool,
    interpret: bool = False,
) -> tuple[QTensor, QTensor, Array, Array]:
  """Quantises a matrix in groups of 128 along its rows and along its columns.

  Rows that do not count are quantised as zeros: padding, whose gradients are
  zeros as well.

  Args:
    x_MN: bfloat16 or float32; its shape `grid.fits`.
    row_mask_M: float32, 0 on rows that do not count.
    dtype: the 8-bit format, a float.
    margin: see `scale_from_amax`.
    power_of_two: see `scale_from_amax`.
    interpret: run on a CPU, for tests.

  Returns:
    (the rows [M, N], the columns as rows [N, M], amax, and
    `QuantizedPair.quantization_error` of the rows)
  """
  rows, columns = x_MN.shape
  grid, by_name = _specs(rows, columns)
  low, f32, u32 = jnp.dtype(dtype), jnp.float32, jnp.uint32
  outs = [('matrix', low), ('rows', f32), ('turned', u32), ('columns', f32)]
  outs += [('number', kind) for kind in NUMBERS]
  scale_of = functools.partial(
      scale_from_amax, dtype=low, margin=margin, power_of_two=power_of_two
  )
  row_major, of_rows, transposed, of_columns, *numbers = pl.pallas_call(
      functools.partial(_both_kernel, dtype=low, scale_of=scale_of),
      grid=grid,
      in_specs=[by_name[name][1] for name in ('matrix', 'mask')],
      out_specs=[by_name[name][1] for name, _ in outs],
      out_shape=[
          jax.ShapeDtypeStruct(by_name[name][0], kind) for name, kind in outs
      ],
      name='quantize_both_ways',
      **kernel_options(interpret, _WARPS),
  )(x_MN.reshape(rows // 4, 4, columns), row_mask_M.reshape(rows // 4, 4))
  return (
      QTensor(
          values=row_major.reshape(rows, columns),
          scale=of_rows.reshape(-1, rows).T,
      ),
      QTensor(values=transpose.as_values(transposed, low), scale=of_columns.T),
      *join_tiles(*numbers),
  )


@lowered_once('margin', 'power_of_two', 'interpret')
def regroup_and_transpose(
    x8: QTensor,
    *,
    margin: int,
    power_of_two: bool,
    interpret: bool = False,
) -> QTensor:
  """Returns a matrix in groups along its rows in groups along its columns.

  Args:
    x8: [M, N], whose shape `grid.fits`, with scales [M, N / 128].
    margin: see `scale_from_amax`.
    power_of_two: see `scale_from_amax`.
    interpret: run on a CPU, for tests.

  Returns:
    The transpose, [N, M] with scales [N, M / 128].
  """
  rows, columns = x8.values.shape
  grid, by_name = _specs(rows, columns)
  dtype = x8.values.dtype
  outs = [('turned', jnp.uint32), ('columns', jnp.float32)]
  scale_of = functools.partial(
      scale_from_amax, dtype=dtype, margin=margin, power_of_two=power_of_two
  )
  transposed, of_columns = pl.pallas_call(
      functools.partial(_regroup_kernel, scale_of=scale_of),
      grid=grid,
      in_specs=[by_name[name][1] for name in ('matrix', 'rows')],
      out_specs=[by_name[name][1] for name, _ in outs],
      out_shape=[
          jax.ShapeDtypeStruct(by_name[name][0], kind) for name, kind in outs
      ],
      name='regroup_and_turn',
      **kernel_options(interpret, _WARPS),
  )(
      x8.values.reshape(rows // 4, 4, columns),
      x8.scale.T.reshape(-1, rows // 4, 4),
  )
  return QTensor(
      values=transpose.as_values(transposed, dtype), scale=of_columns.T
  )
