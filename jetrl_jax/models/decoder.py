"""The decoder: tokens to hidden states and logits, for all families.

A block is eight operations, the same for training, prefill and decode:

    x, rows   = add_norm_quantize(residual)          attn_norm
    qkv       = dot(rows)                            attn/qkv
    q, keys   = rope_append(qkv, cache)
    rows      = attention(q, keys)
    residual  = x + dot(rows)                        attn/o
    x, rows   = add_norm_quantize(residual)          mlp_norm
    h         = swiglu(dot(rows))                    mlp/gate_up
    residual  = x + dot(h)                           mlp/down

Only the `attend` object (`models/attention.py`) differs between the three: it
knows which keys a row sees and where they are stored. `kernels/` decides how
many of these operations one kernel computes. docs/numerics.md, "Where decode
and training run different code", lists all such places.

The operation before a dot makes the dot's `Rows`, in the `row_format` that the
dot asks for: quantised already if the dot's scale is known. With `defer`, in a
decode step on a GPU, a dot leaves its scale and the residual sum to the kernel
that follows.

Devices along the axis `tensor` share each dot (`tensor_parallel.py`). `axes`
gathers what the next operation needs whole; on one device it does nothing.

Rows are flat, [M, D]. The modules that own weights are in `layers.py`.
"""

import dataclasses
import functools
from typing import Any, TypeAlias, cast

import jax.numpy as jnp

from jetrl_jax.core import collectives
from jetrl_jax.core.typing import Array, PyTree
from jetrl_jax.fp8.products import DeferredScale, RowFormat, Rows
from jetrl_jax.fp8.scaling_state import COLLECTION
from jetrl_jax.kernels import mlp as mlp_op
from jetrl_jax.kernels.add_norm_quantize import PendingAdd, add
from jetrl_jax.kernels.gather_columns import Gathers, Workspace
from jetrl_jax.kernels.swiglu import swiglu
from jetrl_jax.models import remat, rope, tensor_parallel
from jetrl_jax.models.attention import DecodeAttention, PackedAttention
from jetrl_jax.models.layers import Embedding, Leaf, Linear, RMSNorm
from jetrl_jax.models.types import ModelConfig

Attend: TypeAlias = PackedAttention | DecodeAttention
# Keys and values of one layer: [B, K, T, H] each, or a cache's pages.
KeysValues: TypeAlias = tuple[Array, Array]


class Attention(Leaf):
  """Grouped-query attention with rotary positions."""

  config: ModelConfig

  def setup(self):
    """Makes the modules."""
    cfg, common = self.config, (self.recipe, self.axes)
    heads, kv_heads, head_dim = cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
    pieces = functools.partial(tensor_parallel.pieces, cfg, self.axes)
    self.qkv = Linear(
        *common,
        in_dim=cfg.model_dim,
        out_dim=(heads + 2 * kv_heads) * head_dim,
        pieces=pieces('attn/qkv'),
        use_bias=cfg.qkv_bias,
        late_scale=True,
    )
    if cfg.qk_norm:
      self.q_norm, self.k_norm = (
          RMSNorm(*common, dim=head_dim, eps=cfg.norm_eps, of_heads=True)
          for _ in range(2)
      )
    self.o = Linear(
        *common,
        in_dim=heads * head_dim,
        out_dim=cfg.model_dim,
        pieces=pieces('attn/o'),
    )

  def row_format(self) -> RowFormat:
    """Returns the form in which attention wants its rows."""
    return self.qkv.row_format()

  def __call__(
      self,
      rows: Rows,
      positions_M: Array,
      row_mask_M: Array,
      attend: Attend,
      cache: KeysValues | None,
      gathers: Gathers,
      after: Array | None = None,
  ) -> tuple[Array | DeferredScale, KeysValues]:
    """Returns (what the block adds to the residual, keys and values)."""
    cfg = tensor_parallel.on_device(self.config, self.axes.tensor)
    norm_heads = self._norm_heads if cfg.qk_norm else None
    rotation = rope.rotation(positions_M, rope.inverse_frequencies(cfg))
    rows = rows.map(self.axes.enter)
    defers = attend.defers_qkv(cfg)
    qkv = self.qkv(rows, row_mask_M, defer=defers, after=after)
    q_MNH, keys = attend.rope_append(
        qkv,
        rotation,
        cache,
        cfg,
        norm_heads=norm_heads,
        offset_KH=self._key_offset(cfg) if attend.smooth_k else None,
        tap=functools.partial(self.tap, shared=True),
    )
    rows, cache = attend(q_MNH, keys, self.o.row_format())
    rows = gathers.rows(rows)
    self.tap_rows('attention', rows, self.o.row_format())
    return self.o(rows, row_mask_M, defer=attend.defers, after=after), cache

  def _key_offset(self, config: ModelConfig) -> Array:
    """Returns the bias of the keys' slow channels [K, H], and 0 of others."""
    heads, kv_heads = config.num_heads, config.num_kv_heads
    bias_OH = self.qkv.constant_bias().reshape(-1, config.head_dim)
    bias_KH = bias_OH[heads : heads + kv_heads]
    return jnp.where(rope.is_slow(config), bias_KH, jnp.zeros_like(bias_KH))

  def _norm_heads(self, q_MNH: Array, k_MKH: Array) -> tuple[Array, Array]:
    """Normalises each head of the queries and of the keys."""

    def normed(norm, x_MNH):
      # The norm's backward reads its rows.
      heads_MH = remat.keep(x_MNH).reshape(-1, self.config.head_dim)
      return norm(heads_MH)[1].values.reshape(x_MNH.shape)

    return normed(self.q_norm, q_MNH), normed(self.k_norm, k_MKH)


class MLP(Leaf):
  """SwiGLU feed-forward: down(silu(gate) * up)."""

  config: ModelConfig

  def setup(self):
    """Makes the modules."""
    cfg, common = self.config, (self.recipe, self.axes)
    pieces = functools.partial(tensor_parallel.pieces, cfg, self.axes)
    self.gate_up = Linear(
        *common,
        in_dim=cfg.model_dim,
        out_dim=2 * cfg.ffn_dim,
        pieces=pieces('mlp/gate_up'),
        late_scale=True,
    )
    self.down = Linear(
        *common,
        in_dim=cfg.ffn_dim,
        out_dim=cfg.model_dim,
        pieces=pieces('mlp/down'),
    )

  def row_format(self, num_rows: int) -> RowFormat:
    """Returns the form in which the MLP wants so many rows."""
    cfg = tensor_parallel.on_device(self.config, self.axes.tensor)
    return mlp_op.row_format(
        self.gate_up.row_format(),
        num_rows,
        (cfg.model_dim, cfg.ffn_dim),
        self._is_one_operation(),
    )

  def __call__(
      self,
      rows: Rows,
      row_mask_M: Array,
      gathers: Gathers | None = None,
      defer: bool = False,
      after: Array | None = None,
  ) -> Array | DeferredScale:
    """Returns what the block adds to the residual stream.

    By default XLA gathers.
    """
    rows = rows.map(self.axes.enter)
    gathers = gathers or Gathers(self.axes, None)
    if self._is_one_operation():
      dots = (
          self.gate_up.operands(after=after),
          self.down.operands(after=after),
      )
      return mlp_op.mlp(
          self.recipe,
          rows,
          *dots,
          row_mask_M,
          self.axes,
          defer=defer,
          gather=gathers.inputs,
      )
    h_MF = swiglu(self.gate_up(rows, row_mask_M, after=after))
    h_MF = self.tap('swiglu', gathers.inputs(h_MF))
    return self.down(Rows(h_MF), row_mask_M, defer=defer, after=after)

  def _is_one_operation(self) -> bool:
    """Whether `kernels/mlp` computes gate_up, SwiGLU and down together."""
    if self.is_initializing():
      return False
    cfg = tensor_parallel.on_device(self.config, self.axes.tensor)
    # A device computes all columns of h that it holds, and a share of down's.
    dims = cfg.model_dim // self.axes.tensor, cfg.ffn_dim
    is_quantized = self.gate_up.is_quantized and self.down.is_quantized
    return is_quantized and mlp_op.is_fused(self.recipe, dims)


class Block(Leaf):
  """One transformer layer, pre-norm."""

  config: ModelConfig

  def setup(self):
    """Makes the modules."""
    cfg, common = self.config, (self.recipe, self.axes)
    norm = {'dim': cfg.model_dim, 'eps': cfg.norm_eps}
    self.attn_norm = RMSNorm(*common, **norm)
    self.attn = Attention(*common, config=cfg)
    self.mlp_norm = RMSNorm(*common, **norm)
    self.mlp = MLP(*common, config=cfg)

  def __call__(
      self,
      residual: Array | PendingAdd,
      positions_M: Array,
      row_mask_M: Array,
      attend: Attend,
      cache: KeysValues | None,
      workspace: Workspace | None = None,
      after: Array | None = None,
  ) -> tuple[Array | PendingAdd, KeysValues, Workspace | None]:
    """Returns (residual stream [M, D], keys and values, workspace)."""
    gathers = Gathers(self.axes, workspace)
    x_MD, rows = self.attn_norm(residual, self.attn.row_format())
    delta, cache = self.attn(
        rows, positions_M, row_mask_M, attend, cache, gathers, after
    )
    residual = remat.keep(_add(x_MD, delta, gathers))
    row_format = self.mlp.row_format(positions_M.shape[0])
    x_MD, rows = self.mlp_norm(residual, row_format)
    delta = self.mlp(
        rows, row_mask_M, gathers, defer=attend.defers, after=after
    )
    return _add(x_MD, delta, gathers), cache, gathers.workspace


def _add(
    x_MD: Array, delta: Array | DeferredScale, gathers: Gathers
) -> Array | PendingAdd:
  """Returns x + delta; a device may have only some columns of delta."""
  if not isinstance(delta, DeferredScale):
    return gathers.add(x_MD, delta)
  if delta.values.shape != x_MD.shape:
    values = gathers.outputs(delta.values)
    delta = dataclasses.replace(delta, values=values)
  return add(x_MD, delta)


class Decoder(Leaf):
  """The whole model.

  Attributes:
    config: shapes and family.
    remat: what the backward pass recomputes, see `remat.py`.
  """

  config: ModelConfig
  remat: str = 'none'

  def setup(self):
    """Makes the modules."""
    cfg, common = self.config, (self.recipe, self.axes)
    pieces = functools.partial(tensor_parallel.pieces, cfg, self.axes)
    self.embed = Embedding(
        *common,
        vocab_size=cfg.vocab_size,
        model_dim=cfg.model_dim,
        pieces=pieces('embed'),
    )
    block = remat.wrap(Block, self.remat)
    self.layers = [block(*common, config=cfg) for _ in range(cfg.num_layers)]
    self.final_norm = RMSNorm(*common, dim=cfg.model_dim, eps=cfg.norm_eps)
    if not cfg.tied_embeddings:
      self.lm_head = Linear(
          *common,
          in_dim=cfg.model_dim,
          out_dim=cfg.vocab_size,
          pieces=pieces('lm_head'),
      )

  def __call__(
      self,
      tokens_M: Array,
      positions_M: Array,
      row_mask_M: Array,
      attend: Attend,
      caches: list[KeysValues] | None = None,
      workspace: Workspace | None = None,
  ) -> tuple[Array, list[KeysValues], Workspace | None]:
    """Runs all blocks.

    Args:
      tokens_M: int32 token ids, M a multiple of 16.
      positions_M: int32 positions within their sequences.
      row_mask_M: float32, 0 on rows that are padding.
      attend: `PackedAttention` or `DecodeAttention`.
      caches: per layer (keys, values) for `DecodeAttention`, else None.
      workspace: of a decode step's gathers; None if XLA gathers.

    Returns:
      (hidden [M, D] after the final norm, per layer (keys, values), the
      workspace).
    """
    residual = self.embed(tokens_M)
    new_caches, after, before, chain = [], None, None, None
    if self.axes.exchanges and caches is None:
      residual, chain = collectives.first_turn(residual)
    for i, layer in enumerate(self.layers):
      cache = None if caches is None else caches[i]
      if chain is not None:
        # Devices exchange a layer's weights while they compute the one before,
        # at the earliest. In a backward pass they have sent a layer's gradients
        # before the one before is done.
        residual, before, chain = collectives.in_turn(residual, chain)
      residual, cache, workspace = layer(
          residual, positions_M, row_mask_M, attend, cache, workspace, after
      )
      new_caches.append(cache)
      after = before
    _, rows = self.final_norm(residual)
    if self.is_initializing():
      self.head(rows.values, row_mask_M)
    return rows.values, new_caches, workspace

  def head(self, hidden_MD: Array, row_mask_M: Array, kernel=None) -> Array:
    """Returns float32 logits of normed hidden rows, [M, V / tensor].

    Those of this device's tokens. float32, because BF16 logits step by 0.06 to
    0.125 nat at |logit| 8 to 32.

    Args:
      hidden_MD: the rows.
      row_mask_M: float32, 0 on rows that are padding.
      kernel: the result of `head_kernel`. A caller that takes the rows in
        chunks passes it, so that devices gather the kernel and sum its gradient
        once and not once per chunk.
    """
    hidden_MD = self.axes.enter(hidden_MD)
    if self.config.tied_embeddings:
      logits_MV = self.embed.logits(hidden_MD, row_mask_M, kernel)
    else:
      logits_MV = self.lm_head(
          Rows(hidden_MD), row_mask_M, out_dtype=jnp.float32, kernel=kernel
      )
    return cast(Array, logits_MV)

  def head_kernel(self) -> tuple[Any, Any]:
    """Returns (master or None, weight) of the head, as a device reads them."""
    owner = self.embed if self.config.tied_embeddings else self.lm_head
    return owner.kernel()


def variables(weights: PyTree, fp8_state: PyTree, params: PyTree | None = None):
  """Returns the Flax variable dict of a forward pass.

  Args:
    weights: compute weights.
    fp8_state: the scaling state.
    params: masters; None if no derivative is wanted.
  """
  tree = {'weights': weights, COLLECTION: fp8_state}
  return tree if params is None else tree | {'params': params}
