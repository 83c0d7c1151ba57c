"""The mismatch of a step, split by cause, and the command that prints it."""

import json
import math
import pathlib
import types

import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.config import build as configs
from jetrl_jax.mismatch import __main__ as mismatch_command
from jetrl_jax.mismatch import split as mismatch_split
from jetrl_jax.mismatch import start as mismatch_start
from jetrl_jax.optim.types import TrainState
from jetrl_jax.rl.run import train_state
from tests import whole_run

_NAMES = [('one', ''), ('two', ''), ('stale', '')]


@pytest.fixture(scope='module')
def found(tmp_path_factory):
  """(what was printed, the JSON, the run's files before and after)."""
  workdir = whole_run.finished()
  output = tmp_path_factory.mktemp('mismatch') / 'rows.json'
  before = _files(workdir)
  printed = mismatch_command.run(whole_run.config(), workdir, output)
  return printed, json.loads(output.read_text()), before, _files(workdir)


def _files(folder: pathlib.Path):
  return {
      str(file.relative_to(folder)): file.stat().st_mtime_ns
      for file in folder.rglob('*')
      if file.is_file()
  }


def test_the_step_of_a_run_with_a_kl_term_meets_its_reference(tmp_path):
  without, spec = (
      configs.build(whole_run.config(**{'algorithm.kl_reward_coef': coef}))
      for coef in (0.0, 0.1)
  )
  state = TrainState(
      trainable={},
      frozen={},
      fp8_state={},
      opt_state=(),
      weights={'x': jnp.arange(3.0)},
      opt_step=jnp.int32(0),
  )
  assert mismatch_start.reference_of(without, state, None) is None
  first = train_state.reference(tmp_path / 'reference', state, cold=True)
  cold = mismatch_start.reference_of(spec, state, None)
  state.weights['x'].delete()  # As the step does.
  state.weights['x'] = jnp.full(3, 7.0)
  resumed = mismatch_start.reference_of(spec, state, tmp_path)
  for found in (cold, resumed):
    assert found is not None
    np.testing.assert_array_equal(found.weights['x'], first.weights['x'])


def test_a_step_without_a_sampled_token_has_nothing_to_compare():
  # All that an environment that fails in every `reset` leaves.
  nothing = types.SimpleNamespace(sampled=np.zeros(0, bool))
  exp = types.SimpleNamespace(completions=[nothing])
  start = types.SimpleNamespace(
      collector=types.SimpleNamespace(
          collect=lambda step, state: types.SimpleNamespace(experience=exp)
      ),
      step=0,
      state=None,
  )
  with pytest.raises(ValueError, match='the policy sampled no token'):
    mismatch_start.Start.rollout(start)


def test_the_links_of_a_chain_add_up_by_hand():
  # Two tokens. Differences: (0.5, 0), (-0.25, 0), (0, 1).
  points = [
      np.asarray(values, np.float32)
      for values in ([-1, -2], [-1.5, -2], [-1.25, -2], [-1.25, -3])
  ]
  causes, (here, late), rest = mismatch_split.add_up(
      _NAMES, points, np.asarray([1.0, -1.0], np.float32)
  )
  means = [row.metrics['rollout_corr/kl'] for row in causes]
  assert means == [0.25, -0.125, 0.5]
  assert here.metrics['rollout_corr/kl'] == 0.25 - 0.125
  assert late.metrics['rollout_corr/kl'] == 0.25 - 0.125 + 0.5
  # x = 0.25 and 1: exp(-x) - 1 + x.
  k3 = (math.exp(-0.25) - 0.75 + math.exp(-1)) / 2
  np.testing.assert_allclose(late.metrics['rollout_corr/k3_kl'], k3, rtol=1e-14)
  shares = [row.metrics['training/mismatch_token_frac'] for row in causes]
  assert shares == [0.5, 0.5, 0.5]
  assert here.metrics['training/mismatch_token_frac'] == 0.5
  assert rest == 0


def test_what_cancels_between_two_causes_is_in_neither_total():
  up, down = np.zeros(3, np.float32), np.full(3, -0.125, np.float32)
  causes, (here, late), _ = mismatch_split.add_up(
      _NAMES, [up, down, up, up], np.zeros(3, np.float32)
  )
  assert causes[0].metrics['training/rollout_logprob_diff_max'] == 0.125
  for total in (here, late):
    assert total.metrics['training/mismatch_token_frac'] == 0


def test_an_exact_run_differs_by_its_updates_alone(found):
  rows = {row['name']: row for row in found[1]['rows']}
  share = 'training/mismatch_token_frac'
  for row in found[1]['rows']:
    moved = row['name'] in ('stale weights', mismatch_split.ONE_STEP_LATE)
    assert (row[share] > 0) == moved, row['name']
  assert rows['stale weights'][share] == rows['one step late'][share]
  assert found[1]['rest'] == 0


def test_the_table_has_a_line_per_cause_and_says_how_they_add_up(found):
  printed = found[0]
  for words in (
      '| sampling transform  |',
      '| kernel, batch shape |',
      'fp8_delayed on both sides: nothing to compare',
      '| stale weights ',
      'step 6 of ',
      '1 of 1 updates applied',
      'the rollout (16 slots) and the same tokens in 32',
      'largest rest 0.0e+00 nats',
  ):
    assert words in printed, words


def test_a_run_that_is_looked_at_is_left_alone(found):
  assert found[2] == found[3]


def _error(workdir=None, output=None) -> str:
  with pytest.raises(ValueError) as caught:
    mismatch_command.run(whole_run.config(), workdir, output)
  return str(caught.value)


def test_a_workdir_without_a_checkpoint_is_one_sentence(tmp_path):
  assert 'holds no checkpoint of a run; choose' in _error(workdir=tmp_path)
  assert not list(tmp_path.iterdir())


def test_a_result_without_a_folder_is_refused_before_anything_runs(tmp_path):
  assert 'there is no folder' in _error(output=tmp_path / 'no' / 'x.json')
  assert 'is a folder; choose a file' in _error(output=tmp_path)
  if pathlib.Path('/proc/self').exists():
    assert 'cannot be written' in _error(
        output=pathlib.Path('/proc/self/x.json')
    )


def test_a_run_of_another_recipe_is_refused():
  with pytest.raises(ValueError):
    config = whole_run.config(**{'precision.recipe': 'bf16'})
    mismatch_command.run(config, whole_run.finished(), None)


@pytest.mark.slow
def test_a_mixed_flow_differs_by_its_quantisation_and_its_truncation():
  config = whole_run.config(
      **{'flow': 'fp8_rollout', 'rollout.top_p': 0.9, 'optim.lr': 1e-12}
  )
  with mismatch_start.start(configs.build(config), None) as start:
    split = mismatch_split.split(start)
  share = {
      row.name: row.metrics['training/mismatch_token_frac']
      for row in (*split.causes, *split.totals)
  }
  # log mu is renormalised over fewer tokens: larger, wherever any was cut.
  transform = split.causes[0].metrics
  assert transform['rollout_corr/kl'] > 0
  assert share['kernel, batch shape'] == share["update's program"] == 0
  assert share['quantisation'] > 0.5
  assert share['stale weights'] == 0
  added = sum(row.metrics['rollout_corr/kl'] for row in split.causes)
  total = split.totals[1].metrics['rollout_corr/kl']
  np.testing.assert_allclose(added, total, atol=1e-12)
  assert split.rest < 1e-12
