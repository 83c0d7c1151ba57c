"""Kernels that transpose 8-bit matrices, for Hopper GPUs (Mosaic).

A program is one warpgroup. To quantise it has a tile of 128 x 64 values of 16
bits, which a bulk copy brings to shared memory. They are read twice: turned,
pair by pair (`ldmatrix.trans`), 64 values of each thread in registers, and as
they lie, 32 at a time. Bulk copies take the results from shared memory. To
transpose bytes a tile is 128 x 128. Hopper turns pairs of bytes only, so bytes
are widened to 16 bits, through shared memory, and back.

Order of the sums: of what was lost, along a row of the tile in a thread and
then over four lanes, then two halves of 64 rows, then over these in a tree, in
float32, and over the tiles by XLA. No log-prob depends on them. The reciprocal
of a scale is the device's (`rcp.approx`), exact for powers of two: on other
scales a value beside a tie may be its neighbour.

Lower bound of the time: the bytes, but the kernels are bound by instructions
(docs/performance_log.md). Compiled for an H200 a thread has 96 registers, or 90
for bytes, and nothing spilled.
"""

# jax 0.10, which the types are checked with, lacks some of it.
# pyright: reportAttributeAccessIssue=false

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jetrl_jax.core.typing import Array
from jetrl_jax.kernels import mosaic_tools as tools
from jetrl_jax.kernels.calls import lowered_once
from jetrl_jax.kernels.quantize_transpose.grid import (
    NUMBERS,
    TILE,
    Grid,
    join_tiles,
)
from jetrl_jax.kernels.quantize_transpose.reference import QuantizedPair

# Columns of a program that quantises: 64 values of each thread.
_WIDTH = 64
# Halves of a tile's rows.
HALVES = pl.ds(0, TILE // 2), pl.ds(TILE // 2, TILE // 2)
_LAYOUT = plgpu.Layout.WGMMA
# How tiles join each of the four numbers of `Grid.look`.
_REDUCE = (jnp.max, jnp.sum, jnp.sum, jnp.sum)
_JOIN = (jnp.maximum, jnp.add, jnp.add, jnp.add)


def matrix(rows: int, columns: int, dtype):
  """Returns a tile in shared memory."""
  return plgpu.SMEM(
      (rows, columns), dtype, transforms=tools.pieces(dtype, columns)
  )


def place(width: int):
  """Returns the rows and the columns of a program's tile."""
  i, j = lax.axis_index('row'), lax.axis_index('column')
  return pl.ds(i * TILE, TILE), pl.ds(j * width, width)


def load(ref, interpret: bool):
  """Returns what a tile in shared memory holds, turned or not."""
  return ref[...] if interpret else tools.load(ref, _LAYOUT)


def valid(ref, counts_ref, axis: int, interpret: bool):
  """Returns float32 values, zeros on rows that do not count.

  Args:
    ref: a tile.
    counts_ref: float32, 0 for each row that does not.
    axis: of the tile, that are the rows.
    interpret: run on a CPU.
  """
  x = load(ref, interpret).astype(jnp.float32)
  counts = tools.loaded(counts_ref, 1 - axis)
  counts = lax.broadcast_in_dim(counts, x.shape, [axis])
  return jnp.where(counts > 0, x, 0.0)


def along_rows(seen: tuple) -> list:
  """Returns four numbers of each row, of what `Grid.look` saw."""
  return [
      reduce(part, axis=1) for reduce, part in zip(_REDUCE, seen, strict=True)
  ]


def joined(*seen: tuple) -> tuple:
  """Returns four numbers of each value or row, of those of some parts."""
  parts = zip(*seen, strict=True)
  return tuple(
      functools.reduce(join, part)
      for join, part in zip(_JOIN, parts, strict=True)
  )


def write_sums(refs, rows: list) -> None:
  """Writes a tile's four numbers, of those of parts of its rows."""
  at = lax.axis_index('row'), lax.axis_index('column')
  for ref, reduce, part in zip(refs, _REDUCE, joined(*rows), strict=True):
    # Counts of rows may be float32.
    ref[at] = reduce(part.astype(ref.dtype), axis=0)


def _quantize_kernel(
    x_ref, mask_ref, scale_ref, *refs, dtype, row_major: bool, interpret: bool
):
  """Writes a tile's 8-bit values, their transpose, and four sums over it."""
  *outs, tile_ref, counts_ref, low_ref, turned_ref, there_ref = refs
  row_major_ref, *outs = outs if row_major else (None, *outs)
  transposed_ref, *sums_refs = outs
  rows, columns = place(_WIDTH)
  plgpu.copy_gmem_to_smem(x_ref.at[rows, columns], tile_ref, there_ref)
  plgpu.copy_gmem_to_smem(mask_ref.at[rows], counts_ref, there_ref)
  grid = Grid.of(scale_ref[0], dtype, clips=interpret)
  plgpu.barrier_wait(there_ref)
  x = valid(tile_ref.transpose((1, 0)), counts_ref, 1, interpret)
  turned_ref[...] = grid.cast(x * grid.inverse)
  plgpu.commit_smem()
  plgpu.copy_smem_to_gmem(turned_ref, transposed_ref.at[columns, rows])
  sums = []
  for half in HALVES:
    x = valid(tile_ref.at[half], counts_ref.at[half], 0, interpret)
    low, seen = grid.look(x)
    sums.append(along_rows(seen))
    if row_major_ref is not None:
      low_ref[half] = low
  write_sums(sums_refs, sums)
  if row_major_ref is not None:
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(low_ref, row_major_ref.at[rows, columns])
  plgpu.wait_smem_to_gmem(0, wait_read_only=True)


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
  """See the package's `quantize_and_transpose`.

  Args:
    x_MN: of 16 bits; its shape `grid.fits`.
    scale: float32 scalar.
    row_mask_M: float32, 0 on rows that do not count.
    dtype: the 8-bit format, a float.
    row_major: also return the values as they came.
    interpret: run on a CPU, for tests.
  """
  rows, columns = x_MN.shape
  grid = rows // TILE, columns // _WIDTH
  numbers = [jax.ShapeDtypeStruct(grid, kind) for kind in NUMBERS]
  out = plgpu.kernel(
      tools.named(
          'quantize_and_turn',
          _quantize_kernel,
          dtype=dtype,
          row_major=row_major,
          interpret=interpret,
      ),
      out_type=[
          *[jax.ShapeDtypeStruct((rows, columns), dtype)] * row_major,
          jax.ShapeDtypeStruct((columns, rows), dtype),
          *numbers,
      ],
      scratch_types=[
          matrix(TILE, _WIDTH, x_MN.dtype),
          plgpu.SMEM((TILE,), jnp.float32),
          matrix(TILE, _WIDTH, dtype),
          matrix(_WIDTH, TILE, dtype),
          plgpu.Barrier(num_arrivals=2),
      ],
      grid=grid,
      grid_names=('row', 'column'),
      **tools.kernel_options(interpret),
  )(x_MN, row_mask_M, scale.reshape(1))
  transposed_NM, *numbers = out[row_major:]
  amax, quantization_error = join_tiles(*numbers)
  return QuantizedPair(
      row_major_MN=out[0] if row_major else None,
      transposed_NM=transposed_NM,
      amax=amax,
      quantization_error=quantization_error,
  )


def _transpose_kernel(x_ref, out_ref, *refs, interpret: bool):
  """Writes a tile's transpose."""
  tile_ref, wide_ref, turned_ref, there_ref = refs
  rows, columns = place(TILE)
  plgpu.copy_gmem_to_smem(x_ref.at[rows, columns], tile_ref, there_ref)
  plgpu.barrier_wait(there_ref)
  wide_ref[...] = load(tile_ref, interpret).astype(jnp.uint16)
  plgpu.commit_smem()
  wide = load(wide_ref.transpose((1, 0)), interpret)
  turned_ref[...] = wide.astype(jnp.uint8)
  plgpu.commit_smem()
  plgpu.copy_smem_to_gmem(turned_ref, out_ref.at[columns, rows])
  plgpu.wait_smem_to_gmem(0, wait_read_only=True)


@lowered_once('interpret')
def transpose(x_MN: Array, *, interpret: bool = False) -> Array:
  """Returns the transpose of an 8-bit matrix whose shape `grid.fits`."""
  rows, columns = x_MN.shape
  out = plgpu.kernel(
      tools.named('turn', _transpose_kernel, interpret=interpret),
      out_type=jax.ShapeDtypeStruct((columns, rows), jnp.uint8),
      scratch_types=[
          matrix(TILE, TILE, jnp.uint8),
          matrix(TILE, TILE, jnp.uint16),
          matrix(TILE, TILE, jnp.uint8),
          plgpu.Barrier(),
      ],
      grid=(rows // TILE, columns // TILE),
      grid_names=('row', 'column'),
      **tools.kernel_options(interpret),
  )(lax.bitcast_convert_type(x_MN, jnp.uint8))
  return lax.bitcast_convert_type(out, x_MN.dtype)
