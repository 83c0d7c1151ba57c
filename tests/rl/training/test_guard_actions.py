"""Planted faults in a whole run, and what the guard does about them.

The faults are functions of the step, so a run that is killed and resumed meets
them again.
"""

import dataclasses
import os
import pathlib
import shutil
import signal

import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.config import build as configs
from jetrl_jax.config import saved_policy
from jetrl_jax.core.interrupt import StopRequested
from jetrl_jax.fp8 import scaling_state
from jetrl_jax.rl.training.guard import Action, GuardState
from jetrl_jax.rl.training.trainer import Trainer
from tests import whole_run

DOWN = 'layers_0/mlp/down'
# As in the other whole runs, but for the precision that the guard changes to,
# which compiles once more.
CHANGES = {
    'guard.enable': True,
    'guard.max_mismatch_token_frac': 0.0,
    'guard.patience': 1,
    'trainer.total_training_steps': 8,
    'trainer.test_freq': 0,
    'trainer.save_freq': 1,
    'trainer.keep_latest': 1,
    'trainer.keep_best': 0,
}


class _Killed(BaseException):
  pass


class _Faulty(Trainer):
  """A run that meets a fault at steps 3, 4, 5 and 7.

  Attributes:
    stop_before: name of the action during which SIGTERM comes.
    killed_in: the step that is killed after its updates.
    copied_in: the step after whose updates the workdir is copied, as a kill
      would leave it.
    copy: where to.
  """

  stop_before = ''
  killed_in = -1
  copied_in = -1
  copy = pathlib.Path()

  def _train_step(self, step, state):
    if step + 1 == 3:
      self._move_a_log_prob()
    if step + 1 in (4, 5) and DOWN in scaling_state.dot_paths(state.fp8_state):
      # A scale far too small: nearly all of the input saturates.
      entry = state.fp8_state['layers_0']['mlp']['down']['input']
      entry['scale'] = jnp.full_like(entry['scale'], 2.0**-30)
    if step + 1 == 7:
      for tree in (state.weights, state.trainable):
        gain = tree['final_norm']['scale']
        tree['final_norm']['scale'] = jnp.full_like(gain, jnp.nan)
    return super()._train_step(step, state)

  def _move_a_log_prob(self):
    """One log-prob of the next rollout, by one unit in the last place."""
    rollout = self.collector.rollout

    def moved(*arguments):
      self.collector.rollout = rollout
      completions = rollout(*arguments)
      logprobs = completions[0].logprobs
      logprobs[0] = np.nextafter(logprobs[0], np.float32(-9))
      return completions

    self.collector.rollout = moved

  def _apply_guard_action(self, state):
    if self.guard.due is not None and self.guard.due.name == self.stop_before:
      os.kill(os.getpid(), signal.SIGTERM)
    due, self.accuracy = self.guard.due, 0.5  # As if it had been evaluated.
    state = super()._apply_guard_action(state)
    # That was another state.
    assert self.accuracy == (0.5 if due is None else None)
    return state

  def _finish(self, step, state, metrics):
    if step == self.killed_in:
      raise _Killed
    if step == self.copied_in:
      self.folder.checkpoints.wait()
      shutil.copytree(self.folder.path, self.copy)
    super()._finish(step, state, metrics)


def _trainer(workdir) -> _Faulty:
  return _Faulty(configs.build(whole_run.config(**CHANGES)), workdir)


@pytest.fixture(scope='module')
def guarded(tmp_path_factory):
  workdir = tmp_path_factory.mktemp('guarded') / 'run'
  trainer = _trainer(workdir)
  trainer.copied_in, trainer.copy = 7, workdir.with_name('killed')
  trainer.train()
  return workdir


@pytest.mark.slow
def test_faults_are_answered_by_rollback_new_scales_precision_and_rollback(
    guarded,
):
  steps = whole_run.records(guarded)[1:]
  actions = ('recalibrate', 'high_precision', 'rollback', 'rollback_to')
  found = [
      [(name, s[f'guard/{name}']) for name in actions if f'guard/{name}' in s]
      for s in steps
  ]
  # The unit in the last place: nothing to blame, so back to step 1, the last
  # that the step after it confirmed; later back to it again, which is in
  # another precision and older than keep_latest.
  back = [('rollback', 1), ('rollback_to', 1)]
  assert found == [
      [],
      [],
      back,
      [('recalibrate', 1)],
      [('high_precision', 1)],
      [],
      back,
      [],
  ]
  assert [s['guard/over'] for s in steps] == [0, 0, 1, 1, 1, 0, 3, 0]
  tokens = steps[2]['response_length/mean'] * 16
  mismatch = [s['training/mismatch_token_frac'] for s in steps]
  # Equal bits everywhere else, also between NaN and NaN.
  assert mismatch == [0, 0, pytest.approx(1 / tokens), 0, 0, 0, 0, 0]
  assert [s['alarm/inexact'] for s in steps] == [0, 0, 1, 0, 0, 0, 0, 0]
  saturated = [s['fp8/input/saturated_frac/max'] for s in steps]
  assert min(saturated[3:5]) > 0.9 and max(saturated[5:]) < 0.01
  assert steps[6]['actor/grad_norm'] is None and steps[7]['actor/grad_norm'] > 0
  assert [DOWN in s['fp8_health'] for s in steps] == [True] * 5 + [False] * 3


@pytest.mark.slow
def test_a_rolled_back_run_goes_on_from_the_weights_of_its_checkpoint(guarded):
  # Two updates after step 1, that of step 8 among them; five were given up.
  last = whole_run.restored(guarded, changes=CHANGES)
  assert last.step == 8 and int(last.state['opt_step']) == 2
  first = whole_run.restored(guarded, 1, CHANGES)
  assert DOWN in scaling_state.dot_paths(first.state['fp8_state'])
  assert DOWN not in scaling_state.dot_paths(last.state['fp8_state'])
  assert last.host_state['guard']['rollbacks'] == 2
  steps = sorted(int(p.name) for p in (guarded / 'checkpoints').glob('[0-9]*'))
  assert steps == [1, 8]


@pytest.mark.slow
def test_a_guarded_policy_is_read_in_the_precision_of_its_checkpoint(guarded):
  for step, quantised in ((1, True), (8, False)):
    recipe = saved_policy.restore(str(guarded), step=step).policy.recipe
    assert recipe.quantizes(DOWN) == quantised
    assert recipe.quantizes('layers_0/mlp/gate_up')


@pytest.mark.slow
def test_a_guarded_run_that_is_killed_ends_in_the_same_bits(guarded):
  # In the precision that the guard chose, and before it rolls back.
  killed = guarded.with_name('killed')
  assert whole_run.restored(killed, changes=CHANGES).step == 6
  _trainer(killed).train()
  assert whole_run.outcome(killed, CHANGES) == whole_run.outcome(
      guarded, CHANGES
  )


@pytest.mark.parametrize(
    'changes',
    [
        {},
        {'guard.enable': False},
        {'guard.actions': ('recalibrate', 'high_precision')},
    ],
)
def test_an_action_that_a_resume_no_longer_allows_is_left_undone(
    tmp_path, caplog, changes
):
  trainer = whole_run.trainer(tmp_path, CHANGES | changes)
  decided = GuardState(
      high_precision=(DOWN,), good=2, due=Action(name='rollback', step=2)
  )
  saved = trainer._host_state() | {'guard': decided.to_json()}
  trainer._restore_host_state(saved)
  trainer.close()
  if not changes:
    assert trainer.guard == decided and not caplog.text
    return
  # The dots that it moved are how the state is.
  assert trainer.guard == dataclasses.replace(decided, due=None)
  assert 'The guard had decided on rollback, which guard.enable' in caplog.text


@pytest.mark.slow
def test_a_guarded_run_that_is_stopped_while_it_acts_ends_in_the_same_bits(
    guarded, tmp_path
):
  stopped = _trainer(tmp_path)
  stopped.stop_before = 'recalibrate'
  with pytest.raises(StopRequested):
    stopped.train()
  # Decided and not done.
  saved = whole_run.restored(tmp_path, changes=CHANGES)
  assert saved.step == 4
  assert saved.host_state['guard']['due']['name'] == 'recalibrate'
  killed = _trainer(tmp_path)
  killed.killed_in = 5
  with pytest.raises(_Killed):
    killed.train()
  assert whole_run.restored(tmp_path, changes=CHANGES).step == 4
  _trainer(tmp_path).train()
  assert whole_run.outcome(tmp_path, CHANGES) == whole_run.outcome(
      guarded, CHANGES
  )
