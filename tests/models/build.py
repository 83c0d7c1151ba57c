"""A tiny decoder, run as rollout and as training forward."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jetrl_jax.core.collectives import Axes
from jetrl_jax.core.compilation import exact_jit
from jetrl_jax.fp8 import Recipe, init_state, observe_kernels, scaling_state
from jetrl_jax.kernels.log_sum_exp import row_stats, temper
from jetrl_jax.kernels.quantized_dot.weights import prepare_weights
from jetrl_jax.models import logprobs
from jetrl_jax.models.attention import DecodeAttention, PackedAttention
from jetrl_jax.models.decoder import Decoder, variables
from tests.models import tiny

TILE = 16
TEMPERATURE = 0.9
FP8 = Recipe()


@functools.cache
def decoder(family: str, recipe: Recipe, remat: str = 'none') -> Decoder:
  """2 layers, D 64, 4 heads of 16 on 2 key heads, F 96, V 80.

  For blocks of 128: D 128, heads of 32, F 128. Dynamic recipes have 1 layer.
  """
  sizes: dict[str, Any] = dict(model_dim=64, head_dim=16, ffn_dim=96)
  if recipe.name == 'fp8_block':
    sizes = dict(model_dim=128, head_dim=32, ffn_dim=128)
  if not recipe.is_delayed and recipe.name != 'bf16':
    sizes['num_layers'] = 1
  cfg = tiny.config(family, vocab_size=80, **sizes)
  return Decoder(recipe=recipe, axes=Axes(), config=cfg, remat=remat)


@functools.cache
def masters(family: str, recipe: Recipe = FP8) -> Any:
  """Parameters with gains, biases and logits that matter."""
  model = decoder(family, recipe)

  def init(key, rows, first, last):
    attend = PackedAttention(first_BT=first, last_BT=last, tile=TILE)
    return model.init(key, rows, rows, jnp.ones(16), attend)['params']

  rows, line = jnp.zeros(16, jnp.int32), jnp.zeros((1, 16), jnp.int32)
  shapes = jax.eval_shape(init, jax.random.key(0), rows, line, line)
  leaves, tree = jax.tree_util.tree_flatten_with_path(shapes)
  made, rng = [], np.random.default_rng(0)
  for path, leaf in leaves:
    x = 0.1 * rng.normal(size=leaf.shape).astype(np.float32)
    gain = 'norm' in jax.tree_util.keystr(path)
    made.append(1 + x if gain else x)
  return jax.tree.unflatten(tree, made)


@dataclasses.dataclass(frozen=True)
class Trees:
  """Masters, dot states and the compute weights made of them."""

  params: Any
  state: Any
  weights: Any


@functools.cache
def trees(family: str, recipe: Recipe) -> Trees:
  """The trees of `masters(family)` with scales that fit."""
  params = masters(family, recipe)
  state = init_state(params, recipe)
  # Inputs reach 7, output gradients of a mean over 768 tokens 0.008.
  scales = {'input': 2.0**-4, 'output_grad': 2.0**-15}
  if recipe.is_delayed:
    state = scaling_state.map_dot_states(
        lambda slot: slot
        | {o: slot[o] | {'scale': jnp.float32(s)} for o, s in scales.items()},
        state,
    )

  @exact_jit
  def quantise(params, state):
    state = observe_kernels(state, params, recipe, Axes())
    return state, prepare_weights(params, state, recipe)

  return Trees(params, *quantise(params, state))


def tokens(batch: int, length: int) -> np.ndarray:
  """[B, T] token ids; the first rows do not depend on B."""
  rng = np.random.default_rng(1)
  return rng.integers(0, 80, (batch, length), np.int32)


def unpacked(tokens_BT: np.ndarray) -> tuple[np.ndarray, ...]:
  """(first, last, positions) of rows that are one sequence each."""
  line = np.arange(tokens_BT.shape[1], dtype=np.int32)
  index = np.broadcast_to(line, tokens_BT.shape)
  return np.zeros_like(index), index, index


def forward(model, weights, state, params, tokens_BT, rows, temperature):
  """Teacher-forced log-probs [B, T] of the next token in each row."""
  first, last, positions = rows
  attend = PackedAttention(first_BT=first, last_BT=last, tile=TILE)
  tree = variables(weights, state, params)
  mask = (last >= 0).astype(jnp.float32).reshape(-1)
  hidden, *_ = model.apply(
      tree, tokens_BT.reshape(-1), positions.reshape(-1), mask, attend
  )
  found, _ = logprobs.target_logprobs(
      lambda *rows: model.apply(tree, *rows[:2], method='head'),
      hidden,
      jnp.roll(tokens_BT, -1, axis=1).reshape(-1),
      temperature,
      chunk_rows=256,
      row_mask_M=mask,
      fp8_state={},
  )
  return found.reshape(tokens_BT.shape)


def decode(model, weights, state, tokens_BT, temperature):
  """The same log-probs, token by token through a cache."""
  slots, length = tokens_BT.shape
  cfg = model.config
  empty = jnp.zeros(
      (slots, cfg.num_kv_heads, length, cfg.head_dim), model.recipe.dtype
  )
  tree = variables(weights, state)

  def step(caches, now):
    t, token, following = now
    position = jnp.full((slots,), t)
    hidden, caches, _ = model.apply(
        tree,
        token,
        position,
        jnp.ones(slots),
        DecodeAttention(
            position_B=position,
            table_BP=jnp.arange(slots)[:, None],
            tile=TILE,
        ),
        caches,
    )
    logits = model.apply(tree, hidden, jnp.ones(slots), method='head')
    inverse = logprobs.inverse_temperature(temperature)
    lse, _ = row_stats(logits, jnp.broadcast_to(inverse, (slots,)))
    picked = logprobs.pick(logits, following)
    return caches, temper(picked, inverse) - lse

  caches = [(empty, empty)] * cfg.num_layers
  following = jnp.roll(tokens_BT, -1, axis=1)
  _, found = jax.lax.scan(
      step, caches, (jnp.arange(length), tokens_BT.T, following.T)
  )
  return found.T


@functools.cache
def compiled_forward(family: str, recipe: Recipe):
  """Compiled `forward` of (weights, state, tokens, rows, temperature)."""
  model = decoder(family, recipe)
  return exact_jit(
      lambda weights, state, *inputs: forward(
          model, weights, state, None, *inputs
      )
  )


@functools.cache
def compiled_decode(family: str, recipe: Recipe):
  """Compiled `decode` of (weights, state, tokens, temperature)."""
  return exact_jit(functools.partial(decode, decoder(family, recipe)))


@functools.cache
def compiled_step(family: str, recipe: Recipe, remat: str = 'none'):
  """Compiled log-probs and gradients of (params, state), as in training."""
  model = decoder(family, recipe, remat)

  def step(params, state, weights, tokens_BT, rows, temperature):
    def loss(params, state):
      found = forward(
          model, weights, state, params, tokens_BT, rows, temperature
      )
      return -jnp.mean(found), found

    grad = jax.grad(loss, argnums=(0, 1), has_aux=True)
    (params_grad, states_seen), found = grad(params, state)
    return found, params_grad, states_seen

  return exact_jit(step)


def equations(jaxpr):
  """Yields the equations of a jaxpr and of those inside, each once."""
  for eqn in jaxpr.eqns:
    yield eqn
    for inner in jax.tree.leaves(
        list(eqn.params.values()), is_leaf=lambda x: hasattr(x, 'eqns')
    ):
      inner = getattr(inner, 'jaxpr', inner)
      if hasattr(inner, 'eqns'):
        yield from equations(inner)
