"""Tests of saving, finding, restoring and retiring checkpoints."""

import json
import logging
import os
import resource
import shutil
import subprocess
import sys
import time
import types

import jax.numpy as jnp
import numpy as np
import pytest
from absl import logging as absl_logging

from jetrl_jax.checkpoint import manifest, restore
from jetrl_jax.checkpoint.manager import CheckpointManager
from tests import saved


@pytest.fixture(name='manager')
def _manager(tmp_path):
  manager = CheckpointManager(tmp_path / 'ckpt', keep_latest=3, keep_best=1)
  yield manager
  manager.close()


def test_what_lies_beside_a_steps_arrays_can_be_amended(manager):
  state = saved.state(3)
  for step in (1, 2, 3, 4):
    manager.save(step, state, {'pending': 'x'}, metric=None)
  manager.wait()
  assert manager.all_steps() == [2, 3, 4]
  manager.amend(2, {'pending': None}, metric=0.5)
  restored = restore.restore(manager._directory, saved.like(state), 2)
  assert restored is not None and restored.host_state == {'pending': None}
  saved.assert_same(restored.state, state)
  manager.save(5, state, {}, metric=0.25)
  # Kept for its metric now; step 3 goes in its place.
  manager.save(6, state, {}, metric=None)
  manager.wait()
  assert manager.all_steps() == [2, 4, 5, 6]


def test_a_fresh_directory_has_nothing_to_restore(manager, tmp_path):
  assert manager.restore(saved.like(saved.state())) is None
  assert manager.all_steps() == []
  assert restore.restore(tmp_path / 'absent', saved.like(saved.state())) is None


def test_host_state_is_that_of_the_moment_of_the_save(manager):
  state, host_state = {'x': jnp.ones(3)}, {'order': [1, 2], 'position': 5}
  manager.save(0, state, host_state, metric=np.float32(0.5))
  host_state['order'].append(3)
  host_state['position'] = 6
  restored = manager.restore(saved.like(state))
  assert restored.host_state == {'order': [1, 2], 'position': 5}


def test_the_newest_and_the_best_steps_stay(tmp_path):
  manager = CheckpointManager(tmp_path, keep_latest=2, keep_best=2)
  # Steps with metric: best two are 1 (0.9) and 3 (0.8); newest two 5 and 6.
  # Step 4 equals step 3 and is newer, so from step 4 on it takes 3's place.
  metrics = {0: 0.1, 1: 0.9, 2: None, 3: 0.8, 4: 0.8, 5: float('nan'), 6: 0.2}
  for step, metric in metrics.items():
    manager.save(step, {'x': jnp.int32(step)}, {}, metric=metric)
  manager.wait()
  assert manager.all_steps() == [1, 4, 5, 6]
  folders = {path.name for path in tmp_path.iterdir()}
  assert folders == {'1', '4', '5', '6', '.lock'}
  like = {'x': saved.like(jnp.int32(0))}
  assert int(manager.restore(like, step=4).state['x']) == 4
  manager.close()


def test_pinned_steps_stay_until_they_are_let_go(tmp_path):
  manager = CheckpointManager(tmp_path, keep_latest=1, keep_best=0)
  manager.pinned = frozenset({1})
  for step in (1, 2, 3):
    manager.save(step, {'x': jnp.int32(step)}, {}, metric=None)
  manager.wait()
  assert manager.all_steps() == [1, 3]
  manager.pinned = frozenset()
  manager.save(4, {'x': jnp.int32(4)}, {}, metric=None)
  manager.wait()
  assert manager.all_steps() == [4]
  manager.close()


def test_what_is_wanted_may_depend_on_the_host_state(tmp_path):
  manager = CheckpointManager(tmp_path, keep_latest=2, keep_best=0)
  for step, name in enumerate('ab'):
    manager.save(step, {name: jnp.int32(7)}, {'name': name}, metric=None)

  def like(host_state):
    return {host_state['name']: saved.like(jnp.int32(0))}

  assert manager.restore(like).state == {'b': 7}
  assert manager.restore(like, 0).state == {'a': 7}
  manager.close()


def test_what_would_not_be_restored_shows_in_the_newest_manifest(manager):
  for step, size in ((1, 3), (2, 4)):
    manager.save(
        step, {'x': jnp.zeros(size)}, {'size': size, 'step': step}, metric=None
    )
  manager.wait()

  def like(host_state):
    return saved.like({'x': jnp.zeros(host_state['size'])})

  found = restore.compare(manager._directory, like)
  assert found == {'size': 4, 'step': 2}
  with pytest.raises(ValueError, match=r'x is saved as float32\[4\], wanted'):
    restore.compare(
        manager._directory, lambda _: saved.like({'x': jnp.zeros(3)})
    )


def test_a_manifest_has_the_format_that_later_versions_look_for(manager):
  manager.save(1, {'x': jnp.zeros(3)}, {}, metric=None)
  manager.wait()
  text = (manager._directory / '1' / 'manifest.json').read_text()
  assert json.loads(text)['body']['format'] == 1


def test_a_manifest_of_a_later_format_is_not_read_as_one_of_this(manager):
  state = {'x': jnp.ones(3)}
  manager.save(1, state, {}, metric=None)
  manager.wait()
  file = manager._directory / '1' / 'manifest.json'
  body = json.loads(file.read_text())['body'] | {'format': 2}
  content = {'body': body, 'sha256': manifest._body_digest(body)}
  file.write_text(json.dumps(content))
  with pytest.raises(ValueError, match='has format 2; this version reads 1'):
    manager.restore(saved.like(state))


def test_a_step_that_was_just_saved_stays_beside_later_ones(tmp_path):
  manager = CheckpointManager(tmp_path, keep_latest=1, keep_best=0)
  for step in (5, 3):
    manager.save(step, {'x': jnp.ones(3)}, {}, metric=None)
  manager.close()
  assert manager.all_steps() == [3, 5]


def test_all_of_a_step_is_on_the_disk_before_it_exists(tmp_path, monkeypatch):
  fsync, rename, synced, not_synced = os.fsync, os.rename, set(), []

  def watched_fsync(descriptor):
    fsync(descriptor)
    synced.add(os.fstat(descriptor).st_ino)

  def watched_rename(source, target):
    if target == tmp_path / '3':
      everything = (source, *source.rglob('*'))
      assert len(everything) > 4
      not_synced.append(
          [p for p in everything if p.stat().st_ino not in synced]
      )
      synced.clear()
    rename(source, target)

  monkeypatch.setattr(os, 'fsync', watched_fsync)
  monkeypatch.setattr(os, 'rename', watched_rename)
  manager = CheckpointManager(tmp_path, keep_latest=1, keep_best=0)
  manager.save(3, {'x': jnp.arange(5)}, {}, metric=None)
  manager.close()
  assert not_synced == [[]]
  # And so is its name, after that.
  assert tmp_path.stat().st_ino in synced


def test_a_step_is_saved_once_and_named_by_a_natural_number(manager):
  manager.save(4, {'x': jnp.ones(1)}, {}, metric=None)
  for step in (4, -1):
    with pytest.raises(ValueError, match='saved once; found .4.'):
      manager.save(step, {'x': jnp.ones(1)}, {}, metric=None)
  with pytest.raises(ValueError, match='has no step 5; found .4.'):
    manager.restore(saved.like({'x': jnp.ones(1)}), step=5)


@pytest.mark.parametrize(
    'host_state',
    [{'a': (1, 2)}, {1: 'a'}, {'a': float('nan')}, {'a': np.int32(1)}, [1]],
)
def test_host_state_that_json_would_change_is_refused(manager, host_state):
  with pytest.raises(ValueError, match='host_state'):
    manager.save(0, {'x': jnp.ones(1)}, host_state, metric=None)
  assert manager.all_steps() == []


@pytest.mark.parametrize(('latest', 'best'), [(0, 1), (1, -1)])
def test_retention_always_keeps_the_newest(tmp_path, latest, best):
  with pytest.raises(ValueError, match=f'keep_latest is {latest}'):
    CheckpointManager(tmp_path, keep_latest=latest, keep_best=best)


def test_two_processes_cannot_save_into_one_directory(manager, tmp_path):
  code = (
      'import sys; from jetrl_jax.checkpoint.manager import CheckpointManager; '
      'CheckpointManager(sys.argv[1], keep_latest=1, keep_best=0)'
  )
  other = subprocess.run(
      [sys.executable, '-c', code, str(tmp_path / 'ckpt')],
      env=os.environ | {'JAX_PLATFORMS': 'cpu'},
      capture_output=True,
      text=True,
      check=False,
  )
  assert other.returncode == 1
  assert 'ValueError: another process saves checkpoints in' in other.stderr


def test_leftovers_of_a_killed_run_are_cleared_and_nothing_else(tmp_path):
  for name in ('.saving.3/state/d', '.deleting.1/state', 'notes', '8/state'):
    (tmp_path / name).mkdir(parents=True)
  CheckpointManager(tmp_path, keep_latest=1, keep_best=0).close()
  assert {p.name for p in tmp_path.iterdir()} == {'notes', '8', '.lock'}


def test_a_failed_write_is_reported_and_leaves_the_good_steps(manager, caplog):
  state = {'x': jnp.asarray(np.random.default_rng(0).normal(size=(300, 300)))}
  manager.save(0, state, {'n': 0}, metric=None)
  manager.wait()
  _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  # Files of 300 kB cannot grow beyond 100 kB: what a full disk looks like.
  resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
  try:
    manager.save(1, state, {'n': 1}, metric=None)
    with pytest.raises(RuntimeError, match='step 1 was not saved') as error:
      manager.wait()
    assert 'newest good step is 0' in str(error.value)
    # Nobody has to look for that sentence between Orbax's tracebacks.
    assert 'Traceback' not in caplog.text
    # The next save tells too, and check() without waiting.
    manager.save(2, state, {'n': 2}, metric=None)
    with pytest.raises(RuntimeError, match='step 2 was not saved'):
      manager.save(3, state, {'n': 3}, metric=None)
    manager.save(4, state, {'n': 4}, metric=None)
    with pytest.raises(RuntimeError, match='step 4 was not saved'):
      for _ in range(1000):
        manager.check()
        time.sleep(0.01)
    directory = manager._directory
    assert {p.name for p in directory.iterdir()} == {'0', '.lock'}
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
  restored = manager.restore(saved.like(state))
  assert restored.host_state == {'n': 0}
  saved.assert_same(restored.state, state)
  manager.save(5, state, {'n': 5}, metric=None)
  manager.wait()
  assert manager.all_steps() == [0, 5]


def test_a_disk_without_room_is_told_before_anything_is_written(
    manager, monkeypatch
):
  state = {'x': jnp.ones((1024, 1024))}
  usage = types.SimpleNamespace(free=2**20)
  monkeypatch.setattr(shutil, 'disk_usage', lambda path: usage)
  manager.save(0, {'x': jnp.ones((256, 1024))}, {}, metric=None)
  with pytest.raises(RuntimeError, match='step 1 was not saved.*4.0 MiB.*1.0 '):
    manager.save(1, state, {}, metric=None)
  assert manager.all_steps() == [0] and not manager.is_copying


def test_only_exceptions_that_orbax_raises_later_are_not_logged(
    manager, caplog
):
  del manager  # It sets the filter.
  logger = absl_logging.get_absl_logger()
  failed = (OSError, OSError('full'), None)
  kept = '/x/orbax/checkpoint/_src/futures/future.py'

  def log(path, name, exc_info):
    record = logger.makeRecord('absl', 40, path, 1, name, (), exc_info)
    logger.handle(record)

  log(kept, 'kept and raised', failed)
  log(kept, 'no exception', None)
  log('/x/orbax/checkpoint/_src/metadata/checkpoint.py', 'written', failed)
  log('/x/orbax/checkpoint/_src/path/deleter.py', 'not kept', failed)
  log('/x/futures/future.py', 'not of Orbax', failed)
  assert caplog.messages == ['no exception', 'not kept', 'not of Orbax']


def test_asyncio_is_silent_of_arrays_that_a_failed_save_left(manager, caplog):
  del manager  # It sets the filter.
  text = 'Future exception was never retrieved\nfuture: <Future %r>'
  logger = logging.getLogger('asyncio')
  logger.error(text, ValueError('Error writing "/run/.saving.6/state/d/5c3"'))
  logger.error(text, ValueError('of somebody else'))
  [message] = caplog.messages
  assert 'of somebody else' in message


def test_a_corrupt_newest_step_gives_the_one_before_and_is_replaced(tmp_path):
  manager = CheckpointManager(tmp_path, keep_latest=1, keep_best=1)
  for step in (1, 2):
    manager.save(step, {'x': jnp.int32(step)}, {}, metric=-step)
  manager.wait()
  files = (tmp_path / '2' / 'state').rglob('*')
  data = max((f for f in files if f.is_file()), key=lambda f: f.stat().st_size)
  content = bytearray(data.read_bytes())
  content[0] ^= 1
  data.write_bytes(content)
  like = saved.like({'x': jnp.int32(0)})
  restored = manager.restore(like)
  assert (restored.step, restored.skipped) == (1, (2,))
  assert int(restored.state['x']) == 1
  assert manager.all_steps() == [1]
  manager.save(2, {'x': jnp.int32(22)}, {}, metric=-2)
  manager.wait()
  assert manager.all_steps() == [1, 2]
  assert int(manager.restore(like).state['x']) == 22
  # The damaged folder is set aside, not thrown away.
  assert (tmp_path / 'corrupt.2' / 'manifest.json').exists()
  manager.close()


def test_corruption_is_named_by_file_and_step(tmp_path, caplog):
  manager = CheckpointManager(tmp_path, keep_latest=5, keep_best=0)
  for step in range(5):
    manager.save(step, {'x': jnp.arange(5) + step}, {}, metric=None)
  manager.close()
  payload = [
      next((tmp_path / str(s) / 'state' / 'ocdbt.process_0' / 'd').iterdir())
      for s in range(5)
  ]
  payload[4].unlink()
  (payload[3].parent / 'stranger').write_bytes(b'')
  payload[2].write_bytes(payload[2].read_bytes()[:-1])
  (tmp_path / '1' / 'manifest.json').write_text('{"body": {}}')
  target = tmp_path / 'outside'
  shutil.move(payload[0], target)
  payload[0].symlink_to(target)
  like = saved.like({'x': jnp.arange(5)})
  with pytest.raises(ValueError, match='no good checkpoint in') as error:
    restore.restore(tmp_path, like)
  lines = str(error.value).splitlines()
  assert lines[1] == f'  step 4: {payload[4]} is missing'
  assert lines[2].startswith(f'  step 3: {payload[3].parent}/stranger is not')
  size = payload[2].stat().st_size
  assert f'{payload[2]} has {size} bytes, the manifest says' in lines[3]
  assert f'step 1: {tmp_path}/1/manifest.json cannot be read' in lines[4]
  assert f'{payload[0]} is neither a plain file nor a folder' in lines[5]
  assert f'Checkpoint of step 4 is corrupt and skipped: {payload[4]}' in (
      caplog.text
  )
  with pytest.raises(ValueError, match='no good checkpoint'):
    restore.restore(tmp_path, like, step=3)
  # In a sentence, whatever the size of the file.
  (tmp_path / '1' / 'manifest.json').write_bytes(b'x' * 9999 + b'\x80')
  with pytest.raises(ValueError, match="1/manifest.json .* can't decode") as e:
    restore.restore(tmp_path, like, step=1)
  assert len(str(e.value)) < 1000
