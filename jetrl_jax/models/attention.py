"""Attention: one tiled routine, one KV order, for training, prefill and decode.

A query row attends the keys `first..last` (inclusive) of its own sequence of
keys, tile after tile with an online softmax. A tile that is masked in full
leaves the running maximum, sum and output exactly as they were, so a row's
result depends only on where its keys fall relative to the tiles: a packed
segment that starts at a multiple of the tile gets the bits of a cache that
starts at 0, and pages that are a multiple of the tile may lie anywhere. Rows
are query tokens times the heads of a group. The backward may use any order.

Keys and values may be stored in FP8 (`kv_dtype`): then every use, the training
forward's too, reads what was stored, and the gradient passes straight through.
The scale is 1, as E4M3 reaches from 2^-9 to 448 by its own exponent. A cache
holds FP8 values in pairs (`attention_kernel.pair`).

Layouts: q [B, K, R, H] with R = T * (N / K), keys and values [B, K, S, H].
"""

import dataclasses
import functools
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax

from jetrl_jax.core.typing import Array
from jetrl_jax.fp8 import DeferredScale, formats
from jetrl_jax.fp8.products import AS_ARRAY, Reads, Rows
from jetrl_jax.fp8.quantization import quantize
from jetrl_jax.kernels import dispatch
from jetrl_jax.kernels.attention import backward as attention_backward
from jetrl_jax.kernels.attention import decode as attention_decode
from jetrl_jax.kernels.attention import forward as attention_forward
from jetrl_jax.kernels.attention import pages as attention_pages
from jetrl_jax.kernels.attention.forward import NO_SCORE, softmax_scale
from jetrl_jax.kernels.rope_append import triton as rope_append
from jetrl_jax.models import remat, rope


def _dot(a, b, contract):
  batch = ((0, 1), (0, 1))
  return lax.dot_general(
      a,
      b,
      (contract, batch),
      precision=lax.Precision.HIGHEST,
      preferred_element_type=jnp.float32,
  )


def _weighted(p, v_tile):
  """Returns p v, of a row the same bits in any number of rows."""
  if v_tile.dtype == jnp.bfloat16:
    return _dot(p, v_tile, ((3,), (2,)))
  # Of 32 channels, say, XLA adds up fewer than 64 rows in another way than
  # more, unless both operands are contraction-minor or in bfloat16.
  v_turned = lax.optimization_barrier(jnp.swapaxes(v_tile, 2, 3))
  return _dot(p, v_turned, ((3,), (3,)))


def _reference(q_BKRH, k_BKSH, v_BKSH, first_BR, last_BR, tile):
  """The kernel's arithmetic in plain JAX; what a CPU runs."""
  batch, kv_heads, rows, head_dim = q_BKRH.shape
  out_dtype = q_BKRH.dtype
  dtype = attention_forward.operand_dtype(out_dtype, k_BKSH.dtype)
  q_BKRH = q_BKRH.astype(dtype)
  ones = jnp.ones((batch, kv_heads, 16, tile), dtype)

  def body(i, carry):
    acc, top, total = carry
    k_tile = lax.dynamic_slice_in_dim(k_BKSH, i * tile, tile, axis=2)
    v_tile = lax.dynamic_slice_in_dim(v_BKSH, i * tile, tile, axis=2)
    k_tile, v_tile = k_tile.astype(dtype), v_tile.astype(dtype)
    scores = _dot(q_BKRH, k_tile, ((3,), (3,))) * softmax_scale(head_dim)
    # The maximum changes no finite value. Without it the product and the
    # subtraction below become one multiply-add where the keys are a single
    # tile, and only there (see `models/logprobs.py: temper`).
    scores = jnp.maximum(scores, jnp.finfo(jnp.float32).min)
    key = i * tile + jnp.arange(tile, dtype=jnp.int32)[None, None, :]
    allowed = (key >= first_BR[:, :, None]) & (key <= last_BR[:, :, None])
    allowed = allowed[:, None]
    seen = jnp.where(allowed, scores, NO_SCORE)
    new_top = jnp.maximum(top, jnp.max(seen, axis=-1))
    decay = jnp.exp2(top - new_top)
    p = jnp.where(allowed, jnp.exp2(scores - new_top[..., None]), 0.0)
    # Sums through a dot: its order does not depend on the number of rows, as
    # long as it has 16 columns (8 of them change it from 96 rows on).
    p = p.astype(dtype)
    total = total * decay + _dot(p, ones, ((3,), (3,)))[..., 0]
    return acc * decay[..., None] + _weighted(p, v_tile), new_top, total

  start = (
      jnp.zeros(q_BKRH.shape, jnp.float32),
      jnp.full((batch, kv_heads, rows), NO_SCORE, jnp.float32),
      jnp.zeros((batch, kv_heads, rows), jnp.float32),
  )
  num_tiles = jnp.max(last_BR) // tile + 1
  acc, top, total = lax.fori_loop(0, num_tiles, body, start)
  safe = jnp.where(total > 0, total, 1.0)
  out = (acc / safe[..., None]).astype(out_dtype)
  return out, top + jnp.log2(safe)


def _reference_backward(
    q_BKRH, k_BKSH, v_BKSH, first_BR, last_BR, out, lse, dout
):
  """Gradients with the whole score matrix in memory (CPU)."""
  head_dim = q_BKRH.shape[-1]
  key = jnp.arange(k_BKSH.shape[2], dtype=jnp.int32)[None, None, :]
  allowed = (key >= first_BR[:, :, None]) & (key <= last_BR[:, :, None])
  scores = _dot(q_BKRH, k_BKSH, ((3,), (3,))) * softmax_scale(head_dim)
  p = jnp.where(allowed[:, None], jnp.exp2(scores - lse[..., None]), 0.0)
  delta = jnp.sum(
      out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1, keepdims=True
  )
  dp = _dot(dout, v_BKSH, ((3,), (3,)))
  ds = (p * (dp - delta) * head_dim**-0.5).astype(q_BKRH.dtype)
  dq = _dot(ds, k_BKSH, ((3,), (2,)))
  dk = _dot(ds, q_BKRH, ((2,), (2,)))
  dv = _dot(p.astype(dout.dtype), dout, ((2,), (2,)))
  return tuple(
      d.astype(x.dtype) for d, x in ((dq, q_BKRH), (dk, k_BKSH), (dv, v_BKSH))
  )


def _forward(q_BKRH, k_BKSH, v_BKSH, first_BR, last_BR, tile):
  has_kernel = dispatch.has_kernel('attention')
  run = attention_forward.forward if has_kernel else _reference
  return run(q_BKRH, k_BKSH, v_BKSH, first_BR, last_BR, tile)


def store(x: Array, kv_dtype) -> Array:
  """Returns keys or values as they are stored, see `kv_dtype`."""
  if kv_dtype is None:
    return x
  if jnp.dtype(kv_dtype) == formats.E4M3:
    return quantize(x, jnp.float32(1.0), formats.E4M3)
  return x.astype(kv_dtype)


def store_values(v: Array, kv_dtype) -> Array:
  """Returns values [..., S, H] as a cache holds them, see `values_shape`."""
  v = store(v, kv_dtype)
  return attention_forward.pair(v) if v.dtype.itemsize == 1 else v


def values_shape(keys: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
  """Returns the shape of a cache's values beside keys [..., S, H].

  The same, or for FP8 [..., S/2, H, 2].
  """
  if keys.dtype.itemsize > 1:
    return keys
  return jax.eval_shape(attention_forward.pair, keys)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def flash_attention(
    q_BKRH: Array,
    k_BKSH: Array,
    v_BKSH: Array,
    first_BR: Array,
    last_BR: Array,
    tile: int,
    kv_dtype: str | None,
) -> Array:
  """Softmax attention of every row over its own range of keys.

  Args:
    q_BKRH: query rows, R a multiple of 16.
    k_BKSH: keys, S a multiple of `tile`.
    v_BKSH: values.
    first_BR: int32, first key a row may see.
    last_BR: int32, last key it may see; below `first` for no key at all, which
      gives exact zeros.
    tile: keys per step of the online softmax; part of the arithmetic.
    kv_dtype: what keys and values are rounded to first; the gradient passes
      straight through. None leaves them.

  Returns:
    [B, K, R, H] in q's dtype.
  """
  k_BKSH, v_BKSH = store(k_BKSH, kv_dtype), store(v_BKSH, kv_dtype)
  return _forward(q_BKRH, k_BKSH, v_BKSH, first_BR, last_BR, tile)[0]


def _fwd(q_BKRH, k_BKSH, v_BKSH, first_BR, last_BR, tile, kv_dtype):
  k_BKSH, v_BKSH = store(k_BKSH, kv_dtype), store(v_BKSH, kv_dtype)
  out, lse = _forward(q_BKRH, k_BKSH, v_BKSH, first_BR, last_BR, tile)
  q_BKRH, k_BKSH, v_BKSH, out, lse = remat.keep(
      (q_BKRH, k_BKSH, v_BKSH, out, lse)
  )
  return out, (q_BKRH, k_BKSH, v_BKSH, first_BR, last_BR, out, lse)


def _bwd(tile, kv_dtype, residuals, dout):
  del kv_dtype
  q_BKRH, k_BKSH, v_BKSH, *rest = residuals
  dtype = q_BKRH.dtype
  operands = (q_BKRH, k_BKSH.astype(dtype), v_BKSH.astype(dtype), *rest)
  if dispatch.has_kernel('attention'):
    grads = attention_backward.backward(*operands, dout_BKRH=dout, tile=tile)
  else:
    grads = _reference_backward(*operands, dout=dout)
  return (*grads, None, None)


flash_attention.defvjp(_fwd, _bwd)


def _group_rows(x_MNH: Array, batch: int, kv_heads: int) -> Array:
  """[B*T, K*G, H] -> [B, K, T*G, H]."""
  heads, head_dim = x_MNH.shape[1:]
  group = heads // kv_heads
  x = x_MNH.reshape(batch, -1, kv_heads, group, head_dim)
  return x.transpose(0, 2, 1, 3, 4).reshape(batch, kv_heads, -1, head_dim)


def _no_tap(name: str, value: Array) -> Array:
  del name
  return value


def _heads(qkv, rotation, config, norm_heads, tap):
  """Returns rotated queries and keys, and values, by heads [M, ., H]."""
  heads, kv_heads = config.num_heads, config.num_kv_heads
  qkv = qkv.reshape(qkv.shape[0], heads + 2 * kv_heads, config.head_dim)
  q_MNH, k_MKH, v_MKH = jnp.split(qkv, [heads, heads + kv_heads], axis=1)
  if norm_heads is not None:
    q_MNH, k_MKH = norm_heads(q_MNH, k_MKH)
  q_MNH = tap('rope_q', rope.rotate(q_MNH, *rotation))
  k_MKH = tap('rope_k', rope.rotate(k_MKH, *rotation))
  return q_MNH, k_MKH, v_MKH


def _ungroup_rows(x_BKRH: Array, group: int) -> Array:
  """[B, K, T*G, H] -> [B*T, K*G*H]."""
  batch, kv_heads, rows, head_dim = x_BKRH.shape
  x = x_BKRH.reshape(batch, kv_heads, rows // group, group, head_dim)
  return x.transpose(0, 2, 1, 3, 4).reshape(
      batch * (rows // group), kv_heads * group * head_dim
  )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedAttention:
  """Causal self-attention within the segments of packed rows.

  Attributes:
    first_BT: int32, index in the row of the token's segment start.
    last_BT: int32, the token's own index; -1 on padding.
    tile: see `flash_attention`; T is a multiple of it.
    kv_dtype: see `flash_attention`.
  """

  first_BT: Array
  last_BT: Array
  tile: int = dataclasses.field(metadata={'static': True})
  kv_dtype: str | None = dataclasses.field(
      default=None, metadata={'static': True}
  )

  # No operation of training takes over what another one left to do.
  joins = False

  def rope_append(
      self, qkv, rotation, cache, config, *, norm_heads=None, tap=_no_tap
  ):
    """Returns (q [M, N, H], (k, v) of [M, K, H]); there is no `cache`.

    Args:
      qkv: [M, (N + 2K) H].
      rotation: see `rope.rotation`.
      cache: None.
      config: the model's shape.
      norm_heads: (q, k) to both, each head normed; None for models without.
      tap: see `layers.Leaf.tap`.
    """
    assert cache is None
    q_MNH, k_MKH, v_MKH = _heads(qkv, rotation, config, norm_heads, tap)
    return q_MNH, (k_MKH, v_MKH)

  def __call__(self, q_MNH, keys, reads: Reads = AS_ARRAY):
    """Returns (rows [M, N*H] for the next dot, (k, v) [B, K, T, H] as stored).

    Args:
      q_MNH: queries.
      keys: what `rope_append` returned.
      reads: what the next dot wants; training leaves the quantising to it.
    """
    del reads
    with jax.named_scope('attention'):
      return self._attend(q_MNH, *keys)

  def _attend(self, q_MNH, k_MKH, v_MKH):
    batch, _ = self.first_BT.shape
    kv_heads = k_MKH.shape[1]
    group = q_MNH.shape[1] // kv_heads
    k_BKSH = _group_rows(k_MKH, batch, kv_heads)
    v_BKSH = _group_rows(v_MKH, batch, kv_heads)
    out = flash_attention(
        _group_rows(q_MNH, batch, kv_heads),
        k_BKSH,
        v_BKSH,
        jnp.repeat(self.first_BT, group, axis=1),
        jnp.repeat(self.last_BT, group, axis=1),
        self.tile,
        self.kv_dtype,
    )
    stored = store(k_BKSH, self.kv_dtype), store_values(v_BKSH, self.kv_dtype)
    return Rows(_ungroup_rows(cast(Array, out), group)), stored


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeAttention:
  """One new token per slot over the slot's pages.

  Attributes:
    position_B: int32, where the new key and value go; all keys up to it are
      attended. -1 for an idle slot, which writes and reads nothing.
    table_BP: int32, the pages of each slot in order, S tokens each; token t
      lies in page t // S at t % S. Pages behind the position are not read.
    tile: see `flash_attention`; S is a multiple of it.
  """

  position_B: Array
  table_BP: Array
  tile: int = dataclasses.field(metadata={'static': True})

  @property
  def joins(self) -> bool:
    """Whether operations leave scales and sums to the next one's kernel."""
    return dispatch.has_kernel('rope_append')

  def rope_append(
      self, qkv, rotation, cache, config, *, norm_heads=None, tap=_no_tap
  ):
    """Returns (q [B, N, H], the pages with the new token).

    Args:
      qkv: [B, (N + 2K) H]; may be a `DeferredScale`.
      rotation: see `rope.rotation`.
      cache: pages of keys and values.
      config: the model's shape.
      norm_heads: see `PackedAttention.rope_append`.
      tap: the same.
    """
    if self.joins and norm_heads is None:
      if not isinstance(qkv, DeferredScale):
        qkv = DeferredScale(values=qkv)
      with jax.named_scope('attention'):
        q_BNH, keys, values = rope_append.rotate_and_append(
            qkv, *rotation, self.position_B, self.table_BP, *cache
        )
      return q_BNH, (keys, values)
    q_BNH, *new = _heads(qkv, rotation, config, norm_heads, tap)
    with jax.named_scope('attention'):
      return q_BNH, self.append(new, cache)

  def append(self, new, cache):
    """Returns the pages (keys, values) with each slot's new ones [B, K, H]."""
    size = cache[0].shape[2]
    return tuple(
        self._append(pool, x, size) for pool, x in zip(cache, new, strict=True)
    )

  def __call__(self, q_BNH, cache, reads: Reads = AS_ARRAY):
    """Returns (rows [B, N*H] for the next dot, the pages).

    Args:
      q_BNH: queries.
      cache: pages that hold the new token already.
      reads: what the next dot wants.
    """
    with jax.named_scope('attention'):
      keys, values = cache
      scale = reads.scale if self.joins else None
      return self._attend(q_BNH, keys, values, scale)

  def _attend(self, q_BNH, keys, values, scale):
    cache, q_BO = (keys, values), q_BNH.reshape(q_BNH.shape[0], -1)
    if not dispatch.has_kernel('decode_attention'):
      out = self._on_cpu(q_BNH, keys, values)
      return Rows(out.reshape(q_BO.shape)), cache
    out, _ = attention_decode.decode(
        *(q_BNH, keys, values, self.table_BP, self.position_B),
        self.tile,
        scale,
    )
    out = out.reshape(q_BO.shape)
    return Rows(out) if scale is None else Rows(q_BO, out), cache

  def _append(self, pool, new_BKH, size):
    """Writes the new keys or values, each slot's in a page of its own."""
    pages, kv_heads = pool.shape[:2]
    last = jnp.maximum(self.position_B, 0)
    page_B = jnp.take_along_axis(self.table_BP, (last // size)[:, None], 1)[
        :, 0
    ]
    at = (
        jnp.where(self.position_B >= 0, page_B, pages)[:, None],
        jnp.arange(kv_heads)[None, :],
    )
    token = (last % size)[:, None]
    if pool.ndim == 5:
      at += (token // 2, slice(None), token % 2)
    else:
      at += (token,)
    return pool.at[at].set(
        store(new_BKH, pool.dtype), mode='drop', unique_indices=True
    )

  def _on_cpu(self, q_MNH, keys, values):
    slots, pages = self.table_BP.shape
    _, kv_heads, size, head_dim = keys.shape
    if values.ndim == 5:
      values = attention_forward.unpair(values)

    def gather(pool_PKSH):
      x = pool_PKSH[self.table_BP].transpose(0, 2, 1, 3, 4)
      return x.reshape(slots, kv_heads, pages * size, head_dim)

    group = q_MNH.shape[1] // kv_heads
    rows = attention_pages.DECODE_ROWS
    q = q_MNH.reshape(slots, kv_heads, group, head_dim)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, -group % rows), (0, 0)))
    last_BR = jnp.broadcast_to(self.position_B[:, None], (slots, q.shape[2]))
    out, _ = _reference(
        q,
        gather(keys),
        gather(values),
        jnp.zeros_like(last_BR),
        last_BR,
        self.tile,
    )
    return out[:, :, :group]
