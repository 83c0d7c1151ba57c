"""Whole runs with turns, on the tiny config."""

import functools
import json
from unittest import mock

import pytest

from jetrl_jax.config import build as configs
from jetrl_jax.rl.run import calibration
from tests import whole_run

_CHANGES = {
    'environment.name': 'tests.rl.rollout.scripted:Digits',
    'environment.kwargs': '{"turns": 2}',
    'trainer.total_training_steps': 2,
    'trainer.test_freq': 2,
    'trainer.save_freq': 1,
}


@functools.cache
def _finished():
  workdir = whole_run.home() / 'environment'
  with mock.patch.object(
      calibration, 'rollout', wraps=calibration.rollout
  ) as sampled:
    whole_run.trainer(workdir, _CHANGES).train()
  # Scales are measured on what the policy will read: observations, too.
  assert sampled.called
  assert all(call.kwargs['environment'] for call in sampled.mock_calls)
  return workdir


def test_turns_are_learnt_from_without_a_bit_of_mismatch():
  start, *steps = whole_run.records(_finished())
  assert [r['training/mismatch_token_frac'] for r in steps] == [0.0, 0.0]
  for record in steps:
    assert 1 <= record['num_turns/mean'] <= 2
    assert 0 < record['environment/observation_frac'] < 1
    assert record['training/updates'] == 1
    assert record['critic/rewards/max'] != record['critic/rewards/min']
  assert sum(r.get('reward/environment_raised', 0) for r in steps) > 0
  # Without an accuracy of the environment's own, it is the reward.
  names = [n for n in start if n.startswith('val-core/')]
  assert 'val-core/heldout/reward/mean@1/ci95' in names
  assert (
      start['val-core/heldout/reward/mean@1']
      == start['val-core/heldout/acc/mean@1']
  )


def test_samples_show_the_observations_too():
  lines = (_finished() / 'samples' / '000002.jsonl').read_text().splitlines()
  responses = [json.loads(line)['response'] for line in lines]
  # The first observation is a digit and '='.
  assert all(r[0].isdigit() and r[1] == '=' for r in responses)


def test_a_resumed_run_has_the_episodes_of_an_uninterrupted_one(tmp_path):
  for steps in (1, 2):
    changes = _CHANGES | {'trainer.total_training_steps': steps}
    whole_run.trainer(tmp_path, changes).train()
  found = whole_run.outcome(tmp_path, _CHANGES)
  expected = whole_run.outcome(_finished(), _CHANGES)
  for name in ('state', 'host_state', 'rollouts', 'export'):
    assert found[name] == expected[name], name


def test_a_step_of_which_no_token_was_sampled_is_taken_and_told(
    tmp_path, caplog
):
  changes = {'environment.name': 'tests.rl.rollout.scripted:Down'}
  with caplog.at_level('WARNING', logger='absl'):
    whole_run.trainer(tmp_path, _CHANGES | changes).train()
  _, *steps = whole_run.records(tmp_path)
  assert len(steps) == 2
  for record in steps:
    assert record['reward/environment_raised'] == 16
    # What was not measured is not 0.
    assert 'training/mismatch_token_frac' not in record
  assert 'an environment environment.timeout_s' in caplog.text


@pytest.mark.parametrize(
    ('changes', 'sentence'),
    [
        ({'environment.kwargs': '{"turns": '}, 'kwargs is no JSON object'),
        ({'environment.kwargs': '[1]'}, r"kwargs is '\[1\]'; allowed: a JSON"),
        ({'environment.kwargs': '{"moves": 2}'}, "argument 'moves'"),
        (
            {'environment.name': 'tests.rl.rollout.scripted:Keyless'},
            "Keyless' cannot be made with .*: KeyError: 'SERVICE_KEY'",
        ),
        ({'environment.max_turns': 0}, 'max_turns is 0'),
        (
            {'environment.name': 'tests.rl.rollout.scripted'},
            'package.module:Class',
        ),
        ({'trainer.synthetic': True}, 'leave environment.name empty'),
    ],
)
def test_an_environment_that_cannot_work_is_refused(changes, sentence):
  with pytest.raises(ValueError, match=sentence):
    configs.build(whole_run.config(**(_CHANGES | changes)))
