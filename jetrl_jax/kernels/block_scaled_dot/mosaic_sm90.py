"""The product of `fp8_block` on a Hopper GPU, as a kernel (Mosaic).

A program computes a tile of the result: 128 x 128 with two computing warpgroups
of 64 rows each, or half of the rows if there are no more. Another warpgroup
loads the operands: for each group, 128 bytes of each row of a and of b, and
their scales, a few groups ahead. If b has a scale per 128 rows, all scales of
the program are loaded before the first group.

Order of the sum: a group's 128 products are four FP8 instructions, which the
tensor core adds from zero. The result is multiplied by its scales and added in
float32 to a total in registers, group by group. So a row's bits depend neither
on the other rows nor on the tiles.

Lower bound of the time for many rows: the tensor core takes 256 cycles for a
group of 64 x 128. The additions of a warpgroup take about half as long, while
the other one multiplies.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jetrl_jax.core.typing import Array
from jetrl_jax.fp8.recipes import BLOCK
from jetrl_jax.kernels import mosaic_tools as tools
from jetrl_jax.kernels.calls import lowered_once


class Tiles(NamedTuple):
  """How programs divide the result.

  Attributes:
    height: rows of a program, 64 for each warpgroup that multiplies.
    width: its columns, at most 128.
    stages: groups that are loaded ahead.
  """

  height: int
  width: int
  stages: int


# The fastest of those tried (docs/performance_log.md).
_MANY, _FEW = Tiles(128, 128, 4), Tiles(64, 128, 5)
_FEW_ROWS = 64
_LOWEST = float(jnp.finfo(jnp.float32).min)
# Consecutive programs take this many tiles of a for each tile of b.
_NEIGHBOURS = 8
# Most values along a dimension that one copy may bring.
_MOST_COPIED = 256


def fits(scale_b_NG: Array, columns: int) -> bool:
  """Whether the kernel can have so many groups.

  With a scale per 128 rows of b, one copy brings a program all of its scales.

  Args:
    scale_b_NG: see `block_dot`.
    columns: N.
  """
  rows, groups = scale_b_NG.shape
  return rows == columns or groups + -groups % 4 <= _MOST_COPIED


def _kernel(
    a_ref,
    b_ref,
    scale_a_ref,
    scale_b_ref,
    out_ref,
    staged_ref,
    blocks_ref,
    barrier_ref,
    *,
    tiles: Tiles,
    near: int,
    exact: bool,
):
  """A tile of the result."""
  height, width, stages = tiles
  across = b_ref.shape[0] // width
  number = lax.axis_index('program')
  # First some neighbouring tiles of a, for each all tiles of b; then the next
  # neighbours.
  ahead, number = lax.div(number, near * across), lax.rem(number, near * across)
  row = (ahead * near + lax.rem(number, near)) * height
  column = lax.div(number, near) * width
  rows, columns = pl.ds(row, height), pl.ds(column, width)
  mine = pl.ds(lax.axis_index('warpgroup') * tools.ROWS, tools.ROWS)

  def operand(size: int):
    return plgpu.BlockSpec(
        (size, BLOCK),
        lambda g: (0, g),
        transforms=tools.pieces(a_ref.dtype),
        memory_space=plgpu.SMEM,
    )

  def scales(size: int):
    return plgpu.BlockSpec((1, size), lambda g: (g, 0), memory_space=plgpu.SMEM)

  def multiplied(run):
    if blocks_ref is not None:
      plgpu.barrier_wait(barrier_ref)
    total = plgpu.layout_cast(
        jnp.zeros((tools.ROWS, width), jnp.float32), plgpu.Layout.WGMMA
    )
    total = run(total)
    staged_ref[mine] = total.astype(out_ref.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(
        staged_ref.at[mine], out_ref.at[rows, columns].at[mine]
    )
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

  def body(at, a_tile, b_tile, scale_a_tile, *rest):
    *scale_b_tile, total = rest

    def product(part):
      plgpu.wgmma(part, a_tile.at[mine], b_tile.transpose((1, 0)))
      return part[...]

    part = pl.run_scoped(product, tools.sums(tools.ROWS, width))
    scale_a = tools.loaded(scale_a_tile.at[0, mine], 1)
    scale_a = lax.broadcast_in_dim(scale_a, part.shape, [0])
    if scale_b_tile:
      scale_b = tools.loaded(scale_b_tile[0].at[0], 0)
      scale_b = lax.broadcast_in_dim(scale_b, part.shape, [1])
    else:
      scale_b = blocks_ref[at[0]]
    tools.has_read()
    if exact:  # Powers of two may be multiplied first, or within the sum.
      return total + part * (scale_a * scale_b)
    # The maximum changes no number. Without it product and sum become one
    # operation, which does not round the product.
    return total + jnp.maximum(part * scale_a * scale_b, _LOWEST)

  operands = [a_ref.at[rows], b_ref.at[columns], scale_a_ref.at[:, rows]]
  specs = [operand(height), operand(width), scales(height)]
  if blocks_ref is None:
    operands.append(scale_b_ref.at[:, columns])
    specs.append(scales(width))
  else:

    @pl.when(lax.axis_index('warpgroup') == height // tools.ROWS)
    def _():
      plgpu.copy_gmem_to_smem(
          scale_b_ref.at[lax.div(column, BLOCK)], blocks_ref, barrier_ref
      )

  plgpu.emit_pipeline_warp_specialized(
      body,
      grid=(a_ref.shape[1] // BLOCK,),
      in_specs=specs,
      max_concurrent_steps=stages,
      memory_registers=tools.MEMORY_REGISTERS,
      wg_axis='warpgroup',
      num_compute_wgs=height // tools.ROWS,
      compute_context=multiplied,
  )(*operands)


@lowered_once('out_dtype', 'power_of_two', 'tiles', 'interpret')
def block_dot(
    a_MK: Array,
    scale_a_MG: Array,
    b_NK: Array,
    scale_b_NG: Array,
    out_dtype,
    *,
    power_of_two: bool,
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> Array:
  """See the package's `block_dot`.

  `tiles` says how the result is divided; None decides by the number of rows.
  All give the same bits. `interpret` runs on a CPU, for tests.
  """
  (rows, inner), columns = a_MK.shape, b_NK.shape[0]
  tiles = tiles or (_FEW if rows <= _FEW_ROWS else _MANY)
  height, width, _ = tiles
  missing = -rows % height
  if missing:
    a_MK, scale_a_MG = (
        jnp.pad(x, ((0, missing), (0, 0))) for x in (a_MK, scale_a_MG)
    )
  down, groups = (rows + missing) // height, inner // BLOCK
  is_blocks = scale_b_NG.shape[0] < columns
  if is_blocks:  # A bulk copy has a multiple of 16 bytes.
    scale_b_NG = jnp.pad(scale_b_NG, ((0, 0), (0, -groups % 4)))
  out = plgpu.kernel(
      tools.named(
          'block_dot',
          _kernel,
          tiles=tiles,
          near=math.gcd(down, _NEIGHBOURS),
          exact=power_of_two,
          is_interpreted=interpret,
      ),
      out_type=jax.ShapeDtypeStruct((rows + missing, columns), out_dtype),
      scratch_types=[
          plgpu.SMEM(
              (height, width), out_dtype, transforms=tools.pieces(out_dtype)
          ),
          plgpu.SMEM((scale_b_NG.shape[1],), jnp.float32)
          if is_blocks
          else None,
          plgpu.Barrier(),
      ],
      grid=(down * (columns // width),),
      grid_names=('program',),
      num_threads=height // tools.ROWS + 1,
      thread_name='warpgroup',
      **tools.kernel_options(interpret),
  )(a_MK, b_NK, scale_a_MG.T, scale_b_NG if is_blocks else scale_b_NG.T)
  return out[:rows]
