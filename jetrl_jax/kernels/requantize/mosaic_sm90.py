"""Quantises an updated kernel again, in place, on a Hopper GPU (Mosaic).

It is one pass that reads a master and its old 8-bit values, and writes new ones
over the old. The 8-bit values are those of `quantize`, bit for bit.

A program is one warpgroup and has up to 4096 neighbouring values in registers,
1024 at a time of which a thread has eight, read straight from memory. Only the
warps' parts of the five sums are in shared memory. The order of such a sum: a
thread's values of the same place in each 1024 first, then a thread's eight,
lanes and warps in a tree, in float32, then XLA's over the programs; no weight
depends on them.

Lower bound of the time: with bfloat16 masters the 4 bytes a value, 63 us at 4.3
TB/s for a kernel of 18944 x 3584. A program has 12 KB on their way, with
float32 masters 20 KB, and 100 registers a thread, so a multiprocessor has four.
"""

# jax 0.10, which the types are checked with, lacks some of it.
# pyright: reportAttributeAccessIssue=false

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jetrl_jax.core.typing import Array
from jetrl_jax.fp8 import formats
from jetrl_jax.kernels import mosaic_tools as tools
from jetrl_jax.kernels.requantize import groups

_VECTOR = 8
_CHUNK = _VECTOR * tools.THREADS
# Saturated, flushed, signal, noise, changed.
_SUMS = 5
_LIMIT = formats.format_max(formats.E4M3)


def _kernel(master_ref, scales_ref, old_ref, sums_ref, *, interpret: bool):
  """A few thousand values; `old_ref` receives the new ones."""
  program = lax.axis_index('program')
  scale, inverse = scales_ref[0], scales_ref[1]
  layout = plgpu.Layout.WG_STRIDED((_CHUNK,), vec_size=_VECTOR)
  places = [
      (program, pl.ds(i, _CHUNK)) for i in range(0, old_ref.shape[1], _CHUNK)
  ]
  # Read before anything is written, because the new values overwrite the old
  # ones.
  pairs = [
      [tools.read(ref.at[at], layout) for ref in (master_ref, old_ref)]
      for at in places
  ]

  def of_true(values):
    return jnp.where(values, 1.0, 0.0)

  totals: Any = [0.0] * _SUMS
  for at, (master, old) in zip(places, pairs, strict=True):
    x = master.astype(jnp.float32)
    scaled = x * inverse
    if interpret:  # A cast on a GPU saturates.
      scaled = jnp.clip(scaled, -_LIMIT, _LIMIT)
    low = scaled.astype(formats.E4M3)
    stored = low.astype(jnp.float32)
    error = x - stored * scale
    # Compared as floats, because the two zeros are equal.
    changed = old.astype(jnp.float32) != stored
    seen = (
        of_true(jnp.abs(x) > _LIMIT * scale),
        of_true((x != 0) & (stored == 0)),
        x * x,
        error * error,
        of_true(changed),
    )
    totals = [a + b for a, b in zip(totals, seen, strict=True)]
    old_ref[at] = low
  for i, total in enumerate(totals):
    sums_ref[i, program] = jnp.sum(total)


def requantize_kernel(
    master_OI: Array,
    old_OI: Array,
    scale: Array,
    *,
    interpret: bool = False,
) -> tuple[Array, Array]:
  """See `groups.Kernel`; `interpret` runs on a CPU, for tests."""
  tile = groups.tile_of(master_OI.size)
  programs = master_OI.size // tile
  # A sum to a row, because XLA adds five columns with a thread each, which took
  # 0.7 ms for the weights of a 7B's MLP.
  result = jax.ShapeDtypeStruct((_SUMS, programs), jnp.float32)
  kernel = plgpu.kernel(
      tools.named('requantize_kernel', _kernel, interpret=interpret),
      out_type=result,
      grid=(programs,),
      grid_names=('program',),
      **tools.kernel_options(interpret),
  )
  # XLA divides, as in `quantize`: a kernel's division rounds differently, and a
  # resumed run quantises with XLA.
  operands = master_OI.reshape(-1, tile), jnp.stack([scale, 1.0 / scale])
  old = old_OI.reshape(-1, tile)
  partial, [values] = tools.in_place(kernel, operands, [old], result)
  return values.reshape(old_OI.shape), jnp.sum(partial, axis=1)
