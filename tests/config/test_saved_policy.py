"""A policy read back samples what the run sampled."""

import contextlib
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest

from jetrl_jax.config import build as configs
from jetrl_jax.config import saved_policy
from jetrl_jax.config.sections import take
from jetrl_jax.core import rng
from jetrl_jax.data import Example, Prompt
from jetrl_jax.metrics import provenance
from jetrl_jax.rewards.types import RewardConfig
from jetrl_jax.rl.rollout.engine import Engine, EngineConfig
from jetrl_jax.rl.rollout.scheduler import rollout
from jetrl_jax.rl.scoring import experience
from tests import whole_run


def _greedy(found: saved_policy.SavedPolicy, questions: list[str]):
  """Answers to questions, as held-out evaluation samples them."""
  texts, _ = found.prompt_format.apply(
      [_example(q) for q in questions], found.tokenizer
  )
  engine = Engine(
      found.policy,
      EngineConfig(
          num_slots=16,
          max_prompt_length=found.max_prompt_length,
          max_response_length=found.max_response_length,
          stop_ids=found.tokenizer.eos_ids,
          decode_block=4,
      ),
      found.mesh,
  )
  prompts = [
      Prompt(
          id=i,
          tokens=found.tokenizer.encode(text, add_special_tokens=True),
          text=text,
          answer='',
          source='',
          extra={},
      )
      for i, text in enumerate(texts)
  ]
  return rollout(
      engine,
      found.params,
      prompts,
      num_generations=1,
      temperature=0.0,
      base_key=rng.key(0, rng.EVALUATION, 0),
      weight_version=0,
  )


def _example(question: str):
  return Example(id=0, prompt=question, answer='', source='', extra={})


@pytest.mark.parametrize(
    'each, tensor, fits',
    [(3, 2, False), (3, 3, True), (1, 2, True), (2, 4, True), (4, 3, False)],
)
def test_a_runs_mesh_is_kept_where_its_processes_can_have_it(
    monkeypatch, each, tensor, fits
):
  class Device:
    platform = 'cpu'

    def __init__(self, process_index):
      self.process_index = process_index

  count = 2 if tensor != 3 or each == 3 else 3
  found = [Device(p) for p in range(count) for _ in range(each)]
  monkeypatch.setattr(jax, 'process_count', lambda: count)
  monkeypatch.setattr(jax, 'devices', lambda: found)
  data = count * each // tensor
  mesh = {'data': data, 'fsdp': 1, 'tensor': tensor}
  assert saved_policy._fits(mesh) == fits


def test_a_policy_of_a_run_answers_as_the_run_s_last_evaluation():
  workdir = whole_run.finished()
  found = saved_policy.load(str(workdir))
  assert found.origin == f'step 6 of {workdir}'
  lines = (workdir / 'samples' / '000006.jsonl').read_text().splitlines()
  samples = [json.loads(line) for line in lines]
  completions = _greedy(found, [s['prompt'] for s in samples])
  answers = [experience.response_text(c, found.tokenizer) for c in completions]
  assert answers == [s['response'] for s in samples]
  assert (found.max_prompt_length, found.max_response_length) == (16, 12)


def test_an_older_step_can_be_named():
  workdir = whole_run.finished()
  found = saved_policy.load(str(workdir), step=4)
  assert found.origin == f'step 4 of {workdir}'
  newest = saved_policy.load(str(workdir))
  old, new = (jax.tree.leaves(f.params.weights) for f in (found, newest))
  assert any((np.asarray(a) != b).any() for a, b in zip(old, new, strict=True))


def test_a_run_whose_learning_rate_warms_up_and_decays_is_read(tmp_path):
  workdir = shutil.copytree(whole_run.finished(), tmp_path / 'run')
  config = json.loads((workdir / 'config.json').read_text())
  config['optim'] |= {'lr_decay': 'cosine', 'lr_warmup_steps': 2}
  (workdir / 'config.json').write_text(json.dumps(config))
  assert saved_policy.restore(str(workdir)).origin == f'step 6 of {workdir}'


def test_a_hugging_face_folder_is_read_in_bfloat16():
  found = saved_policy.load(str(whole_run.finished() / 'export'))
  assert found.policy.recipe.name == 'bf16'
  assert found.origin.startswith('checkpoint ')
  assert not jax.tree.leaves(found.params.fp8_state)
  kernel = found.params.weights['layers_0']['attn']['qkv']['kernel']
  assert kernel.dtype == jax.numpy.bfloat16
  assert len(_greedy(found, ['1+1='])[0].tokens) > 0


@pytest.mark.parametrize(
    ('make', 'step', 'message'),
    [
        (lambda f: f / 'nothing', None, 'no such folder'),
        (lambda f: f, None, r'config\.json'),
        (lambda f: f, 3, 'is no workdir of a run'),
    ],
)
def test_a_path_that_holds_no_policy_is_refused(tmp_path, make, step, message):
  with pytest.raises(ValueError, match=message):
    saved_policy.load(str(make(tmp_path)), step=step)


def test_a_workdir_without_config_or_step_is_refused(tmp_path):
  (tmp_path / 'checkpoints').mkdir()
  with pytest.raises(ValueError, match=r'config\.json is not the config'):
    saved_policy.load(str(tmp_path))
  shutil.copy(whole_run.finished() / 'config.json', tmp_path)
  with pytest.raises(ValueError, match='holds no step; let the run save one'):
    saved_policy.load(str(tmp_path))


def test_a_config_that_is_no_object_is_refused(tmp_path):
  (tmp_path / 'config.json').write_text('[]')
  with pytest.raises(ValueError, match='it holds a list, no object'):
    configs.read(tmp_path / 'config.json')


@pytest.mark.parametrize(
    'section, name',
    [
        ('precision', 'recipe'),
        ('mesh', 'fsdp'),
        ('model', 'freeze'),
        ('optim', 'lr_warmup_steps'),
    ],
)
def test_a_workdir_of_a_version_with_fewer_settings_names_the_setting(
    tmp_path, section, name
):
  (tmp_path / 'checkpoints').mkdir()
  config = json.loads((whole_run.finished() / 'config.json').read_text())
  del config[section][name]
  (tmp_path / 'config.json').write_text(json.dumps(config))
  with pytest.raises(ValueError, match=f"lacks a setting.*'{name}'.*another"):
    saved_policy.load(str(tmp_path))


@pytest.fixture(name='relative')
def _relative(tmp_path):
  """A run whose config has relative paths; it was started in home()."""
  workdir = shutil.copytree(whole_run.finished(), tmp_path / 'run')
  home = whole_run.home()
  config = json.loads((workdir / 'config.json').read_text())
  path = str(pathlib.Path(config['model']['path']).relative_to(home))
  config['model']['path'] = config['data']['tokenizer'] = path
  functions = config['reward']['functions']
  config['reward']['functions'] = [
      function.removeprefix(f'{home}/') for function in functions
  ]
  assert config['reward']['functions'] != functions
  (workdir / 'config.json').write_text(json.dumps(config))
  with contextlib.chdir(home):
    provenance.record_start(workdir, 1)
  return workdir


def test_a_run_with_relative_paths_loads_from_any_folder(
    relative, monkeypatch, tmp_path
):
  monkeypatch.chdir(tmp_path)
  found = saved_policy.restore(str(relative))
  assert found.folder is not None and found.folder.is_dir()
  assert saved_policy.tokenizer_of(found).folder == found.folder
  assert found.config is not None
  configs.reward_specs(take(RewardConfig, found.config))
  (function,) = found.config.reward.functions
  assert function.startswith(f'{whole_run.home()}/tiny/')


@pytest.mark.parametrize('setting', ['model.path', 'data.tokenizer'])
def test_a_relative_path_that_is_nowhere_says_where_it_comes_from(
    relative, monkeypatch, tmp_path, setting
):
  (relative / 'starts.jsonl').unlink()  # As an earlier version left it.
  if setting == 'data.tokenizer':
    config = json.loads((relative / 'config.json').read_text())
    config['model']['path'] = str(whole_run.home() / config['model']['path'])
    (relative / 'config.json').write_text(json.dumps(config))
  monkeypatch.chdir(tmp_path)
  with pytest.raises(
      ValueError, match=f'The path is {setting} of .*; a relative one starts'
  ):
    saved_policy.load(str(relative))


def test_an_error_that_names_no_path_is_not_said_to_be_about_one(
    relative, monkeypatch, tmp_path
):
  (relative / 'starts.jsonl').unlink()
  config = json.loads((relative / 'config.json').read_text())
  config['model']['shape'] = 'qwen2.5-7b'
  (relative / 'config.json').write_text(json.dumps(config))
  # Neither model.path nor data.tokenizer leads anywhere from here.
  monkeypatch.chdir(tmp_path)
  with pytest.raises(ValueError) as refused:
    saved_policy.restore(str(relative))
  assert str(refused.value) == (
      'model.shape is for model.init=random without model.path; a checkpoint'
      ' has a shape of its own'
  )


def test_where_the_start_folder_is_gone_the_current_one_counts(
    relative, monkeypatch
):
  start = json.dumps({'folder': '/nowhere'})
  (relative / 'starts.jsonl').write_text(f'{start}\n')
  monkeypatch.chdir(whole_run.home())
  assert saved_policy.load(str(relative)).origin == f'step 6 of {relative}'


def test_a_run_from_elsewhere_loads_without_its_compiled_programs(
    tmp_path, caplog
):
  shutil.copytree(whole_run.finished(), tmp_path / 'run')
  file = tmp_path / 'run' / 'config.json'
  config = json.loads(file.read_text())
  config['compile_cache_dir'] = f'{file}/cache'
  file.write_text(json.dumps(config))
  assert saved_policy.load(str(tmp_path / 'run')).origin.startswith('step 6 of')
  assert 'Compiled programs are not kept: compile_cache_dir: ' in caplog.text
