"""Attention's decode kernel for Hopper GPUs (Mosaic).

The arithmetic is that of training's kernel, `kernels/attention/mosaic_sm90.py`,
instruction by instruction.

A program is one warpgroup and goes through the keys of one KV head of a slot,
64 at a time. Hopper's matrix instructions have 64 rows and the queries of a
group are at most 16, so all products are turned round: keys, and channels of
the values, are the rows. C, the columns, are 8 or 16.

    scores [64, C] = K [64, H] Q^T        out [H, C] += V^T [H, 64] P^T

In shared memory are the query rows [16, H], which the output replaces, the
weights [C, 64], and tiles of keys and values, two to four at a time
(`_STAGES`), which bulk copies bring from the pages that the slot's table names.
In registers are the scores, the output [H, C] and the row sums [64, C], all
float32. 16-bit keys and values go from shared memory to the tensor core. FP8
ones are widened to float16 on the way, in registers (`mosaic_registers.py`).

Order of a sum: for a score the tensor core adds 16 channels at a time, for the
output and the row sum 16 keys at a time, and tiles follow in ascending order.
Of FP8, the channels and keys of such a step are those of training. A row sum is
a product with ones. The maximum of a tile is taken over four warps and has no
order.

Lower bound of the time: reading the keys and values once, 35.4 us for 128 slots
of 1152 FP8 keys of a 7B at 4.3 TB/s. The tensor core has about 320 cycles of
work for a tile of 128 channels, the read takes 1000 in FP8 and 2000 in 16 bits.
For each tile the warps of a program meet at eight barriers (seven with 16-bit
keys) and wait for two copies, so a multiprocessor needs a few programs. With
heads of 128 and groups of at most eight it has room for four that have FP8 keys
(102 registers a thread, 45 KiB of shared memory) and for two that have 16-bit
ones (68, 109 KiB), both compiled without spills. On an H100 128 slots take 56
us with FP8 keys (at 3.0 TB/s their bytes take 50), and 68 with a third tile
ahead, which leaves room for three programs (docs/performance_log.md).
"""

import functools
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jetrl_jax.core.typing import Array
from jetrl_jax.fp8 import formats, quantize
from jetrl_jax.kernels import mosaic_tools as tools
from jetrl_jax.kernels.attention.layout import MOST_HEADS, TILE, one_kernel
from jetrl_jax.kernels.attention.reference import (
    NO_SCORE,
    operand_dtype,
    softmax_scale,
)
from jetrl_jax.kernels.decode_attention import mosaic_registers as registers

# Tiles ahead, by the bytes of a key's channel. Where no multiprocessor has more
# than one program, there is room for more of them.
_FEW = 132
_STAGES, _STAGES_OF_FEW = {1: 2, 2: 3}, 4


def _columns_of(group: int) -> int:
  """Returns the columns of the products: the tensor core has eights."""
  return 8 if group <= 8 else MOST_HEADS


class _Scratch(NamedTuple):
  """A program's arrays in shared memory.

  Attributes:
    rounded: query rows as they are stored, and the output in the end.
    q: query rows as the tensor core reads them.
    keys: tiles of keys; of FP8 the even tokens come first.
    values: tiles of values, or of words of two FP8 values.
    weights: [rows, keys] of a tile.
    low: the output, quantised; None if it is not.
    q_there: the query rows have come.
    keys_there: barriers, one a stage: its keys have come.
    values_there: the same of the values.
  """

  rounded: Any
  q: Any
  keys: Any
  values: Any
  weights: Any
  low: Any
  q_there: Any
  keys_there: Any
  values_there: Any

  @classmethod
  def types(
      cls,
      q_dtype,
      stored,
      head_dim: int,
      *,
      stages: int,
      columns: int,
      lowers: bool,
  ) -> '_Scratch':
    """Returns the arrays to allocate."""
    dtype, in_pairs = operand_dtype(q_dtype, stored), stored.itemsize == 1

    def matrix(*shape: int, dtype=dtype):
      transforms = tools.pieces(dtype, shape[-1])
      return plgpu.SMEM(shape, dtype, transforms=transforms)

    shape = MOST_HEADS, head_dim
    words = (TILE // 2, jnp.uint16) if in_pairs else (TILE, stored)
    return cls(
        rounded=plgpu.SMEM(shape, q_dtype),
        q=matrix(*shape),
        keys=matrix(stages, TILE, head_dim, dtype=stored),
        values=matrix(stages, words[0], head_dim, dtype=words[1]),
        weights=matrix(columns, TILE),
        low=plgpu.SMEM(shape, formats.E4M3) if lowers else None,
        q_there=plgpu.Barrier(),
        keys_there=plgpu.Barrier(
            num_arrivals=2 if in_pairs else 1, num_barriers=stages
        ),
        values_there=plgpu.Barrier(num_barriers=stages),
    )


class _Pages(NamedTuple):
  """A slot's keys and values of one KV head, tile by tile.

  Attributes:
    k_ref: all pages of keys; of FP8 [P, K, S/2, 2, H].
    v_ref: all pages of values; of FP8 [P, K, S/2, H], words of two tokens.
    table_ref: [P], the slot's pages in order.
    head: number of the KV head.
    tiles: of the slot.
    per_page: tiles.
    scratch: where they go.
  """

  k_ref: Any
  v_ref: Any
  table_ref: Any
  head: Any
  tiles: Any
  per_page: int
  scratch: _Scratch

  def page_of(self, i):
    """Returns a tile's page, or one of the slot's where there is no tile."""
    i = jnp.maximum(jnp.minimum(i, self.tiles - 1), 0)
    return self.table_ref[lax.div(i, jnp.int32(self.per_page))]

  def stage_of(self, i):
    """Returns a tile's place among those on their way."""
    return lax.rem(i, jnp.int32(self.scratch.keys.shape[0]))

  def _rows(self, i, height: int):
    return pl.ds(lax.rem(i, jnp.int32(self.per_page)) * height, height)

  def ask_keys(self, i, page) -> None:
    """Asks for a tile's keys; of FP8 for the even tokens, then the odd ones."""
    stage = self.stage_of(i)
    there = self.scratch.keys_there.at[stage]
    pool, to = self.k_ref.at[page, self.head], self.scratch.keys.at[stage]
    if len(pool.shape) == 2:
      plgpu.copy_gmem_to_smem(pool.at[self._rows(i, TILE)], to, there)
      return
    half = TILE // 2
    for n in (0, 1):
      plgpu.copy_gmem_to_smem(
          pool.at[self._rows(i, half), n], to.at[pl.ds(n * half, half)], there
      )

  def ask_values(self, i, page) -> None:
    """Asks for a tile's values."""
    stage, height = self.stage_of(i), self.scratch.values.shape[1]
    plgpu.copy_gmem_to_smem(
        self.v_ref.at[page, self.head, self._rows(i, height)],
        self.scratch.values.at[stage],
        self.scratch.values_there.at[stage],
    )


def _kernel(
    q_ref,
    k_ref,
    v_ref,
    table_ref,
    last_ref,
    *refs,
    page_size: int,
    group: int,
    interpret: bool,
):
  """A KV head of a slot."""
  *scale_refs, out_ref, scratch = refs
  head, slot = lax.axis_index('head'), lax.axis_index('slot')
  last = last_ref[slot]
  tiles = lax.div(last + TILE, jnp.int32(TILE))
  stages, in_pairs = scratch.keys.shape[0], len(k_ref.shape) == 5
  pages = _Pages(
      k_ref,
      v_ref,
      table_ref.at[slot],
      head=head,
      tiles=tiles,
      per_page=page_size // TILE,
      scratch=scratch,
  )
  mine = pl.ds(head * group, group)
  # Rows beyond the group hold old memory, and nobody reads their results.
  whose = pl.ds(0, group)
  plgpu.copy_gmem_to_smem(
      q_ref.at[slot, mine], scratch.rounded.at[whose], scratch.q_there
  )
  for i in map(jnp.int32, range(stages)):

    @pl.when(i < tiles)
    def _(i=i):
      page = pages.page_of(i)
      pages.ask_keys(i, page)
      pages.ask_values(i, page)

  plgpu.barrier_wait(scratch.q_there)
  scratch.q[...] = registers.query(
      scratch.rounded, scratch.q.dtype, in_pairs, interpret
  )
  plgpu.commit_smem()
  out = _attended(pages, last, in_pairs, interpret)
  columns = scratch.weights.shape[0]
  turned = scratch.rounded.at[pl.ds(0, columns)].transpose((1, 0))
  tools.write(turned, out.astype(turned.dtype))
  plgpu.commit_smem()
  result = scratch.rounded
  for scale_ref in scale_refs:
    layout = plgpu.Layout.WG_STRIDED(result.shape, vec_size=4)
    rounded = result[...] if interpret else tools.load(result, layout)
    result = scratch.low
    result[...] = quantize(rounded, scale_ref[0], formats.E4M3)
    plgpu.commit_smem()
  plgpu.copy_smem_to_gmem(result.at[whose], out_ref.at[slot, mine])
  plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _attended(pages: _Pages, last, in_pairs: bool, interpret: bool):
  """Returns the output, float32, of the query rows in `pages.scratch`.

  It is [H, 8] or [H, 16].

  Args:
    pages: the first tiles have been asked for.
    last: the last key to attend.
    in_pairs: keys and values are FP8.
    interpret: run on a CPU.
  """
  scratch, tiles = pages.scratch, pages.tiles
  stages, _, head_dim = scratch.keys.shape
  dtype, layout = scratch.q.dtype, plgpu.Layout.WGMMA
  columns = scratch.weights.shape[0]

  def across(of_row, height: int):
    return lax.broadcast_in_dim(of_row, (height, columns), [1])

  def products(keys):
    q = scratch.q.at[pl.ds(0, columns)].transpose((1, 0))
    if interpret:  # The interpreter has no product of operands in registers.
      return jnp.dot(keys[...], q[...], preferred_element_type=jnp.float32)

    def multiply(ref):
      plgpu.wgmma(ref, keys, q)
      return ref[...]

    return pl.run_scoped(multiply, tools.sums(TILE, columns))

  def masked(i, scores):
    key = plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=layout)
    if in_pairs:
      odd = 2 * key - (TILE - 1)
      key = jnp.where(key < TILE // 2, 2 * key, odd)
    # So low that its weight is 0 next to any maximum.
    return jnp.where(key + i * TILE <= last, scores, 2.0 * NO_SCORE)

  def added(sums, weights, p, values):
    """Returns the sums with a tile's values, and with its weights."""
    ones = jnp.ones((tools.ROWS, TILE), dtype)
    if interpret:
      return [
          x + jnp.dot(a[...], p, preferred_element_type=jnp.float32)
          for x, a in zip(sums, (values, ones), strict=True)
      ]
    ones = plgpu.layout_cast(ones, layout)

    def add(refs):
      plgpu.wgmma(refs[0], values, weights)
      plgpu.wgmma(refs[1], ones, weights)

    start = [plgpu.WGMMAAccumulatorRef.init(x) for x in sums]
    return cast(Any, pl.run_state(add)(start))

  def attend(i, carry, is_masked: bool):
    acc, top, total, page, page_before = carry
    stage = pages.stage_of(i)
    plgpu.barrier_wait(scratch.keys_there.at[stage])
    keys = scratch.keys.at[stage]
    if in_pairs:
      keys = registers.keys(keys, interpret)
    scores = products(keys)
    scores = tools.scaled(scores, softmax_scale(head_dim), interpret)
    if is_masked:
      scores = masked(i, scores)
    new_top = jnp.maximum(top, jnp.max(scores, axis=0))
    decay = tools.power_of_2(top - new_top)
    p = tools.power_of_2(scores - across(new_top, TILE)).astype(dtype)
    weights = scratch.weights.transpose((1, 0))
    weights[...] = p
    # Also: every warp is done with these keys, and with the values before.
    plgpu.commit_smem()

    @pl.when(i + stages < tiles)
    def _():
      pages.ask_keys(i + stages, page)

    @pl.when((i > 0) & (i + stages - 1 < tiles))
    def _():
      pages.ask_values(i + stages - 1, page_before)

    # Read one tile early, because a number of the table takes a while to load.
    ahead = pages.page_of(i + stages + 1)
    sums = [x * across(decay, x.shape[0]) for x in (acc, total)]
    plgpu.barrier_wait(scratch.values_there.at[stage])
    values = scratch.values.at[stage]
    if in_pairs:
      values = registers.values(values, interpret)
    else:
      values = values.transpose((1, 0))
    acc, total = added(sums, weights, p, values)
    return acc, new_top, total, ahead, page

  def zeros(height: int):
    return plgpu.layout_cast(jnp.zeros((height, columns), jnp.float32), layout)

  top = plgpu.layout_cast(
      jnp.full((columns,), NO_SCORE, jnp.float32), layout.reduce(0)
  )
  next_pages = [pages.page_of(jnp.int32(stages - n)) for n in (0, 1)]
  carry = zeros(head_dim), top, zeros(tools.ROWS), *next_pages
  whole = lax.div(last + 1, jnp.int32(TILE))
  # All tiles but the last one, which may end within.
  for bounds, is_masked in (((0, whole), False), ((whole, tiles), True)):
    carry = lax.fori_loop(
        *bounds, functools.partial(attend, is_masked=is_masked), carry
    )
  acc, _, total, *_ = carry
  # All rows hold the sum.
  total = jnp.max(total, axis=0)
  safe = jnp.where(total > 0.0, total, 1.0)
  return tools.ratio(acc, across(safe, head_dim), interpret)


@one_kernel('stages', 'interpret')
def decode(
    q_BNH: Array,
    k_PKSH: Array,
    values: Array,
    table_BP: Array,
    last_B: Array,
    out_scale: Array | None = None,
    *,
    stages: int | None = None,
    interpret: bool = False,
) -> Array:
  """Returns the output [B, N, H], see the package.

  `stages` is how many tiles are on their way; None decides by the number of
  programs. All give the same bits. `interpret` runs on a CPU, for tests.
  """
  slots, heads, head_dim = q_BNH.shape
  _, kv_heads, page_size, _ = k_PKSH.shape
  stored, group = k_PKSH.dtype, heads // kv_heads
  if stages is None:
    few = slots * kv_heads <= _FEW
    stages = _STAGES_OF_FEW if few else _STAGES[stored.itemsize]
  if stored.itemsize == 1:
    k_PKSH = k_PKSH.reshape(-1, kv_heads, page_size // 2, 2, head_dim)
    pairs = lax.bitcast_convert_type(values, jnp.uint8)
    values = lax.bitcast_convert_type(pairs, jnp.uint16)
  steps = [] if out_scale is None else [out_scale.reshape(1)]
  return plgpu.kernel(
      tools.named(
          'flash_attention',
          _kernel,
          page_size=page_size,
          group=group,
          interpret=interpret,
      ),
      out_type=jax.ShapeDtypeStruct(
          q_BNH.shape, formats.E4M3 if steps else q_BNH.dtype
      ),
      scratch_types=[
          _Scratch.types(
              *(q_BNH.dtype, stored, head_dim),
              stages=stages,
              columns=_columns_of(group),
              lowers=bool(steps),
          )
      ],
      grid=(kv_heads, slots),
      grid_names=('head', 'slot'),
      **tools.kernel_options(interpret),
  )(q_BNH, k_PKSH, values, table_BP, last_B, *steps)
