"""Tests of saving, finding, restoring and retiring checkpoints."""

import collections
import json
import logging
import os
import resource
import shutil
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl import logging as absl_logging

from jetrl_jax import checkpoint, checkpoint_arrays, rng
from jetrl_jax.checkpoint import CheckpointManager

Pair = collections.namedtuple('Pair', ['first', 'second'])


def _state(seed=0):
  """Every kind of leaf that a run saves, each with its own values."""
  generator = np.random.default_rng(seed)
  params = {
      'embed': {'embedding': generator.normal(size=(5, 4)).astype('float32')},
      'head': {'kernel': generator.normal(size=(4, 6)).astype('float32')},
  }
  params = jax.tree.map(jnp.asarray, params)
  return {
      'trainable': params,
      'frozen': {},
      'fp8': {'amax_history': jnp.arange(16.0) * seed, 'scale': jnp.ones(())},
      'opt': optax.adamw(1e-3).init(params),
      'moments': Pair(
          jnp.asarray(generator.normal(size=(3, 7)), jnp.float8_e4m3fn),
          [jnp.asarray(generator.normal(size=11), jnp.bfloat16), None],
      ),
      'step': jnp.int32(seed),
      'bytes': jnp.arange(9, dtype=jnp.uint8) + seed,
      'key': rng.key(seed, rng.INIT),
      'keys': jax.random.split(rng.key(seed, rng.INIT), 3),
      'empty': jnp.zeros((0, 3), jnp.bfloat16),
  }


def _like(state):
  return jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
      state,
  )


def _bits(leaf):
  if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
    leaf = jax.random.key_data(leaf)
  return np.asarray(leaf).tobytes()


def _assert_same(found, expected):
  assert jax.tree.structure(found) == jax.tree.structure(expected)
  paths = jax.tree_util.tree_flatten_with_path(expected)[0]
  for (path, want), have in zip(paths, jax.tree.leaves(found), strict=True):
    assert have.dtype == want.dtype, path
    assert have.shape == want.shape, path
    assert _bits(have) == _bits(want), path
    assert have.sharding.is_equivalent_to(want.sharding, want.ndim), path


@pytest.fixture(name='manager')
def _manager(tmp_path):
  manager = CheckpointManager(tmp_path / 'ckpt', keep_latest=3, keep_best=1)
  yield manager
  manager.close()


def test_every_kind_of_leaf_comes_back_to_the_bit(manager):
  state = _state(3)
  host_state = {'position': 2**60, 'names': ['ä', ''], 'rate': 0.1, 'n': None}
  manager.save(7, state, host_state, metric=0.25)
  restored = manager.restore(_like(state))
  _assert_same(restored.state, state)
  assert restored.step == 7
  assert restored.host_state == host_state
  assert restored.skipped == ()


def test_what_lies_beside_a_steps_arrays_can_be_amended(manager):
  state = _state(3)
  for step in (1, 2, 3, 4):
    manager.save(step, state, {'pending': 'x'}, metric=None)
  manager.wait()
  assert manager.all_steps() == [2, 3, 4]
  manager.amend(2, {'pending': None}, metric=0.5)
  restored = checkpoint.restore(manager._directory, _like(state), 2)
  assert restored is not None and restored.host_state == {'pending': None}
  _assert_same(restored.state, state)
  manager.save(5, state, {}, metric=0.25)
  # Kept for its metric now; step 3 goes in its place.
  manager.save(6, state, {}, metric=None)
  manager.wait()
  assert manager.all_steps() == [2, 4, 5, 6]


def test_arrays_are_written_as_they_are_for_a_compressor_takes_memory(manager):
  state = {'zeros': jnp.zeros((1024, 1024))}
  manager.save(0, state, {}, metric=None)
  manager.wait()
  files = [path for path in manager._directory.rglob('*') if path.is_file()]
  written = sum(path.stat().st_size for path in files)
  nbytes = state['zeros'].nbytes
  assert nbytes <= written < 1.1 * nbytes
  _assert_same(manager.restore(_like(state)).state, state)


def test_a_fresh_directory_has_nothing_to_restore(manager, tmp_path):
  assert manager.restore(_like(_state())) is None
  assert manager.all_steps() == []
  assert checkpoint.restore(tmp_path / 'absent', _like(_state())) is None


def test_arrays_may_be_deleted_or_donated_once_save_returns(manager):
  # 8 MB so that the files are not written by the time the buffers are reused.
  values = np.random.default_rng(0).normal(size=(2, 1024, 1024))
  state = {
      'deleted': jnp.asarray(values[0], jnp.float32),
      'donated': jnp.asarray(values[1], jnp.float32),
  }
  expected = {name: np.array(leaf) for name, leaf in state.items()}
  like = _like(state)
  overwrite = jax.jit(lambda x: x * 0 - 1, donate_argnums=0).lower(
      like['donated']
  )
  overwrite = overwrite.compile()
  manager.save(0, state, {}, metric=None)
  state['deleted'].delete()
  filler = [overwrite(state['donated'])]
  filler += [jnp.full((1024, 1024), -1.0) for _ in range(4)]
  jax.block_until_ready(filler)
  restored = manager.restore(like)
  for name, array in expected.items():
    assert np.array_equal(restored.state[name], array)


def test_host_state_is_that_of_the_moment_of_the_save(manager):
  state, host_state = {'x': jnp.ones(3)}, {'order': [1, 2], 'position': 5}
  manager.save(0, state, host_state, metric=np.float32(0.5))
  host_state['order'].append(3)
  host_state['position'] = 6
  restored = manager.restore(_like(state))
  assert restored.host_state == {'order': [1, 2], 'position': 5}


def test_sharded_arrays_come_back_in_the_sharding_asked_for(manager):
  devices = np.array(jax.devices()[:8]).reshape(2, 4)
  mesh = jax.sharding.Mesh(devices, ('data', 'fsdp'))
  spec = jax.sharding.PartitionSpec
  array = jnp.arange(64.0).reshape(8, 8).astype(jnp.float8_e4m3fn)
  shardings = [
      jax.sharding.NamedSharding(mesh, spec('fsdp', None)),
      jax.sharding.NamedSharding(mesh, spec(None, ('fsdp', 'data'))),
      jax.sharding.NamedSharding(mesh, spec()),
      jax.sharding.SingleDeviceSharding(jax.devices()[3]),
  ]
  state = {str(i): jax.device_put(array, s) for i, s in enumerate(shardings)}
  manager.save(0, state, {}, metric=None)
  _assert_same(manager.restore(_like(state)).state, state)
  # Another number of devices at the resume: the same bytes, placed anew.
  turned = {
      str(i): jax.device_put(array, s) for i, s in enumerate(shardings[::-1])
  }
  _assert_same(manager.restore(_like(turned)).state, turned)


def test_each_part_of_an_array_comes_to_the_host_by_itself(monkeypatch):
  devices = np.array(jax.devices()[:4]).reshape(2, 2)
  mesh = jax.sharding.Mesh(devices, ('data', 'fsdp'))
  spec = jax.sharding.PartitionSpec
  placed = {
      'in parts': spec(('data', 'fsdp')),
      # The writer reads half of each copy, which is another array.
      'copied': spec('fsdp'),
      'everywhere': spec(),
  }
  named = {
      name: jax.device_put(
          jnp.arange(8.0), jax.sharding.NamedSharding(mesh, place)
      )
      for name, place in placed.items()
  }
  named |= {'alone': jnp.arange(6.0), 'key': rng.key(0, rng.INIT)}
  seen = []
  monkeypatch.setattr(checkpoint_arrays.np, 'asarray', seen.append)
  checkpoint_arrays.copy_to_host(named)
  assert [part.shape for part in seen] == [(2,)] * 4 + [(6,)]
  # What the writer will ask, which must be the very object that has the copy.
  assert seen[-1] is named['alone'].addressable_shards[0].data
  assert seen[0] is named['in parts'].addressable_shards[0].data


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
  like = {'x': _like(jnp.int32(0))}
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
    return {host_state['name']: _like(jnp.int32(0))}

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
    return _like({'x': jnp.zeros(host_state['size'])})

  found = checkpoint.compare(manager._directory, like)
  assert found == {'size': 4, 'step': 2}
  with pytest.raises(ValueError, match=r'x is saved as float32\[4\], wanted'):
    checkpoint.compare(manager._directory, lambda _: _like({'x': jnp.zeros(3)}))


def test_a_manifest_has_the_format_that_later_versions_look_for(manager):
  manager.save(1, {'x': jnp.zeros(3)}, {}, metric=None)
  manager.wait()
  text = (manager._directory / '1' / 'manifest.json').read_text()
  assert json.loads(text)['body']['format'] == 1


def test_one_process_saves(tmp_path, monkeypatch):
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  with pytest.raises(ValueError, match='saved by one process, found 2'):
    CheckpointManager(tmp_path, keep_latest=1, keep_best=0)


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
  # And so is its name, behind that.
  assert tmp_path.stat().st_ino in synced


def test_leaves_that_differ_are_listed_by_name(manager):
  manager.save(
      0, {'a': {'b': jnp.ones((2, 3))}, 'c': jnp.int32(0)}, {}, metric=None
  )
  like = _like(
      {
          'a': {'b': jnp.ones((3, 2), jnp.bfloat16), 'new': jnp.ones(1)},
      }
  )
  with pytest.raises(ValueError, match='another model or optimiser') as error:
    manager.restore(like)
  assert str(error.value).splitlines()[1:] == [
      '  a/new is not saved',
      '  c is not wanted',
      '  a/b is saved as float32[2, 3], wanted as bfloat16[3, 2]',
  ]
  many = {f'new_{i:02}': jnp.ones(1) for i in range(20)}
  with pytest.raises(ValueError, match='use another folder') as error:
    manager.restore(_like(many))
  # 20 not saved, 2 not wanted.
  assert str(error.value).splitlines()[10:] == [
      '  new_09 is not saved',
      '  and 12 more',
  ]
  like = {'a': {'b': jax.ShapeDtypeStruct((2, 3), 'float32')}}
  with pytest.raises(ValueError, match='a/b is wanted without a sharding'):
    manager.restore(like)


@pytest.mark.parametrize(
    'wanted', [((6,), 'float32'), ((2, 3), 'int32'), ((2, 4), 'float32')]
)
def test_nothing_is_cast_reshaped_or_padded(manager, wanted):
  manager.save(0, {'a': jnp.ones((2, 3))}, {}, metric=None)
  with pytest.raises(ValueError, match='a is saved as float32'):
    manager.restore(_like({'a': jnp.ones(*wanted)}))


def test_an_array_without_elements_is_checked_too(manager):
  manager.save(0, {'a': jnp.ones((0, 3)), 'b': jnp.ones(1)}, {}, metric=None)
  like = _like({'a': jnp.ones((3, 0)), 'b': jnp.ones(1)})
  with pytest.raises(ValueError, match='a is saved as float32.0, 3.'):
    manager.restore(like)


def test_a_step_is_saved_once_and_named_by_a_natural_number(manager):
  manager.save(4, {'x': jnp.ones(1)}, {}, metric=None)
  for step in (4, -1):
    with pytest.raises(ValueError, match='saved once; found .4.'):
      manager.save(step, {'x': jnp.ones(1)}, {}, metric=None)
  with pytest.raises(ValueError, match='has no step 5; found .4.'):
    manager.restore(_like({'x': jnp.ones(1)}), step=5)


@pytest.mark.parametrize(
    'host_state',
    [{'a': (1, 2)}, {1: 'a'}, {'a': float('nan')}, {'a': np.int32(1)}, [1]],
)
def test_host_state_that_json_would_change_is_refused(manager, host_state):
  with pytest.raises(ValueError, match='host_state'):
    manager.save(0, {'x': jnp.ones(1)}, host_state, metric=None)
  assert manager.all_steps() == []


@pytest.mark.parametrize(
    ('state', 'message'),
    [
        ({'x': 3}, 'found a leaf 3; allowed: jax arrays'),
        ({'x': np.ones(1)}, 'allowed: jax arrays'),
        (jnp.ones(1), 'allowed: a dict at the root'),
        ({'a.b': jnp.ones(1)}, "leaf 'a.b' has no unique name"),
    ],
)
def test_a_state_that_cannot_be_named_is_refused(manager, state, message):
  with pytest.raises(ValueError, match=message):
    manager.save(0, state, {}, metric=None)


@pytest.mark.parametrize(('latest', 'best'), [(0, 1), (1, -1)])
def test_retention_always_keeps_the_newest(tmp_path, latest, best):
  with pytest.raises(ValueError, match=f'keep_latest is {latest}'):
    CheckpointManager(tmp_path, keep_latest=latest, keep_best=best)


def test_two_processes_cannot_save_into_one_directory(manager, tmp_path):
  code = (
      'import sys; from jetrl_jax.checkpoint import CheckpointManager; '
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
  restored = manager.restore(_like(state))
  assert restored.host_state == {'n': 0}
  _assert_same(restored.state, state)
  manager.save(5, state, {'n': 5}, metric=None)
  manager.wait()
  assert manager.all_steps() == [0, 5]


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
  like = _like({'x': jnp.int32(0)})
  restored = manager.restore(like)
  assert (restored.step, restored.skipped) == (1, (2,))
  assert int(restored.state['x']) == 1
  assert manager.all_steps() == [1]
  manager.save(2, {'x': jnp.int32(22)}, {}, metric=-2)
  manager.wait()
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
  like = _like({'x': jnp.arange(5)})
  with pytest.raises(ValueError, match='no good checkpoint in') as error:
    checkpoint.restore(tmp_path, like)
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
    checkpoint.restore(tmp_path, like, step=3)
  # In a sentence, whatever the size of the file.
  (tmp_path / '1' / 'manifest.json').write_bytes(b'x' * 9999 + b'\x80')
  with pytest.raises(ValueError, match="1/manifest.json .* can't decode") as e:
    checkpoint.restore(tmp_path, like, step=1)
  assert len(str(e.value)) < 1000
