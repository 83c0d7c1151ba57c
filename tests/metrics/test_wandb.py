"""Scalars to Weights & Biases: the wiring, against a stand-in for the package.

The stand-in keeps what wandb's run keeps: an id, and the step that follows the
last one sent.
"""

import importlib.machinery
import sys
import types

import pytest

from jetrl_jax.metrics import writer as metrics
from jetrl_jax.metrics.wandb import WandbConfig
from jetrl_jax.metrics.writer import MetricWriter


class _Error(Exception):
  pass


class _Run:

  def __init__(self):
    self.sent, self.step, self.finished = [], 0, 0

  def log(self, scalars, step):
    self.sent.append((step, scalars))
    self.step = step + 1

  def finish(self):
    self.finished += 1


class _Server(types.ModuleType):
  """The package, and the runs that a server would keep."""

  Error = _Error

  def __init__(self):
    super().__init__('wandb')
    self.__spec__ = importlib.machinery.ModuleSpec('wandb', None)
    self.runs, self.arguments, self.refuses = {}, {}, False

  def Settings(self, **settings):
    return settings

  def init(self, **arguments):
    if self.refuses:
      raise _Error('No API key configured')
    self.arguments = arguments
    return self.runs.setdefault(arguments['id'], _Run())


@pytest.fixture
def server(monkeypatch):
  made = _Server()
  monkeypatch.setitem(sys.modules, 'wandb', made)
  return made


def _writer(workdir, **changes) -> MetricWriter:
  settings = {'project': 'p', 'entity': '', 'run_config': {'seed': 1}}
  return MetricWriter(
      workdir, tensorboard=False, wandb=WandbConfig(**settings | changes)
  )


def test_an_id_that_a_full_disk_left_empty_is_made_again(server, tmp_path):
  (tmp_path / 'wandb_run_id').touch()
  for _ in range(2):
    _writer(tmp_path).close()
  [run_id] = server.runs
  assert len(run_id) == 16


def test_scalars_are_sent_under_their_step_and_nested_values_are_not(
    server, tmp_path
):
  writer = _writer(tmp_path / 'run')
  line = {'a': 1.5, 'm': metrics.Mean(sum=6.0, weight=4.0), 'n': {'x': 1}}
  writer.write(3, line)
  writer.close()
  (run,) = server.runs.values()
  assert run.sent == [(3, {'a': 1.5, 'm': 1.5})] and run.finished == 1
  found = server.arguments
  assert (found['project'], found['entity'], found['name']) == (
      'p',
      None,
      'run',
  )
  assert found['config'] == {'seed': 1} and found['resume'] == 'allow'


def test_a_resumed_run_continues_its_curves_and_sends_no_step_twice(
    server, tmp_path
):
  writer = _writer(tmp_path)
  for step in (0, 1, 2):
    writer.write(step, {'a': step})
  writer.close()
  writer = _writer(tmp_path)
  writer.truncate_after(1)
  for step in (2, 3):
    writer.write(step, {'a': step})
  writer.close()
  (run,) = server.runs.values()
  assert run.sent == [(step, {'a': step}) for step in range(4)]


def test_a_run_that_begins_anew_sends_its_steps_to_a_run_of_its_own(
    server, tmp_path
):
  for attempt in (1, 2):
    writer = _writer(tmp_path)
    writer.truncate_after(-1)
    for step in range(attempt):
      writer.write(step, {'attempt': attempt})
    writer.close()
  assert [[step for step, _ in run.sent] for run in server.runs.values()] == [
      [0],
      [0, 1],
  ]


def test_without_a_project_wandb_is_not_imported(server, tmp_path):
  MetricWriter(tmp_path, tensorboard=False).close()
  assert server.runs == {} and not (tmp_path / 'wandb_run_id').exists()


def test_a_start_that_is_refused_says_how_to_go_on(server, tmp_path):
  server.refuses = True
  with pytest.raises(ValueError, match='No API key.*WANDB_MODE=offline'):
    _writer(tmp_path)


def test_a_missing_package_names_the_extra(monkeypatch):
  monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
  with pytest.raises(ValueError, match=r"pip install 'jetrl_jax\[wandb\]'"):
    WandbConfig(project='p', entity='', run_config={})
