"""A checkpoint's arrays: to the host, to the disk, back as they were."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.checkpoint import arrays as checkpoint_arrays
from jetrl_jax.checkpoint.manager import CheckpointManager
from jetrl_jax.core import rng
from tests import saved


@pytest.fixture(name='manager')
def _manager(tmp_path):
  manager = CheckpointManager(tmp_path / 'ckpt', keep_latest=3, keep_best=1)
  yield manager
  manager.close()


def test_every_kind_of_leaf_comes_back_to_the_bit(manager):
  state = saved.state(3)
  host_state = {'position': 2**60, 'names': ['ä', ''], 'rate': 0.1, 'n': None}
  manager.save(7, state, host_state, metric=0.25)
  restored = manager.restore(saved.like(state))
  saved.assert_same(restored.state, state)
  assert restored.step == 7
  assert restored.host_state == host_state
  assert restored.skipped == ()


def test_arrays_are_written_as_they_are_for_a_compressor_takes_memory(manager):
  state = {'zeros': jnp.zeros((1024, 1024))}
  manager.save(0, state, {}, metric=None)
  manager.wait()
  files = [path for path in manager._directory.rglob('*') if path.is_file()]
  written = sum(path.stat().st_size for path in files)
  nbytes = state['zeros'].nbytes
  assert nbytes <= written < 1.1 * nbytes
  saved.assert_same(manager.restore(saved.like(state)).state, state)


def test_arrays_may_be_deleted_or_donated_once_they_are_copied(manager):
  # 8 MB so that the files are not written by the time the buffers are reused.
  values = np.random.default_rng(0).normal(size=(2, 1024, 1024))
  state = {
      'deleted': jnp.asarray(values[0], jnp.float32),
      'donated': jnp.asarray(values[1], jnp.float32),
  }
  expected = {name: np.array(leaf) for name, leaf in state.items()}
  like = saved.like(state)
  overwrite = jax.jit(lambda x: x * 0 - 1, donate_argnums=0).lower(
      like['donated']
  )
  overwrite = overwrite.compile()
  manager.save(0, state, {}, metric=None)
  manager.wait_for_copy()
  state['deleted'].delete()
  filler = [overwrite(state['donated'])]
  filler += [jnp.full((1024, 1024), -1.0) for _ in range(4)]
  jax.block_until_ready(filler)
  restored = manager.restore(like)
  for name, array in expected.items():
    assert np.array_equal(restored.state[name], array)


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
  saved.assert_same(manager.restore(saved.like(state)).state, state)
  # Another number of devices at the resume: the same bytes, placed anew.
  turned = {
      str(i): jax.device_put(array, s) for i, s in enumerate(shardings[::-1])
  }
  saved.assert_same(manager.restore(saved.like(turned)).state, turned)


def test_what_is_written_of_a_gpus_arrays_are_whole_copies_on_the_host(
    monkeypatch,
):
  devices = np.array(jax.devices()[:4]).reshape(2, 2)
  mesh = jax.sharding.Mesh(devices, ('data', 'fsdp'))
  spec = jax.sharding.PartitionSpec
  places = [spec(('data', 'fsdp')), spec('fsdp'), spec(None, 'data'), spec()]
  array = jnp.arange(32.0).reshape(8, 4).astype(jnp.float8_e4m3fn)
  named = {
      str(place): jax.device_put(array, jax.sharding.NamedSharding(mesh, place))
      for place in places
  }
  named |= {'one': jnp.float32(3), 'none': jnp.zeros((0, 3))}
  key = rng.key(0, rng.INIT)
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  found = checkpoint_arrays.on_host(named | {'key': key})
  assert list(found) == [*named, 'key'] and found.pop('key') is key
  for name, leaf in found.items():
    # In one piece, which shares no memory with what it is a copy of.
    assert leaf.sharding.device_set == {jax.devices('cpu')[0]}
    assert leaf.dtype == named[name].dtype
    assert np.array_equal(leaf, named[name])
    parts = [part.data for part in named[name].addressable_shards if leaf.size]
    at = [part.unsafe_buffer_pointer() for part in parts]
    assert leaf.unsafe_buffer_pointer() not in at


def test_a_copy_on_the_host_is_the_memory_that_was_filled(monkeypatch):
  filled = []
  empty = np.empty

  def kept(*args):
    filled.append(empty(*args))
    return filled[-1]

  monkeypatch.setattr(checkpoint_arrays.np, 'empty', kept)
  place = jax.sharding.SingleDeviceSharding(jax.devices('cpu')[0])
  copy = checkpoint_arrays._copied(jnp.arange(1000.0), place)
  (memory,) = filled
  offset = copy.unsafe_buffer_pointer() - memory.ctypes.data
  assert 0 <= offset <= memory.nbytes - copy.nbytes


def test_without_a_cpu_for_jax_the_writer_copies(monkeypatch):
  def missing(backend):
    raise RuntimeError(f'Unknown backend {backend}')

  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  monkeypatch.setattr(jax, 'local_devices', missing)
  named = {'x': jnp.arange(4.0)}
  assert checkpoint_arrays.on_host(named) is named


def test_a_save_copies_before_the_writer_asks(manager, monkeypatch):
  calls, write = [], manager._orbax.save
  monkeypatch.setattr(
      checkpoint_arrays,
      'on_host',
      lambda named: (calls.append([*named]), named)[1],
  )
  monkeypatch.setattr(
      manager._orbax,
      'save',
      lambda *a, **k: (calls.append('w'), write(*a, **k)),
  )
  manager.save(0, {'x': jnp.arange(4.0)}, {}, metric=None)
  manager.wait()
  assert calls == [['x'], 'w']


def test_a_save_copies_beside_what_goes_on(manager, monkeypatch):
  go = threading.Event()
  monkeypatch.setattr(
      checkpoint_arrays, 'on_host', lambda named: (go.wait(60), named)[1]
  )
  assert not manager.is_copying
  manager.save(0, {'x': jnp.arange(4.0)}, {}, metric=None)
  assert manager.is_copying
  go.set()
  manager.wait_for_copy()
  assert not manager.is_copying


def test_a_copy_that_fails_is_told_and_waited_for_no_longer(
    manager, monkeypatch
):
  def fail(named):
    raise MemoryError(f'no room for {len(named)}')

  monkeypatch.setattr(checkpoint_arrays, 'on_host', fail)
  manager.save(0, {'x': jnp.arange(4.0)}, {}, metric=None)
  manager.wait_for_copy()
  with pytest.raises(RuntimeError, match='step 0 was not saved.*room for 1'):
    manager.wait()
  assert manager.all_steps() == []


def test_leaves_that_differ_are_listed_by_name(manager):
  manager.save(
      0, {'a': {'b': jnp.ones((2, 3))}, 'c': jnp.int32(0)}, {}, metric=None
  )
  like = saved.like(
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
    manager.restore(saved.like(many))
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
    manager.restore(saved.like({'a': jnp.ones(*wanted)}))


def test_an_array_without_elements_is_checked_too(manager):
  manager.save(0, {'a': jnp.ones((0, 3)), 'b': jnp.ones(1)}, {}, metric=None)
  like = saved.like({'a': jnp.ones((3, 0)), 'b': jnp.ones(1)})
  with pytest.raises(ValueError, match='a is saved as float32.0, 3.'):
    manager.restore(like)


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
