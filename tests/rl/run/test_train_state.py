"""Tests of how training states are built, restored and calibrated."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jetrl_jax.core import sharding
from jetrl_jax.fp8 import scaling_state
from jetrl_jax.models.policy import PolicyParams
from jetrl_jax.optim.adamw import OptimizerConfig
from jetrl_jax.rl.run import train_state
from tests.rl import tiny_run, tiny_updates

PARAMS = {
    'embed': {'embedding': 0},
    'layers_0': {'attn': {'qkv': {'kernel': 1, 'bias': 2}}},
    'layers_1': {'attn': {'qkv': {'kernel': 3, 'bias': 4}}},
}


def test_patterns_match_whole_paths():
  trainable, frozen = train_state.partition(
      PARAMS, ('embed/.*', 'layers_0/.*/bias')
  )
  assert frozen == {
      'embed': {'embedding': 0},
      'layers_0': {'attn': {'qkv': {'bias': 2}}},
  }
  assert trainable == {
      'layers_0': {'attn': {'qkv': {'kernel': 1}}},
      'layers_1': PARAMS['layers_1'],
  }


def test_no_pattern_freezes_nothing():
  assert train_state.partition(PARAMS, ()) == (PARAMS, {})


@pytest.mark.parametrize(
    ('patterns', 'message'),
    [
        # A part of a path is no match.
        (('embed',), r"\['embed'\] match no parameter; paths look like"),
        (('.*bias', 'layer_0/.*'), r"\['layer_0/\.\*'\] match no parameter"),
        (('.*',), 'matches every parameter; nothing to train'),
        (('embed/.*', 'layers_.*'), 'matches every parameter'),
    ],
)
def test_patterns_that_cannot_be_meant_are_refused(patterns, message):
  with pytest.raises(ValueError, match=message):
    train_state.partition(PARAMS, patterns)


@pytest.mark.parametrize('name', ['fp8_delayed', 'bf16'])
def test_a_pattern_of_dots_that_matches_none_is_refused(name):
  # A part of a path is no match, and a parameter is no dot.
  for wrong in (
      *('layer_0/.*', 'layers_0/attn', 'attn/qkv'),
      *('layers_0/attn/qkv/kernel', 'embed'),
  ):
    kept = ('layers_1/.*', wrong)
    recipe = dataclasses.replace(
        tiny_run.FP8, name=name, high_precision_layers=kept
    )
    of = tiny_run.policy(recipe, layers=2)
    with pytest.raises(ValueError) as refused:
      train_state.create(
          of,
          tiny_run.masters(of),
          OptimizerConfig(lr=1e-3).build(),
          sharding.make_mesh(),
      )
    assert str(refused.value).startswith(
        f"precision.high_precision_layers: '{wrong}' matches no dot; they are"
        " ['layers_0/attn/"
    )


def test_a_cold_start_has_kernel_scales_and_nothing_else_recorded():
  run, _, _ = tiny_run.cold_fp8_run()
  state = run.start
  assert int(state.opt_step) == 0
  paths = scaling_state.dot_paths(state.fp8_state)
  assert paths == [
      f'layers_0/{dot}'
      for dot in ('attn/o', 'attn/qkv', 'mlp/down', 'mlp/gate_up')
  ]
  for path in paths:
    layer, part, dot = path.split('/')
    slot = state.fp8_state[layer][part][dot]
    amax = float(jnp.abs(state.trainable[layer][part][dot]['kernel']).max())
    assert float(slot['kernel']['amax_history'].max()) == amax
    assert 448 * float(slot['kernel']['scale']) >= amax
    for operand in ('input', 'output_grad'):
      assert not slot[operand]['amax_history'].any()
      assert float(slot[operand]['scale']) == 1.0


def test_a_bf16_run_has_no_slots_and_casts_every_weight():
  state = tiny_run.bf16_run().start
  assert state.fp8_state == {}
  for leaf in jax.tree.leaves(state.weights):
    assert leaf.dtype == jnp.bfloat16


def test_weights_of_a_restored_state_are_those_it_was_saved_with():
  run, (update, *_) = tiny_run.fp8_run(), tiny_updates.updates('fp8')
  saved = train_state.without_weights(update.after)
  assert set(saved) == {
      'trainable',
      'frozen',
      'fp8_state',
      'opt_state',
      'opt_step',
      'rollout_fp8_state',
  }
  # A unified flow has no slots of the rollout's own.
  assert not saved['rollout_fp8_state']
  empty = dataclasses.replace(update.after, weights={})
  restored = train_state.with_weights(run.policy, empty, run.mesh, record=False)
  tiny_run.assert_same_bits(restored, update.after)


def test_the_abstract_state_is_what_create_makes():
  mesh = sharding.make_mesh(fsdp=4)
  of = tiny_run.policy(mesh=mesh)
  optimizer = OptimizerConfig(moments='float32').build()
  frozen = ('final_norm/.*',)
  made = tiny_run.cold_state(of, mesh, optimizer, frozen)
  shapes = tiny_run.state_shapes(of)
  like = train_state.abstract(of, shapes.trainable, optimizer, mesh, frozen)
  assert like.weights == {}
  found = jax.tree_util.tree_leaves_with_path(train_state.without_weights(like))
  expected = jax.tree_util.tree_leaves_with_path(
      train_state.without_weights(made)
  )
  assert [path for path, _ in found] == [path for path, _ in expected]
  for (path, a), (_, b) in zip(found, expected, strict=True):
    assert (a.shape, a.dtype) == (b.shape, b.dtype), path
    assert a.sharding.is_equivalent_to(b.sharding, a.ndim), path


def test_the_reference_outlives_the_run_and_its_updates(tmp_path):
  first, *_, last = tiny_updates.updates('fp8')
  # What a run left that was killed before its first checkpoint is replaced.
  for state in (last.after, first.before):
    made = train_state.reference(tmp_path / 'reference', state, cold=True)
  tiny_run.assert_same_bits(
      made, PolicyParams(first.before.weights, first.before.fp8_state)
  )
  restored = train_state.reference(
      tmp_path / 'reference', last.after, cold=False
  )
  tiny_run.assert_same_bits(restored, made)
  # A copy: the update takes the state's own buffers over.
  for a, b in zip(
      jax.tree.leaves(made.weights),
      jax.tree.leaves(first.before.weights),
      strict=True,
  ):
    assert a is not b


def test_a_resumed_run_without_its_reference_is_refused(tmp_path):
  with pytest.raises(ValueError, match='holds no reference policy'):
    train_state.reference(
        tmp_path / 'reference', tiny_run.fp8_run().start, cold=False
    )
