"""The precision flow of the real decoder: rollout against training."""

import functools

import jax
import jax.numpy as jnp
import pytest

from jetrl_jax.fp8 import Recipe, flow, init_state, prepare_weights
from jetrl_jax.models.attention import DecodeAttention, PackedAttention
from jetrl_jax.models.decoder import Decoder, variables
from jetrl_jax.models.types import ModelConfig
from jetrl_jax.rl.logprobs import row_stats, target_logprobs, temper
from jetrl_jax.sharding import Axes

ROWS, LENGTH, SLOTS, TILE = 2, 32, 16, 16
FP8 = Recipe()


def config(family):
  return ModelConfig(
      family=family,
      vocab_size=64,
      num_layers=2,
      model_dim=32,
      num_heads=4,
      num_kv_heads=2,
      head_dim=16,
      ffn_dim=48,
      norm_eps=1e-6,
      rope_theta=1e4,
      rope_scaling=None,
      max_position=64,
      qkv_bias=family == 'qwen2',
      qk_norm=family == 'qwen3',
      tied_embeddings=family == 'qwen2',
  )


def decoder(family, recipe, remat=False):
  return Decoder(recipe=recipe, axes=Axes(), config=config(family), remat=remat)


def packed():
  index = jnp.broadcast_to(jnp.arange(LENGTH), (ROWS, LENGTH))
  attend = PackedAttention(
      first_BT=jnp.zeros((ROWS, LENGTH), jnp.int32), last_BT=index, tile=TILE
  )
  tokens = jnp.zeros((ROWS * LENGTH,), jnp.int32)
  return tokens, index.reshape(-1), jnp.ones(ROWS * LENGTH), attend


def trees(family, recipe):
  """Shapes of masters, slots and compute weights."""
  model = decoder(family, recipe)
  params = jax.eval_shape(
      lambda key, inputs: model.init(key, *inputs)['params'],
      jax.random.key(0),
      packed(),
  )
  state = jax.eval_shape(lambda p: init_state(p, recipe), params)
  weights = jax.eval_shape(
      lambda p, s: prepare_weights(p, s, recipe), params, state
  )
  return params, state, weights


@functools.cache
def train_graph(family, recipe=FP8):
  model = decoder(family, recipe, remat=True)

  def loss(params, state, weights, inputs, temperature):
    tree = variables(weights, state, params)
    hidden, _ = model.apply(tree, *inputs)
    logprobs, _ = target_logprobs(
        lambda x: model.apply(tree, x, method='head'),
        hidden,
        inputs[0],
        temperature,
        chunk_rows=16,
    )
    return jnp.sum(logprobs)

  traced = jax.make_jaxpr(jax.value_and_grad(loss))(
      *trees(family, recipe), packed(), jnp.float32(1)
  )
  return flow.extract(traced)


@functools.cache
def decode_graph(family, recipe=FP8):
  model = decoder(family, recipe)
  _, state, weights = trees(family, recipe)

  def step(tree, temperature, carry):
    count, key, tokens, positions, caches, _ = carry
    attend = DecodeAttention(position_B=positions, tile=TILE)
    hidden, caches = model.apply(
        tree, tokens, positions, jnp.ones(SLOTS), attend, caches
    )
    with jax.named_scope('head'):
      logits = temper(model.apply(tree, hidden, method='head'), temperature)
      lse, _ = row_stats(logits)
    with jax.named_scope('sampling'):
      key, now = jax.random.split(key)
      tokens = jax.random.categorical(now, logits).astype(jnp.int32)
    with jax.named_scope('head'):
      chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
      logprobs = chosen - lse
    return count + 1, key, tokens, positions + 1, caches, logprobs

  # Positions are an argument, as in the engine: were they zeros made in here,
  # rotary embeddings would rightly count as one angle for all rows.
  def decode(state, weights, tokens, positions, caches, temperature):
    body = functools.partial(step, variables(weights, state), temperature)
    key, logprobs = jax.random.key(0), jnp.zeros(SLOTS)
    carry = 0, key, tokens, positions, caches, logprobs
    return jax.lax.while_loop(lambda carry: carry[0] < 4, body, carry)

  slots = jnp.zeros(SLOTS, jnp.int32)
  cache = jax.ShapeDtypeStruct((SLOTS, 2, LENGTH, 16), recipe.dtype)
  return flow.extract(
      jax.make_jaxpr(decode)(
          state, weights, slots, slots, [(cache, cache)] * 2, jnp.float32(1)
      )
  )


@functools.cache
def prefill_graph(family, recipe=FP8):
  model = decoder(family, recipe)
  _, state, weights = trees(family, recipe)

  def prefill(state, weights, inputs):
    return model.apply(variables(weights, state), *inputs)[1]

  return flow.extract(jax.make_jaxpr(prefill)(state, weights, packed()))


@pytest.mark.parametrize('family', ['qwen2', 'qwen3', 'llama'])
@pytest.mark.parametrize(
    'recipe', [FP8, Recipe(name='bf16')], ids=['fp8', 'bf16']
)
def test_decode_and_prefill_are_part_of_the_training_forward(family, recipe):
  train = train_graph(family, recipe)
  flow.require_subgraph(decode_graph(family, recipe), train)
  flow.require_subgraph(prefill_graph(family, recipe), train)


def test_every_dot_of_the_blocks_is_in_fp8():
  dots = {
      node.path.split('/', 1)[1]: node.inputs
      for node in decode_graph('llama').nodes
      if node.kind == 'dot' and node.path.startswith('Decoder/layers_1/')
  }
  for name in ('attn/qkv', 'attn/o', 'mlp/gate_up', 'mlp/down'):
    assert dots[f'layers_1/{name}'] == ('e4m3', 'e4m3')


def test_fp8_rollout_under_bf16_training_is_refused():
  with pytest.raises(
      ValueError, match='first at Decoder/layers_0/attn/qkv: the rollout has'
  ):
    flow.require_subgraph(
        decode_graph('llama'), train_graph('llama', Recipe(name='bf16'))
    )


ONE_LAYER = Recipe(high_precision_layers=('layers_1/mlp/down',))
OTHER_SCALES = Recipe(power_of_two_scales=False)


@pytest.mark.parametrize(
    ('rollout', 'training', 'path'),
    [
        (ONE_LAYER, FP8, 'Decoder/layers_1/mlp/down'),
        (FP8, ONE_LAYER, 'Decoder/layers_1/mlp/down'),
        # Scales that are no powers of two are applied before the result is
        # rounded to BF16, the others after.
        (OTHER_SCALES, FP8, 'Decoder/layers_0/attn/qkv'),
        (FP8, OTHER_SCALES, 'Decoder/layers_0/attn/qkv'),
    ],
    ids=['layer-rollout', 'layer-training', 'scale-rollout', 'scale-training'],
)
def test_a_difference_planted_on_one_side_is_named(rollout, training, path):
  with pytest.raises(ValueError, match=f'first at {path}: the rollout has'):
    flow.require_subgraph(
        decode_graph('llama', rollout), train_graph('llama', training)
    )
