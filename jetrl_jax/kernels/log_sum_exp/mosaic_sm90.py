"""Log-sum-exp and mean of rows of logits for Hopper GPUs (Mosaic).

A row is cut into chunks, and one program joins the chunks of a row. A row's
result depends on the row alone.

A chunk has 4096 logits. A program is one warpgroup and goes through a share of
all rows' chunks. Bulk copies bring its next chunks to shared memory while it
computes: three of 16 KiB are on their way, and a multiprocessor has four such
programs. Each thread has 32 logits of a chunk in registers, in four quarters of
1024: eight of each quarter, in two runs of four. The joining program is one
warpgroup too, with a chunk's numbers in each thread's registers.

Order of a sum: quarter by quarter at each of 1024 places; a thread's eight
places one after another; then lanes, then warps, in trees. The chunks of a row
are added over lanes and warps alike. All is float32.

Lower bound of the time: reading the logits once, 18 us for 128 rows of 152064
at 4.3 TB/s. A multiprocessor reads a chunk in 1000 cycles and takes 430 to
issue its instructions. Compiled for an H200 a thread has 69 registers and
nothing spilled.
"""

# jax 0.10, which the types are checked with, lacks some of it.
# pyright: reportAttributeAccessIssue=false

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jetrl_jax.core.typing import Array
from jetrl_jax.kernels import mosaic_tools as tools
from jetrl_jax.kernels.calls import lowered_once
from jetrl_jax.kernels.log_sum_exp.reference import LOWEST

# Logits of a chunk, and of each of its quarters.
CHUNK = 4096
LANES = CHUNK // 4
QUARTER = plgpu.Layout.WG_STRIDED((LANES,), vec_size=4)
_LOG2_E = math.log2(math.e)
# Threads of a program that joins chunks. It reads this many chunks, or a
# multiple.
_THREADS = 128
# Chunks that a program has on their way, and programs of a multiprocessor: they
# fill its shared memory. Not measured.
_STAGES, _RESIDENT = 3, 4
_MULTIPROCESSORS = 132  # of an H200; used if no GPU is at hand


def ask_chunk(logits_ref, row, chunk, tile_ref, there_ref) -> None:
  """Asks for a chunk [4096] of a row.

  The last one ends in the next row, or with the last row's last logit.
  """
  plgpu.copy_gmem_to_smem(
      logits_ref.at[row, pl.ds(chunk * CHUNK, CHUNK)],
      tile_ref,
      there_ref,
      oob_mode=plgpu.OOBFillMode.UNDEFINED,
  )


def read_chunk(tile_ref, inverse, chunk, vocab: int) -> list:
  """Returns the tempered logits of a chunk, by quarters.

  Args:
    tile_ref: a chunk that has come.
    inverse: what its logits are multiplied by.
    chunk: its number.
    vocab: tokens; columns after them have the lowest logit.
  """
  quarters = [tile_ref.at[pl.ds(i * LANES, LANES)] for i in range(4)]

  # Written into the tile, so that other chunks need no mask.
  @pl.when((chunk + 1) * CHUNK > vocab)
  def _():
    lane = lanes()
    for start, ref in zip(range(0, CHUNK, LANES), quarters, strict=True):
      is_there = lane < vocab - chunk * CHUNK - start
      ref[...] = jnp.where(is_there, tools.load(ref, QUARTER), -jnp.inf)

  return [
      jnp.maximum(tools.load(ref, QUARTER) * inverse, LOWEST)
      for ref in quarters
  ]


def lanes():
  """Returns the places in a quarter."""
  return plgpu.broadcasted_iota(jnp.int32, (LANES,), 0, layout=QUARTER)


def _chunk_kernel(
    logits_ref, inverse_ref, *refs, vocab: int, programs: int, interpret: bool
):
  """Chunks' largest logits z, sums of exp(z - top) and of those z."""
  *out_refs, tiles_ref, there_ref = refs
  stages, chunks = tiles_ref.shape[0], pl.cdiv(vocab, CHUNK)
  first = lax.axis_index('program')
  items = inverse_ref.shape[0] * chunks
  count = lax.div(items - 1 - first, jnp.int32(programs)) + 1

  def place_of(i):
    item = first + i * programs
    return lax.div(item, jnp.int32(chunks)), lax.rem(item, jnp.int32(chunks))

  def ask(i):
    stage = lax.rem(i, jnp.int32(stages))
    tile = tiles_ref.at[stage], there_ref.at[stage]
    ask_chunk(logits_ref, *place_of(i), *tile)

  for i in map(jnp.int32, range(stages)):
    pl.when(i < count)(functools.partial(ask, i))

  def step(i, _):
    row, chunk = place_of(i)
    stage = lax.rem(i, jnp.int32(stages))
    inverse = inverse_ref[row]
    plgpu.barrier_wait(there_ref.at[stage])
    quarters = read_chunk(tiles_ref.at[stage], inverse, chunk, vocab)
    tools.has_read()
    pl.when(i + stages < count)(lambda: ask(i + stages))
    top = jnp.max(functools.reduce(jnp.maximum, quarters))
    total = weighted = plgpu.layout_cast(
        jnp.zeros((LANES,), jnp.float32), QUARTER
    )
    for z in quarters:
      # After the vocabulary's end z is the lowest number, and this is 0.
      p = tools.power_of_2((z - top) * _LOG2_E)
      total += p
      weighted = tools.multiply_add(p, z, weighted, interpret, QUARTER)
    parts = top, jnp.sum(total), jnp.sum(weighted)
    for ref, part in zip(out_refs, parts, strict=True):
      ref[row, chunk] = part

  lax.fori_loop(0, count, step, None)


def _core_count() -> int:
  return getattr(jax.devices()[0], 'core_count', _MULTIPROCESSORS)


def chunk_stats(
    logits_MV: Array, inverse_M: Array, *, interpret: bool
) -> list[Array]:
  """Returns the chunks' largest logit z, sums of exp(z - top) and of that z.

  Args:
    logits_MV: float32.
    inverse_M: float32, what each row's logits are multiplied by.
    interpret: run on a CPU, for tests.

  Returns:
    three [M, C], C a multiple of 128, of which the last are not written
  """
  rows, vocab = logits_MV.shape
  chunks = pl.cdiv(vocab, CHUNK)
  shape = rows, pl.cdiv(chunks, _THREADS) * _THREADS
  programs = min(rows * chunks, _RESIDENT * _core_count())
  return plgpu.kernel(
      tools.named(
          'row_stats',
          _chunk_kernel,
          vocab=vocab,
          programs=programs,
          interpret=interpret,
      ),
      out_type=[jax.ShapeDtypeStruct(shape, jnp.float32)] * 3,
      scratch_types=[
          plgpu.SMEM((_STAGES, CHUNK), jnp.float32),
          plgpu.Barrier(num_barriers=_STAGES),
      ],
      grid=(programs,),
      grid_names=('program',),
      **tools.kernel_options(interpret),
  )(as_copied(logits_MV, interpret), inverse_M)


def as_copied(logits_MV: Array, interpret: bool) -> Array:
  """Returns logits as bulk copies take them.

  A row is a multiple of 16 bytes and a chunk at least. Interpreted, it is whole
  chunks, because nothing may be read after it.
  """
  vocab = logits_MV.shape[1]
  pad = max(-vocab % (CHUNK if interpret else 4), CHUNK - vocab)
  return jnp.pad(logits_MV, ((0, 0), (0, pad))) if pad else logits_MV


def joined(shape: tuple[int, ...]):
  """Returns the layout of a row's chunks."""
  return plgpu.Layout.WG_STRIDED(shape, vec_size=1)


def load_parts(refs: Sequence, row, vocab: int) -> tuple:
  """Returns (numbers of the chunks of a row, some of their parts).

  Args:
    refs: the first of what `chunk_stats` returns, or all.
    row: its number.
    vocab: tokens; where there is no chunk the parts are what adds nothing.
  """
  shape = refs[0].shape[1:]
  layout = joined(shape)
  at = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)
  is_there = at < pl.cdiv(vocab, CHUNK)
  parts = [
      jnp.where(is_there, tools.load(ref.at[row], layout), other)
      for ref, other in zip(refs, (LOWEST, 0.0, 0.0), strict=False)
  ]
  return at, *parts


def join(top, total, *, interpret: bool) -> tuple:
  """Returns a row's log-sum-exp, its sum, and the scales of its chunks."""
  row_top = jnp.max(top)
  scale = jnp.exp(top - row_top)
  # The product is rounded first. Two kernels join chunks, and a fused
  # multiply-add would give another sum.
  total = tools.product(total, scale, interpret, joined(top.shape))
  row_total = jnp.sum(total)
  return row_top + jnp.log(row_total), row_total, scale


def _join_kernel(*refs, vocab: int, interpret: bool):
  """Joins the chunks of a row."""
  *part_refs, lse_ref, mean_ref = refs
  row = lax.axis_index('row')
  _, top, total, weighted = load_parts(part_refs, row, vocab)
  lse_ref[row], row_total, scale = join(top, total, interpret=interpret)
  # A chunk whose weight is 0 may have an infinite sum.
  weighted = jnp.where(scale > 0.0, weighted * scale, 0.0)
  mean_ref[row] = jnp.sum(weighted) / row_total


@lowered_once('interpret')
def row_stats(
    logits_MV: Array, inverse_M: Array, *, interpret: bool = False
) -> tuple[Array, Array]:
  """See the package's `row_stats`; `interpret` runs on a CPU, for tests."""
  rows, vocab = logits_MV.shape
  parts = chunk_stats(logits_MV, inverse_M, interpret=interpret)
  return tuple(
      plgpu.kernel(
          tools.named(
              'join_row_stats', _join_kernel, vocab=vocab, interpret=interpret
          ),
          out_type=[jax.ShapeDtypeStruct((rows,), jnp.float32)] * 2,
          grid=(rows,),
          grid_names=('row',),
          **tools.kernel_options(interpret, approximate=False),
      )(*parts)
  )
