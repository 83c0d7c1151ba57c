"""FP8 dots of few rows as kernels of Pallas' other form for GPUs, Mosaic.

Our kernels are in Pallas' Triton form, which JAX is to remove. Here is what a
decode step's dots are in the other, for `gemm_forms.py` to time and compare:
one warpgroup asks for tiles, which Hopper's bulk copies bring, and others
multiply them; programs of one cluster share what they read.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.pallas import mosaic_gpu

from jetrl_jax.fp8 import formats


class Program(NamedTuple):
  """How a dot is shared out."""

  tile: tuple[int, int]  # rows and columns of a program
  cluster: tuple[int, int]  # programs that share tiles, along both
  stages: int  # tiles on their way
  chunk: int  # bytes of a row in a tile


# projection -> M -> the fastest of those tried (docs/performance_log.md).
PROGRAMS = {
    'gate_up': {
        64: Program((64, 144), (1, 1), 4, 128),
        128: Program((128, 144), (1, 1), 4, 128),
    },
    'down': {
        128: Program((64, 64), (2, 1), 6, 256),
        256: Program((128, 64), (2, 2), 4, 256),
    },
    'qkv': {128: Program((64, 72), (1, 2), 5, 256)},
    'o': {128: Program((64, 64), (2, 2), 6, 256)},
}
# Of Hopper's widest swizzle, and what a multiplying warpgroup has of M.
_CHUNK, _WARPGROUP_ROWS = 128, 64


def dots(x_MK, w_PNK, program: Program, finish, dtype):
  """Returns finish(x w_0^T, x w_1^T, ...), [M, N].

  Args:
    x_MK: E4M3.
    w_PNK: E4M3, P matrices.
    program: how it is shared out.
    finish: of P float32 arrays.
    dtype: of its result.
  """
  (rows, dim), (parts, columns, _) = x_MK.shape, w_PNK.shape
  (height, width), cluster, stages, chunk = program
  groups = height // _WARPGROUP_ROWS
  grid = rows // height // cluster[0], -(-columns // width) // cluster[1]
  # Hopper's instruction reads 8 rows of 128 bytes as one piece.
  pieces = (
      mosaic_gpu.TilingTransform((8, _CHUNK)),
      mosaic_gpu.SwizzleTransform(_CHUNK),
  )

  def kernel(x_ref, w_ref, out_ref, staged_ref):
    own = pl.ds(lax.axis_index('warpgroup') * _WARPGROUP_ROWS, _WARPGROUP_ROWS)
    where = [
        lax.axis_index(f'grid_{name}') * size + lax.axis_index(name)
        for name, size in zip('mn', cluster, strict=True)
    ]
    of_m = pl.ds(where[0] * height, height)
    # The last program makes some columns of the one before it once more.
    first = jnp.minimum(where[1] * width, columns - width)
    of_n = pl.ds(pl.multiple_of(first, 8), width)

    def spec(size: int, shared_along: str, programs: int):
      return mosaic_gpu.BlockSpec(
          (size, chunk),
          lambda k: (0, k),
          transforms=pieces,
          memory_space=mosaic_gpu.SMEM,
          collective_axes=(shared_along,) if programs > 1 else (),
      )

    def multiplied(run):
      def scope(*sums):
        run(sums)
        staged_ref[own] = finish(*(total[...] for total in sums))
        mosaic_gpu.commit_smem()
        mosaic_gpu.copy_smem_to_gmem(
            staged_ref.at[own], out_ref.at[of_m, of_n].at[own]
        )
        mosaic_gpu.wait_smem_to_gmem(0, wait_read_only=True)

      sums = mosaic_gpu.ACC((_WARPGROUP_ROWS, width), jnp.float32)
      pl.run_scoped(scope, *[sums] * parts)

    def body(_, x_tile, *rest):
      *w_tiles, sums = rest
      for w_tile, total in zip(w_tiles, sums, strict=True):
        mosaic_gpu.wgmma(total, x_tile.at[own], w_tile.transpose((1, 0)))
      mosaic_gpu.wgmma_wait(0)
      return sums

    mosaic_gpu.emit_pipeline_warp_specialized(
        body,
        grid=(dim // chunk,),
        memory_registers=40,
        in_specs=[
            spec(height, 'n', cluster[1]),
            *[spec(width, 'm', cluster[0])] * parts,
        ],
        wg_axis='warpgroup',
        num_compute_wgs=groups,
        max_concurrent_steps=stages,
        compute_context=multiplied,
    )(x_ref.at[of_m], *(w_ref.at[part, of_n] for part in range(parts)))

  return mosaic_gpu.kernel(
      kernel,
      out_type=jax.ShapeDtypeStruct((rows, columns), dtype),
      scratch_types=[mosaic_gpu.SMEM((height, width), dtype)],
      grid=grid,
      grid_names=('grid_m', 'grid_n'),
      cluster=cluster,
      cluster_names=('m', 'n'),
      num_threads=groups + 1,
      thread_name='warpgroup',
  )(x_MK, w_PNK)


def _instruction(name: str):
  """Returns one of the device's instructions, of float32 sums."""

  def run(x):
    layout = mosaic_gpu.Layout.WGMMA
    result = mosaic_gpu.ShapeDtypeStruct(x.shape, x.dtype, layout=layout)

    @mosaic_gpu.inline_mgpu(arg_types=(layout,), return_type=result)
    def inline(context, x: fragmented_array.FragmentedArray):
      del context
      return x._pointwise(x._lift_fast_instr(name))

    return inline(x)

  return run


def swiglu(gate, up, scales: tuple[float, ...], step: float):
  """Returns h in E4M3, rounded as `jetrl_jax.fp8.swiglu.hidden` rounds it."""
  gate, up = (
      x.astype(jnp.bfloat16).astype(jnp.float32) * math.prod(scales)
      for x in (gate, up)
  )
  power = _instruction('ex2.approx.ftz.f32')(gate * -math.log2(math.e))
  h = gate * _instruction('rcp.approx.ftz.f32')(1.0 + power) * up
  h = h.astype(jnp.bfloat16).astype(jnp.float32) * (1.0 / step)
  return h.astype(formats.E4M3)
