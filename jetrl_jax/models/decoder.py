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

What differs between the three is the `attend` object (`models/attention.py`):
which keys a row sees and where they are stored. `Rows` go into a dot: an array,
with its FP8 values where the operation before has quantised it already. With
`defer`, in a decode step on a GPU, a dot leaves its scale and the sum with the
residual stream to the kernel that follows. How many of the operations one
kernel computes is decided in `kernels/`, not here.

Devices along the axis `tensor` share each dot (`tensor_parallel.py`): `axes`
gathers what a following operation needs whole, and on one device does nothing.

Rows are flat [M, D]. Modules that own weights: `layers.py`.
"""

import dataclasses
import functools
from typing import Any, cast

import jax.numpy as jnp

from jetrl_jax.core.typing import Array, PyTree
from jetrl_jax.fp8.products import DeferredScale, Reads, Rows, map_rows
from jetrl_jax.fp8.scaling_state import COLLECTION
from jetrl_jax.kernels import mlp as mlp_op
from jetrl_jax.kernels.add_norm_quantize import add
from jetrl_jax.kernels.swiglu import swiglu
from jetrl_jax.models import remat, rope, tensor_parallel
from jetrl_jax.models.layers import Embedding, Leaf, Linear, RMSNorm
from jetrl_jax.models.types import ModelConfig


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

  def reads(self) -> Reads:
    """Returns what the norm before is to hand over."""
    return self.qkv.reads()

  def __call__(self, rows, positions_M, row_mask_M, attend, cache):
    """Returns (what the block adds, keys and values), see `Block`."""
    cfg = tensor_parallel.on_device(self.config, self.axes.tensor)
    heads = self._norm_heads if cfg.qk_norm else None
    rotation = rope.rotation(positions_M, rope.inverse_frequencies(cfg))
    rows = map_rows(self.axes.enter, rows)
    qkv = self.qkv(rows, row_mask_M, defer=attend.defers and heads is None)
    q_MNH, keys = attend.rope_append(
        qkv,
        rotation,
        cache,
        cfg,
        norm_heads=heads,
        tap=functools.partial(self.tap, shared=True),
    )
    rows, cache = attend(q_MNH, keys, self.o.reads())
    rows = map_rows(self.axes.gather_inputs, rows)
    self.tap_rows('attention', rows, self.o.reads())
    return self.o(rows, row_mask_M, defer=attend.defers), cache

  def _norm_heads(self, q_MNH: Array, k_MKH: Array) -> tuple[Array, Array]:
    """Returns queries and keys, each head normed by itself."""

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

  def reads(self, rows: int) -> Reads:
    """Returns what the norm before is to hand over for so many rows."""
    return self.gate_up.reads(mlp_op.parts(rows, self._dims, self._is_one()))

  def __call__(self, rows, row_mask_M, defer=False):
    """Returns what the block adds, see `Block`."""
    rows = map_rows(self.axes.enter, rows)
    if self._is_one():
      dots = self.gate_up.operands(), self.down.operands()
      return mlp_op.mlp(
          self.recipe, rows, *dots, row_mask_M, self.axes, defer=defer
      )
    h_MF = swiglu(self.gate_up(rows, row_mask_M))
    h_MF = self.tap('swiglu', self.axes.gather_inputs(h_MF))
    return self.down(Rows(h_MF), row_mask_M, defer=defer)

  def _is_one(self) -> bool:
    """Whether both dots are one operation."""
    if self.is_initializing():
      return False
    quantised = self.gate_up.is_quantised and self.down.is_quantised
    dim, inner = self._dims
    dims = dim // self.axes.tensor, inner  # Of down's result, and of h.
    return quantised and mlp_op.fits(self.recipe, dims)

  @property
  def _dims(self) -> tuple[int, int]:
    """(D, F) of one device."""
    cfg = tensor_parallel.on_device(self.config, self.axes.tensor)
    return cfg.model_dim, cfg.ffn_dim


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

  def __call__(self, residual, positions_M, row_mask_M, attend, cache):
    """Returns (the residual stream [M, D], keys and values)."""
    x_MD, rows = self.attn_norm(residual, self.attn.reads())
    delta, cache = self.attn(rows, positions_M, row_mask_M, attend, cache)
    residual = remat.keep(self._add(x_MD, delta))
    reads = self.mlp.reads(positions_M.shape[0])
    x_MD, rows = self.mlp_norm(residual, reads)
    delta = self.mlp(rows, row_mask_M, defer=attend.defers)
    return self._add(x_MD, delta), cache

  def _add(self, x_MD: Array, delta: Array | DeferredScale):
    """Returns x + delta, of which a device may have some columns alone."""
    if not isinstance(delta, DeferredScale):
      return self.axes.add(x_MD, delta)
    if delta.values.shape != x_MD.shape:
      values = self.axes.gather_outputs(delta.values)
      delta = dataclasses.replace(delta, values=values)
    return add(x_MD, delta)


class Decoder(Leaf):
  """The whole model.

  Attributes:
    config: shapes and family.
    remat: what the backward pass computes again, see `remat.py`.
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

  def __call__(self, tokens_M, positions_M, row_mask_M, attend, caches=None):
    """Runs all blocks.

    Args:
      tokens_M: int32 token ids, M a multiple of 16.
      positions_M: int32 positions within their sequences.
      row_mask_M: float32, 0 on rows that are padding.
      attend: `PackedAttention` or `DecodeAttention`.
      caches: per layer (keys, values) for `DecodeAttention`, else None.

    Returns:
      (hidden [M, D] after the final norm, per layer (keys, values)).
    """
    residual = self.embed(tokens_M)
    new_caches = []
    for i, layer in enumerate(self.layers):
      cache = None if caches is None else caches[i]
      residual, cache = layer(residual, positions_M, row_mask_M, attend, cache)
      new_caches.append(cache)
    _, rows = self.final_norm(residual)
    if self.is_initializing():
      self.head(rows.values, row_mask_M)
    return rows.values, new_caches

  def head(self, hidden_MD: Array, row_mask_M: Array, kernel=None) -> Array:
    """Returns float32 logits [M, V] of normed hidden rows.

    float32, because BF16 logits step by 0.06 to 0.125 nat at |logit| 8 to 32.

    Args:
      hidden_MD: the rows.
      row_mask_M: float32, 0 on rows that are padding.
      kernel: what `head_kernel` gave, for rows that are taken in chunks: else
        devices gather it, and add up its gradient, once a chunk.
    """
    hidden_MD = self.axes.enter(hidden_MD)
    if self.config.tied_embeddings:
      logits_MV = self.embed.attend(hidden_MD, row_mask_M, kernel)
    else:
      logits_MV = self.lm_head(
          Rows(hidden_MD), row_mask_M, out_dtype=jnp.float32, kernel=kernel
      )
    return self.axes.gather_outputs(cast(Array, logits_MV))

  def head_kernel(self) -> tuple[Any, Any]:
    """Returns (master or None, weight) of the head, as a device reads them."""
    owner = self.embed if self.config.tied_embeddings else self.lm_head
    return owner.kernel()


def variables(weights: PyTree, fp8_state: PyTree, params: PyTree | None = None):
  """Returns the Flax variable dict of a forward pass.

  Args:
    weights: compute weights.
    fp8_state: delayed-scaling slots.
    params: masters, when a derivative is wanted.
  """
  tree = {'weights': weights, COLLECTION: fp8_state}
  return tree if params is None else tree | {'params': params}
