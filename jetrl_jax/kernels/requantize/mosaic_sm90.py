"""Quantises an updated kernel again, in place, on a Hopper GPU (Mosaic).

It is one pass that reads a master and its old 8-bit values, and writes new ones
over the old. The 8-bit values are those of `quantize`, bit for bit.

A program is one warpgroup and has up to 8192 neighbouring values. It goes over
them 2048 at a time, of which a thread has twice eight neighbours in registers,
read straight from memory and written straight to it. Only the warps' parts of
the five sums are in shared memory. The order of such a sum: a thread's eight
values, blocks of 1024 one after another, lanes and warps in a tree, in float32,
then XLA's over the programs; no weight depends on them.

Lower bound of the time: with bfloat16 masters the 4 bytes a value, 63 us at 4.3
TB/s for a kernel of 18944 x 3584. 18 instructions a value need about as much. A
program has 6 KB on their way, with float32 masters 10 KB, and compiled for an
H200 48 registers a thread, so a multiprocessor has ten.
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

_VECTOR = 8
# Rows of neighbours: a thread has one of each such block.
_ROWS = tools.THREADS
_BLOCK = _VECTOR * _ROWS
# Values of a program at most, and blocks that it reads at once.
_MOST, _AT_ONCE = 8192, 2
# Saturated, flushed, signal, noise, changed.
_SUMS = 5
_LIMIT = formats.format_max(formats.E4M3)
_LAYOUT = plgpu.Layout.TILED(
    plgpu.Tiling(((_ROWS, _VECTOR), (tools.LANES, _VECTOR))),
    warp_dims=(-4,),
    lane_dims=(-2,),
    vector_dim=-1,
)


def _kernel(master_ref, scales_ref, old_ref, sums_ref, *, interpret: bool):
  """A few thousand values; `old_ref` receives the new ones."""
  program = lax.axis_index('program')
  scale, inverse = scales_ref[0], scales_ref[1]
  limit = _LIMIT * scale
  blocks = old_ref.shape[1] // _ROWS
  at_once = min(blocks, _AT_ONCE)

  def of_true(values):
    return jnp.where(values, 1.0, 0.0)

  def quantize(master, old):
    """Returns a block's new values, and each thread's five sums over it."""
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
        of_true(jnp.abs(x) > limit),
        of_true((x != 0) & (stored == 0)),
        x * x,
        error * error,
        of_true(changed),
    )
    return low, [jnp.sum(part, axis=1) for part in seen]

  def step(i, totals):
    places = [
        (program, pl.ds((i * at_once + k) * _ROWS, _ROWS))
        for k in range(at_once)
    ]
    # Read before anything is written: else the second read would wait.
    pairs = [
        [tools.read(ref.at[at], _LAYOUT) for ref in (master_ref, old_ref)]
        for at in places
    ]
    for at, pair in zip(places, pairs, strict=True):
      low, seen = quantize(*pair)
      old_ref[at] = low
      totals = [a + b for a, b in zip(totals, seen, strict=True)]
    return totals

  zeros: Any = plgpu.layout_cast(
      jnp.zeros((_ROWS,), jnp.float32), _LAYOUT.reduce(1)
  )
  totals = lax.fori_loop(0, blocks // at_once, step, [zeros] * _SUMS)
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
  size = master_OI.size
  programs = size // min(size & -size, _MOST)
  # A sum to a row: what XLA adds lies side by side.
  result = jax.ShapeDtypeStruct((_SUMS, programs), jnp.float32)
  kernel = plgpu.kernel(
      tools.named('requantize_kernel', _kernel, interpret=interpret),
      out_type=result,
      grid=(programs,),
      grid_names=('program',),
      # A thread overwrites only what it has read itself.
      **tools.kernel_options(interpret, barriers=False),
  )
  # XLA divides, as in `quantize`: a kernel's division rounds differently, and a
  # resumed run quantises with XLA.
  scales = jnp.stack([scale, 1.0 / scale])
  master, old = (a.reshape(programs, -1, _VECTOR) for a in (master_OI, old_OI))
  partial, [values] = tools.in_place(kernel, [master, scales], [old], result)
  return values.reshape(old_OI.shape), jnp.sum(partial, axis=1)
