"""What a workdir says of the starts before this one, and keeps of them."""

import json
import re
import shutil

import numpy as np
import pytest

from jetrl_jax.rl.scoring import store
from jetrl_jax.rl.scoring.experience import Experience
from jetrl_jax.rl.training.workdir import changed_settings
from tests import whole_run


def test_settings_that_differ_from_an_earlier_start_are_named():
  before = '{"optim": {"lr": 1e-6, "old": 1}, "seed": 1, "flow": ""}'
  after = '{"optim": {"lr": 2e-6, "new": 1}, "seed": 1, "flow": "bf16"}'
  assert changed_settings(before, after) == [
      'optim.lr: 1e-06 -> 2e-06',
      "flow: '' -> 'bf16'",
  ]
  assert changed_settings(after, after) == []
  assert changed_settings('{"optim": ', after) == []


def test_a_config_json_that_is_no_text_keeps_no_run_from_going_on(tmp_path):
  folder = whole_run.trainer(tmp_path).folder
  (tmp_path / 'config.json').write_bytes(b'{"seed": "\x80"}')
  folder.write_config('{"seed": 1}')
  assert (tmp_path / 'config.json').read_text() == '{"seed": 1}'
  folder.close()


def test_without_its_checkpoints_a_run_begins_anew_and_keeps_the_old_lines(
    tmp_path, caplog
):
  workdir = tmp_path / 'run'
  shutil.copytree(whole_run.finished(), workdir)
  shutil.rmtree(workdir / 'checkpoints')
  old = (workdir / 'metrics.jsonl').read_bytes()
  changes = {'trainer.total_training_steps': 1}
  whole_run.trainer(workdir, changes).train()
  assert (workdir / 'metrics_before.jsonl').read_bytes() == old
  # What it learnt from cannot be made again.
  assert (workdir / 'rollouts' / '000006.npz').exists()
  assert 'the metrics of the earlier run are kept in metrics_be' in caplog.text
  steps = (workdir / 'metrics.jsonl').read_text().splitlines()
  assert [json.loads(line)['step'] for line in steps] == [0, 1]


def test_a_resume_forgets_what_later_steps_left(tmp_path):
  workdir = tmp_path / 'run'
  shutil.copytree(whole_run.finished(), workdir)
  (workdir / 'samples' / 'mine.jsonl').touch()
  trainer = whole_run.trainer(workdir)

  def left() -> tuple[list[str], list[str], list[int]]:
    return (
        sorted(p.stem for p in (workdir / 'samples').iterdir()),
        sorted(p.stem for p in (workdir / 'rollouts').iterdir()),
        [record['step'] for record in whole_run.records(workdir)],
    )

  six = [f'{step:06d}' for step in range(1, 7)]
  trainer.folder.drop_after(4, is_whole=True)
  assert left() == (['000000', '000003', 'mine'], six[:4], [0, 1, 2, 3, 4])
  # Step 3 is updated, and has still to be evaluated.
  trainer.folder.drop_after(3, is_whole=False)
  assert left() == (['000000', 'mine'], six[:3], [0, 1, 2])
  trainer.close()


def test_lines_that_were_lost_are_told_of(tmp_path, caplog):
  workdir = tmp_path / 'run'
  shutil.copytree(whole_run.finished(), workdir)
  file = workdir / 'metrics.jsonl'
  lines = file.read_bytes().splitlines(keepends=True)
  told = {}
  for kept in (7, 4, 0):
    file.write_bytes(b''.join(lines[:kept]))
    trainer = whole_run.trainer(workdir)
    caplog.clear()
    trainer.folder.drop_after(6, is_whole=True)
    trainer.close()
    told[kept] = re.findall('lost the lines of steps (.+);', caplog.text)
  assert told == {7: [], 4: ['4 to 6'], 0: ['0 to 6']}


def test_a_full_disk_is_named_with_what_to_do(tmp_path):
  folder = whole_run.trainer(tmp_path).folder
  # Every write to it says that the disk is full.
  folder._writer._file.close()
  folder._writer._file = open('/dev/full', 'ab')
  (tmp_path / 'samples').touch()
  said = f'step 1 cannot be written to {tmp_path}: '
  with pytest.raises(OSError, match='No space left on device. Once') as full:
    folder.log(1, {'a': 1.0})
  assert str(full.value).startswith(said)
  with pytest.raises(OSError, match='File exists'):
    folder.save_samples(1, [{}])
  folder.close()


def test_a_saved_rollout_has_each_answers_score_accuracy_and_advantage(
    tmp_path,
):
  folder = whole_run.trainer(tmp_path).folder
  file = whole_run.finished() / 'rollouts' / '000001.npz'
  completions, _ = store.load_rollouts(file)
  values = {
      name: np.random.default_rng(i).random((4, 4)).astype(dtype)
      for i, (name, dtype) in enumerate(
          [('score', 'f8'), ('accuracy', 'f8'), ('advantage', 'f4')]
      )
  }
  exp = Experience(
      prompts=[],
      completions=completions,
      scores_PG=values['score'],
      overlong_PG=np.zeros((4, 4)),
      kl_penalty_PG=np.zeros((4, 4)),
      rewards_PG=np.zeros((4, 4)),
      accuracy_PG=values['accuracy'],
      errors={},
      advantages_PG=values['advantage'],
  )
  folder.save_rollouts(7, exp)
  folder.close()
  _, found = store.load_rollouts(tmp_path / 'rollouts' / '000007.npz')
  assert set(found) == set(values)
  for name, value in values.items():
    np.testing.assert_array_equal(found[name], value.reshape(-1))


def test_an_export_that_was_cut_short_is_made_again(tmp_path):
  workdir = tmp_path / 'run'
  shutil.copytree(whole_run.finished(), workdir)
  # As a kill leaves it, before it has its name.
  partial = workdir / '.export.partial'
  (workdir / 'export').rename(partial)
  (partial / 'model.safetensors').write_bytes(b'')
  whole_run.trainer(workdir).train()
  assert not partial.exists()
  name = 'export/model.safetensors'
  whole = (whole_run.finished() / name).read_bytes()
  assert (workdir / name).read_bytes() == whole


def test_a_config_or_an_export_that_finds_no_room_is_named_with_what_to_do(
    tmp_path, monkeypatch
):
  workdir = tmp_path / 'run'
  shutil.copytree(whole_run.finished(), workdir)
  export = (workdir / 'export' / 'model.safetensors').read_bytes()

  def full(*_, **__):
    raise OSError(28, 'No space left on device')

  for what, where in (
      ('config.json', 'jetrl_jax.core.files.sync'),
      ('the export', 'jetrl_jax.models.hf.save.write_tensors'),
  ):
    with monkeypatch.context() as patched:
      patched.setattr(where, full)
      said = f'{what} cannot be written to {workdir}: No space left on device. '
      with pytest.raises(OSError, match=f'^{said}Once there is room, the same'):
        whole_run.trainer(workdir).train()
  # The one of before stays until another is whole.
  assert (workdir / 'export' / 'model.safetensors').read_bytes() == export


def test_a_run_does_not_start_from_the_export_that_it_would_replace(tmp_path):
  workdir = tmp_path / 'run'
  shutil.copytree(whole_run.finished(), workdir)
  config = (workdir / 'config.json').read_bytes()
  export = workdir / 'export'
  with pytest.raises(ValueError, match='which the export of this run will'):
    whole_run.trainer(workdir, {'model.path': str(export)})
  assert (workdir / 'config.json').read_bytes() == config
  assert (export / 'config.json').exists()
