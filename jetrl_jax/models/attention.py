"""Attention of a forward pass: over packed rows, or over the pages of a cache.

A layer gets one of the two objects of this file: `PackedAttention` in training
and prefill, `DecodeAttention` in decode. Nothing else in a layer differs. Both
attend to the keys in the same order (`kernels/attention`,
`kernels/decode_attention`).
"""

import dataclasses
from collections.abc import Callable
from typing import TypeAlias, cast

import jax
import jax.numpy as jnp

from jetrl_jax.core.typing import Array
from jetrl_jax.fp8.products import UNQUANTIZED, DeferredScale, RowFormat, Rows
from jetrl_jax.kernels import dispatch
from jetrl_jax.kernels.attention import flash_attention
from jetrl_jax.kernels.decode_attention import decode_attention
from jetrl_jax.kernels.kv_storage import store, store_values
from jetrl_jax.kernels.rope_append import append, has_kernel, rope_append
from jetrl_jax.models import rope
from jetrl_jax.models.types import ModelConfig

# (queries, keys) to both with each head normalised.
NormHeads: TypeAlias = Callable[[Array, Array], tuple[Array, Array]]


def _group_rows(x_MNH: Array, batch: int, kv_heads: int) -> Array:
  """[B*T, K*G, H] -> [B, K, T*G, H]."""
  heads, head_dim = x_MNH.shape[1:]
  group = heads // kv_heads
  x = x_MNH.reshape(batch, -1, kv_heads, group, head_dim)
  return x.transpose(0, 2, 1, 3, 4).reshape(batch, kv_heads, -1, head_dim)


def _no_tap(name: str, value: Array) -> Array:
  del name
  return value


def _heads(
    qkv: Array,
    rotation: tuple[Array, Array],
    config: ModelConfig,
    norm_heads: NormHeads | None,
    offset_KH: Array | None,
    tap: Callable[[str, Array], Array],
) -> tuple[Array, Array, Array]:
  """Returns rotated queries and keys, and values, by heads [M, ., H]."""
  heads, kv_heads = config.num_heads, config.num_kv_heads
  qkv = qkv.reshape(qkv.shape[0], heads + 2 * kv_heads, config.head_dim)
  q_MNH, k_MKH, v_MKH = jnp.split(qkv, [heads, heads + kv_heads], axis=1)
  if norm_heads is not None:
    q_MNH, k_MKH = norm_heads(q_MNH, k_MKH)
  q_MNH = tap('rope_q', rope.rotate(q_MNH, *rotation))
  k_MKH = rope.rotate(k_MKH, *rotation)
  if offset_KH is not None:
    k_MKH = k_MKH - offset_KH[None]
  return q_MNH, tap('rope_k', k_MKH), v_MKH


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
    smooth_k: see `Policy`.
  """

  first_BT: Array
  last_BT: Array
  tile: int = dataclasses.field(metadata={'static': True})
  kv_dtype: str | None = dataclasses.field(
      default=None, metadata={'static': True}
  )
  smooth_k: bool = dataclasses.field(default=False, metadata={'static': True})

  # In training and prefill XLA applies scales and adds the residual.
  defers = False

  def defers_qkv(self, config: ModelConfig) -> bool:
    """Whether qkv's dot leaves its scales and bias to `rope_append`."""
    del config
    return False

  def rope_append(
      self,
      qkv: Array | DeferredScale,
      rotation: tuple[Array, Array],
      cache: tuple[Array, Array] | None,
      config: ModelConfig,
      *,
      norm_heads: NormHeads | None = None,
      offset_KH: Array | None = None,
      tap: Callable[[str, Array], Array] = _no_tap,
  ) -> tuple[Array, tuple[Array, Array]]:
    """Returns (q [M, N, H], (k, v), each [M, K, H]); `cache` must be None.

    Args:
      qkv: [M, (N + 2K) H].
      rotation: see `rope.rotation`.
      cache: None.
      config: the model's shape.
      norm_heads: (q, k) to (q, k) with each head normed; None for models
        without these norms.
      offset_KH: what is subtracted from each rotated key, see
        `Policy.smooth_k`; None for nothing.
      tap: see `layers.Leaf.tap`.
    """
    assert cache is None and not isinstance(qkv, DeferredScale)
    q_MNH, k_MKH, v_MKH = _heads(
        qkv, rotation, config, norm_heads, offset_KH, tap
    )
    return q_MNH, (k_MKH, v_MKH)

  def __call__(
      self,
      q_MNH: Array,
      keys: tuple[Array, Array],
      row_format: RowFormat = UNQUANTIZED,
  ) -> tuple[Rows, tuple[Array, Array]]:
    """Returns (rows [M, N*H] for the next dot, (k, v) [B, K, T, H] as stored).

    Args:
      q_MNH: queries.
      keys: what `rope_append` returned.
      row_format: not used: the next dot quantises its rows itself.
    """
    del row_format
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
        group,
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
      lies in page t // S at t % S. Pages after the position are not read.
    tile: see `flash_attention`; S is a multiple of it.
    smooth_k: see `Policy`. Keys are then rotated in plain JAX.
  """

  position_B: Array
  table_BP: Array
  tile: int = dataclasses.field(metadata={'static': True})
  smooth_k: bool = dataclasses.field(default=False, metadata={'static': True})

  @property
  def defers(self) -> bool:
    """Whether dots leave scales and the residual sum to the next kernel."""
    return dispatch.has_kernel('rope_append')

  def defers_qkv(self, config: ModelConfig) -> bool:
    """Whether qkv's dot leaves its scales and bias to `rope_append`."""
    takes = not config.qk_norm and not self.smooth_k
    return takes and has_kernel(config.head_dim)

  def rope_append(
      self,
      qkv: Array | DeferredScale,
      rotation: tuple[Array, Array],
      cache: tuple[Array, Array] | None,
      config: ModelConfig,
      *,
      norm_heads: NormHeads | None = None,
      offset_KH: Array | None = None,
      tap: Callable[[str, Array], Array] = _no_tap,
  ) -> tuple[Array, tuple[Array, Array]]:
    """Returns (q [B, N, H], the pages with the new token).

    Args:
      qkv: [B, (N + 2K) H]; may be a `DeferredScale`.
      rotation: see `rope.rotation`.
      cache: pages of keys and values.
      config: the model's shape.
      norm_heads: see `PackedAttention.rope_append`.
      offset_KH: see `PackedAttention.rope_append`.
      tap: see `PackedAttention.rope_append`.
    """
    assert cache is not None
    if self.defers_qkv(config):
      if not isinstance(qkv, DeferredScale):
        qkv = DeferredScale(values=qkv)
      q_BNH, cache = rope_append(
          qkv, rotation, self.position_B, self.table_BP, cache
      )
      return tap('rope_q', q_BNH), cache
    assert not isinstance(qkv, DeferredScale)
    q_BNH, k_BKH, v_BKH = _heads(
        qkv, rotation, config, norm_heads, offset_KH, tap
    )
    with jax.named_scope('attention'):
      return q_BNH, self.append((k_BKH, v_BKH), cache)

  def append(
      self, new: tuple[Array, Array], cache: tuple[Array, Array]
  ) -> tuple[Array, Array]:
    """Returns the pages with each slot's new key and value, [B, K, H] each."""
    size = cache[0].shape[2]
    keys, values = (
        append(pool, x, self.position_B, self.table_BP, size)
        for pool, x in zip(cache, new, strict=True)
    )
    return keys, values

  def __call__(
      self,
      q_BNH: Array,
      cache: tuple[Array, Array],
      row_format: RowFormat = UNQUANTIZED,
  ) -> tuple[Rows, tuple[Array, Array]]:
    """Returns (rows [B, N*H] for the next dot, the pages).

    Args:
      q_BNH: queries.
      cache: pages that hold the new token already.
      row_format: the form in which the next dot wants its rows.
    """
    scale = row_format.scale if self.defers else None
    keys, values = cache
    with jax.named_scope('attention'):
      out = decode_attention(
          q_BNH,
          keys,
          values,
          self.table_BP,
          self.position_B,
          self.tile,
          scale,
      )
    out = out.reshape(out.shape[0], -1)
    if scale is None:
      return Rows(out), cache
    return Rows(jax.ShapeDtypeStruct(out.shape, q_BNH.dtype), out), cache
