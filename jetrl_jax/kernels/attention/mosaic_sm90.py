"""Attention's forward kernel for Hopper GPUs (Mosaic).

A row's bits are those of decode's kernel
(`kernels/decode_attention/mosaic_sm90.py`).

A program has two computing warpgroups of 64 query rows each (`Program`), of one
KV head, and goes through its keys 64 at a time. A third warpgroup asks for the
tiles of keys and values, three ahead.

    scores [64, 64] = Q [64, H] K^T        out [64, H] += P [64, 64] V

In shared memory are the query rows with the first and last key of each, the
tiles, a matrix of ones [16, 64], and at the end the output. In registers are
the scores of a tile and of the next one, the weights in 16 bits, the output and
the row sums [64, 16]. All sums are float32. FP8 keys and values come as
float16: XLA widens them before the kernel.

Order of a sum: for a score the tensor core adds 16 channels at a time. For the
output and the row sum it adds 16 keys at a time, and tiles follow in ascending
order. Of FP8, the channels and keys of such a step are those of decode
(`layout.py`). A row sum is a product with ones.

Lower bound of the time: the tensor core takes 540 cycles for a warpgroup's tile
of 64 keys and 128 channels. The special function units take 260 cycles of these
for the powers of two. Both overlap as long as the other warpgroup, or the
scores of the next tile, keep the tensor core busy. With 64 channels the tensor
core takes 290 cycles, so either may be the limit.
"""

import functools
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jetrl_jax.core.typing import Array
from jetrl_jax.kernels import mosaic_tools as tools
from jetrl_jax.kernels.attention.layout import (
    TILE,
    channels_as_decoded,
    one_kernel,
    pad_rows,
    tokens_as_decoded,
)
from jetrl_jax.kernels.attention.reference import (
    NO_SCORE,
    operand_dtype,
    softmax_scale,
)

# Columns of the product with ones.
_SUM_COLUMNS = 16


class Program(NamedTuple):
  """How a program is made.

  Attributes:
    groups: warpgroups that multiply, 64 rows each.
    stages: tiles of keys and of values that are loaded ahead.
  """

  groups: int
  stages: int


_BEST = Program(groups=2, stages=3)


def key_tiles_of(first_BR: Array, last_BR: Array, rows: int) -> Array:
  """Returns the key tiles of each program, int32 [B, programs, 4].

  (begin, inner, inner_end, end): every row of the program sees all keys of the
  tiles from `inner` to `inner_end`; what is masked there is nothing, so a row's
  bits are the same either way.

  Args:
    first_BR: first key that each row may see.
    last_BR: last one.
    rows: query rows of a program.
  """
  first, last = (x.reshape(x.shape[0], -1, rows) for x in (first_BR, last_BR))

  def least(x):
    return jnp.min(x, axis=2)

  def most(x):
    return jnp.max(x, axis=2)

  begin, end = least(first) // TILE, (most(last) + TILE) // TILE
  # At least one tile; it changes nothing if no row sees a key.
  end = jnp.maximum(begin + 1, end)
  inner = jnp.minimum((most(first) + TILE - 1) // TILE, end)
  inner_end = jnp.maximum((least(last) + 1) // TILE, inner)
  return jnp.stack([begin, inner, inner_end, end], axis=2)


def _kernel(
    q_ref,
    k_ref,
    v_ref,
    first_ref,
    last_ref,
    tiles_ref,
    ones_ref,
    out_ref,
    lse_ref,
    scratch,
    *,
    program: Program,
    even_first: bool,
    interpret: bool,
):
  """Attends from some query rows of a KV head."""
  batch, head, place = map(lax.axis_index, ('batch', 'head', 'place'))
  group = lax.axis_index('warpgroup')
  begin, inner, inner_end, end = [tiles_ref[batch, place, i] for i in range(4)]

  def slot_of(i):
    return lax.rem(i - begin, jnp.int32(program.stages))

  @pl.when(group == program.groups)
  def _():

    def place_of(ref):
      return lambda i: {'tile': ref.at[batch, head, pl.ds(i * TILE, TILE)]}

    streams = zip(scratch.streams, map(place_of, (k_ref, v_ref)), strict=True)
    tools.ask(begin, end, program.stages, list(streams), interpret=interpret)

  @pl.when(group < program.groups)
  def _():
    tools.take_registers(program.groups)
    start = (place * program.groups + group) * tools.ROWS
    _multiply(
        q_ref.at[batch, head],
        (first_ref.at[batch], last_ref.at[batch]),
        ones_ref,
        (out_ref.at[batch, head], lse_ref.at[batch, head]),
        (begin, inner, inner_end, end),
        pl.ds(pl.multiple_of(start, tools.ROWS), tools.ROWS),
        slot_of,
        scratch.of_group(group),
        even_first=even_first,
        interpret=interpret,
    )


def _multiply(
    q_ref,
    span_refs,
    ones_ref,
    out_refs,
    tiles,
    mine,
    slot_of,
    scratch,
    *,
    even_first: bool,
    interpret: bool,
):
  """Computes 64 rows of the output and their log-sum-exp in a warpgroup."""
  begin, inner, inner_end, end = tiles
  keys, values = scratch.streams
  head_dim, dtype = q_ref.shape[-1], q_ref.dtype
  layout = plgpu.Layout.WGMMA

  places = scratch.q, *scratch.span
  for ref, place in zip((q_ref, *span_refs), places, strict=True):
    plgpu.copy_gmem_to_smem(ref.at[mine], place, scratch.barrier)
  plgpu.copy_gmem_to_smem(ones_ref, scratch.ones, scratch.barrier)
  plgpu.barrier_wait(scratch.barrier)

  def across(of_row, columns: int):
    return lax.broadcast_in_dim(of_row, (tools.ROWS, columns), [0])

  def multiplied(i, sums):
    """Starts the product of a tile's scores; the reader waits for it."""
    slot = slot_of(i)
    plgpu.barrier_wait(keys.there.at[slot])
    k_tile = keys.tiles['tile'].at[slot]
    plgpu.wgmma(sums, scratch.q, k_tile.transpose((1, 0)))

  def scores_of(i, sums):
    scores = sums[...]
    plgpu.barrier_arrive(keys.used.at[slot_of(i)])
    return scores

  def masked(i, scores):
    key = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=layout)
    if even_first:
      odd = 2 * key - (TILE - 1)
      key = jnp.where(key < TILE // 2, 2 * key, odd)
    key += i * TILE
    first, last = (across(tools.loaded(x, 1), TILE) for x in scratch.span)
    # So low that its weight is 0 next to any maximum.
    return jnp.where((key >= first) & (key <= last), scores, 2.0 * NO_SCORE)

  def attend(i, products, carry, is_masked: bool):
    """Adds a tile's values, of the products of queries and keys."""
    acc, top, total = carry
    scores = tools.scaled(products, softmax_scale(head_dim), interpret)
    if is_masked:
      scores = masked(i, scores)
    new_top = jnp.maximum(top, jnp.max(scores, axis=1))
    decay = tools.power_of_2(top - new_top)
    p = tools.power_of_2(scores - across(new_top, TILE)).astype(dtype)
    acc, total = (x * across(decay, x.shape[1]) for x in (acc, total))
    slot = slot_of(i)
    plgpu.barrier_wait(values.there.at[slot])
    v_tile = values.tiles['tile'].at[slot]
    ones = scratch.ones.transpose((1, 0))
    if interpret:  # The interpreter has no product of operands in registers.
      acc += jnp.dot(p, v_tile[...], preferred_element_type=jnp.float32)
      total += jnp.dot(p, ones[...], preferred_element_type=jnp.float32)
      tools.has_read()
    else:

      def add(refs):
        plgpu.wgmma(refs[0], p, v_tile)
        plgpu.wgmma(refs[1], p, ones)

      start = [plgpu.WGMMAAccumulatorRef.init(x) for x in (acc, total)]
      acc, total = cast(Any, pl.run_state(add)(start))
    plgpu.barrier_arrive(values.used.at[slot])
    return acc, new_top, total

  sums = tools.sums(tools.ROWS, TILE)

  def step(i, carry, is_masked: bool):
    """Starts the next tile's scores, and attends to this tile meanwhile."""
    *carry, products = carry

    def run(ref):
      multiplied(i + 1, ref)
      found = attend(i, products, carry, is_masked)
      return *found, scores_of(i + 1, ref)

    return pl.run_scoped(run, sums)

  def zeros(columns: int):
    return plgpu.layout_cast(
        jnp.zeros((tools.ROWS, columns), jnp.float32), layout
    )

  top = plgpu.layout_cast(
      jnp.full((tools.ROWS,), NO_SCORE, jnp.float32), layout.reduce(1)
  )
  carry = zeros(head_dim), top, zeros(_SUM_COLUMNS)
  # The last tile has no next one.
  stop = end - 1

  def run_first(ref):
    multiplied(begin, ref)
    return scores_of(begin, ref)

  carry = *carry, pl.run_scoped(run_first, sums)
  inner, inner_end = jnp.minimum(inner, stop), jnp.minimum(inner_end, stop)
  for bounds, is_masked in (
      ((begin, inner), True),
      ((inner, inner_end), False),
      ((inner_end, stop), True),
  ):
    carry = lax.fori_loop(
        *bounds, functools.partial(step, is_masked=is_masked), carry
    )
  *carry, products = carry
  acc, top, total = attend(stop, products, carry, True)
  # All columns hold the sum.
  total = jnp.max(total, axis=1)
  safe = jnp.where(total > 0.0, total, 1.0)
  out = tools.ratio(acc, across(safe, head_dim), interpret)
  results = out.astype(scratch.out.dtype), top + jnp.log2(safe)
  places = scratch.out, scratch.lse
  for result, place in zip(results, places, strict=True):
    place[...] = result
  plgpu.commit_smem()
  for place, ref in zip(places, out_refs, strict=True):
    plgpu.copy_smem_to_gmem(place, ref.at[mine])
  plgpu.wait_smem_to_gmem(0, wait_read_only=True)


class _Scratch(NamedTuple):
  """A program's arrays in shared memory, of one warpgroup or of all.

  Attributes:
    q: query rows.
    span: first and last key that each may see.
    ones: what row sums are multiplied with.
    out: rows of the output.
    lse: the log-sum-exp of each row.
    barrier: rows, spans and ones have come.
    streams: the streams of keys and of values.
  """

  q: Any
  span: tuple[Any, Any]
  ones: Any
  out: Any
  lse: Any
  barrier: Any
  streams: tuple[tools.Stream, tools.Stream]

  @classmethod
  def types(cls, program: Program, head_dim: int, dtype, out_dtype):
    """Returns the arrays to allocate."""

    def matrix(*shape: int, dtype=dtype):
      return plgpu.SMEM(shape, dtype, transforms=tools.pieces(dtype))

    groups, stages = program
    rows = groups, tools.ROWS

    def stream():
      tiles = matrix(stages, TILE, head_dim)
      return tools.Stream.types(stages, groups, tile=tiles)

    return cls(
        q=matrix(*rows, head_dim),
        span=(plgpu.SMEM(rows, jnp.int32), plgpu.SMEM(rows, jnp.int32)),
        ones=matrix(groups, _SUM_COLUMNS, TILE),
        out=matrix(*rows, head_dim, dtype=out_dtype),
        lse=plgpu.SMEM(rows, jnp.float32),
        barrier=plgpu.Barrier(num_arrivals=4, num_barriers=groups),
        streams=(stream(), stream()),
    )

  def of_group(self, group) -> '_Scratch':
    """Returns a warpgroup's part; the streams are everybody's."""
    own = jax.tree.map(lambda ref: ref.at[group], self[:-1])
    return _Scratch(*own, streams=self.streams)


@one_kernel('program', 'interpret')
def forward(
    q_BKRH: Array,
    k_BKSH: Array,
    v_BKSH: Array,
    first_BR: Array,
    last_BR: Array,
    *,
    program: Program = _BEST,
    interpret: bool = False,
) -> tuple[Array, Array]:
  """Returns (out [B, K, R, H], base-2 log-sum-exp [B, K, R]), see the package.

  Every `program` gives the same bits. `interpret` runs on a CPU, for tests.
  """
  wanted, out_dtype = q_BKRH.shape[2], q_BKRH.dtype
  even_first = k_BKSH.dtype.itemsize == 1
  dtype = operand_dtype(out_dtype, k_BKSH.dtype)
  if even_first:
    q_BKRH = channels_as_decoded(q_BKRH, dtype)
    k_BKSH = channels_as_decoded(k_BKSH, dtype)
    k_BKSH = tokens_as_decoded(k_BKSH, dtype)
    v_BKSH = tokens_as_decoded(v_BKSH, dtype)
  height = program.groups * tools.ROWS
  q_BKRH = pad_rows(q_BKRH, 2, height)
  first_BR = pad_rows(first_BR, 1, height)
  last_BR = pad_rows(last_BR, 1, height, fill=-1)
  batch, kv_heads, rows, head_dim = q_BKRH.shape
  out, lse = plgpu.kernel(
      tools.named(
          'flash_attention',
          _kernel,
          program=program,
          even_first=even_first,
          interpret=interpret,
      ),
      out_type=[
          jax.ShapeDtypeStruct(q_BKRH.shape, out_dtype),
          jax.ShapeDtypeStruct((batch, kv_heads, rows), jnp.float32),
      ],
      scratch_types=[_Scratch.types(program, head_dim, dtype, out_dtype)],
      grid=(batch, kv_heads, rows // height),
      grid_names=('batch', 'head', 'place'),
      num_threads=program.groups + 1,
      thread_name='warpgroup',
      **tools.kernel_options(interpret),
  )(
      q_BKRH,
      k_BKSH,
      v_BKSH,
      first_BR,
      last_BR,
      key_tiles_of(first_BR, last_BR, height),
      jnp.ones((_SUM_COLUMNS, TILE), dtype),
  )
  return out[:, :, :wanted], lse[:, :, :wanted]
