"""SwiGLU's backward and the quantisers around it, for Hopper GPUs (Mosaic).

A program is one warpgroup and has 64 rows of 64 columns of gate, of up and of
dh, which bulk copies bring to shared memory. It goes over 16 rows at a time,
which it reads turned, pair by pair (`ldmatrix.trans`): 8 values of each in a
thread. So h, dgate and dup are computed once, and their transposes are what is
in registers. The gradient is also wanted as it lies, and Hopper turns no
single bytes: dgate and dup, rounded to 16 bits as they are, are turned back
into the tiles of gate and up (`stmatrix.trans`), read from there and cast
again, which is three instructions a value. Bulk copies take the 8-bit tiles
from shared memory, 20 KiB beside 24 of bfloat16.

Order of the sums of what was lost: the eights of a column's rows one after
another, dgate's before dup's in each 16 of them; then the two neighbours of a
thread, four lanes, and over the columns lanes and warps in trees, in float32,
and over the tiles by XLA. No gradient depends on them.

Lower bound of the time: instructions, 3112 of a warp for a tile, not the 11
bytes a value. Compiled for an H200 a thread has 128 registers and nothing
spilled, so a multiprocessor has four programs. With
32 rows at a time it has 146, with all 64 it has 229.
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
from jetrl_jax.fp8 import formats
from jetrl_jax.kernels import mosaic_tools as tools
from jetrl_jax.kernels.calls import lowered_once
from jetrl_jax.kernels.quantize_transpose import QuantizedPair
from jetrl_jax.kernels.quantize_transpose import mosaic_sm90 as transpose
from jetrl_jax.kernels.quantize_transpose.grid import (
    NUMBERS,
    join_tiles,
)
from jetrl_jax.kernels.swiglu import formula
from jetrl_jax.kernels.swiglu.backward_formula import Grid, Maths, derivatives

# Rows and columns of a program, rows that are computed at a time, and of which
# 8-bit values are stored at a time: Hopper's narrowest swizzle.
_TILE = 64
_PART = 16
_STORED = 32
# A thread has two neighbours of so many.
_RUN = 8


def _maths(interpret: bool) -> Maths:
  """Returns the functions, of turned tiles."""
  reciprocal = functools.partial(tools.reciprocal, interpret=interpret)

  def share(x, factor: float, offset: float):
    if interpret:
      return jnp.clip(x * factor + offset, 0.0, 1.0)
    literals = tools.literal(factor), tools.literal(offset)
    return tools.instruction('fma.rn.sat.f32', x, literals=literals)

  return Maths(
      sigmoid=lambda x: formula.sigmoid(x, tools.power_of_2, reciprocal),
      product=functools.partial(tools.product, interpret=interpret),
      # Scales and counts make exact products.
      multiply_add=lambda x, y, z: x * y + z,
      share=share,
      saturates=not interpret,
  )


def _gather(sums: tuple, seen: tuple) -> tuple:
  """Adds what `Grid.look` saw of some rows, eight by eight."""
  runs = [
      tuple(part[:, i : i + _RUN] for part in seen)
      for i in range(0, seen[0].shape[1], _RUN)
  ]
  return transpose.joined(*([sums] if sums else []), *runs)


def _kernel(
    product_ref, dh_ref, mask_ref, scales_ref, *refs, dtype, interpret: bool
):
  """A tile of gate, of up and of dh."""
  row_major_ref, h_transposed_ref, dy_transposed_ref, *refs = refs
  sums_refs, refs = refs[: 2 * len(NUMBERS)], refs[2 * len(NUMBERS) :]
  tiles, (counts_ref, h_ref, *refs, there_ref) = refs[:3], refs[3:]
  turned_refs, low_refs = refs[:2], refs[2:]
  i, j = lax.axis_index('row'), lax.axis_index('column')
  rows, columns = (pl.ds(k * _TILE, _TILE) for k in (i, j))
  halves = columns, pl.ds(dh_ref.shape[1] + j * _TILE, _TILE)
  places = [
      *(product_ref.at[rows, half] for half in halves),
      dh_ref.at[rows, columns],
      mask_ref.at[rows],
  ]
  for place, ref in zip(places, (*tiles, counts_ref), strict=True):
    plgpu.copy_gmem_to_smem(place, ref, there_ref)
  maths, y_scale = _maths(interpret), scales_ref[0]
  h_grid = Grid.of(scales_ref[1], formats.E4M3, maths=maths)
  dy_grid = Grid.of(scales_ref[2], dtype, maths=maths)
  plgpu.barrier_wait(there_ref)
  h_sums, dy_sums, lows = (), (), ([], [], [])
  for start in range(0, _TILE, _PART):
    part = pl.ds(start, _PART)
    turned = [ref.at[part].transpose((1, 0)) for ref in tiles]
    gate, up, dh = (
        transpose.load(ref, interpret).astype(jnp.float32) for ref in turned
    )
    made = derivatives(gate * y_scale, up * y_scale, dh, maths)
    counts = tools.loaded(counts_ref.at[part], 0)
    is_valid = lax.broadcast_in_dim(counts, dh.shape, [1]) > 0
    # The rounding that the compute dtype would have been.
    h, *dy = (
        jnp.where(is_valid, x.astype(dh_ref.dtype).astype(jnp.float32), 0.0)
        for x in made
    )
    low, seen = h_grid.look(h)
    h_sums = _gather(h_sums, seen)
    lows[0].append(low)
    for x, of_half, ref in zip(dy, lows[1:], turned[:2], strict=True):
      low, seen = dy_grid.look(x)
      dy_sums = _gather(dy_sums, seen)
      of_half.append(low)
      ref[...] = x.astype(dh_ref.dtype)
    if (end := start + _PART) % _STORED == 0:
      stored = pl.ds(end - _STORED, _STORED)
      for ref, parts in zip((h_ref, *turned_refs), lows, strict=True):
        ref[:, stored] = jnp.concatenate(parts, axis=1)
        parts.clear()
  plgpu.commit_smem()
  plgpu.copy_smem_to_gmem(h_ref, h_transposed_ref.at[columns, rows])
  for half, ref in zip(halves, turned_refs, strict=True):
    plgpu.copy_smem_to_gmem(ref, dy_transposed_ref.at[half, rows])
  for tile_ref, low_ref in zip(tiles[:2], low_refs, strict=True):
    x = transpose.load(tile_ref, interpret).astype(jnp.float32)
    low_ref[...] = dy_grid.cast(x * dy_grid.inverse)
  plgpu.commit_smem()
  for half, ref in zip(halves, low_refs, strict=True):
    plgpu.copy_smem_to_gmem(ref, row_major_ref.at[rows, half])
  for refs, sums in ((sums_refs[:4], h_sums), (sums_refs[4:], dy_sums)):
    transpose.write_sums(refs, [transpose.along_rows(sums)])
  plgpu.wait_smem_to_gmem(0, wait_read_only=True)


@lowered_once('dtype', 'interpret')
def backward(
    product_MG: Array,
    dh_MF: Array,
    scales: Array,
    row_mask_M: Array,
    dtype,
    *,
    interpret: bool = False,
) -> tuple[QuantizedPair, QuantizedPair]:
  """Returns (h transposed, the gradient of gate|up with its transpose).

  Rows that do not count are quantised as zeros, as `quantize_and_transpose`
  does.

  Args:
    product_MG: gate|up before it is scaled, bfloat16, G = 2 F.
    dh_MF: the gradient of h, of the same dtype; its shape `fits`.
    scales: float32 [3], powers of two: of gate|up, of h's 8-bit values (E4M3 as
      in the forward) and of those of the gradient.
    row_mask_M: float32, 0 on rows that do not count.
    dtype: 8-bit format of the gradient, a float.
    interpret: run on a CPU, for tests.
  """
  rows, columns = dh_MF.shape
  grid = rows // _TILE, columns // _TILE

  def tile(kind, stored: int = _TILE):
    transforms = tools.pieces(kind, stored)
    return plgpu.SMEM((_TILE, _TILE), kind, transforms=transforms)

  row_major, h_transposed, dy_transposed, *sums = plgpu.kernel(
      tools.named('swiglu_backward', _kernel, dtype=dtype, interpret=interpret),
      out_type=[
          jax.ShapeDtypeStruct((rows, 2 * columns), dtype),
          jax.ShapeDtypeStruct((columns, rows), formats.E4M3),
          jax.ShapeDtypeStruct((2 * columns, rows), dtype),
          *[jax.ShapeDtypeStruct(grid, kind) for kind in NUMBERS] * 2,
      ],
      scratch_types=[
          *[tile(dh_MF.dtype)] * 3,
          plgpu.SMEM((_TILE,), jnp.float32),
          tile(formats.E4M3, _STORED),
          *[tile(dtype, _STORED)] * 2,
          *[tile(dtype)] * 2,
          plgpu.Barrier(num_arrivals=4),
      ],
      grid=grid,
      grid_names=('row', 'column'),
      # Until `commit_smem` a warp writes 16 columns of a tile, which it alone
      # has read, and nothing is read that another one wrote.
      **tools.kernel_options(interpret, barriers=False),
  )(product_MG, dh_MF, row_mask_M, scales)
  h_amax, h_error = join_tiles(*sums[:4])
  dy_amax, dy_error = join_tiles(*sums[4:])
  h = QuantizedPair(
      row_major_MN=None,
      transposed_NM=h_transposed,
      amax=h_amax,
      quantization_error=h_error,
  )
  dy = QuantizedPair(
      row_major_MN=row_major,
      transposed_NM=dy_transposed,
      amax=dy_amax,
      quantization_error=dy_error,
  )
  return h, dy
