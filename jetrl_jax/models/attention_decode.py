"""Attention's decode kernel for NVIDIA GPUs (Pallas, Triton backend).

One query token per slot: its few rows make one tile of 16, and its keys lie in
pages. The arithmetic is that of `attention_kernel.py`.

FP8 values lie in pairs (`attention_kernel.pair`): two tokens that follow each
other, as one 16-bit word per channel. The tensor core wants values with the
tokens as rows of its operand; shared memory hands out 16-bit words that way and
no bytes. So a tile's even tokens come first and then its odd ones. Of keys, a
thread widens four neighbouring channels at once: of every 32 channels the first
two of each four come first.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jetrl_jax.compilation import kernel_options
from jetrl_jax.fp8 import formats, quantize
from jetrl_jax.models.attention_kernel import (
    attend_tile,
    finish,
    one_kernel,
    operand_dtype,
    start,
)
from jetrl_jax.typing import Array

DECODE_ROWS = 16


def _words(pairs: Array) -> Array:
  """Pairs as uint16, the earlier token in the low byte."""
  return lax.bitcast_convert_type(
      lax.bitcast_convert_type(pairs, jnp.uint8), jnp.uint16
  )


def _rows_of_pairs(keys: Array) -> Array:
  """[..., S, H] to [..., S/2, 2, H]."""
  *lead, length, head_dim = keys.shape
  return keys.reshape(*lead, length // 2, 2, head_dim)


# Bytes 0 and 2 of two neighbouring words, or 1 and 3, widened. Left to the
# compiler it is six instructions more for every four values.
_WIDEN = """{
.reg .b32 bytes;
.reg .b16 wanted, rest;
prmt.b32 bytes, $1, 0, %s;
mov.b32 {wanted, rest}, bytes;
cvt.rn.f16x2.e4m3x2 $0, wanted;
}"""


def _token_of_pair(words, n: int, interpret: bool):
  """Returns the first (0) or second (1) token's values as float16."""
  if interpret:
    byte = (words >> (8 * n)).astype(jnp.uint8)
    return lax.bitcast_convert_type(byte, formats.E4M3).astype(jnp.float16)
  (values,) = triton.elementwise_inline_asm(
      _WIDEN % ('0x0020', '0x0031')[n],
      args=[words],
      constraints='=r,r',
      pack=2,
      result_shape_dtypes=[jax.ShapeDtypeStruct(words.shape, jnp.float16)],
  )
  return values


def _load_tile(k_ref, v_ref, lead, i, start, tile: int, dtype, interpret: bool):
  """Returns what `attend_tile` takes: the tile whole, or even and odd tokens.

  Args:
    k_ref: keys.
    v_ref: values, or words of two.
    lead: indices before that of the token.
    i: tile there.
    start: number of its first key.
    tile: tokens.
    dtype: of the products.
    interpret: see `power_of_2`.
  """
  if v_ref.dtype != jnp.uint16:
    at = (*lead, pl.ds(i * tile, tile), slice(None))
    return [(k_ref[at], v_ref[at], lambda row: start + row)]
  at = (*lead, pl.ds(i * (tile // 2), tile // 2))
  words = v_ref[(*at, slice(None))]
  return [
      (
          k_ref[(*at, n, slice(None))].astype(dtype),
          _token_of_pair(words, n, interpret),
          lambda row, n=n: start + n + 2 * row,
      )
      for n in (0, 1)
  ]


def _decode_kernel(
    q_ref,
    k_ref,
    v_ref,
    table_ref,
    last_ref,
    *refs,
    tile,
    page_size,
    group,
    interpret,
):
  *steps, out_ref, lse_ref = refs
  head, last = pl.program_id(0), last_ref[0]
  per_page = jnp.int32(page_size // tile)
  dtype = operand_dtype(q_ref.dtype, k_ref.dtype)
  mine = pl.ds(head * group, DECODE_ROWS)
  mask = jnp.arange(DECODE_ROWS) < group
  q = triton.load(q_ref.at[mine, :], mask=mask[:, None], other=0.0)
  q = q.astype(dtype)
  first_R = jnp.zeros((DECODE_ROWS,), jnp.int32)
  last_R = jnp.full((DECODE_ROWS,), last, jnp.int32)

  def attend(i, carry, span):
    *carry, page = carry
    # A tile ahead: the loads of keys that are on their way need it.
    ahead = table_ref[lax.div(jnp.minimum(i + 1, last // tile), per_page)]
    parts = _load_tile(
        *(k_ref, v_ref, (page, head), lax.rem(i, per_page), i * tile),
        *(tile, dtype, interpret),
    )
    return *attend_tile(q, parts, span, carry, interpret), ahead

  # All tiles but the last one, which may end within.
  whole = (last + 1) // tile
  carry = (*start(*q.shape), table_ref[0])
  body = functools.partial(attend, span=None)
  carry = lax.fori_loop(0, whole, body, carry)
  body = functools.partial(attend, span=(first_R, last_R))
  *carry, _ = lax.fori_loop(whole, (last + tile) // tile, body, carry)
  out, lse = finish(carry)
  out = out.astype(q_ref.dtype)
  for step_ref in steps:
    out = quantize(out, step_ref[0], formats.E4M3)
  triton.store(out_ref.at[mine, :], out, mask=mask[:, None])
  triton.store(lse_ref.at[mine], lse, mask=mask)


def _stages(programs: int, is_fp8: bool) -> int:
  """Returns how many tiles of decode are best on their way at a time.

  Up to four programs to a multiprocessor of an H200 run at the same time,
  whatever they hold; of more, as many as its shared memory has room for.
  """
  few = programs <= 4 * 132
  if is_fp8:
    return 3 if few else 2
  return 2 if few else 3


@one_kernel('tile', 'program', 'interpret')
def decode(
    q_BNH: Array,
    k_PKSH: Array,
    values: Array,
    table_BP: Array,
    last_B: Array,
    tile: int,
    step: Array | None = None,
    *,
    program: tuple[int, int] | None = None,
    interpret: bool = False,
) -> tuple[Array, Array]:
  """Attends from one query token per slot to the slot's pages.

  Args:
    q_BNH: queries; the heads of a group are neighbours.
    k_PKSH: pages of keys, S tokens each, a multiple of `tile`.
    values: pages of values [P, K, S, H]; of FP8 `pair`s [P, K, S/2, H, 2].
    table_BP: int32, the slot's pages in order.
    last_B: int32, the last key to attend; -1 for none.
    tile: see `attention.flash_attention`.
    step: scale on which the result is quantised to E4M3; None to leave it.
    program: its warps, and tiles on their way at a time; None for the fastest.
      All give the same bits.
    interpret: run on a CPU, for tests.

  Returns:
    (out [B, N, H], base-2 log-sum-exp [B, N])
  """
  batch, heads, head_dim = q_BNH.shape
  kv_heads, pages = k_PKSH.shape[1], table_BP.shape[1]
  group = heads // kv_heads
  if group > DECODE_ROWS:
    raise ValueError(
        f'{group} query heads share a KV head; allowed: at most {DECODE_ROWS}'
    )
  # Whole: the pages of a slot lie anywhere.
  page_size = k_PKSH.shape[2]
  is_fp8 = k_PKSH.dtype.itemsize == 1
  num_warps, num_stages = program or (1, _stages(kv_heads * batch, is_fp8))
  if is_fp8:
    k_PKSH, values = _rows_of_pairs(k_PKSH), _words(values)
  pools = [
      pl.BlockSpec(pool.shape, lambda h, b, dims=pool.ndim: (0,) * dims)
      for pool in (k_PKSH, values)
  ]
  slot = pl.BlockSpec((None, heads, head_dim), lambda h, b: (b, 0, 0))
  steps = [] if step is None else [step.reshape(1)]
  return pl.pallas_call(
      functools.partial(
          _decode_kernel,
          tile=tile,
          page_size=page_size,
          group=group,
          interpret=interpret,
      ),
      grid=(kv_heads, batch),
      in_specs=[
          slot,
          *pools,
          pl.BlockSpec((None, pages), lambda h, b: (b, 0)),
          pl.BlockSpec((1,), lambda h, b: (b,)),
          *[pl.BlockSpec((1,), lambda h, b: (0,))] * len(steps),
      ],
      out_specs=[slot, pl.BlockSpec((None, heads), lambda h, b: (b, 0))],
      out_shape=[
          jax.ShapeDtypeStruct(
              q_BNH.shape, formats.E4M3 if steps else q_BNH.dtype
          ),
          jax.ShapeDtypeStruct((batch, heads), jnp.float32),
      ],
      name='flash_attention',
      **kernel_options(interpret, num_warps, num_stages),
  )(q_BNH, k_PKSH, values, table_BP, last_B, *steps)
