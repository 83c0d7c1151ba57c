"""Exports of a run: what loads again, and how the command says no."""

import dataclasses
import hashlib
import shutil

import jax
import numpy as np
import pytest

from jetrl_jax import export, models
from jetrl_jax.checkpoint.manager import CheckpointManager
from jetrl_jax.config import build as configs
from jetrl_jax.config import saved_policy
from jetrl_jax.data import Tokenizer
from jetrl_jax.rl.run import train_state
from jetrl_jax.rl.training.workdir import RunFolder
from tests import commands, whole_run


def _values(folder, **changes):
  """All flags: the tiny run into `folder`, and `changes`."""
  values = {name: default for name, _, default, _ in export.FLAGS}
  values['out'] = str(folder)
  if 'checkpoint' not in changes:
    values['workdir'] = str(whole_run.finished())
  assert set(changes) <= set(values)
  return values | changes


def _export(folder, **changes):
  return folder, export.export(_values(folder, **changes))


def _bytes(tree):
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {
      jax.tree_util.keystr(path): (leaf.dtype, np.asarray(leaf).tobytes())
      for path, leaf in leaves
  }


def test_an_fp8_export_comes_back_as_the_runs_own_weights(tmp_path):
  folder, said = _export(tmp_path / 'x', format='fp8')
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


def test_an_fp8_export_of_a_float32_run_comes_back_in_float32(tmp_path):
  config = {'precision.compute_dtype': 'float32'}
  run = saved_policy.restore(str(_of_start(tmp_path / 'run', **config)))
  folder, _ = _export(
      tmp_path / 'x', workdir=str(tmp_path / 'run'), format='fp8'
  )
  found = saved_policy.restore(str(folder))
  assert found.policy.recipe.compute_dtype == 'float32'
  embedding = found.state.weights['embed']['embedding']
  assert embedding.dtype == np.float32
  assert _bytes(found.state.weights) == _bytes(run.state.weights)
  again, _ = _export(tmp_path / 'y', checkpoint=str(folder), format='fp8')
  for name in ('model.safetensors', 'config.json'):
    assert (again / name).read_bytes() == (folder / name).read_bytes()


@pytest.mark.slow
def test_a_mixed_run_is_exported_with_the_scales_of_its_training(tmp_path):
  config = {
      'precision.rollout_recipe': 'fp8_token',
      'algorithm.old_logprobs': 'recompute',
      'trainer.total_training_steps': 1,
      'trainer.test_freq': 0,
  }
  whole_run.trainer(tmp_path / 'run', config).train()
  path = str(tmp_path / 'run')
  with pytest.raises(ValueError, match='leave --data out'):
    _export(tmp_path / 'x', workdir=path, format='fp8', data='x.jsonl')
  folder, _ = _export(tmp_path / 'x', workdir=path, format='fp8')
  run = saved_policy.restore(path, recipe='fp8_delayed')
  found = saved_policy.restore(str(folder))
  assert _bytes(found.state.weights) == _bytes(run.state.weights)


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


def test_the_tokenizer_of_an_export_is_that_of_the_run(tmp_path):
  own = tmp_path / 'own'
  own.mkdir()
  # Another end and a chat template; no file names the end's id.
  shutil.copy(whole_run.home() / 'tiny/model/tokenizer.json', own)
  (own / 'tokenizer_config.json').write_text('{"eos_token": "<unk>"}')
  (own / 'chat_template.jinja').write_text('{{ messages[0]["content"] }}')
  settings = {'data.tokenizer': str(own), 'trainer.total_training_steps': 1}
  run = tmp_path / 'run'
  whole_run.trainer(run, settings | {'trainer.test_freq': 0}).train()
  exported, _ = _export(tmp_path / 'x', workdir=str(run))
  files = {path.name for path in own.iterdir()}
  for folder in (exported, run / 'export'):
    carried = {path.name for path in folder.iterdir()}
    assert carried == {*files, 'config.json', 'model.safetensors'}
    for name in files:
      assert (folder / name).read_bytes() == (own / name).read_bytes()
    assert Tokenizer(folder).eos_ids == Tokenizer(own).eos_ids == (2,)


def test_an_older_step_can_be_exported(tmp_path):
  folder, said = _export(tmp_path / 'x', step=4)
  assert said.startswith('step 4 of ')
  params = models.load_checkpoint(
      folder, models.load_config(folder), dtype='float32'
  )
  newest = saved_policy.restore(str(whole_run.finished())).state
  assert _bytes(params) != _bytes(newest.masters)


def _of_start(workdir, times=(1,), **changes):
  """The workdir of a run that has not learnt.

  Its step i has the masters of a start, `times[i]` times as large.
  """
  workdir.mkdir(exist_ok=True)
  spec = configs.build(whole_run.config(**changes))
  state = train_state.create(
      spec.policy,
      spec.initial_params(),
      spec.optimizer.build(),
      spec.mesh,
      spec.freeze,
  )
  (workdir / 'config.json').write_text(spec.config_text)
  saver = CheckpointManager(
      workdir / 'checkpoints', keep_latest=len(times), keep_best=0
  )
  for step, factor in enumerate(times):
    larger = dataclasses.replace(
        state,
        trainable=jax.tree.map(lambda x, by=factor: by * x, state.trainable),
    )
    saver.save(step, train_state.without_weights(larger), {}, metric=None)
  saver.close()
  return workdir


def test_an_export_undoes_the_invariant_scaling(tmp_path):
  changes = {'precision.invariant_scale': 2.0}
  run = _of_start(tmp_path / 'run', **changes)
  exported, _ = _export(tmp_path / 'x', workdir=str(run))
  # What the run itself would write at its end.
  spec = configs.build(whole_run.config(**changes))
  state = saved_policy.restore(str(run)).state
  assert float(state.masters['layers_0']['attn_norm']['scale'][0]) == 2.0
  folder = RunFolder(run, spec.run, None)
  folder.export(spec, state, spec.export_source)
  folder.close()
  # A power of two is undone to the bit.
  start = configs.build(whole_run.config()).initial_params()
  expected = jax.tree.map(lambda x: x.astype('bfloat16'), start)
  for made in (exported, run / 'export'):
    found = models.load_checkpoint(
        made, models.load_config(made), dtype='bfloat16'
    )
    assert _bytes(found) == _bytes(expected)


def test_a_run_without_fp8_has_no_fp8_export(tmp_path):
  _of_start(tmp_path, **{'precision.recipe': 'bf16'})
  with pytest.raises(
      ValueError, match='no static FP8 scales .* or use --format=bf16'
  ):
    _export(tmp_path / 'x', workdir=str(tmp_path), format='fp8')
  # FP8 can be asked for; what it needs beside the weights is not there.
  found = saved_policy.restore(str(tmp_path), recipe='fp8_delayed')
  assert not found.calibrated
  qkv = found.state.fp8_state['layers_0']['attn']['qkv']
  assert qkv['input']['scale'] == 1 and qkv['kernel']['scale'] < 0.1


def test_a_checkpoint_is_calibrated_for_its_fp8_export(tmp_path):
  source = whole_run.finished() / 'export'
  folder, said = _export(
      tmp_path / 'x',
      checkpoint=str(source),
      format='fp8',
      data=str(whole_run.home() / 'tiny/heldout.jsonl'),
      template='{prompt}',
  )
  assert '4 dots in FP8' in said and 'calibrated on 6 prompts of' in said
  found = saved_policy.restore(str(folder))
  assert found.calibrated and found.policy.recipe.name == 'fp8_delayed'
  qkv = found.state.fp8_state['layers_0']['attn']['qkv']
  # A normalised row of width 32 has entries around 1; 448 is the largest e4m3.
  assert 1 / 448 <= qkv['input']['scale'] < 32 / 448
  masters = models.load_checkpoint(source, found.policy.model, dtype='float32')
  kernel = found.state.weights['layers_0']['attn']['qkv']['kernel']
  np.testing.assert_allclose(
      np.asarray(kernel.values, np.float32) * kernel.scale,
      np.asarray(masters['layers_0']['attn']['qkv']['kernel']),
      rtol=2**-4,  # Three bits of mantissa, to nearest.
      atol=kernel.scale * 2**-10,  # Half of the smallest subnormal.
  )
  again, _ = _export(tmp_path / 'y', checkpoint=str(folder), format='fp8')
  for name in ('model.safetensors', 'config.json'):
    assert (again / name).read_bytes() == (folder / name).read_bytes()


def test_an_older_step_is_calibrated_for_its_fp8_export(tmp_path):
  run = _of_start(tmp_path / 'run', (1, 4), **{'precision.recipe': 'bf16'})
  folder, said = _export(
      tmp_path / 'x',
      workdir=str(run),
      step=0,
      format='fp8',
      data=str(whole_run.home() / 'tiny/heldout.jsonl'),
      template='{prompt}',
  )
  assert said.startswith('step 0 of ') and 'calibrated on 6 prompts' in said
  found = saved_policy.restore(str(folder)).state.weights
  kernel = found['layers_0']['mlp']['down']['kernel']
  largest = np.abs(np.asarray(kernel.values, np.float32)).max() * kernel.scale
  older = saved_policy.restore(str(run), step=0).state.masters
  expected = np.abs(older['layers_0']['mlp']['down']['kernel']).max()
  np.testing.assert_allclose(largest, expected, rtol=2**-4)


def test_prompts_of_another_models_tokenizer_calibrate_nothing(tmp_path):
  source = tmp_path / 'x'
  shutil.copytree(whole_run.finished() / 'export', source)
  whole_run.shift_ids(source, '=')
  with pytest.raises(ValueError, match='gives the data the id 117; allowed'):
    _export(
        tmp_path / 'y',
        checkpoint=str(source),
        format='fp8',
        data=str(whole_run.home() / 'tiny/heldout.jsonl'),
        template='{prompt}',
    )


def test_a_wrong_export_is_one_sentence(tmp_path):
  for message, changes in (
      ('is no workdir of a run', {'workdir': str(tmp_path)}),
      ('has no step 5; found', {'step': 5}),
      ('by one of --workdir', {'workdir': None}),
      ('by one of --workdir', {'checkpoint': 'x', 'workdir': 'x'}),
      ('give it as --workdir', {'checkpoint': str(whole_run.finished())}),
      ('leave --data out', {'format': 'fp8', 'data': 'x.jsonl'}),
      (
          'no static FP8 scales .*--data=FILE.jsonl',
          {
              'checkpoint': str(whole_run.finished() / 'export'),
              'format': 'fp8',
          },
      ),
      (
          '--max_prompt_length is 0; allowed: 1 to',
          {
              'checkpoint': str(whole_run.finished() / 'export'),
              'format': 'fp8',
              'data': 'x.jsonl',
              'max_prompt_length': 0,
          },
      ),
  ):
    with pytest.raises(ValueError, match=message):
      _export(tmp_path / 'x', **changes)
  (tmp_path / 'x').write_text('')
  with pytest.raises(ValueError, match='exists already; export to a new'):
    _export(tmp_path / 'x')
  with pytest.raises(ValueError, match='x/y cannot be made: '):
    _export(tmp_path / 'x' / 'y')


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['--workdir=nowhere', '--out=x'], 'nowhere is no workdir of a run'),
        (['--out=x'], 'by one of --workdir'),
        (['--workdir=x', '--out=x', '--format=int8'], 'bf16|fp8'),
        (['--wordkir=x'], 'nknown command line flag'),
    ],
)
def test_the_command_says_no_in_one_line(arguments, message):
  code, output, errors = commands.run(*arguments, module='jetrl_jax.export')
  assert code == 1 and output == ''
  assert errors.startswith('error: ') and errors.count('\n') <= 2
  assert message in errors and 'Traceback' not in errors
