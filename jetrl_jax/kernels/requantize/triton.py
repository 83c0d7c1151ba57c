"""Quantises an updated kernel again, in place (Pallas, Triton backend).

After an optimiser step each kernel of a recipe with delayed scales is quantised
again. XLA reads the master to quantise it, reads it again with the 8-bit values
to measure what was lost, compares old values with new ones, and copies the new
ones over the old ones. This kernel does all of it in one pass: with bfloat16
masters it moves 4 bytes a value. The 8-bit values are those of `quantize`, bit
for bit; the sums are added in another order.

A program has up to 32 x 128 values and four warps, all in registers. The order
of its five sums is a tree over the tile, in float32, then XLA's over the
programs; no weight depends on them.

Lower bound of the time: the 4 bytes a value. On an H100 a kernel of 18944 x
3584 takes as long as XLA's programs within 1%
(benchmarks/results/kernels_qwen7b_h100_2026-11-25.md).
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jetrl_jax.core.typing import Array
from jetrl_jax.fp8 import formats
from jetrl_jax.kernels.requantize import groups
from jetrl_jax.kernels.triton_tools import kernel_options

_ROW = 128
# Saturated, flushed, signal, noise, changed; padded to a power of two.
_SUMS = 8
_LIMIT = formats.format_max(formats.E4M3)


def _kernel(master_ref, old_ref, scales_ref, out_ref, sums_ref):
  scale, inverse = scales_ref[0], scales_ref[1]
  # Read before anything is written, because the new values overwrite these.
  old = old_ref[...].astype(jnp.float32)
  x = master_ref[...].astype(jnp.float32)
  low = jnp.clip(x * inverse, -_LIMIT, _LIMIT).astype(formats.E4M3)
  out_ref[...] = low
  stored = low.astype(jnp.float32)
  error = x - stored * scale
  seen = (
      jnp.abs(x) > _LIMIT * scale,
      (x != 0) & (stored == 0),
      x * x,
      error * error,
      # Compared as floats, because the two zeros are equal.
      old != stored,
  )
  for i, values in enumerate(seen):
    sums_ref[i] = jnp.sum(values.astype(jnp.float32))


def requantize_kernel(
    master_OI: Array,
    old_OI: Array,
    scale: Array,
    *,
    interpret: bool = False,
) -> tuple[Array, Array]:
  """See `groups.Kernel`; `interpret` runs on a CPU, for tests."""
  rows = groups.tile_of(master_OI.size) // _ROW
  programs = master_OI.size // _ROW // rows
  block = pl.BlockSpec((rows, _ROW), lambda i: (i, 0))
  values, partial = pl.pallas_call(
      _kernel,
      grid=(programs,),
      in_specs=[block, block, pl.BlockSpec((2,), lambda i: (0,))],
      out_specs=[block, pl.BlockSpec((None, _SUMS), lambda i: (i, 0))],
      out_shape=[
          jax.ShapeDtypeStruct((programs * rows, _ROW), old_OI.dtype),
          jax.ShapeDtypeStruct((programs, _SUMS), jnp.float32),
      ],
      input_output_aliases={1: 0},
      name='requantize_kernel',
      **kernel_options(interpret, num_warps=4),
  )(
      master_OI.reshape(-1, _ROW),
      old_OI.reshape(-1, _ROW),
      # XLA divides, as in `quantize`: Triton's division rounds differently, and
      # a resumed run quantises with XLA.
      jnp.stack([scale, 1.0 / scale]),
  )
  return values.reshape(old_OI.shape), jnp.sum(partial[:, :5], axis=0)
