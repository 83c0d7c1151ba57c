"""The policy: one decoder and one recipe, as pure functions.

Rollout and training both call these functions. `jit` compiles them at the
outermost boundary. None of them knows whether it runs on one device, or inside
`shard_map` on a part of the rows.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jetrl_jax.core import sharding
from jetrl_jax.core.collectives import Axes
from jetrl_jax.core.compilation import exact_jit, inexact_jit
from jetrl_jax.core.compile_ahead import Program
from jetrl_jax.core.typing import Array, PRNGKey, PyTree
from jetrl_jax.fp8 import Recipe
from jetrl_jax.fp8.recipes import LM_HEAD
from jetrl_jax.kernels import dispatch, gather_columns
from jetrl_jax.kernels.dispatch import Kernels
from jetrl_jax.kernels.gather_columns import Workspace
from jetrl_jax.kernels.kv_storage import values_shape
from jetrl_jax.kernels.log_sum_exp import row_stats
from jetrl_jax.models import logprobs, remat, tensor_parallel
from jetrl_jax.models.attention import DecodeAttention, PackedAttention
from jetrl_jax.models.decoder import Decoder, variables
from jetrl_jax.models.types import ModelConfig


class PackedTokens(Protocol):
  """What a forward pass reads of packed rows, [B, T] each; see `TrainBatch`."""

  @property
  def tokens(self) -> Array:
    """int32 token ids."""
    ...

  @property
  def positions(self) -> Array:
    """int32 position within the segment."""
    ...

  @property
  def segment_ids(self) -> Array:
    """int32, from 1 within the row; 0 on padding."""
    ...


class PolicyParams(NamedTuple):
  """All that a forward pass reads.

  Attributes:
    weights: compute weights, see `kernels.prepare_weights`.
    fp8_state: the scaling state, which has the activation scales in use.
  """

  weights: PyTree
  fp8_state: PyTree


class PlacedParams(PolicyParams):
  """Weights as the dots of a rollout read them, on `mesh.tensor` devices.

  They have another layout than those of training, see `Policy.place`.
  """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
  """Everything that defines a forward pass, except its arrays.

  Attributes:
    model: the decoder's shape.
    recipe: how its dots compute.
    axes: devices over which rows and weights are split.
    tile: attention tile in tokens, part of the arithmetic: a multiple of 16.
      Packed segments start at multiples of it. Attention's kernels take 64;
      with others attention is plain JAX, which is slower.
    logit_chunk_rows: most rows whose [rows, vocabulary] logits are in memory at
      once. With fewer the gradient of lm_head is read and written more often.
    remat: what of a block the backward pass recomputes: 'none', 'selective'
      (its norms and MLP) or 'full' (all of it); see `remat.py`.
    kv_cache_dtype: what keys and values are rounded to, in rollout and
      training: 'compute' (compute_dtype) or 'float8_e4m3fn', which halves the
      KV cache.
    smooth_k: subtract from each FP8 key, before it is rounded, the bias of the
      channels that rotary embedding hardly turns. It is the same for all
      tokens, so attention computes the same but for rounding. Some models
      (Qwen2.5) have so large a bias there that E4M3 keeps little of the rest
      (docs/numerics.md).
    kernels: which implementation of each operation runs.
    exact: compile with the options that equality to the bit rests on. False
      leaves them to XLA (skipped roundings, kernels chosen by timing), as other
      systems do, and claims nothing; for comparisons.
  """

  model: ModelConfig
  recipe: Recipe
  axes: Axes = Axes()
  tile: int = 64
  logit_chunk_rows: int = 1024
  remat: str = 'full'
  kv_cache_dtype: str = 'compute'
  smooth_k: bool = False
  kernels: Kernels = dataclasses.field(
      default_factory=lambda: dispatch.automatic()
  )
  exact: bool = True

  def __post_init__(self):
    if self.kv_cache_dtype not in ('compute', 'float8_e4m3fn'):
      raise ValueError(
          f'kv_cache_dtype is {self.kv_cache_dtype!r}; allowed: compute,'
          ' float8_e4m3fn'
      )
    if self.smooth_k and self.kv_cache_dtype == 'compute':
      raise ValueError(
          "smooth_k is True, but kv_cache_dtype is 'compute'; set it to"
          " 'float8_e4m3fn', or smooth_k to False"
      )
    if self.smooth_k and not self.model.qkv_bias:
      raise ValueError(
          'smooth_k is True, but the keys of this model have no bias; set it to'
          ' False'
      )
    remat.check(self.remat)
    tensor_parallel.check(self.model, self.recipe, self.axes)
    for name, value in (
        ('attention_tile', self.tile),
        ('logit_chunk_rows', self.logit_chunk_rows),
    ):
      if value < 16 or value % 16:
        raise ValueError(f'{name} is {value}; it must be a multiple of 16')

  @property
  def decoder(self) -> Decoder:
    """The Flax module."""
    return Decoder(self.recipe, self.axes, config=self.model, remat=self.remat)

  @property
  def kv_dtype(self) -> str:
    """Dtype in which keys and values are stored."""
    if self.kv_cache_dtype == 'compute':
      return jnp.dtype(self.recipe.dtype).name
    return self.kv_cache_dtype

  @property
  def has_fp8_keys(self) -> bool:
    """Whether keys and values are stored in 8 bits."""
    return self.kv_cache_dtype != 'compute'

  def with_wide_keys(self) -> 'Policy':
    """Returns the policy with keys and values in the compute dtype."""
    return dataclasses.replace(self, kv_cache_dtype='compute', smooth_k=False)

  def jit(
      self,
      function: Callable[..., Any],
      *,
      check: Callable[..., None] | None = None,
      **options: Any,
  ) -> Program:
    """Compiles a function of the flow.

    Args:
      function: pure.
      check: see `Program`.
      **options: as for `exact_jit`.
    """
    compiled = exact_jit if self.exact else inexact_jit
    return Program(
        compiled(self.bound(function), **options),
        on_several=self.axes.devices > 1,
        check=check,
    )

  def bound(self, function):
    """Returns the function, traced with the policy's kernels."""
    inner = function

    # `wraps` below takes the name from here; profiles show it.
    while isinstance(inner, functools.partial):
      inner = inner.func

    @functools.wraps(inner)
    def traced(*args, **kwargs):
      with dispatch.using(self.kernels):
        return function(*args, **kwargs)

    return traced

  def jit_per_device(
      self, function, mesh: Mesh, in_specs, out_specs, **options
  ) -> Program:
    """Compiles a function that each device runs on its part of the data."""
    return self.jit(
        sharding.per_device(function, mesh, in_specs, out_specs),
        out_shardings=sharding.named(out_specs, mesh),
        **options,
    )

  def _apply(self, tree: PyTree, *args, **kwargs) -> Any:
    # Flax's own return type counts collections that change; none does here.
    return self.decoder.apply(tree, *args, **kwargs)

  def init(self, key: PRNGKey) -> PyTree:
    """Returns random float32 masters: normal(0.02) kernels, unit gains."""
    tokens = jnp.zeros((self.tile,), jnp.int32)
    attend = PackedAttention(
        first_BT=tokens[None],
        last_BT=jnp.arange(self.tile, dtype=jnp.int32)[None],
        tile=self.tile,
        kv_dtype=self.kv_dtype,
    )
    mask = jnp.ones((self.tile,), jnp.float32)
    whole = dataclasses.replace(self, axes=Axes()).decoder
    return whole.init(key, tokens, tokens, mask, attend)['params']

  def placed(self) -> 'Policy':
    """Returns the policy that reads `PlacedParams`; itself on one device."""
    if self.axes.tensor == 1:
      return self
    return dataclasses.replace(
        self, axes=dataclasses.replace(self.axes, placed=True)
    )

  def place(self, params: PolicyParams) -> PlacedParams:
    """Returns stored weights as this device's dots read them."""
    weights = tensor_parallel.place(self.axes, self.model, params.weights)
    return PlacedParams(weights, params.fp8_state)

  def placed_specs(self, params: PolicyParams) -> PlacedParams:
    """Returns the PartitionSpecs of what `place` makes."""
    weights = tensor_parallel.placed_specs(
        self.model, self.axes, params.weights
    )
    return PlacedParams(weights, jax.tree.map(lambda _: P(), params.fp8_state))

  def replicated_shapes(self, params: PolicyParams, mesh: Mesh) -> PolicyParams:
    """Returns the shapes of what a rollout reads, each with its sharding.

    Whole copies, or with tensor parallelism what `place` makes.

    Args:
      params: arrays or shapes, as they are stored.
      mesh: devices.
    """
    specs: Any = jax.tree.map(lambda _: P(), params)
    if self.axes.tensor > 1:
      specs = self.placed_specs(params)
      stored = sharding.tree_specs(params, mesh)
      place = sharding.per_device(self.place, mesh, (stored,), specs)
      params = jax.eval_shape(place, params)
    return jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=where
        ),
        params,
        sharding.named(specs, mesh),
    )

  def hidden(
      self,
      params: PolicyParams,
      batch: PackedTokens,
      masters: PyTree | None = None,
  ) -> Array:
    """Returns final hidden states [B*T, D] of packed rows."""
    index = jnp.arange(batch.tokens.shape[1], dtype=jnp.int32)[None, :]
    valid = batch.segment_ids > 0
    attend = PackedAttention(
        first_BT=jnp.where(valid, index - batch.positions, index),
        last_BT=jnp.where(valid, index, -1),
        tile=self.tile,
        kv_dtype=self.kv_dtype,
        smooth_k=self.smooth_k,
    )
    hidden_MD, *_ = self._apply(
        variables(params.weights, params.fp8_state, masters),
        batch.tokens.reshape(-1),
        batch.positions.reshape(-1),
        valid.astype(jnp.float32).reshape(-1),
        attend,
    )
    return hidden_MD

  def logprobs(
      self,
      params: PolicyParams,
      batch: PackedTokens,
      temperature: Array,
      masters: PyTree | None = None,
  ) -> tuple[Array, Array]:
    """Returns each token's log-prob and entropy, [B, T] float32, in nats.

    Aligned with the token: index t holds log pi(token t | tokens before it).
    Index 0 of a row and the first token of a segment are meaningless; the
    loss mask is 0 there.

    Args:
      params: weights and scales.
      batch: packed rows.
      temperature: float32 scalar; pi is the tempered softmax over the whole
        vocabulary.
      masters: receive the derivative; None if none is wanted.
    """
    logprobs_BT, entropy_BT, *_ = self.target_logprobs(
        params, batch, temperature, masters
    )
    return logprobs_BT, entropy_BT

  def target_logprobs(
      self,
      params: PolicyParams,
      batch: PackedTokens,
      temperature: Array,
      masters: PyTree | None,
      *,
      show: bool = False,
  ) -> tuple[Array, ...]:
    """Returns the results of `logprobs`, and with `show` the logits.

    `show` adds the tempered logits [B*T, V] and their log-sum-exp [B*T], whose
    row t predicts token t + 1.
    """
    hidden_MD = self.hidden(params, batch, masters)
    weights, state = params
    tree = variables(weights, state, masters)
    kernel = self._apply(tree, method='head_kernel')

    def head(rows_MD, mask_M, head_state):
      tree = variables(weights, state | head_state)
      return self._apply(tree, rows_MD, mask_M, kernel, method='head')

    targets_BT = jnp.roll(batch.tokens, -1, axis=1)
    logprobs_M, entropy_M, *shown = logprobs.target_logprobs(
        head,
        hidden_MD,
        targets_BT.reshape(-1),
        temperature,
        chunk_rows=self.logit_chunk_rows,
        row_mask_M=(batch.segment_ids > 0).astype(jnp.float32).reshape(-1),
        fp8_state={LM_HEAD: state[LM_HEAD]} if LM_HEAD in state else {},
        axes=self.axes,
        show=show,
    )
    shape = batch.tokens.shape
    return (
        jnp.roll(logprobs_M.reshape(shape), 1, axis=1),
        jnp.roll(entropy_M.reshape(shape), 1, axis=1),
        *shown,
    )

  def prefill(
      self, params: PolicyParams, tokens_PT: Array, lengths_P: Array
  ) -> list[tuple[Array, Array]]:
    """Returns keys and values of prompts, per layer, as `page_shapes` has them.

    Args:
      params: weights and scales.
      tokens_PT: int32 prompts, padded at the end; T a multiple of the tile.
      lengths_P: int32 tokens per prompt; 0 for an empty row.
    """
    prompts, length = tokens_PT.shape
    index = jnp.broadcast_to(
        jnp.arange(length, dtype=jnp.int32)[None, :], (prompts, length)
    )
    valid = index < lengths_P[:, None]
    attend = PackedAttention(
        first_BT=jnp.where(valid, 0, index),
        last_BT=jnp.where(valid, index, -1),
        tile=self.tile,
        kv_dtype=self.kv_dtype,
        smooth_k=self.smooth_k,
    )
    _, caches, _ = self._apply(
        variables(params.weights, params.fp8_state),
        tokens_PT.reshape(-1),
        jnp.where(valid, index, 0).reshape(-1),
        valid.astype(jnp.float32).reshape(-1),
        attend,
    )
    return caches

  def decode(
      self,
      params: PolicyParams,
      tokens_B: Array,
      positions_B: Array,
      table_BP: Array,
      caches: list[tuple[Array, Array]],
      workspace: Workspace | None = None,
  ) -> tuple[Array, list[tuple[Array, Array]], Workspace | None]:
    """Feeds one token per slot.

    Args:
      params: weights and scales.
      tokens_B: int32 the token to feed, B a multiple of 16.
      positions_B: int32 its position; -1 for an idle slot.
      table_BP: int32, see `DecodeAttention`.
      caches: per layer pages of (keys, values), see `page_shapes`.
      workspace: of gathers, see `idle_workspace`.

    Returns:
      (float32 logits [B, V / tensor], of this device's tokens; caches; the
      workspace)
    """
    tree = variables(params.weights, params.fp8_state)
    mask_B = jnp.ones(tokens_B.shape, jnp.float32)
    hidden_MD, caches, workspace = self._apply(
        tree,
        tokens_B,
        jnp.maximum(positions_B, 0),
        mask_B,
        DecodeAttention(
            position_B=positions_B,
            table_BP=table_BP,
            tile=self.tile,
            smooth_k=self.smooth_k,
        ),
        caches,
        workspace,
    )
    with jax.named_scope('head'):
      logits_BV = self._apply(tree, hidden_MD, mask_B, method='head')
    return logits_BV, caches, workspace

  def idle_workspace(self, rows: int) -> Workspace | None:
    """Returns zeros for the gathers of a decode step; None if XLA gathers.

    Args:
      rows: most slots of a device.
    """
    if not gather_columns.is_used(self.kernels, self.axes):
      return None
    row_bytes = tensor_parallel.most_row_bytes(
        self.model, self.recipe, self.axes
    )
    return gather_columns.workspace(self.axes, rows, row_bytes)

  def log_sum_exp(
      self,
      logits_BV: Array,
      inverse_B: Array,
      known_B: Array | None,
      slots: int,
  ) -> Array:
    """Returns the log-sum-exp of tempered logits, as training computes it.

    Args:
      logits_BV: float32, of this device's share of the slots.
      inverse_B: float32, 1 / temperature of each row.
      known_B: the result, if the kernel that drew the token computed it.
      slots: those of all devices that share sequences; for taps.
    """
    del slots
    if known_B is not None:
      return known_B
    with jax.named_scope('head'):
      lse_B, _ = row_stats(logits_BV, inverse_B)
    return lse_B

  def page_shapes(
      self, pages: int, size: int
  ) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Shapes of one layer's keys and values in pages of `size` tokens.

    Keys [P, K, S, H]; values the same, or FP8 in pairs [P, K, S/2, H, 2]. K are
    those of all devices, copies included.
    """
    model, tensor = self.model, self.axes.tensor
    heads = tensor_parallel.on_device(model, tensor).num_kv_heads * tensor
    keys = jax.ShapeDtypeStruct(
        (pages, heads, size, model.head_dim),
        jnp.dtype(self.kv_dtype),
    )
    return keys, values_shape(keys)
