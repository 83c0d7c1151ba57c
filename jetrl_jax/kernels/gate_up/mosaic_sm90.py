"""gate_up and SwiGLU of few rows, on a Hopper GPU as one kernel (Mosaic).

    h_MF = E4M3(silu(x W_gate^T) * (x W_up^T))

A program computes up to 144 columns of h, for all 64 or 128 rows. One warpgroup
loads its operands to shared memory, 128 bytes of a row at a time: x's [M, 128],
and gate's and up's [144, 128]. It loads four such tiles ahead (`_STAGES`). Each
of the other warpgroups has 64 rows of x. For each tile it runs four FP8
instructions for gate and four for up, with both sums in float32 registers. h
goes to memory in 8 bits through shared memory.

Order of a sum: the tensor core adds 32 products at a time along a row, as
cuBLAS does for every number of rows. So the bits are those of the dot and of
SwiGLU's kernel.

Lower bound of the time: reading the weights once, 31.6 us for a 7B at 4.3 TB/s.
Two things come on top: the start, until the first tiles are there, and the end,
SwiGLU of the last columns. Nothing overlaps with them, because each
multiprocessor has one program.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jetrl_jax.core.typing import Array
from jetrl_jax.fp8 import formats
from jetrl_jax.fp8.quantization import QTensor
from jetrl_jax.kernels import mosaic_tools as tools
from jetrl_jax.kernels.calls import lowered_once
from jetrl_jax.kernels.swiglu import formula

ROWS = 64, 128
# Columns of h that a program makes: whole units, as many as registers hold.
_UNIT, _MOST = 16, 144
_MULTIPROCESSORS = 132  # of an H200; used if no GPU is at hand
_STAGES = 4


def width_of(columns: int) -> int:
  """Returns the columns of h that one program makes: as many in each."""
  units, count = -(-columns // _UNIT), _core_count()
  programs = -(-units // (_MOST // _UNIT * count)) * count
  return -(-units // programs) * _UNIT


def _core_count() -> int:
  return getattr(jax.devices()[0], 'core_count', _MULTIPROCESSORS)


def fits(rows: int, dims: tuple[int, ...]) -> bool:
  """Whether the kernel can be used and is faster, see the package.

  It is not faster if some multiprocessors get a second program, because all
  wait for it (docs/performance_log.md).
  """
  dim, columns = dims
  whole = dim % tools.SWIZZLE == 0 and columns % _UNIT == 0
  width = width_of(columns)
  one_round = width <= columns <= width * _core_count()
  return whole and rows in ROWS and one_round


def _kernel(x_ref, w_ref, *refs, width: int, interpret: bool):
  """Some columns of h, for all rows."""
  *number_refs, out_ref, staged_ref = refs
  rows, columns = out_ref.shape
  groups = rows // tools.ROWS
  mine = pl.ds(lax.axis_index('warpgroup') * tools.ROWS, tools.ROWS)
  # The last program repeats some columns of the one before it.
  first = jnp.minimum(lax.axis_index('program') * width, columns - width)
  those = pl.ds(pl.multiple_of(first, _UNIT), width)

  def tile(size: int):
    return plgpu.BlockSpec(
        (size, tools.SWIZZLE),
        lambda k: (0, k),
        transforms=tools.pieces(x_ref.dtype),
        memory_space=plgpu.SMEM,
    )

  def of_gate(gate):
    reciprocal = functools.partial(tools.reciprocal, interpret=interpret)
    return formula.sigmoid(gate, tools.power_of_2, reciprocal)

  def multiplied(run):
    def scope(*sums):
      run(sums)
      # Rounded as the dot's product is.
      gate, up = (total[...].astype(jnp.bfloat16) for total in sums)
      *scales, out_scale = [ref[0] for ref in number_refs]
      staged_ref[mine] = formula.hidden(
          gate, up, scales, out_scale, of_gate, saturates=not interpret
      )
      plgpu.commit_smem()
      plgpu.copy_smem_to_gmem(staged_ref.at[mine], out_ref.at[mine, those])
      plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    pl.run_scoped(scope, *[tools.sums(tools.ROWS, width)] * 2)

  def body(_, x_tile, *rest):
    *w_tiles, sums = rest
    for w_tile, total in zip(w_tiles, sums, strict=True):
      plgpu.wgmma(total, x_tile.at[mine], w_tile.transpose((1, 0)))
    plgpu.wgmma_wait(0)
    return sums

  plgpu.emit_pipeline_warp_specialized(
      body,
      grid=(x_ref.shape[1] // tools.SWIZZLE,),
      in_specs=[tile(rows), tile(width), tile(width)],
      max_concurrent_steps=_STAGES,
      memory_registers=tools.MEMORY_REGISTERS,
      wg_axis='warpgroup',
      num_compute_wgs=groups,
      compute_context=multiplied,
  )(x_ref, *(w_ref.at[half, those] for half in range(2)))


@lowered_once('interpret')
def hidden(
    x8: QTensor, weight: QTensor, out_scale: Array, *, interpret: bool = False
) -> QTensor:
  """Returns h, see the package's `gate_up`; gate|up is rounded to bfloat16.

  `interpret` runs on a CPU, for tests.
  """
  (rows, dim), columns = x8.values.shape, weight.values.shape[0] // 2
  width = width_of(columns)
  values = plgpu.kernel(
      tools.named('gate_up', _kernel, width=width, interpret=interpret),
      out_type=jax.ShapeDtypeStruct((rows, columns), formats.E4M3),
      scratch_types=[plgpu.SMEM((rows, width), formats.E4M3)],
      grid=(-(-columns // width),),
      grid_names=('program',),
      num_threads=rows // tools.ROWS + 1,
      thread_name='warpgroup',
      **tools.kernel_options(interpret, overlap=columns % width > 0),
  )(
      x8.values,
      weight.values.reshape(2, columns, dim),
      *(number.reshape(1) for number in (x8.scale, weight.scale, out_scale)),
  )
  return QTensor(values=values, scale=out_scale)
