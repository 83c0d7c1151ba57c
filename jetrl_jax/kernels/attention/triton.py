"""Attention's forward kernel for NVIDIA GPUs (Pallas, Triton backend).

This kernel, for training and prefill, and decode's kernel
(`kernels/decode_attention/triton.py`) both run `attend_tile` over key tiles in
ascending order. A row gets the same bits in both: the dots contract in one
order for any number of rows and warps, a maximum has no order, and the row sum
is a dot with ones, because a plain sum would be split over warps.
`reference.py` has the arithmetic in plain JAX, `triton_backward.py` the
gradients.

The caller widens FP8 keys and values and lays them out in the order in which
decode contracts them. In a tile the even tokens come first, then the odd ones.
Of every 32 channels of keys, the first two of each four come first.

A program has 64 query rows of a KV head and four warps with FP8 keys, 128 rows
and eight warps else. Queries, weights, output and sums stay in registers. Tiles
of 64 keys and values (`tile`) pass through shared memory, two or three at a
time.

Order of a sum: for a score the tensor core adds 16 channels at a time, for the
output and the row sum 16 keys at a time, in float32. Tiles follow in ascending
order.

Lower bound of the time: the tensor core, which also makes the row sums (7% of
the time, docs/performance_log.md).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jetrl_jax.core.typing import Array
from jetrl_jax.kernels.attention.layout import (
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
from jetrl_jax.kernels.triton_tools import kernel_options, power_of_2

ROW_TILE = 64
# Columns of the dot with ones: the fewest that a tensor core multiplies.
_SUM_COLUMNS = 16


def scores_of(q, k):
  """Base-2 scores of query rows (first axis) and keys."""
  scores = jnp.dot(q, k.T, preferred_element_type=jnp.float32)
  return scores * softmax_scale(q.shape[1])


def allowed_keys(shape: tuple[int, ...], first, last, keys):
  """Returns which keys each row may see.

  Args:
    shape: (rows, keys).
    first: first key that each row may see.
    last: last one.
    keys: function from a key's place, an array of them, to its number.
  """
  key = keys(lax.broadcasted_iota(jnp.int32, shape, 1))
  return (key >= first[:, None]) & (key <= last[:, None])


def tile_scores(q, k, span, keys):
  """Returns (base-2 scores of query rows and keys, which of them are seen).

  Args:
    q: query rows.
    k: keys.
    span: (first, last) key that each row may see; None where all see all, and
      then so is the second result.
    keys: see `allowed_keys`.
  """
  scores = scores_of(q, k)
  if span is None:
    return scores, None
  first, last = span
  return scores, allowed_keys(scores.shape, first, last, keys)


def no_scores(rows: int):
  """Returns the maximum before the first tile."""
  return jnp.full((rows,), NO_SCORE, jnp.float32)


def start(rows: int, head_dim: int):
  """Returns (output, maximum, sum) before the first tile."""
  return (
      jnp.zeros((rows, head_dim), jnp.float32),
      no_scores(rows),
      jnp.zeros((rows, _SUM_COLUMNS), jnp.float32),
  )


def for_tiles(first, last, tile: int, body, carry):
  """Runs `body(i, carry, masked)` over the key tiles that some row sees.

  Not `masked` where every row sees the whole tile: what is masked there is
  nothing, so a row's bits are the same either way.
  """
  begin, end = jnp.min(first) // tile, (jnp.max(last) + tile) // tile
  inner = jnp.minimum((jnp.max(first) + tile - 1) // tile, end)
  inner_end = jnp.maximum((jnp.min(last) + 1) // tile, inner)
  masked = functools.partial(body, masked=True)
  carry = lax.fori_loop(begin, inner, masked, carry)
  carry = lax.fori_loop(
      inner, inner_end, functools.partial(body, masked=False), carry
  )
  return lax.fori_loop(inner_end, end, masked, carry)


def highest(scores, seen):
  """Returns each row's highest score of those `seen`; None for all."""
  if seen is not None:
    scores = jnp.where(seen, scores, NO_SCORE)
  return jnp.max(scores, axis=1)


def weights_of(scores, top, seen, dtype, interpret: bool):
  """Returns the weights of the values, 0 where not `seen`."""
  p = power_of_2(scores - top[:, None], interpret)
  if seen is not None:
    p = jnp.where(seen, p, 0.0)
  return p.astype(dtype)


def add_weighed(sums, decay, parts):
  """Adds a tile to (output, sum).

  Args:
    sums: so far.
    decay: what they are multiplied with first, of every row.
    parts: (weights, values) of the tile's parts.
  """
  acc, total = (x * decay[:, None] for x in sums)
  for p, v in parts:
    ones = jnp.ones((p.shape[1], _SUM_COLUMNS), p.dtype)
    acc += jnp.dot(p, v, preferred_element_type=jnp.float32)
    total += jnp.dot(p, ones, preferred_element_type=jnp.float32)
  return acc, total


def attend_tile(q, parts, span, carry, interpret: bool):
  """Adds a tile of keys, in its parts, to (output, maximum, sum).

  Args:
    q: query rows.
    parts: (keys, values, keys' numbers as in `allowed_keys`).
    span: see `tile_scores`.
    carry: (output, maximum, sum) so far.
    interpret: see `power_of_2`.
  """
  acc, top, total = carry
  scored = [tile_scores(q, k, span, keys) for k, _, keys in parts]
  new_top = top
  for scores, seen in scored:
    new_top = jnp.maximum(new_top, highest(scores, seen))
  decay = power_of_2(top - new_top, interpret)
  # One after the other, because the weights of two parts need many registers.
  weighed = (
      (weights_of(scores, new_top, seen, q.dtype, interpret), v)
      for (scores, seen), (_, v, _) in zip(scored, parts, strict=True)
  )
  acc, total = add_weighed((acc, total), decay, weighed)
  return acc, new_top, total


def finish(carry):
  """Returns (output, base-2 log-sum-exp); zeros for a row without keys."""
  acc, top, total = carry
  # All columns hold the sum.
  total = jnp.max(total, axis=1)
  safe = jnp.where(total > 0, total, 1.0)
  return acc / safe[:, None], top + jnp.log2(safe)


def _forward_kernel(
    q_ref,
    k_ref,
    v_ref,
    first_ref,
    last_ref,
    out_ref,
    lse_ref,
    *,
    tile,
    even_first,
    interpret,
):
  q, first, last = q_ref[...], first_ref[...], last_ref[...]

  def body(i, carry, masked):
    at = (pl.ds(i * tile, tile), slice(None))

    def keys(row):
      if even_first:
        row = jnp.where(row < tile // 2, 2 * row, 2 * row - tile + 1)
      return i * tile + row

    span = (first, last) if masked else None
    parts = [(k_ref[at], v_ref[at], keys)]
    return attend_tile(q, parts, span, carry, interpret)

  out, lse = finish(for_tiles(first, last, tile, body, start(*q.shape)))
  out_ref[...] = out.astype(out_ref.dtype)
  lse_ref[...] = lse


def rows_spec(head_dim: int, row_tile: int) -> pl.BlockSpec:
  """A tile of query rows of one head and sequence."""
  return pl.BlockSpec(
      (None, None, row_tile, head_dim), lambda r, h, b: (b, h, r, 0)
  )


def whole_spec(*shape: int) -> pl.BlockSpec:
  """All rows of one head and sequence."""
  zeros = (0,) * len(shape)
  return pl.BlockSpec((None, None, *shape), lambda r, h, b: (b, h, *zeros))


def row_vector_spec(row_tile: int) -> pl.BlockSpec:
  """A number per query row, the same for all heads."""
  return pl.BlockSpec((None, row_tile), lambda r, h, b: (b, r))


def head_row_vector_spec(row_tile: int) -> pl.BlockSpec:
  """A number per query row and head."""
  return pl.BlockSpec((None, None, row_tile), lambda r, h, b: (b, h, r))


@one_kernel('tile', 'interpret')
def forward(
    q_BKRH: Array,
    k_BKSH: Array,
    v_BKSH: Array,
    first_BR: Array,
    last_BR: Array,
    tile: int,
    *,
    interpret: bool = False,
) -> tuple[Array, Array]:
  """Returns (out [B, K, R, H], base-2 log-sum-exp [B, K, R]), see the package.

  `interpret` runs on a CPU, for tests.
  """
  wanted, out_dtype = q_BKRH.shape[2], q_BKRH.dtype
  even_first = k_BKSH.dtype.itemsize == 1
  # The fastest choice; all choices give the same bits.
  row_tile, num_warps, num_stages = (64, 4, 2) if even_first else (128, 8, 3)
  if even_first:
    dtype = operand_dtype(out_dtype, k_BKSH.dtype)
    q_BKRH = channels_as_decoded(q_BKRH, dtype)
    k_BKSH = channels_as_decoded(k_BKSH, dtype)
    k_BKSH = tokens_as_decoded(k_BKSH, tile, dtype)
    v_BKSH = tokens_as_decoded(v_BKSH, tile, dtype)
  q_BKRH = pad_rows(q_BKRH, 2, row_tile)
  first_BR = pad_rows(first_BR, 1, row_tile)
  last_BR = pad_rows(last_BR, 1, row_tile, fill=-1)
  batch, kv_heads, rows, head_dim = q_BKRH.shape
  out, lse = pl.pallas_call(
      functools.partial(
          _forward_kernel, tile=tile, even_first=even_first, interpret=interpret
      ),
      grid=(rows // row_tile, kv_heads, batch),
      in_specs=[
          rows_spec(head_dim, row_tile),
          whole_spec(*k_BKSH.shape[2:]),
          whole_spec(*v_BKSH.shape[2:]),
          row_vector_spec(row_tile),
          row_vector_spec(row_tile),
      ],
      out_specs=[
          rows_spec(head_dim, row_tile),
          head_row_vector_spec(row_tile),
      ],
      out_shape=[
          jax.ShapeDtypeStruct(q_BKRH.shape, out_dtype),
          jax.ShapeDtypeStruct((batch, kv_heads, rows), jnp.float32),
      ],
      name='flash_attention',
      **kernel_options(interpret, num_warps, num_stages),
  )(q_BKRH, k_BKSH, v_BKSH, first_BR, last_BR)
  return out[:, :, :wanted], lse[:, :, :wanted]
