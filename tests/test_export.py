"""Exports of a run: what loads again, and how the command says no."""

import hashlib

import jax
import numpy as np
import pytest

from jetrl_jax import checkpoint, export, models, saved_policy
from jetrl_jax import config as configs
from jetrl_jax.rl import state as states
from jetrl_jax.rl.train_step import merge
from tests import whole_run


@pytest.fixture(autouse=True)
def _cached():
  with whole_run.cached_compilation():
    yield


def _export(folder, **changes):
  arguments = {'step': None, 'fp8': False} | changes
  said = export.export(str(whole_run.finished()), folder, **arguments)
  return folder, said


def _bytes(tree):
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {
      jax.tree_util.keystr(path): (leaf.dtype, np.asarray(leaf).tobytes())
      for path, leaf in leaves
  }


def test_an_fp8_export_comes_back_as_the_runs_own_weights(tmp_path):
  folder, said = _export(tmp_path / 'x', fp8=True)
  assert said.startswith('step 6 of ') and '4 dots in FP8' in said
  run = saved_policy.restore(str(whole_run.finished()))
  found = saved_policy.restore(str(folder))
  assert found.calibrated
  recipe = run.policy.recipe
  assert found.policy.recipe.name == recipe.name == 'fp8_delayed'
  assert found.policy.recipe.power_of_two_scales
  # All that a forward reads, so its log-probs are the same bits too.
  assert _bytes(found.state.weights) == _bytes(run.state.weights)
  for layer in ('attn', 'mlp'):
    for name, slot in run.state.fp8_state['layers_0'][layer].items():
      again = found.state.fp8_state['layers_0'][layer][name]
      assert again['input']['scale'] == slot['input']['scale']
      assert again['kernel']['scale'] == slot['kernel']['scale']


def test_a_bfloat16_export_is_what_the_run_itself_exported(tmp_path):
  folder, said = _export(tmp_path / 'x')
  assert said.endswith('in bfloat16')
  own = whole_run.finished() / 'export'
  assert {p.name for p in folder.iterdir()} == {p.name for p in own.iterdir()}
  for file in folder.iterdir():
    digests = [
        hashlib.sha256(path.read_bytes()).digest()
        for path in (file, own / file.name)
    ]
    assert digests[0] == digests[1], file.name


def test_an_older_step_can_be_exported(tmp_path):
  folder, said = _export(tmp_path / 'x', step=4)
  assert said.startswith('step 4 of ')
  params = models.load_checkpoint(
      folder, models.load_config(folder), dtype='float32'
  )
  newest = saved_policy.restore(str(whole_run.finished())).state
  assert _bytes(params) != _bytes(merge(newest.trainable, newest.frozen))


def test_a_run_without_fp8_has_no_fp8_export(tmp_path):
  parts = configs.build(whole_run.config(**{'precision.recipe': 'bf16'}))
  state = states.create(
      parts.policy,
      parts.initial_params(),
      parts.optimizer.build(),
      parts.mesh,
      parts.freeze,
  )
  (tmp_path / 'config.json').write_text(parts.config_text)
  saver = checkpoint.CheckpointManager(
      tmp_path / 'checkpoints', keep_latest=1, keep_best=0
  )
  saver.save(0, states.without_weights(state), {}, metric=None)
  saver.close()
  with pytest.raises(
      ValueError, match='no static FP8 scales .*use --format=bf16'
  ):
    export.export(str(tmp_path), tmp_path / 'x', step=None, fp8=True)
  # FP8 can be asked for; what it needs beside the weights is not there.
  found = saved_policy.restore(str(tmp_path), recipe='fp8_delayed')
  assert not found.calibrated
  qkv = found.state.fp8_state['layers_0']['attn']['qkv']
  assert qkv['input']['scale'] == 1 and qkv['kernel']['scale'] < 0.1


def test_a_wrong_export_is_one_sentence(tmp_path):
  with pytest.raises(ValueError, match='is no workdir of a run'):
    export.export(str(tmp_path), tmp_path / 'x', step=None, fp8=False)
  with pytest.raises(ValueError, match='has no step 5; found'):
    _export(tmp_path / 'x', step=5)
  (tmp_path / 'x').write_text('')
  with pytest.raises(ValueError, match='exists already; name a new folder'):
    _export(tmp_path / 'x')


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['--workdir=nowhere', '--out=x'], 'nowhere is no workdir of a run'),
        pytest.param(
            ['--out=x'], '--workdir must have a value', marks=pytest.mark.slow
        ),
        pytest.param(
            ['--workdir=x', '--out=x', '--format=int8'],
            'bf16|fp8',
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ['--wordkir=x'],
            'nknown command line flag',
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_command_says_no_in_one_line(arguments, message):
  process = whole_run.start(*arguments, module='jetrl_jax.export')
  output, errors = process.communicate(timeout=250)
  assert process.returncode == 1 and output == ''
  assert errors.startswith('error: ') and errors.count('\n') <= 2
  assert message in errors and 'Traceback' not in errors
