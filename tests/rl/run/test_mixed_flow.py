"""Mixed flows: a rollout in another precision than training's."""

import dataclasses
import functools
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import logging

from jetrl_jax import kernels
from jetrl_jax.config import build as configs
from jetrl_jax.core.interrupt import StopRequested
from jetrl_jax.fp8 import Recipe, scaling_state
from jetrl_jax.models.policy import Policy
from jetrl_jax.optim.types import TrainState
from jetrl_jax.rl import objective
from jetrl_jax.rl.run import flow_check, mixed_flow, train_state
from jetrl_jax.rl.run.other_precision import OtherPrecision
from tests import whole_run
from tests.rl import tiny_run, tiny_updates

_CHANGES = {'trainer.total_training_steps': 2, 'trainer.test_freq': 2}
# Delayed scales, which are a state of the rollout's own.
_DELAYED = _CHANGES | {'precision.rollout_recipe': 'fp8_delayed'}
_FP8_ROLLOUT = _DELAYED | {
    'flow': 'fp8_rollout',
    'trainer.val_recipes': ('bf16',),
}
_BF16_ROLLOUT = _CHANGES | {
    'precision.rollout_recipe': 'bf16',
    'algorithm.old_logprobs': 'recompute',
}


@pytest.fixture(scope='module')
def fp8_rollout(tmp_path_factory):
  """A finished run that trains in BF16 and samples in FP8."""
  workdir = tmp_path_factory.mktemp('fp8_rollout')
  whole_run.trainer(workdir, _FP8_ROLLOUT).train()
  return workdir


def _steps(workdir) -> list[dict]:
  return whole_run.records(workdir)[1:]


def test_a_rollout_in_another_precision_is_another_policy(fp8_rollout):
  for step in _steps(fp8_rollout):
    # E4M3 rounds by up to 6%: no token's float32 log-prob survives, and the
    # quantised policy is still nearly the same one.
    assert step['training/mismatch_token_frac'] > 0.9
    assert 0 < step['training/rollout_logprob_diff_mean'] < 0.1
    assert 0 < step['rollout_corr/k3_kl'] < 0.01
    # pi_old is training's own, so the first update is on-policy for the ratio.
    assert step['actor/ppo_kl'] == 0.0
    assert step['training/updates'] == 1


def test_the_rollouts_weights_follow_the_masters_step_by_step(fp8_rollout):
  for step in _steps(fp8_rollout):
    assert step['rollout_fp8/changed_weight_bytes/mean'] > 0.01
    # How far either side moved, by log-probs of the same answers.
    assert step['actor/update_k3'] > 0 and step['rollout_actor/update_k3'] > 0
    # Its activation scales have seen its own inputs: nothing is cut off.
    assert step['rollout_fp8/input/saturated_frac/max'] < 0.01
    assert step['rollout_fp8/input/sqnr_db/min'] > 25
    # Training is BF16, and no gradient is quantised anywhere.
    assert not any(name.startswith(('fp8', 'rollout_fp8/out')) for name in step)


def test_held_out_accuracy_is_measured_in_other_recipes_from_step_0_on(
    fp8_rollout,
):
  lines = whole_run.records(fp8_rollout)
  own = 'val-core/heldout/acc/mean@1'
  assert [line['step'] for line in lines if own in line] == [0, 2]
  for line in lines:
    assert (own in line) == ('val-bf16/heldout/acc/mean@1' in line)


def test_other_recipes_are_evaluated_on_the_masters_of_the_state():
  spec = configs.build(whole_run.config(**_FP8_ROLLOUT))
  masters = spec.initial_params()
  optimizer = spec.optimizer.build()
  state = train_state.create(spec.policy, masters, optimizer, spec.mesh)
  high = OtherPrecision(spec, 'bf16', state).params(state)
  # What the BF16 side of the run reads itself, to the bit.
  jax.tree.map(np.testing.assert_array_equal, high.weights, state.weights)
  low = OtherPrecision(spec, 'fake_int4', state).params(state)
  down = low.weights['layers_0']['mlp']['down']['kernel']
  assert down.values.dtype == np.int8 and abs(down.values).max() <= 7


def test_a_recipe_whose_scales_belong_to_a_run_is_refused_for_evaluation():
  with pytest.raises(ValueError, match="val_recipes has 'fp8_delayed'; allo"):
    configs.build(whole_run.config(**{'trainer.val_recipes': ('fp8_delayed',)}))


def test_a_checkpoint_has_the_rollouts_scales_and_makes_its_weights_again(
    fp8_rollout,
):
  state = whole_run.restored(fp8_rollout, changes=_FP8_ROLLOUT).state
  assert state['fp8_state'] == {}
  qkv, *_ = scaling_state.dot_paths(state['rollout_fp8_state'])
  slot = functools.reduce(
      lambda node, key: node[key], qkv.split('/'), state['rollout_fp8_state']
  )
  # Two fillings by the calibration and one observation per step.
  assert int(np.count_nonzero(slot['input']['amax_history'])) == 4
  assert not np.count_nonzero(slot['output_grad']['amax_history'])
  assert 'rollout_weights' not in state


@pytest.mark.slow
def test_a_mixed_run_that_is_stopped_and_resumed_ends_in_the_same_bits(
    tmp_path, fp8_rollout
):
  trainer = whole_run.trainer(tmp_path, _FP8_ROLLOUT)
  train_step = trainer._train_step

  def stop(step, state):
    if step == 1:  # After the first requantisation.
      os.kill(os.getpid(), signal.SIGTERM)
    return train_step(step, state)

  trainer._train_step = stop
  with pytest.raises(StopRequested):
    trainer.train()
  assert whole_run.restored(tmp_path, changes=_FP8_ROLLOUT).step == 1
  whole_run.trainer(tmp_path, _FP8_ROLLOUT).train()
  assert whole_run.outcome(tmp_path, _FP8_ROLLOUT) == whole_run.outcome(
      fp8_rollout, _FP8_ROLLOUT
  )


@pytest.mark.slow
def test_truncated_importance_sampling_changes_the_gradient_of_a_mixed_flow(
    tmp_path, fp8_rollout
):
  # Another loss: accumulate compiles once more.
  changes = {'flow': 'flashrl', 'trainer.total_training_steps': 1}
  whole_run.trainer(tmp_path, _DELAYED | changes).train()
  (corrected,), (plain, _) = _steps(tmp_path), _steps(fp8_rollout)
  name = 'rollout_corr/kl'
  assert corrected[name] == plain[name]  # The same rollout, to the bit.
  assert corrected['actor/grad_norm'] != plain['actor/grad_norm']
  assert corrected['actor/grad_norm'] == pytest.approx(
      plain['actor/grad_norm'], rel=0.1
  )


@pytest.mark.slow
@pytest.mark.parametrize('rollout_recipe', ['int8', 'fp8_token'])
def test_dynamic_scales_need_neither_calibration_nor_history(
    tmp_path, rollout_recipe
):
  changes = {'flow': 'qurl', 'precision.rollout_recipe': rollout_recipe}
  whole_run.trainer(tmp_path, _CHANGES | changes).train()
  for step in _steps(tmp_path):
    assert step['training/mismatch_token_frac'] > 0.9
    assert 0 < step['rollout_corr/k3_kl'] < 0.01
    assert step['rollout_fp8/changed_weight_bytes/mean'] > 0.01
    # How far either side moved, by log-probs of the same answers.
    assert step['actor/update_k3'] > 0 and step['rollout_actor/update_k3'] > 0
    assert step['rollout_fp8/kernel/sqnr_db/min'] > 25
    # Nobody looks at the inputs: an absent number is not a 0.
    assert not any(name.startswith('rollout_fp8/input') for name in step)


@pytest.mark.slow
def test_training_may_be_the_quantised_side(tmp_path):
  whole_run.trainer(tmp_path, _BF16_ROLLOUT).train()
  for step in _steps(tmp_path):
    assert step['training/mismatch_token_frac'] > 0.9
    assert step['fp8/changed_weight_bytes/mean'] > 0.01
    assert not any(name.startswith('rollout_fp8') for name in step)


def _mixed_state(
    train: Recipe, rollout: Recipe
) -> tuple[Policy, Policy, TrainState]:
  """Policies and a state of shapes."""
  policies = tiny_run.policy(train), tiny_run.policy(rollout)
  state, side = (tiny_run.state_shapes(policy) for policy in policies)
  state = dataclasses.replace(
      state, rollout_fp8_state=side.fp8_state, rollout_weights=side.weights
  )
  return *policies, state


_LOSS = functools.partial(objective.policy_loss, objective.LossConfig())


def _report(
    train: Recipe, rollout: Recipe, moved: tuple[str, ...] = ()
) -> None:
  policy, rollout_policy, state = _mixed_state(train, rollout)
  flow_check.report_mixed_flow(
      policy,
      rollout_policy,
      _LOSS,
      tiny_run.engine_config(),
      state,
      moved=moved,
  )


@pytest.mark.parametrize(
    'train, rollout, dot',
    [
        (
            tiny_run.BF16,
            tiny_run.FP8,
            'dot_general (e4m3, e4m3) -> bf16; training has dot_general'
            ' (bf16, bf16) -> bf16',
        ),
        (
            tiny_run.FP8,
            tiny_run.BF16,
            'dot_general (bf16, bf16) -> bf16; training has dot_general'
            ' (e4m3, e4m3) -> bf16',
        ),
    ],
)
def test_the_start_up_says_how_the_two_sides_of_a_mixed_flow_differ(
    train, rollout, dot, monkeypatch
):
  said = []
  monkeypatch.setattr(logging, 'info', lambda *args: said.append(args))
  _report(train, rollout)
  ((text, *values),) = said
  sentence = text % tuple(values)
  assert f'Mixed flow ({rollout.name} rollout, {train.name} tr' in sentence
  for layer in ('attn/qkv', 'attn/o', 'mlp/gate_up', 'mlp/down'):
    assert f'layers_0/{layer}: the rollout has {dot}' in sentence


def test_a_mixed_flow_that_quantises_nothing_is_refused():
  everything = dataclasses.replace(tiny_run.FP8, high_precision_layers=('.*',))
  with pytest.raises(ValueError, match='no dot is quantised on one side only'):
    _report(tiny_run.BF16, everything)
  # Unless it is the guard that has left nothing to quantise.
  _report(tiny_run.BF16, everything, moved=('layers_0/mlp/down',))


def test_a_copied_pi_old_is_refused_where_it_would_undo_every_correction():
  changes = {
      'precision.recipe': 'bf16',
      'precision.rollout_recipe': 'fp8_delayed',
  }
  with pytest.raises(
      ValueError,
      match="training runs 'bf16' and the rollout 'fp8_delayed': in a mixed"
      ".*no correction could act. Set algorithm.old_logprobs='recompute'",
  ):
    configs.build(whole_run.config(**changes))


def test_the_same_recipe_on_both_sides_is_one_flow():
  spec = configs.build(
      whole_run.config(**{'precision.rollout_recipe': 'fp8_delayed'})
  )
  assert not spec.is_mixed and spec.rollout_policy == spec.policy


def test_observing_sees_what_the_rollouts_own_recipe_feeds_its_dots():
  run = tiny_run.fp8_run()
  side = run.start
  mixed = dataclasses.replace(
      side,
      fp8_state={},
      rollout_fp8_state=side.fp8_state,
      rollout_weights=side.weights,
  )
  requantizer = mixed_flow.Requantizer(run.policy, run.mesh, mixed)
  batches = tiny_updates.batches(tiny_run.completions())
  seen = [
      requantizer._observed_inputs(mixed_flow.as_rollout(mixed), b)
      for b in batches
  ]
  # What the training forward of the same recipe observes, backward and all.
  gradients, _ = run.accumulate(side, batches)
  joined = functools.reduce(scaling_state.combine, seen)
  for layer, theirs in gradients.fp8.items():
    of_inputs, of_gradients = joined[layer]
    tiny_run.assert_same_bits(of_inputs[:, 0], theirs[0, :, 0])
    assert not np.any(of_gradients)
    assert np.all(theirs[:, :, 0])


def test_a_rollout_with_dynamic_scales_is_measured_where_dots_are_chosen():
  run = tiny_run.fp8_run()
  batches = tiny_updates.batches(tiny_run.completions())
  tokens = sum(int((np.asarray(b.segment_ids) > 0).sum()) for b in batches)
  plain, choosing = (
      tiny_run.policy(Recipe(name='int8', min_sqnr_db=least), run.mesh)
      for least in (0.0, 30.0)
  )
  state = mixed_flow.create(plain, run.start, run.mesh)
  measure = mixed_flow.Requantizer(plain, run.mesh, state).calibrate
  assert measure(state, batches) is state
  measure = mixed_flow.Requantizer(choosing, run.mesh, state).calibrate
  seen = measure(state, batches)
  for path in scaling_state.dot_paths(state.rollout_fp8_state):
    sums = _at(seen.rollout_fp8_state, path)['input']['health']
    elements, *_, signal, noise = np.asarray(sums)
    width = _at(state.trainable, path)['kernel'].shape[1]
    assert elements == tokens * width
    assert 30 < 10 * np.log10(signal / noise) < 50


def _at(tree, path: str):
  return functools.reduce(lambda node, key: node[key], path.split('/'), tree)


def test_requantised_weights_are_those_of_the_masters():
  run = tiny_run.fp8_run()
  mixed = dataclasses.replace(
      tiny_run.copy(run.start),
      rollout_fp8_state=tiny_run.copy(run.start.fp8_state),
      rollout_weights=tiny_run.copy(run.start.weights),
  )
  moved = jax.tree.map(lambda x: x * 1.5, mixed.trainable)
  mixed = dataclasses.replace(mixed, trainable=moved)
  requantizer = mixed_flow.Requantizer(run.policy, run.mesh, mixed)
  after, changed = requantizer(
      mixed, tiny_updates.batches(tiny_run.completions())
  )
  expected = kernels.prepare_weights(
      dataclasses.replace(after, trainable=moved).masters,
      after.rollout_fp8_state,
      run.policy.recipe,
  )
  tiny_run.assert_same_bits(after.rollout_weights, expected)
  # 1.5 x is no power of two: about every byte is another.
  assert min(jax.tree.leaves(changed)) > 0.5
  # Training's own side is not touched.
  tiny_run.assert_same_bits(after.fp8_state, run.start.fp8_state)
  tiny_run.assert_same_bits(after.weights, run.start.weights)
  assert jnp.all(after.opt_step == run.start.opt_step)
