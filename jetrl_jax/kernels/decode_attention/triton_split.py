"""Decode's attention of few slots, as three kernels (Pallas, Triton backend).

A program of `triton.py` goes through a slot's keys tile by tile. That takes 1.3
us per tile on an H200, however idle the GPU is. At the end of a rollout, with
few slots and the longest sequences, it is most of a decode step. But only two
things depend on an order: the maximum, which is also the maximum of the parts'
maxima, and each channel's sum over keys. So many programs compute scores, then
many compute weights, and then one program per few output channels adds up.
Every number is computed as in `triton.py` and added in the same order, so the
bits are the same.

Each program has one warp and a slot's KV head: for scores and for weights a
chunk of its tiles of 64 keys, for the sums 16 output channels of all tiles.
Between the kernels the scores [N, S], the weights and a number a tile go
through memory, in a cache that holds them. Keys and values pass through shared
memory, three and six tiles at a time. The sums are in registers.

Order of a sum: each channel's goes through all keys, 16 at a time, in ascending
order of tiles, in one program.

Lower bound of the time: the sums' chain over a slot's tiles. It takes 0.45 us a
tile with 512 programs, and why is not known (docs/performance_log.md).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jetrl_jax.core.typing import Array
from jetrl_jax.fp8 import formats, quantize
from jetrl_jax.kernels.attention.reference import operand_dtype
from jetrl_jax.kernels.attention.triton import (
    add_weighed,
    allowed_keys,
    finish,
    highest,
    no_scores,
    scores_of,
    start,
    weights_of,
)
from jetrl_jax.kernels.decode_attention import triton_pages as pages
from jetrl_jax.kernels.triton_tools import kernel_options, power_of_2

_ROWS = pages.DECODE_ROWS
# Tiles of keys that are loaded ahead; more would leave shared memory for fewer
# programs.
_STAGES = 3


class Split(NamedTuple):
  """How programs divide the work of a slot's KV head.

  Attributes:
    chunks: groups of neighbouring tiles; one program makes the scores of a
      group; a power of two.
    channels: output channels that one program sums; a power of two.
    stages: tiles of values that are loaded ahead.
  """

  chunks: int
  channels: int
  stages: int


# Above so many programs of `triton.py`, one to a slot's KV head, that
# is taken to be faster: one for each multiprocessor of an H200. Measured: with
# 64 the split is, with 256 it is not (docs/performance_log.md).
_FEW = 132


def best(programs: int) -> Split | None:
  """Returns the fastest split of so many programs; None for no split."""
  return Split(chunks=16, channels=16, stages=6) if programs <= _FEW else None


def _my_tiles(last, split: Split, tile: int):
  """Returns this program's tiles, as (begin, end); none after the last."""
  tiles = lax.div(last + tile, jnp.int32(tile))
  each = lax.div(tiles + split.chunks - 1, jnp.int32(split.chunks))
  begin = pl.program_id(2) * each
  return begin, jnp.minimum(begin + each, tiles)


def _places(parts: int, i, tile: int):
  """Returns where a tile's parts are in an array over keys."""
  width = tile // parts
  return [pl.ds(i * tile + n * width, width) for n in range(parts)]


def _seen(i, last, parts: int, tile: int):
  """Returns which keys of a tile's parts there are."""
  span = jnp.zeros((_ROWS,), jnp.int32), jnp.full((_ROWS,), last, jnp.int32)
  return [
      allowed_keys((_ROWS, tile // parts), *span, numbers)
      for numbers in pages.key_numbers(parts, i * tile)
  ]


def _scores_kernel(
    q_ref,
    k_ref,
    table_ref,
    last_ref,
    scores_ref,
    top_ref,
    chunk_top_ref,
    *,
    split,
    tile,
    page_size,
    group,
):
  """A chunk's scores, and their maxima from its begin to each of its tiles."""
  head, last = pl.program_id(0), last_ref[0]
  per_page = jnp.int32(page_size // tile)
  dtype = operand_dtype(q_ref.dtype, k_ref.dtype)
  q, mask = pages.load_query(q_ref, head, group, dtype)
  mine = pl.ds(head * group, _ROWS)
  begin, end = _my_tiles(last, split, tile)

  sizes = tile, page_size

  def body(i, carry):
    page, top = carry
    ahead = pages.page_of(table_ref, i + 1, last, sizes)
    at = (page, head), lax.rem(i, per_page), tile
    keys = pages.load_keys(k_ref, *at, dtype)
    places = _places(len(keys), i, tile)
    seen = _seen(i, last, len(keys), tile)
    for part, place, allowed in zip(keys, places, seen, strict=True):
      scores = scores_of(q, part)
      triton.store(scores_ref.at[mine, place], scores, mask=mask[:, None])
      top = jnp.maximum(top, highest(scores, allowed))
    triton.store(top_ref.at[i, mine], top, mask=mask)
    return ahead, top

  page = pages.page_of(table_ref, begin, last, sizes)
  _, top = lax.fori_loop(begin, end, body, (page, no_scores(_ROWS)))
  triton.store(chunk_top_ref.at[pl.program_id(2), mine], top, mask=mask)


def _highest_of(chunk_top_ref, chunks, mine, mask):
  """Returns each row's highest score in some chunks."""
  tops = triton.load(
      chunk_top_ref.at[:, mine],
      mask=chunks[:, None] & mask[None, :],
      other=no_scores(1)[0],
  )
  return jnp.max(tops, axis=0)


def _weights_kernel(
    scores_ref,
    top_ref,
    chunk_top_ref,
    last_ref,
    weights_ref,
    decay_ref,
    *,
    split,
    tile,
    group,
    parts,
    interpret,
):
  """A chunk's weights, and what each tile makes of the sums before it."""
  chunk, last = pl.program_id(2), last_ref[0]
  mine = pl.ds(pl.program_id(0) * group, _ROWS)
  mask = jnp.arange(_ROWS) < group
  earlier = jnp.arange(split.chunks) < chunk
  before = _highest_of(chunk_top_ref, earlier, mine, mask)

  def body(i, old):
    top = triton.load(top_ref.at[i, mine], mask=mask, other=0.0)
    top = jnp.maximum(before, top)
    places, seen = _places(parts, i, tile), _seen(i, last, parts, tile)
    for place, allowed in zip(places, seen, strict=True):
      scores = triton.load(
          scores_ref.at[mine, place], mask=mask[:, None], other=0.0
      )
      weights = weights_of(scores, top, allowed, weights_ref.dtype, interpret)
      triton.store(weights_ref.at[mine, place], weights, mask=mask[:, None])
    decay = power_of_2(old - top, interpret)
    triton.store(decay_ref.at[i, mine], decay, mask=mask)
    return top

  lax.fori_loop(*_my_tiles(last, split, tile), body, before)


def _sums_kernel(
    weights_ref,
    decay_ref,
    chunk_top_ref,
    v_ref,
    table_ref,
    last_ref,
    *refs,
    split,
    tile,
    page_size,
    group,
    dtype,
    interpret,
):
  """Some channels of the output; of the first, the log-sum-exp too."""
  *steps, out_ref, lse_ref = refs
  head, last = pl.program_id(0), last_ref[0]
  per_page = jnp.int32(page_size // tile)
  channels = pl.ds(pl.program_id(2) * split.channels, split.channels)
  mine = pl.ds(head * group, _ROWS)
  mask = jnp.arange(_ROWS) < group

  def decay_of(i):
    i = jnp.minimum(i, lax.div(last, jnp.int32(tile)))
    return triton.load(decay_ref.at[i, mine], mask=mask, other=0.0)

  def body(i, carry):
    *sums, page, decay = carry
    ahead = pages.page_of(table_ref, i + 1, last, (tile, page_size))
    # Loaded ahead as well: Triton loads early only what goes into a dot.
    next_decay = decay_of(i + 1)
    at = (page, head), lax.rem(i, per_page), tile
    values = pages.load_values(v_ref, *at, channels, interpret)
    weights = [
        triton.load(weights_ref.at[mine, place], mask=mask[:, None], other=0.0)
        for place in _places(len(values), i, tile)
    ]
    sums = add_weighed(sums, decay, zip(weights, values, strict=True))
    return *sums, ahead, next_decay

  acc, _, total = start(_ROWS, split.channels)
  acc, total, *_ = lax.fori_loop(
      0,
      lax.div(last + tile, jnp.int32(tile)),
      body,
      (acc, total, table_ref[0], decay_of(0)),
  )
  every = jnp.full((split.chunks,), True)
  out, lse = finish((acc, _highest_of(chunk_top_ref, every, mine, mask), total))
  out = out.astype(dtype)
  for out_scale_ref in steps:
    out = quantize(out, out_scale_ref[0], formats.E4M3)
  triton.store(out_ref.at[mine, channels], out, mask=mask[:, None])
  is_first = pl.program_id(2) == 0
  triton.store(lse_ref.at[mine], lse, mask=mask & is_first)


def decode(
    q_BNH: Array,
    k_pool: Array,
    v_pool: Array,
    table_BP: Array,
    last_B: Array,
    out_scale: Array | None,
    split: Split,
    *,
    tile: int,
    page_size: int,
    group: int,
    interpret: bool,
) -> tuple[Array, Array]:
  """See `triton.decode`.

  Args:
    q_BNH: queries.
    k_pool: see `triton_pages.pools`.
    v_pool: as k_pool.
    table_BP: pages of each slot.
    last_B: last key of each.
    out_scale: scale on which the result is quantised.
    split: how the work is shared out.
    tile: keys.
    page_size: tokens.
    group: see `triton_pages.group_of`.
    interpret: run on a CPU, for tests.
  """
  batch, heads, head_dim = q_BNH.shape
  kv_heads, length = k_pool.shape[1], table_BP.shape[1] * page_size
  # A tiny model's heads have fewer channels.
  split = split._replace(channels=min(split.channels, head_dim))
  sizes = dict(split=split, tile=tile, group=group)
  tiles = length // tile

  def of_slot(*dims):
    return pl.BlockSpec((None, *dims), lambda h, b, _: (b, *[0] * len(dims)))

  def call(kernel, programs, operands, results, name, stages, **more):
    return pl.pallas_call(
        functools.partial(kernel, **sizes, **more),
        grid=(kv_heads, batch, programs),
        in_specs=[spec for _, spec in operands],
        out_specs=[of_slot(*dims) for dims, _ in results],
        out_shape=[
            jax.ShapeDtypeStruct((batch, *dims), dtype)
            for dims, dtype in results
        ],
        name=name,
        **kernel_options(interpret, 1, stages),
    )(*[x for x, _ in operands])

  table = table_BP, of_slot(table_BP.shape[1])
  last = last_B, pl.BlockSpec((1,), lambda h, b, _: (b,))
  of_keys, of_tiles = of_slot(heads, length), of_slot(tiles, heads)
  scores, top, chunk_top = call(
      _scores_kernel,
      split.chunks,
      [
          (q_BNH, of_slot(heads, head_dim)),
          (k_pool, pages.whole(k_pool)),
          *(table, last),
      ],
      [
          ((heads, length), jnp.float32),
          ((tiles, heads), jnp.float32),
          ((split.chunks, heads), jnp.float32),
      ],
      'attention_scores',
      _STAGES,
      page_size=page_size,
  )
  dtype = operand_dtype(q_BNH.dtype, k_pool.dtype)
  weights, decay = call(
      _weights_kernel,
      split.chunks,
      [
          (scores, of_keys),
          (top, of_tiles),
          (chunk_top, of_slot(split.chunks, heads)),
          last,
      ],
      [((heads, length), dtype), ((tiles, heads), jnp.float32)],
      'attention_weights',
      _STAGES,
      parts=1 if k_pool.dtype.itemsize > 1 else 2,
      interpret=interpret,
  )
  scales = [] if out_scale is None else [out_scale.reshape(1)]
  out_dtype = q_BNH.dtype if out_scale is None else formats.E4M3
  out, lse = call(
      _sums_kernel,
      head_dim // split.channels,
      [
          *((weights, of_keys), (decay, of_tiles)),
          (chunk_top, of_slot(split.chunks, heads)),
          (v_pool, pages.whole(v_pool)),
          *(table, last),
          *[(x, pl.BlockSpec((1,), lambda h, b, _: (0,))) for x in scales],
      ],
      [((heads, head_dim), out_dtype), ((heads,), jnp.float32)],
      'attention_sums',
      split.stages,
      page_size=page_size,
      dtype=q_BNH.dtype,
      interpret=interpret,
  )
  return out, lse
