"""The precision flow of the real policy: rollout against training."""

import collections
import dataclasses
import functools
from typing import Any
from unittest import mock

import jax
import pytest

from jetrl_jax.core import sharding
from jetrl_jax.fp8 import Recipe, flow, formats
from jetrl_jax.kernels import dispatch
from jetrl_jax.kernels.decode_attention import reference as decode_attention
from jetrl_jax.rl.objective import LossConfig, policy_loss
from jetrl_jax.rl.run import flow_check, gradients
from jetrl_jax.rl.types import TrainBatch
from tests import kernels_in_use
from tests.models import build, tiny
from tests.rl import tiny_run

FP8 = Recipe()
LOSS = functools.partial(policy_loss, LossConfig(kl_loss_coef=0.1))


def policy(family, recipe):
  return tiny_run.policy(recipe, family=family, layers=2)


@functools.cache
def train_graph(family, recipe=FP8):
  of = policy(family, recipe)
  return flow_check.train_graph(of, LOSS, tiny_run.state_shapes(of))


@functools.cache
def decode_graph(family, recipe=FP8):
  of = policy(family, recipe)
  config = tiny_run.engine_config(top_k=5, top_p=0.9, min_p=0.01)
  return flow_check.decode_graph(of, config, tiny_run.state_shapes(of))


@functools.cache
def prefill_graph(family, recipe=FP8):
  of = policy(family, recipe)
  return flow_check.prefill_graph(of, tiny_run.state_shapes(of))


@pytest.mark.parametrize('family', tiny.FORWARDS)
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


# Everything but the last dot in BF16: what differs first is that dot.
ONLY_DOWN: dict[str, Any] = dict(
    high_precision_layers=('layers_0/.*', '.*/attn/.*', '.*/gate_up')
)
TOKEN, INT8 = Recipe(name='fp8_token'), Recipe(name='int8')
INT4 = Recipe(name='fake_int4')


@pytest.mark.parametrize('recipe', [TOKEN, INT8, INT4], ids=lambda r: r.name)
def test_dynamic_recipes_are_one_flow_and_named_by_their_granularity(recipe):
  decode = decode_graph('llama', recipe)
  flow.require_subgraph(decode, train_graph('llama', recipe))
  found = {
      node.signature()
      for node in decode.nodes
      if node.path == 'Decoder/layers_1/mlp/down'
  }
  assert 'reduce_max (f32) -> f32, per row' in found
  assert (
      found
      >= {
          'fp8_token': {
              'convert_element_type (f32) -> e4m3',
              'dot_general (e4m3, e4m3) -> bf16',
              'mul (bf16, bf16) -> bf16, per row',
              'mul (bf16, bf16) -> bf16, per channel',
          },
          'int8': {
              'round (f32) -> f32',
              'convert_element_type (f32) -> i8',
              'dot_general (i8, i8) -> i32',
              'convert_element_type (i32) -> f32',
              'mul (f32, f32) -> f32, per channel',
          },
          'fake_int4': {
              'round (f32) -> f32',
              'convert_element_type (f32) -> i8',
              'convert_element_type (i8) -> bf16',
              'dot_general (bf16, bf16) -> f32',
              'mul (f32, f32) -> f32, per row',
              'mul (f32, f32) -> f32, per channel',
          },
      }[recipe.name]
  )


def test_int8_under_fp8_is_refused_though_its_numbers_are_integers():
  differences = flow.check_subgraph(
      decode_graph('llama', dataclasses.replace(INT8, **ONLY_DOWN)),
      train_graph('llama', dataclasses.replace(TOKEN, **ONLY_DOWN)),
  )
  assert differences[0].node.path == 'Decoder/layers_1/mlp/down'
  assert any('dot_general (i8, i8) -> i32;' in str(d) for d in differences)


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


def check(of, state):
  flow_check.check_flow(of, LOSS, tiny_run.engine_config(), state)


def test_the_check_at_start_up_takes_shapes_or_arrays():
  of = tiny_run.policy()
  check(of, tiny_run.state_shapes(of))
  check(of, tiny_run.cold_state(of))


def test_the_check_at_start_up_sees_a_device_of_many():
  of = tiny_run.policy(mesh=sharding.make_mesh(data=2, fsdp=4))
  check(of, tiny_run.state_shapes(of))


def test_the_check_at_start_up_names_what_only_the_rollout_rounds():
  of = policy('qwen2', FP8)
  state = tiny_run.state_shapes(of)

  class RoundsLogits(type(of)):

    def decode(self, params, *inputs):
      logits, *rest = super().decode(params, *inputs)
      return logits.astype('bfloat16').astype('float32'), *rest

  fields = {f.name: getattr(of, f.name) for f in dataclasses.fields(of)}
  with pytest.raises(ValueError, match='convert_element_type .f32. -> bf16'):
    check(RoundsLogits(**fields), state)


def _hopper_policy(monkeypatch, recipe, dim=128, **changes):
  """A policy whose programs are traced as for a Hopper GPU."""
  kernels_in_use.as_on_hopper(monkeypatch)
  of = policy('qwen2', recipe)
  # Attention's kernels take such heads and tiles.
  sizes = dict(model_dim=dim, head_dim=64, ffn_dim=2 * dim)
  model = dataclasses.replace(of.model, **sizes)
  return dataclasses.replace(of, model=model, tile=64, **changes)


_GPU_DECODE = {
    'add_norm_quantize',
    'decode_attention',
    'log_sum_exp',
    'rope_append',
    'sample_token',
    'swiglu',
}


@kernels_in_use.needs_mosaic
@pytest.mark.parametrize('kv_cache_dtype', ['compute', 'float8_e4m3fn'])
@pytest.mark.parametrize(
    'recipe, dim, more',
    [
        (FP8, 64, set()),
        # The MLP's two dots are one operation.
        (FP8, 128, set()),
        (Recipe(high_precision_layers=('.*/down',)), 128, set()),
        (Recipe(name='fp8_block'), 128, {'block_scaled_dot'}),
        (Recipe(name='bf16'), 128, set()),
    ],
    ids=['fp8', 'fp8-tiles', 'fp8-some', 'block', 'bf16'],
)
def test_what_a_gpu_runs_is_one_flow_and_its_kernels_are_named(
    recipe, dim, more, kv_cache_dtype, monkeypatch
):
  of = _hopper_policy(monkeypatch, recipe, dim, kv_cache_dtype=kv_cache_dtype)
  state = tiny_run.state_shapes(of)
  check(of, state)
  graph = flow_check.decode_graph(of, tiny_run.engine_config(), state)
  assert {k.operation for k in graph.kernels} == _GPU_DECODE | more
  assert not [node for node in graph.nodes if node.kind == 'kernel']
  said = 'layers_*/attn/attention: decode_attention by mosaic_sm90;'
  assert said in graph.implementations()
  attention = graph.by_path()['Decoder/layers_1/attn/attention']
  stored = {'e4m3'} & {x for node in attention for x in node.outputs}
  assert bool(stored) == (kv_cache_dtype != 'compute')


@kernels_in_use.needs_mosaic
@pytest.mark.parametrize('recipe', [FP8, Recipe(name='bf16')])
def test_smooth_keys_are_one_flow_on_a_gpu_rotated_in_plain_jax(
    recipe, monkeypatch
):
  keys = {'kv_cache_dtype': 'float8_e4m3fn', 'smooth_k': True}
  of = _hopper_policy(monkeypatch, recipe, **keys)
  state = tiny_run.state_shapes(of)
  check(of, state)
  graph = flow_check.decode_graph(of, tiny_run.engine_config(), state)
  used = {k.operation for k in graph.kernels}
  assert used == _GPU_DECODE - {'rope_append'}


@kernels_in_use.needs_mosaic
@pytest.mark.parametrize(
    'operation', ['add_norm_quantize', 'attention', 'rope_append', 'swiglu']
)
def test_a_gpu_without_one_of_the_kernels_is_one_flow(operation, monkeypatch):
  kernels = dispatch.select(f'{operation}=reference', kernels_in_use.HOPPER)
  of = _hopper_policy(monkeypatch, FP8, kernels=kernels)
  one_layer = dataclasses.replace(of.model, num_layers=1)
  of = dataclasses.replace(of, model=one_layer)
  check(of, tiny_run.state_shapes(of))


@kernels_in_use.needs_mosaic
@pytest.mark.parametrize('kv_cache_dtype', ['compute', 'float8_e4m3fn'])
@pytest.mark.parametrize('recipe', [FP8, Recipe(name='fp8_token')])
def test_heads_that_no_kernel_takes_are_one_flow_on_a_gpu(
    recipe, kv_cache_dtype, monkeypatch
):
  """As in configs/quickstart.py: heads of 32 and a tile of 16."""
  kernels = dispatch.select('attention=reference', kernels_in_use.HOPPER)
  changes = dict(kernels=kernels, kv_cache_dtype=kv_cache_dtype)
  of = _hopper_policy(monkeypatch, recipe, **changes)
  model = dataclasses.replace(of.model, head_dim=32, num_layers=1)
  of = dataclasses.replace(of, model=model, tile=16)
  check(of, tiny_run.state_shapes(of))


@kernels_in_use.needs_mosaic
def test_a_gate_up_of_many_rows_is_one_kernel_with_the_same_flow(monkeypatch):
  of = _hopper_policy(monkeypatch, FP8, 512)
  state = tiny_run.state_shapes(of)
  # A decode step has gate_up's kernel at these rows alone.
  monkeypatch.setattr(flow_check, '_SLOTS', 64)
  check(of, state)
  graph = flow_check.decode_graph(of, tiny_run.engine_config(), state)
  assert 'layers_*/mlp: gate_up by mosaic_sm90' in graph.implementations()


@kernels_in_use.needs_mosaic
def test_a_dot_that_only_a_gpu_rollout_leaves_unquantised_is_named(monkeypatch):
  rollout, training = (
      _hopper_policy(monkeypatch, recipe) for recipe in (ONE_LAYER, FP8)
  )
  with pytest.raises(ValueError, match='first at Decoder/layers_1/mlp/down'):
    flow.require_subgraph(
        flow_check.decode_graph(
            rollout, tiny_run.engine_config(), tiny_run.state_shapes(rollout)
        ),
        flow_check.train_graph(training, LOSS, tiny_run.state_shapes(training)),
    )


@kernels_in_use.needs_mosaic
def test_what_a_kernel_of_decode_alone_rounds_otherwise_is_named(monkeypatch):
  of = _hopper_policy(monkeypatch, FP8)
  fewer_bits = mock.Mock(E4M3=formats.E5M2)
  monkeypatch.setattr(decode_attention, 'formats', fewer_bits)
  with pytest.raises(ValueError, match=r'layers_0/attn/o: .* -> e5m2'):
    check(of, tiny_run.state_shapes(of))


@kernels_in_use.needs_mosaic
def test_the_check_at_start_up_says_what_computes_each_operation(monkeypatch):
  of = _hopper_policy(monkeypatch, FP8)
  said = []
  monkeypatch.setattr(flow_check.logging, 'info', lambda *x: said.append(x))
  check(of, tiny_run.state_shapes(of))
  [(_, decode, training)] = said
  assert 'layers_*/attn/qkv: dot e4m3 x e4m3 -> bf16;' in decode
  assert 'layers_*/attn/attention: attention by mosaic_sm90;' in training


def _kernels(layers: int) -> dict[str, int]:
  """Returns how many kernels of each name a GPU's update is made of."""
  of = tiny_run.policy(family='qwen3', layers=layers)
  # Whole tiles of everything, for which all kernels are.
  sizes = dict(model_dim=128, head_dim=64, ffn_dim=128, vocab_size=128)
  of = dataclasses.replace(
      of, model=dataclasses.replace(of.model, **sizes), tile=64, remat='full'
  )
  state = tiny_run.state_shapes(of)

  def update(state, batch, temperature):
    of_leaves = gradients.differentiable_loss(
        of, LOSS, state, batch, temperature
    )
    return jax.grad(of_leaves, argnums=(0, 1), has_aux=True)(
        state.trainable, state.fp8_state
    )

  traced = jax.make_jaxpr(of.bound(update))(
      state,
      TrainBatch.of_shapes(1, of.tile),
      jax.ShapeDtypeStruct((), 'float32'),
  )
  found = collections.defaultdict(set)
  for eqn in build.equations(traced.jaxpr):
    if eqn.primitive.name == kernels_in_use.CALL:
      found[str(eqn.params['name'])].add(id(eqn.params['jaxprs'][0]))
  return {name: len(kernels) for name, kernels in found.items()}


@kernels_in_use.needs_mosaic
def test_no_kernel_is_made_again_for_another_layer(monkeypatch):
  kernels_in_use.as_on_hopper(monkeypatch)
  two = _kernels(layers=2)
  assert {'rms_norm', 'turn', 'swiglu_backward', 'flash_attention'} <= {*two}
  assert _kernels(layers=3) == two
