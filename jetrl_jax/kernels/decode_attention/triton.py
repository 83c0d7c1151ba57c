"""Attention's decode kernel for NVIDIA GPUs (Pallas, Triton backend).

A slot has one query token: its few rows make one tile of 16. Its keys are in
pages (`triton_pages.py`). The arithmetic is that of
`kernels/attention/triton.py`. A program goes through a slot's keys tile by
tile. If the slots are too few to keep a GPU busy this way, `triton_split.py`
runs instead.

A program has a slot's KV head, 16 rows of which a group's count, and one or two
warps. Queries, weights, output and sums are in registers. Tiles of 64 keys and
values pass through shared memory, two or three on their way (`_best`).

Order of a sum: as in training, 16 channels or 16 keys at a time by the tensor
core in float32, and tiles in ascending order; of FP8, even tokens of a tile
before odd ones.

Lower bound of the time: reading the keys and values once. 128 slots of 1152 FP8
keys of a 7B take 40 us alone on an H200, 88% of it (docs/performance_log.md).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jetrl_jax.core.typing import Array
from jetrl_jax.fp8 import formats, quantize
from jetrl_jax.kernels.attention.layout import one_kernel
from jetrl_jax.kernels.attention.reference import operand_dtype
from jetrl_jax.kernels.attention.triton import (
    attend_tile,
    finish,
    start,
)
from jetrl_jax.kernels.decode_attention import triton_pages as pages
from jetrl_jax.kernels.decode_attention import triton_split as attention_split
from jetrl_jax.kernels.triton_tools import kernel_options


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
  q, mask = pages.load_query(q_ref, head, group, dtype)
  first_R = jnp.zeros((pages.DECODE_ROWS,), jnp.int32)
  last_R = jnp.full((pages.DECODE_ROWS,), last, jnp.int32)

  def attend(i, carry, span):
    *carry, page = carry
    ahead = pages.page_of(table_ref, i + 1, last, (tile, page_size))
    at = (page, head), lax.rem(i, per_page), tile
    values = pages.load_values(v_ref, *at, slice(None), interpret)
    keys = pages.load_keys(k_ref, *at, dtype)
    numbers = pages.key_numbers(len(keys), i * tile)
    parts = list(zip(keys, values, numbers, strict=True))
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
  for out_scale_ref in steps:
    out = quantize(out, out_scale_ref[0], formats.E4M3)
  mine = pl.ds(head * group, pages.DECODE_ROWS)
  triton.store(out_ref.at[mine, :], out, mask=mask[:, None])
  triton.store(lse_ref.at[mine], lse, mask=mask)


def _best(programs: int, is_fp8: bool) -> tuple[int, int]:
  """Returns the fastest (warps, tiles that are loaded ahead).

  Up to four programs to a multiprocessor of an H200 run at the same time,
  whatever they hold; of more, as many as its shared memory has room for.
  """
  if programs <= 2 * 132:
    return (2, 3) if is_fp8 else (1, 3)
  few = programs <= 4 * 132
  if is_fp8:
    return 1, 3 if few else 2
  return 1, 2 if few else 3


@one_kernel('tile', 'program', 'interpret')
def decode(
    q_BNH: Array,
    k_PKSH: Array,
    values: Array,
    table_BP: Array,
    last_B: Array,
    tile: int,
    out_scale: Array | None = None,
    *,
    program: tuple[int, int] | attention_split.Split | None = None,
    interpret: bool = False,
) -> tuple[Array, Array]:
  """Returns (out [B, N, H], base-2 log-sum-exp [B, N]), see the package.

  `program` says how the work is divided: a number of warps and of tiles that
  are loaded ahead, or a split. None takes the fastest; all give the same bits.
  `interpret` runs on a CPU, for tests.
  """
  batch, kv_heads = q_BNH.shape[0], k_PKSH.shape[1]
  is_fp8 = k_PKSH.dtype.itemsize == 1
  if program is None:
    programs = kv_heads * batch
    program = attention_split.best(programs) or _best(programs, is_fp8)
  group = pages.group_of(q_BNH, k_PKSH)
  k_pool, v_pool = pages.pools(k_PKSH, values)
  sizes = dict(tile=tile, page_size=k_PKSH.shape[2], group=group)
  operands = q_BNH, k_pool, v_pool, table_BP, last_B
  if isinstance(program, attention_split.Split):
    return attention_split.decode(
        *operands, out_scale, program, **sizes, interpret=interpret
    )
  num_warps, num_stages = program
  slot = pl.BlockSpec((None, *q_BNH.shape[1:]), lambda h, b: (b, 0, 0))
  steps = [] if out_scale is None else [out_scale.reshape(1)]
  return pl.pallas_call(
      functools.partial(_decode_kernel, **sizes, interpret=interpret),
      grid=(kv_heads, batch),
      in_specs=[
          slot,
          pages.whole(k_pool),
          pages.whole(v_pool),
          pl.BlockSpec((None, table_BP.shape[1]), lambda h, b: (b, 0)),
          pl.BlockSpec((1,), lambda h, b: (b,)),
          *[pl.BlockSpec((1,), lambda h, b: (0,))] * len(steps),
      ],
      out_specs=[
          slot,
          pl.BlockSpec((None, q_BNH.shape[1]), lambda h, b: (b, 0)),
      ],
      out_shape=[
          jax.ShapeDtypeStruct(
              q_BNH.shape, formats.E4M3 if steps else q_BNH.dtype
          ),
          jax.ShapeDtypeStruct(q_BNH.shape[:2], jnp.float32),
      ],
      name='flash_attention',
      **kernel_options(interpret, num_warps, num_stages),
  )(*operands, *steps)
