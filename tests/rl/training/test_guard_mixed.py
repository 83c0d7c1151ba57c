"""The guard in whole mixed runs: planted faults, and precision that gives way.

All of these compile what they move to; the decisions alone are in
`test_guard.py`, the choice of dots in `rl/run/test_precision.py`.
"""

import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.config import build as configs
from jetrl_jax.config import saved_policy
from jetrl_jax.fp8 import QTensor, scaling_state
from jetrl_jax.kernels.quantized_dot.weights import prepare_weights
from jetrl_jax.rl.run import precision as run_precision
from jetrl_jax.rl.training.trainer import Trainer
from tests import whole_run
from tests.rl import tiny_run

pytestmark = pytest.mark.slow

DOWN = 'layers_0/mlp/down'
_GUARDED = {
    'guard.enable': True,
    'guard.patience': 1,
    'trainer.test_freq': 0,
    'trainer.save_freq': 1,
    'trainer.keep_latest': 2,
    'trainer.keep_best': 0,
}
# Delayed scales on the rollout's side alone: they can saturate, and be measured
# anew.
FAULTY = _GUARDED | {
    'flow': 'flashrl',
    'precision.rollout_recipe': 'fp8_delayed',
    'guard.max_k3': 1e-3,
    'trainer.total_training_steps': 10,
}
# Dynamic scales; 39 dB is more than the input of `down` keeps of INT8. No
# mismatch at all is allowed, so the guard moves one dot after the other.
STRICT = _GUARDED | {
    'flow': 'flashrl',
    'precision.min_sqnr_db': 39.0,
    'guard.max_k3': 0.0,
    'guard.actions': ('high_precision', 'rollback'),
    'trainer.total_training_steps': 5,
}
ACTIONS = ('recalibrate', 'high_precision', 'rollback', 'rollback_to')


class _Copied(Trainer):
  """A run that meets faults, and whose workdir is copied once.

  Attributes:
    faulty: meets a fault on the rollout's side at steps 3, 4, 6 and 7, and one
      in the masters at step 9.
    copied_in: the step after whose updates the workdir is copied, as a kill
      would leave it.
    copy: where to.
    acted: the rollout's recipe and the state after each action, by the step
      that it follows.
  """

  faulty = False
  copied_in = -1
  copy = pathlib.Path()

  def __init__(self, *arguments):
    super().__init__(*arguments)
    self.acted = {}

  def _apply_guard_action(self, state):
    action = self.guard.due
    state = super()._apply_guard_action(state)
    if action is not None:
      self.acted[self.folder.saved_step] = (
          self.spec.rollout_policy.recipe,
          jax.device_get(state),
      )
    return state

  def _train_step(self, step, state):
    if self.faulty:
      self._plant(step + 1, state)
    return super()._train_step(step, state)

  def _plant(self, step, state):
    layer = 'layers_0'
    if step in (3, 4) and DOWN in scaling_state.dot_paths(
        state.rollout_fp8_state
    ):
      # A scale far too small: nearly all of the rollout's input saturates.
      entry = state.rollout_fp8_state[layer]['mlp']['down']['input']
      entry['scale'] = jnp.full_like(entry['scale'], 2.0**-30)
    if step in (6, 7):
      # The rollout's kernel is four times training's: other log-probs. What it
      # feeds, `down`, is in 8 bits no more and cannot saturate.
      held = state.rollout_weights[layer]['mlp']['gate_up']
      held['kernel'] = QTensor(
          values=held['kernel'].values, scale=held['kernel'].scale * 4
      )
    if step == 9:
      for tree in (state.weights, state.rollout_weights, state.trainable):
        gain = tree['final_norm']['scale']
        tree['final_norm']['scale'] = jnp.full_like(gain, jnp.nan)

  def _finish(self, step, state, metrics):
    if step == self.copied_in:
      self.folder.checkpoints.wait()
      shutil.copytree(self.folder.path, self.copy)
    super()._finish(step, state, metrics)


def _trainer(workdir, changes) -> _Copied:
  trainer = _Copied(configs.build(whole_run.config(**changes)), workdir)
  trainer.faulty = changes is FAULTY
  return trainer


def _run(tmp_path_factory, changes, copied_in):
  workdir = tmp_path_factory.mktemp('mixed') / 'run'
  trainer = _trainer(workdir, changes)
  trainer.copied_in, trainer.copy = copied_in, workdir.with_name('killed')
  trainer.train()
  return workdir, trainer.acted


@pytest.fixture(scope='module')
def faulty(tmp_path_factory):
  return _run(tmp_path_factory, FAULTY, copied_in=7)


@pytest.fixture(scope='module')
def strict(tmp_path_factory):
  return _run(tmp_path_factory, STRICT, copied_in=3)


def _actions(steps):
  return [
      [(name, s[f'guard/{name}']) for name in ACTIONS if f'guard/{name}' in s]
      for s in steps
  ]


def test_faults_of_the_rollouts_side_are_answered(faulty):
  steps = whole_run.records(faulty[0])[1:]
  back = [('rollback', 1), ('rollback_to', 1)]
  # The dot that saturates; then the mismatch, which names no dot, so scales and
  # the noisiest dot are tried; then NaN, which only a checkpoint undoes. Step 1
  # is the last that the step after it confirmed.
  assert _actions(steps) == [
      [],
      [],
      [('recalibrate', 1)],
      [('high_precision', 1)],
      [],
      [('recalibrate', 1)],
      [('high_precision', 1)],
      [],
      back,
      [],
  ]
  saturated = [s['rollout_fp8/input/saturated_frac/max'] for s in steps]
  assert min(saturated[2:4]) > 0.9
  assert max(saturated[:2] + saturated[4:8] + saturated[9:]) < 0.01
  k3 = [s['rollout_corr/k3_kl'] for s in steps]
  assert min(k3[5:7]) > 1e-3 > max(k3[:2] + k3[7:8] + k3[9:])
  assert steps[3]['guard_dots'] == {DOWN: 1}
  (noisiest,) = steps[6]['guard_dots']
  kept = {
      dot: min(entry['sqnr_db'] for entry in operands.values())
      for dot, operands in steps[6]['rollout_fp8_health'].items()
  }
  assert min(kept, key=kept.get) == noisiest != DOWN
  counts = [len(s['rollout_fp8_health']) for s in steps]
  assert counts == [4] * 4 + [3] * 3 + [2] * 3


def test_new_scales_of_the_rollout_are_measured_as_at_its_start(faulty):
  for step in (3, 6):
    recipe, state = faulty[1][step]
    for path in scaling_state.dot_paths(state.rollout_fp8_state):
      slot = _at(state.rollout_fp8_state, path)
      # Prompts, then a short rollout; nothing of what was seen before.
      assert np.count_nonzero(slot['input']['amax_history']) == 2
      assert np.count_nonzero(slot['kernel']['amax_history']) == 1
    # Training is BF16 and has no scales.
    assert state.fp8_state == {}
    _assert_weights_of(state, state.rollout_fp8_state, recipe)


def test_moved_dots_are_in_high_precision_on_both_sides(faulty):
  for step, moved in ((4, 1), (7, 2)):
    recipe, state = faulty[1][step]
    dots = scaling_state.dot_paths(state.rollout_fp8_state)
    assert len(dots) == 4 - moved and DOWN not in dots
    kernels = [
        _at(weights, DOWN)['kernel']
        for weights in (state.weights, state.rollout_weights)
    ]
    tiny_run.assert_same_bits(*kernels)
    _assert_weights_of(state, state.rollout_fp8_state, recipe)


def test_a_rollback_takes_the_rollouts_weights_and_scales_back_too(faulty):
  first = whole_run.restored(faulty[0], 1, FAULTY)
  assert len(scaling_state.dot_paths(first.state['rollout_fp8_state'])) == 4
  recipe, state = faulty[1][9]
  # Its scales, but for the dots that have left 8 bits since.
  kept = scaling_state.restrict(first.state['rollout_fp8_state'], recipe)
  assert len(scaling_state.dot_paths(kept)) == 2
  tiny_run.assert_same_bits(state.rollout_fp8_state, kept)
  tiny_run.assert_same_bits(state.trainable, first.state['trainable'])
  _assert_weights_of(state, kept, recipe)
  last = whole_run.restored(faulty[0], changes=FAULTY)
  assert last.step == 10 and int(last.state['opt_step']) == 2


def test_a_guarded_mixed_run_that_is_killed_ends_in_the_same_bits(faulty):
  killed = faulty[0].with_name('killed')
  assert whole_run.restored(killed, changes=FAULTY).step == 6
  _trainer(killed, FAULTY).train()
  found = whole_run.outcome(killed, FAULTY)
  assert found == whole_run.outcome(faulty[0], FAULTY)


def test_dots_give_way_one_by_one_until_the_two_sides_agree(strict):
  workdir, _ = strict
  # 37.8 dB of its input are less than 39; the start keeps it out of INT8.
  settled = run_precision.read(workdir)
  assert settled is not None
  assert settled.high_precision == {DOWN: pytest.approx(37.8, abs=0.5)}
  steps = whole_run.records(workdir)[1:]
  one = [('high_precision', 1)]
  assert _actions(steps) == [one, one, one, [], []]
  moved = [dot for s in steps[:3] for dot in s['guard_dots']]
  assert len({DOWN, *moved}) == 4
  mismatch = [s['training/mismatch_token_frac'] for s in steps]
  # Nothing is quantised any more: what was a mixed flow is exact.
  assert min(mismatch[:3]) > 0.5 and mismatch[3:] == [0, 0]
  # Nor was it meant to be before: that is no alarm.
  assert not any(s['alarm/inexact'] for s in steps)
  assert [s['rollout_corr/k3_kl'] for s in steps[3:]] == [0, 0]
  assert not any('rollout_fp8_health' in s for s in steps[3:])


def test_chosen_and_moved_dots_survive_a_kill(strict):
  workdir, _ = strict
  killed = workdir.with_name('killed')
  assert whole_run.restored(killed, changes=_chosen(STRICT)).step == 2
  _trainer(killed, STRICT).train()
  changes = _chosen(STRICT)
  assert whole_run.outcome(killed, changes) == whole_run.outcome(
      workdir, changes
  )


def test_a_checkpoint_is_read_with_the_dots_it_was_sampled_with(strict):
  policy = saved_policy.restore(str(strict[0])).policy
  assert policy.recipe.name == 'int8'
  assert not any(
      policy.recipe.quantizes(f'layers_0/{dot}')
      for dot in ('attn/qkv', 'attn/o', 'mlp/gate_up', 'mlp/down')
  )


def _chosen(changes):
  """The changes with what the start chose written out, to read checkpoints."""
  return changes | {'precision.high_precision_layers': (DOWN,)}


def _at(tree, path):
  for key in path.split('/'):
    tree = tree[key]
  return tree


def _assert_weights_of(state, rollout_fp8_state, recipe):
  """The rollout's weights are the masters, quantised with these scales."""
  masters = state.masters
  expected = prepare_weights(masters, rollout_fp8_state, recipe)
  tiny_run.assert_same_bits(state.rollout_weights, expected)
