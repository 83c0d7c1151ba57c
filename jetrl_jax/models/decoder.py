"""The decoder: tokens to hidden states and logits, for all families.

One Flax module serves training, prefill and decode: what differs is the
`attend` object it is given (see `models/attention.py`). Rows are flat
[M, D]. Dots go through the recipe (`kernels/quantized_dot/linear.py`); BF16 is
the same code with another dot.

What owns weights, and how they are read: `layers.py`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jetrl_jax.core.typing import Array, PyTree
from jetrl_jax.fp8 import DeferredScale, QTensor
from jetrl_jax.fp8.scaling_state import COLLECTION
from jetrl_jax.kernels import gate_up as gate_up_kernel
from jetrl_jax.kernels import mlp as fused_mlp
from jetrl_jax.kernels import swiglu
from jetrl_jax.models import remat, rope
from jetrl_jax.models.layers import TAPS, Embedding, Leaf, Linear, RMSNorm, Sum
from jetrl_jax.models.types import ModelConfig


def _step(leaf: Leaf, *path: str) -> Array | None:
  """Returns the scale on which a dot quantises its rows, if that is known."""
  if leaf.is_initializing() or not leaf.recipe.is_delayed:
    return None
  slots, weights = (
      leaf.get_variable(name, path[0], {}) for name in (COLLECTION, 'weights')
  )
  for name in path[1:]:
    slots, weights = slots.get(name, {}), weights[name]
  return slots['input']['scale'] if _is_quantised(weights) else None


def _is_quantised(weights: PyTree) -> bool:
  """Whether the kernel of a dot is in 8 bits."""
  return isinstance(weights['kernel'], QTensor)


def _added(
    dot: Linear, fused: bool, x_MI, row_mask_M, low_MI=None
) -> Array | DeferredScale:
  """Returns what a dot adds to the residual stream."""
  if fused:
    # In float32, as a GEMM that adds a residual has it.
    product = dot.unscaled(x_MI, jnp.float32, low_MI)
    if product is not None:
      return product
  return dot(x_MI, row_mask_M, low_MI=low_MI)


class Attention(Leaf):
  """Grouped-query attention with rotary positions."""

  config: ModelConfig

  @nn.compact
  def __call__(self, x_MD, low_MD, positions_M, row_mask_M, attend, cache):
    """Returns (what the block adds, keys and values), see `Block`."""
    cfg, common = self.config, (self.recipe, self.axes)
    heads, kv_heads, head_dim = cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
    rows = x_MD.shape[0]
    qkv_dot = Linear(
        *common,
        in_dim=cfg.model_dim,
        out_dim=(heads + 2 * kv_heads) * head_dim,
        use_bias=cfg.qkv_bias,
        late_scale=True,
        name='qkv',
    )
    o_dot = Linear(
        *common, in_dim=heads * head_dim, out_dim=cfg.model_dim, name='o'
    )
    rotation = rope.rotation(positions_M, rope.inverse_frequencies(cfg))
    if attend.fuses and not cfg.qk_norm:
      qkv = qkv_dot.unscaled(x_MD, x_MD.dtype, low_MD)
      if qkv is None:
        qkv = DeferredScale(values=qkv_dot(x_MD, row_mask_M, low_MI=low_MD))
      with jax.named_scope('attention'):
        o_MO, low_MO, cache = attend.append_and_attend(
            qkv, rotation, cache, _step(self, 'o')
        )
      return _added(o_dot, True, o_MO, row_mask_M, low_MO), cache
    qkv = qkv_dot(x_MD, row_mask_M, low_MI=low_MD)
    qkv = qkv.reshape(rows, heads + 2 * kv_heads, head_dim)
    q_MNH, k_MKH, v_MKH = jnp.split(qkv, [heads, heads + kv_heads], axis=1)
    if cfg.qk_norm:

      def per_head(name, x_MNH):
        norm_of_head = RMSNorm(
            *common, dim=head_dim, eps=cfg.norm_eps, name=name
        )
        # The norm's backward reads its rows.
        heads_MH = remat.keep(x_MNH).reshape(-1, head_dim)
        return norm_of_head(heads_MH)[1].reshape(x_MNH.shape)

      q_MNH, k_MKH = per_head('q_norm', q_MNH), per_head('k_norm', k_MKH)
    q_MNH = self.tap('rope_q', rope.rotate(q_MNH, *rotation))
    k_MKH = self.tap('rope_k', rope.rotate(k_MKH, *rotation))
    with jax.named_scope('attention'):
      o_MO, cache = attend(q_MNH, k_MKH, v_MKH, cache)
      self.tap('attention', o_MO)
    return _added(o_dot, attend.fuses, o_MO, row_mask_M), cache


class MLP(Leaf):
  """SwiGLU feed-forward: down(silu(gate) * up)."""

  config: ModelConfig

  @nn.compact
  def __call__(self, x_MD, low_MD, row_mask_M, fused=False):
    """Returns what the block adds, see `Block`."""
    cfg, common = self.config, (self.recipe, self.axes)
    gate_up = Linear(
        *common,
        in_dim=cfg.model_dim,
        out_dim=2 * cfg.ffn_dim,
        late_scale=True,
        name='gate_up',
    )
    down = Linear(
        *common, in_dim=cfg.ffn_dim, out_dim=cfg.model_dim, name='down'
    )
    if self._is_one():
      operands = gate_up.operands(), down.operands()
      if fused:
        return fused_mlp.unscaled_mlp(x_MD, low_MD, *operands)
      return fused_mlp.mlp(self.recipe, x_MD, low_MD, *operands, row_mask_M)
    if low_MD is not None and low_MD.ndim == 3:
      product = gate_up.unscaled(x_MD, x_MD.dtype, low_MD)
      assert product is not None  # A norm makes copies for such dots alone.
      h_MF = swiglu.swiglu_of(product)
    else:
      y_MG = gate_up(x_MD, row_mask_M, low_MI=low_MD)
      h_MF = self.tap('swiglu', swiglu.swiglu(y_MG))
    return _added(down, fused, h_MF, row_mask_M)

  def copies(self, rows: int) -> int:
    """Returns how many copies of its FP8 rows a fused decode step reads."""
    # A dot of few rows is faster in two parts, gate and up, and a kernel that
    # makes both at once is faster still.
    dims = self.config.model_dim, self.config.ffn_dim
    if self._is_one():
      return 1 if gate_up_kernel.fits(rows, dims) else 2
    # Two parts have SwiGLU's kernel; training must have it as well.
    return 2 if swiglu.has_kernel(self.config.ffn_dim) else 1

  def _is_one(self) -> bool:
    """Whether both dots are computed as one; nothing shows inside."""
    cfg, names = self.config, ('gate_up', 'down')
    if self.is_initializing() or self.is_mutable_collection(TAPS):
      return False
    return fused_mlp.fits(self.recipe, (cfg.model_dim, cfg.ffn_dim)) and all(
        _is_quantised(self.get_variable('weights', name)) for name in names
    )


class Block(Leaf):
  """One transformer layer, pre-norm.

  What attention and MLP add is an array, or in a fused decode step an
  `DeferredScale`, which the norm that follows adds.
  """

  config: ModelConfig

  @nn.compact
  def __call__(self, x_MD, positions_M, row_mask_M, attend, cache):
    """Returns (rows [M, D] or their `Sum`, keys and values)."""
    cfg, common = self.config, (self.recipe, self.axes)

    def normed(name, x_MD, *dot, copies=1):
      norm_of_part = RMSNorm(
          *common, dim=cfg.model_dim, eps=cfg.norm_eps, name=name
      )
      return norm_of_part(x_MD, _step(self, *dot), copies)

    def plus(name, x_MD, added):
      if isinstance(added, DeferredScale):
        return Sum(x_MD, added)
      return self.tap(name, x_MD + added)

    x_MD, y_MD, low_MD = normed('attn_norm', x_MD, 'attn', 'qkv')
    attended, cache = Attention(*common, config=cfg, name='attn')(
        y_MD, low_MD, positions_M, row_mask_M, attend, cache
    )
    x_MD = remat.keep(plus('attn_sum', x_MD, attended))
    mlp = MLP(*common, config=cfg, name='mlp')
    x_MD, y_MD, low_MD = normed(
        'mlp_norm', x_MD, 'mlp', 'gate_up', copies=mlp.copies(len(positions_M))
    )
    added = mlp(y_MD, low_MD, row_mask_M, attend.fuses)
    return plus('mlp_sum', x_MD, added), cache


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
    self.embed = Embedding(
        *common, vocab_size=cfg.vocab_size, model_dim=cfg.model_dim
    )
    block = remat.wrap(Block, self.remat)
    self.layers = [block(*common, config=cfg) for _ in range(cfg.num_layers)]
    self.final_norm = RMSNorm(*common, dim=cfg.model_dim, eps=cfg.norm_eps)
    if not cfg.tied_embeddings:
      self.lm_head = Linear(
          *common, in_dim=cfg.model_dim, out_dim=cfg.vocab_size
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
    x_MD = self.embed(tokens_M)
    new_caches = []
    for i, layer in enumerate(self.layers):
      cache = None if caches is None else caches[i]
      x_MD, cache = layer(x_MD, positions_M, row_mask_M, attend, cache)
      new_caches.append(cache)
    if self.is_initializing():
      self.head(x_MD, row_mask_M)
    return self.final_norm(x_MD)[1], new_caches

  def head(self, hidden_MD: Array, row_mask_M: Array, kernel=None) -> Array:
    """Returns float32 logits [M, V] of normed hidden rows.

    float32, because BF16 logits step by 0.06 to 0.125 nat at |logit| 8 to 32.

    Args:
      hidden_MD: the rows.
      row_mask_M: float32, 0 on rows that are padding.
      kernel: what `head_kernel` gave, for rows that are taken in chunks: else
        devices gather it, and add up its gradient, once a chunk.
    """
    if self.config.tied_embeddings:
      return self.embed.attend(hidden_MD, row_mask_M, kernel)
    return self.lm_head(hidden_MD, row_mask_M, jnp.float32, kernel=kernel)

  def head_kernel(self) -> tuple[Any, Any]:
    """Returns (master or None, weight) of the head, whole on every device."""
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
