"""What a run takes beside its devices, and what is said where it is missing."""

import dataclasses
from unittest import mock

import pytest
from absl import logging as absl_logging

from jetrl_jax.config import build as configs
from jetrl_jax.core.collectives import Axes
from jetrl_jax.dry_run import storage
from jetrl_jax.rl.settings import GuardConfig
from jetrl_jax.rl.training import initialize
from tests import whole_run

_GIB = 2**30


@pytest.fixture(name='spec', scope='module')
def _parts():
  return configs.build(whole_run.config())


def _found(spec, workdir, **there) -> storage.StorageNeeds:
  """The room of a run where so many bytes are."""
  found = storage.of_run(spec, initialize.abstract(spec), workdir)
  return dataclasses.replace(found, **there)


def _disk(monkeypatch, free):
  there = mock.Mock(free=free)
  monkeypatch.setattr(storage.shutil, 'disk_usage', lambda place: there)


@pytest.mark.parametrize(
    'axes, here, share',
    [
        # Four processes of one device: two on this host, or all.
        (Axes(fsdp=4), 2, 0.5),
        (Axes(data=4), 2, 1.0),
        (Axes(fsdp=2, tensor=2), 2, 0.5),
        (Axes(data=2, tensor=2), 2, 1.0),
        (Axes(fsdp=4), 4, 1.0),
    ],
)
def test_a_host_holds_what_its_processes_hold(monkeypatch, axes, here, share):
  names = [storage.socket.gethostname()] * here + ['other'] * (4 - here)
  monkeypatch.setattr(storage.processes, 'count', lambda: 4)
  monkeypatch.setattr(storage.processes, 'together', lambda *_: names)
  policy = mock.Mock(axes=axes)
  assert storage._share_of_host(mock.Mock(policy=policy)) == share


def test_a_begun_run_has_room_in_what_it_wrote(spec, tmp_path, monkeypatch):
  spec = dataclasses.replace(spec, export_source=tmp_path)
  needed = sum(count for _, count, _ in _found(spec, tmp_path).rows)
  _disk(monkeypatch, needed - _GIB)
  for name in ('export/model', 'checkpoints/20/state'):
    (problem,) = _found(spec, tmp_path).lacking_disk()
    assert problem.startswith('up to ')
    # An earlier export is there until the new one is whole.
    assert 'already' not in problem
    (tmp_path / name).parent.mkdir(parents=True)
    with open(tmp_path / name, 'wb') as file:
      file.truncate(_GIB)  # Of holes alone.
  assert _found(spec, tmp_path).lacking_disk() == []
  guarded = dataclasses.replace(spec, guard=GuardConfig(enable=True))
  (problem,) = _found(guarded, tmp_path).lacking_disk()
  assert 'and 1.0 GiB already in these folders' in problem


def test_a_run_that_can_save_no_checkpoint_does_not_start(spec, tmp_path):
  enough = _found(spec, tmp_path)
  enough = dataclasses.replace(enough, free=enough.next_checkpoint)
  enough.check()
  short = dataclasses.replace(enough, free=enough.free - 1)
  with pytest.raises(ValueError, match='no checkpoint can be saved in .*needs'):
    short.check()


def test_a_run_that_saves_nothing_more_needs_no_room_to_save(spec, tmp_path):
  assert _found(spec, whole_run.finished()).next_checkpoint == 0
  run = dataclasses.replace(spec.run, synthetic=True, save_freq=0)
  synthetic = dataclasses.replace(spec, run=run)
  assert _found(synthetic, tmp_path).next_checkpoint == 0


def test_the_kept_checkpoints_lie_beside_one_being_written(spec, tmp_path):
  run = dataclasses.replace(spec.run, keep_latest=2, keep_best=1)
  found = _found(dataclasses.replace(spec, run=run), tmp_path)
  assert found.rows[0][:2] == ('checkpoints/', 4 * found.checkpoint)


def test_what_a_run_writes_beside_its_states_is_about_as_counted():
  run = whole_run.finished()
  spec = configs.build(whole_run.config())
  rows = {name: n for name, n, _ in _found(spec, run).rows}
  for name in ('metrics.jsonl', 'tensorboard/', 'samples/', 'rollouts/'):
    files = [p for p in (run / name, *(run / name).rglob('*')) if p.is_file()]
    real = sum(file.stat().st_size for file in files)
    assert 0.5 * real < rows[name] < 3 * real, name


def test_a_host_must_hold_a_checkpoint_that_is_on_a_device(spec, tmp_path):
  enough = _found(spec, tmp_path)
  enough = dataclasses.replace(enough, host=enough.host_needed)
  short = dataclasses.replace(enough, host=enough.host - 1)
  # On a CPU the arrays are there already.
  assert not short.lacking_host()
  with mock.patch('jax.default_backend', lambda: 'gpu'):
    assert not enough.lacking_host()
    (problem,) = short.lacking_host()
  assert problem.startswith('a checkpoint is copied to the host, ')


def test_the_host_memory_of_a_7b_is_what_was_measured(spec, tmp_path):
  # 57 GiB, docs/performance_log.md; a small one has little on its way.
  found = _found(spec, tmp_path, checkpoint=round(43.9 * _GIB))
  assert round(found.host_needed / _GIB) == 57
  found = _found(spec, tmp_path, checkpoint=_GIB)
  assert found.host_needed == 8 * _GIB


def test_a_container_has_what_its_group_may_take(tmp_path, monkeypatch):
  whole, limit = storage.physical_bytes(), tmp_path / 'memory.max'
  monkeypatch.setattr(storage, '_LIMITS', (str(limit),))
  for text, expected in (('max\n', None), ('1024\n', 1024)):
    limit.write_text(text)
    assert storage.physical_bytes() == expected or expected is None
  limit.unlink()
  assert storage.physical_bytes() >= whole


def test_a_run_warns_of_a_full_disk_before_it_begins(
    spec, tmp_path, monkeypatch
):
  warnings = []
  monkeypatch.setattr(
      absl_logging, 'warning', lambda text, *args: warnings.append(text % args)
  )
  _found(spec, tmp_path).warn()
  assert not warnings
  _disk(monkeypatch, 1000)
  _found(spec, tmp_path).warn()
  (warning,) = warnings
  assert warning.startswith('This run may not reach its end: up to ')
  assert 'free there are 1000 B' in warning
