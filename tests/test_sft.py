"""The supervised warm start, on the tiny config."""

import dataclasses
import json
import pathlib
import shutil
from unittest import mock

import jax
import numpy as np
import pytest

from jetrl_jax import models, sft
from jetrl_jax.data import Prompt
from tests import whole_run
from tests.data.small import write_tokenizer


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  """(workdir, exported folder) of 120 steps on ten sums."""
  folder = tmp_path_factory.mktemp('sft')
  # Of its own, with a template that the model's has not.
  own = shutil.copytree(whole_run.home() / 'tiny/model', folder / 'own')
  (own / 'chat_template.jinja').write_text('{{ messages[0]["content"] }}')
  config = whole_run.config(
      **{
          'data.tokenizer': str(own),
          'sft.total_training_steps': 120,
          'sft.batch_size': 10,
          'sft.output': str(folder / 'out'),
          'rollout.max_response_length': 32,
          'optim.lr': 5e-3,
      }
  )
  sft.train(config, folder / 'run')
  return folder / 'run', folder / 'out'


def test_the_loss_falls_and_nothing_is_skipped(trained):
  records = whole_run.records(trained[0])
  losses = [record['sft/loss'] for record in records]
  # A guess among the 32 tokens costs log 32 = 3.47 nats; ten sums are soon
  # known by heart.
  assert 2.0 < losses[0] < 3.6
  assert losses[-1] < 0.7 * losses[0]
  assert sum(record['training/skipped_updates'] for record in records) == 0
  assert [record['step'] for record in records] == list(range(10, 121, 10))


def test_the_exported_checkpoint_loads_with_its_tokenizer(trained):
  folder = trained[1]
  source = whole_run.home() / 'tiny' / 'model'
  shape = models.load_config(folder)
  assert shape == models.load_config(source)
  params = models.load_checkpoint(folder, shape, dtype='float32')
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))
  own = folder.parent / 'own'
  for name in (
      'tokenizer.json',
      'generation_config.json',
      'chat_template.jinja',
  ):
    assert (folder / name).read_bytes() == (own / name).read_bytes()


@pytest.mark.parametrize(
    'name, value, message',
    [
        ('output', '', 'sft.output is empty'),
        ('output', '~/taken', 'taken exists already; export to a new folder'),
        ('output', 'taken', 'exists already; export to a new folder'),
        ('answer_key', '', "data.answer_key is ''; a warm start trains on"),
        ('batch_size', 0, 'sft.batch_size is 0; it must be >= 1'),
        ('batch_size', 11, 'sft.batch_size is 11; the training data has 10'),
        ('total_training_steps', 0, 'sft.total_training_steps is 0'),
        ('micro_batch_size', 0, 'trainer.micro_batch_size is 0; it must be'),
        ('packed_rows', 5, 'trainer.packed_rows is 5; .* .16., such as 1'),
    ],
)
def test_what_would_fail_after_the_last_step_is_refused_before_the_first(
    tmp_path, monkeypatch, name, value, message
):
  monkeypatch.setenv('HOME', str(tmp_path))
  (tmp_path / 'taken').mkdir()
  (tmp_path / 'taken' / 'config.json').write_text('{}')
  config = whole_run.config(**{'sft.output': str(tmp_path / 'out')})
  value = str(tmp_path / value) if value == 'taken' else value
  sections = (config.sft, config.data, config.trainer)
  setattr(next(s for s in sections if name in s), name, value)
  with pytest.raises(ValueError, match=message):
    sft.train(config, tmp_path / 'run')
  assert not (tmp_path / 'run').exists()


def test_an_answer_that_is_too_long_is_named_before_any_weight(
    tmp_path, monkeypatch
):
  rows = [{'question': '1+1=', 'answer': '2'}, {'question': '1+2='}]
  rows[1]['answer'] = 30 * '3'
  file = tmp_path / 'written.jsonl'
  file.write_text('\n'.join(map(json.dumps, rows)))
  config = whole_run.config(
      **{
          'data.train_files': (str(file),),
          'sft.output': str(tmp_path / 'out'),
          'sft.batch_size': 1,
      }
  )
  monkeypatch.delattr(sft.config_model, 'parameters')
  # Rows of 16 + 12 tokens, up to the tile of 16; the answer has 30 and its end.
  with pytest.raises(ValueError) as refused:
    sft.train(config, tmp_path / 'run')
  assert str(refused.value) == (
      '1 of 2 prompts are too long with their written answers; the longest is'
      ' prompt 1 (written), with 4 + 31 tokens (the end token among them), but'
      ' a row holds 32. Raise rollout.max_response_length from 12 to 19'
      ' or more, or leave those prompts out of data.train_files'
  )
  assert not (tmp_path / 'run').exists()
  config.rollout.max_response_length = 19
  with pytest.raises(AttributeError, match='parameters'):
    sft.train(config, tmp_path / 'run')


def test_an_id_of_a_written_answer_that_the_embedding_lacks_is_refused(
    tmp_path,
):
  # Of the answers' alone: no question has one.
  whole_run.shift_ids(tmp_path, '#')
  config = whole_run.config(
      **{
          'data.tokenizer': str(tmp_path),
          'sft.output': str(tmp_path / 'out'),
          'rollout.max_response_length': 32,
      }
  )
  sft.configs.build(config)
  with pytest.raises(ValueError, match='gives the data the id 104; allowed'):
    sft.train(config, tmp_path / 'run')
  assert not (tmp_path / 'run').exists()


def test_a_workdir_that_cannot_be_written_is_named_before_any_weight(tmp_path):
  (tmp_path / 'file').touch()
  config = whole_run.config(
      **{
          'sft.output': str(tmp_path / 'out'),
          'rollout.max_response_length': 32,
      }
  )
  with pytest.raises(ValueError, match='--workdir=.*file cannot be written'):
    sft.train(config, tmp_path / 'file')


def test_a_disk_without_room_for_the_export_is_refused_before_any_weight(
    tmp_path, monkeypatch
):
  output = tmp_path / 'out'
  config = whole_run.config(
      **{'sft.output': str(output), 'rollout.max_response_length': 32}
  )
  usage = shutil.disk_usage(tmp_path)._replace(free=1000)
  monkeypatch.setattr(shutil, 'disk_usage', lambda _: usage)
  said = (
      f'sft.output is {output}: it needs .* of disk, but 1000 B are free; name'
  )
  with pytest.raises(ValueError, match=said):
    sft.train(config, tmp_path / 'run')


def test_a_setting_of_grpo_that_a_warm_start_has_not_is_warned_of(
    tmp_path, caplog
):
  config = whole_run.config(
      **{
          'sft.output': str(tmp_path / 'out'),
          'sft.total_training_steps': 7,
          'sft.batch_size': 11,  # More than the data has: it ends here.
          'trainer.total_training_steps': 3,
          'precision.min_sqnr_db': 20.0,
      }
  )
  with pytest.raises(ValueError, match='sft.batch_size is 11'):
    sft.train(config, tmp_path / 'run')
  assert (
      'trainer.total_training_steps is 3, which is for GRPO; a warm start'
      ' reads sft.total_training_steps, which is 7' in caplog.text
  )
  assert 'min_sqnr_db is 20; a warm start measures no dot' in caplog.text


def test_a_run_s_metrics_are_kept_and_a_warm_start_s_replaced_with_a_warning(
    tmp_path, monkeypatch, caplog
):
  config = whole_run.config(
      **{
          'sft.output': str(tmp_path / 'out'),
          'rollout.max_response_length': 32,
      }
  )
  metrics = tmp_path / 'run' / 'metrics.jsonl'
  (tmp_path / 'run' / 'checkpoints').mkdir(parents=True)
  metrics.write_text('{"step": 1}\n')

  def loading(*_):
    raise StopIteration

  monkeypatch.setattr(sft.config_model, 'parameters', loading)
  with pytest.raises(ValueError, match='holds checkpoints/, of a run of.*name'):
    sft.train(config, tmp_path / 'run')
  assert metrics.read_text() == '{"step": 1}\n'
  (tmp_path / 'run' / 'checkpoints').rmdir()
  with pytest.raises(StopIteration):
    sft.train(config, tmp_path / 'run')
  assert f'{metrics}, of an earlier warm start, is replaced' in caplog.text


@pytest.mark.parametrize(
    'given, workdir',
    [(None, 'runs/mine_sft'), ('~/a', pathlib.Path.home() / 'a')],
)
def test_the_workdir_is_named_after_the_config_file(
    monkeypatch, given, workdir
):
  train = mock.Mock()
  monkeypatch.setattr(sft, 'train', train)
  monkeypatch.setattr(sft, '_WORKDIR', mock.Mock(value=given))
  for name, value in (('load', None), ('file', pathlib.Path('c/mine_sft.py'))):
    monkeypatch.setattr(sft.config_flags, name, lambda *_, value=value: value)
  sft.main()
  train.assert_called_once_with(None, pathlib.Path(workdir))


@pytest.mark.parametrize('steps, skipped', [(2, 2), (120, 5)])
def test_a_warm_start_that_is_never_finite_ends_at_once_and_exports_nothing(
    tmp_path, trained, steps, skipped
):
  source = trained[1]
  shape = models.load_config(source)
  params = models.load_checkpoint(source, shape, dtype='float32')
  # A finite checkpoint; what is normalised to 1 and more becomes infinite.
  gain = params['final_norm']['scale']
  params['final_norm']['scale'] = gain * 0 + 3e38
  broken = tmp_path / 'broken'
  models.save_checkpoint(broken, params, shape, source_folder=source)
  config = whole_run.config(
      **{
          'model.path': str(broken),
          'model.init': 'checkpoint',
          'sft.total_training_steps': steps,
          'sft.batch_size': 10,
          'sft.output': str(tmp_path / 'out'),
          'rollout.max_response_length': 32,
          'optim.lr': 5e-3,
      }
  )
  with pytest.raises(
      RuntimeError,
      match=f'^{skipped} updates in a row were not finite .gradient norm nan'
      '.*rule out FP8. Nothing was exported.$',
  ):
    sft.train(config, tmp_path / 'run')
  (record,) = whole_run.records(tmp_path / 'run')
  assert record['training/skipped_updates'] == skipped == record['step']
  assert record['training/updates'] == 0
  assert not (tmp_path / 'out').exists()


def test_a_tokenizer_that_could_not_be_exported_is_refused_first(tmp_path):
  write_tokenizer(tmp_path)
  (tmp_path / 'merges.txt').symlink_to('/dev/null')
  config = whole_run.config(
      **{'data.tokenizer': str(tmp_path), 'sft.output': str(tmp_path / 'out')}
  )
  with pytest.raises(ValueError, match='merges.txt: the link leads outside'):
    sft.train(config, tmp_path / 'run')
  assert not (tmp_path / 'run').exists()


def test_a_written_answer_ends_with_the_end_token(tmp_path):
  config = whole_run.config()
  _, _, folder = sft.config_model.build_policy(config)
  tokenizer = sft.configs.build_tokenizer(config, folder)
  settings = sft.take(sft.DataConfig, config)
  data = sft.configs.build_dataset(settings, settings.train_files, tokenizer)
  tokens, start = sft.target_tokens(data[0], 'answer', tokenizer)
  np.testing.assert_array_equal(tokens[:start], data[0].tokens)
  assert tokens[-1] == tokenizer.eos_ids[0] == 1
  assert tokenizer.decode(tokens[start:-1]) == data[0].extra['answer']
  # With verl's layout the key has dots.
  row = dataclasses.replace(data[0], extra={'a': {'b': '12'}})
  tokens, start = sft.target_tokens(row, 'a.b', tokenizer)
  assert tokenizer.decode(tokens[start:-1]) == '12'
  # Llama 3's generation_config.json begins with the end of a document; what
  # ends a turn is the tokenizer's own.
  write_tokenizer(tmp_path, generation={'eos_token_id': [257, 256]})
  tokens, _ = sft.target_tokens(row, 'a.b', sft.Tokenizer(tmp_path))
  assert tokens[-1] == 256


def test_a_warm_start_needs_written_answers():
  row = {'answer': {'target': 24}}
  prompt = Prompt(
      id=7,
      tokens=np.zeros(1, np.int32),
      text='x',
      answer=row['answer'],
      source='s',
      extra=row,
  )
  with pytest.raises(ValueError, match="prompt 7: 'answer' is {'target': 24}"):
    sft.target_tokens(prompt, 'answer', tokenizer=None)
