"""The operands of `fp8_block`'s backward, as kernels for Hopper GPUs (Mosaic).

No log-prob depends on them.

A program is one warpgroup and has a tile of 128 x 128, which a bulk copy brings
to shared memory. Each thread has 64 of its values in registers at a time: half
of the rows, then the other half; then half of the columns, which are read
turned, pair by pair (`ldmatrix.trans`), and the other half. An input of 8 bits
is widened to float16 first, which is exact, because Hopper turns pairs of
bytes. 8-bit values and scales go to memory from shared memory.

Order of the sums: of what was lost, along half a row of the tile in a thread
and then over four lanes, then the halves, then over 64 rows in a tree, in
float32, and over the tiles by XLA.

Lower bound of the time: the bytes once, 2 read and 2 written for a value, or 1
and 1 where an input is restored. Compiled for an H200 a thread has 157
registers, or 106 where an input is restored, and nothing spilled.
"""

# jax 0.10, which the types are checked with, lacks some of it.
# pyright: reportAttributeAccessIssue=false

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jetrl_jax.core.typing import Array
from jetrl_jax.fp8.quantization import QTensor, scale_from_amax
from jetrl_jax.fp8.recipes import BLOCK
from jetrl_jax.kernels import mosaic_tools as tools
from jetrl_jax.kernels.calls import lowered_once
from jetrl_jax.kernels.quantize_transpose import mosaic_sm90 as transpose
from jetrl_jax.kernels.quantize_transpose.grid import (
    NUMBERS,
    Grid,
    join_tiles,
)


def _top(x) -> Array:
  """Returns the amax of each row."""
  return jnp.max(jnp.abs(x), axis=1)


def _grid(scale, x, dtype, interpret: bool) -> Grid:
  """Returns the values on a scale for each row of x."""
  of_rows = lax.broadcast_in_dim(scale, x.shape, [0])
  return Grid.of(of_rows, dtype, clips=interpret)


def _turn(half_of, turned_ref, scale_ref, scale_of, interpret: bool) -> None:
  """Writes the transpose of a tile, with a scale for each column.

  Args:
    half_of: function of some columns to them as rows, float32 [64, 128].
    turned_ref: [128, 128].
    scale_ref: [128].
    scale_of: function from amax to scale.
    interpret: run on a CPU.
  """
  for half in transpose.HALVES:
    x = half_of(half)
    scale = scale_of(_top(x))
    scale_ref[half] = scale
    grid = _grid(scale, x, turned_ref.dtype, interpret)
    turned_ref[half] = grid.cast(x * grid.inverse)


def _both_kernel(x_ref, mask_ref, *refs, scale_of, interpret: bool):
  """Writes a tile, its transpose, the scales of both, and four sums over it."""
  row_major_ref, rows_ref, transposed_ref, columns_ref, *refs = refs
  sums_refs, refs = refs[: len(NUMBERS)], refs[len(NUMBERS) :]
  tile_ref, counts_ref, low_ref, turned_ref, *refs = refs
  of_rows_ref, of_columns_ref, there_ref = refs
  rows, columns = transpose.place(BLOCK)
  i, j = lax.axis_index('row'), lax.axis_index('column')
  plgpu.copy_gmem_to_smem(x_ref.at[rows, columns], tile_ref, there_ref)
  plgpu.copy_gmem_to_smem(mask_ref.at[rows], counts_ref, there_ref)
  plgpu.barrier_wait(there_ref)
  sums = []
  for half in transpose.HALVES:
    parts = [
        transpose.valid(
            tile_ref.at[half, part], counts_ref.at[half], 0, interpret
        )
        for part in transpose.HALVES
    ]
    scale = scale_of(jnp.maximum(*map(_top, parts)))
    of_rows_ref[half] = scale
    # In parts, because four numbers for each value need many registers.
    for part, x in zip(transpose.HALVES, parts, strict=True):
      low, seen = _grid(scale, x, low_ref.dtype, interpret).look(x)
      low_ref[half, part] = low
      sums.append(transpose.along_rows(seen))
  transpose.write_sums(sums_refs, sums)
  plgpu.commit_smem()
  plgpu.copy_smem_to_gmem(low_ref, row_major_ref.at[rows, columns])
  plgpu.copy_smem_to_gmem(of_rows_ref, rows_ref.at[j, rows])

  def half_of(half):
    turned = tile_ref.at[:, half].transpose((1, 0))
    return transpose.valid(turned, counts_ref, 1, interpret)

  _turn(half_of, turned_ref, of_columns_ref, scale_of, interpret)
  plgpu.commit_smem()
  plgpu.copy_smem_to_gmem(turned_ref, transposed_ref.at[columns, rows])
  plgpu.copy_smem_to_gmem(of_columns_ref, columns_ref.at[i, columns])
  plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _regroup_kernel(x_ref, scale_ref, *refs, scale_of, interpret: bool):
  """Writes the transpose of a tile, quantised in groups along its columns."""
  transposed_ref, columns_ref, tile_ref, of_rows_ref, wide_ref, *refs = refs
  turned_ref, of_columns_ref, there_ref = refs
  rows, columns = transpose.place(BLOCK)
  i, j = lax.axis_index('row'), lax.axis_index('column')
  plgpu.copy_gmem_to_smem(x_ref.at[rows, columns], tile_ref, there_ref)
  plgpu.copy_gmem_to_smem(scale_ref.at[j, rows], of_rows_ref, there_ref)
  plgpu.barrier_wait(there_ref)
  wide_ref[...] = transpose.load(tile_ref, interpret).astype(wide_ref.dtype)
  plgpu.commit_smem()

  def half_of(half):
    turned = wide_ref.at[:, half].transpose((1, 0))
    x = transpose.load(turned, interpret).astype(jnp.float32)
    of_rows = tools.loaded(of_rows_ref, 0)
    return x * lax.broadcast_in_dim(of_rows, x.shape, [1])

  _turn(half_of, turned_ref, of_columns_ref, scale_of, interpret)
  plgpu.commit_smem()
  plgpu.copy_smem_to_gmem(turned_ref, transposed_ref.at[columns, rows])
  plgpu.copy_smem_to_gmem(of_columns_ref, columns_ref.at[i, columns])
  plgpu.wait_smem_to_gmem(0, wait_read_only=True)


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
    x_MN: of 16 bits; its shape `grid.fits`.
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
  down, across = rows // BLOCK, columns // BLOCK
  low = jnp.dtype(dtype)
  tile = functools.partial(transpose.matrix, BLOCK, BLOCK)
  outs = [
      ((rows, columns), low),
      ((across, rows), jnp.float32),
      ((columns, rows), low),
      ((down, columns), jnp.float32),
      *(((down, across), kind) for kind in NUMBERS),
  ]
  out = plgpu.kernel(
      tools.named(
          'quantize_both_ways',
          _both_kernel,
          scale_of=_scale_of(low, margin, power_of_two),
          interpret=interpret,
      ),
      out_type=[jax.ShapeDtypeStruct(*shape) for shape in outs],
      scratch_types=[
          tile(x_MN.dtype),
          plgpu.SMEM((BLOCK,), jnp.float32),
          # The halves of a row are written apart.
          plgpu.SMEM(
              (BLOCK, BLOCK), low, transforms=tools.pieces(low, BLOCK // 2)
          ),
          tile(low),
          plgpu.SMEM((BLOCK,), jnp.float32),
          plgpu.SMEM((BLOCK,), jnp.float32),
          plgpu.Barrier(num_arrivals=2),
      ],
      grid=(down, across),
      grid_names=('row', 'column'),
      **tools.kernel_options(interpret),
  )(x_MN, row_mask_M)
  row_major, of_rows, transposed, of_columns, *numbers = out
  return (
      QTensor(values=row_major, scale=of_rows.T),
      QTensor(values=transposed, scale=of_columns.T),
      *join_tiles(*numbers),
  )


def _scale_of(dtype, margin: int, power_of_two: bool):
  return functools.partial(
      scale_from_amax, dtype=dtype, margin=margin, power_of_two=power_of_two
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
  down, across = rows // BLOCK, columns // BLOCK
  low = x8.values.dtype
  tile = functools.partial(transpose.matrix, BLOCK, BLOCK)
  transposed, of_columns = plgpu.kernel(
      tools.named(
          'regroup_and_turn',
          _regroup_kernel,
          scale_of=_scale_of(low, margin, power_of_two),
          interpret=interpret,
      ),
      out_type=[
          jax.ShapeDtypeStruct((columns, rows), low),
          jax.ShapeDtypeStruct((down, columns), jnp.float32),
      ],
      scratch_types=[
          tile(low),
          plgpu.SMEM((BLOCK,), jnp.float32),
          tile(jnp.float16),
          tile(low),
          plgpu.SMEM((BLOCK,), jnp.float32),
          plgpu.Barrier(num_arrivals=2),
      ],
      grid=(down, across),
      grid_names=('row', 'column'),
      **tools.kernel_options(interpret),
  )(x8.values, x8.scale.T)
  return QTensor(values=transposed, scale=of_columns.T)
