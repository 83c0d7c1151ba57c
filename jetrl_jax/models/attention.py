"""Attention of a forward pass: over packed rows, or over a cache's pages.

What differs between training, prefill and decode is the object of this file
that a layer is given. Both attend by one routine with one order of keys
(`kernels/attention`, `kernels/decode_attention`).
"""

import dataclasses
from typing import cast

import jax
import jax.numpy as jnp

from jetrl_jax.core.typing import Array
from jetrl_jax.fp8 import DeferredScale
from jetrl_jax.kernels import dispatch
from jetrl_jax.kernels.attention import flash_attention
from jetrl_jax.kernels.decode_attention import decode_attention
from jetrl_jax.kernels.kv_storage import store, store_values
from jetrl_jax.kernels.rope_append import append, rope_append


def _group_rows(x_MNH: Array, batch: int, kv_heads: int) -> Array:
  """[B*T, K*G, H] -> [B, K, T*G, H]."""
  heads, head_dim = x_MNH.shape[1:]
  group = heads // kv_heads
  x = x_MNH.reshape(batch, -1, kv_heads, group, head_dim)
  return x.transpose(0, 2, 1, 3, 4).reshape(batch, kv_heads, -1, head_dim)


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

  fuses = False  # See `DecodeAttention`.

  def __call__(self, q_MNH, k_MKH, v_MKH, cache):
    """Returns (o [M, N*H], (k, v) of [B, K, T, H] as stored); no `cache`."""
    assert cache is None
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
    return _ungroup_rows(cast(Array, out), group), stored


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
  def fuses(self) -> bool:
    """Whether `append_and_attend` is to be called."""
    return dispatch.has_kernel('rope_append')

  def append_and_attend(
      self,
      qkv: DeferredScale,
      rotation: tuple[Array, Array],
      cache: tuple[Array, Array],
      step: Array | None,
  ):
    """Does what lies between the dots of qkv and o, in two kernels.

    Args:
      qkv: see `rope_append`.
      rotation: see `rope.rotation`.
      cache: pages of keys and values.
      step: scale on which the o dot quantises its rows, if that is known.

    Returns:
      (o [B, N*H], its FP8 values or None, the pages with the new token). Where
      the FP8 values are known o is not: something of its shape and dtype.
    """
    q_BNH, cache = rope_append(
        qkv, rotation, self.position_B, self.table_BP, cache
    )
    out = decode_attention(
        q_BNH, *cache, self.table_BP, self.position_B, self.tile, step
    )
    q_BO, out = (x.reshape(x.shape[0], -1) for x in (q_BNH, out))
    if step is None:
      return out, None, cache
    return q_BO, out, cache

  def __call__(self, q_MNH, k_MKH, v_MKH, cache):
    """Returns (o [B, N*H], the pages with the new token)."""
    size = cache[0].shape[2]
    keys, values = (
        append(pool, new, self.position_B, self.table_BP, size)
        for pool, new in zip(cache, (k_MKH, v_MKH), strict=True)
    )
    out = decode_attention(
        q_MNH, keys, values, self.table_BP, self.position_B, self.tile
    )
    return out.reshape(out.shape[0], -1), (keys, values)
