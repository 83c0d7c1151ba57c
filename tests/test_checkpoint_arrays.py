"""A checkpoint's arrays: to the host, to the disk, back as they were."""

import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax import checkpoint_arrays, rng
from jetrl_jax.checkpoint import CheckpointManager
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
  to_host = types.SimpleNamespace(asarray=seen.append)
  monkeypatch.setattr(checkpoint_arrays, 'np', to_host)
  checkpoint_arrays.copy_to_host(named)
  # What the writer will ask, which must be the very objects that have the copy.
  asked = [*named['in parts'].addressable_shards]
  asked += named['alone'].addressable_shards
  assert len(seen) == len(asked) == 5
  assert {id(part) for part in seen} == {id(shard.data) for shard in asked}


def test_a_save_has_its_arrays_on_the_host_before_the_writer_asks(
    manager, monkeypatch
):
  state, calls = {'x': jnp.arange(4.0)}, []
  write = manager._orbax.save
  monkeypatch.setattr(
      checkpoint_arrays, 'copy_to_host', lambda named: calls.append([*named])
  )
  monkeypatch.setattr(
      manager._orbax,
      'save',
      lambda *a, **k: (calls.append('w'), write(*a, **k)),
  )
  manager.save(0, state, {}, metric=None)
  manager.wait()
  assert calls == [['x'], 'w']


def test_a_save_copies_beside_what_goes_on(manager, monkeypatch):
  copy, go = checkpoint_arrays.copy_to_host, threading.Event()
  monkeypatch.setattr(
      checkpoint_arrays,
      'copy_to_host',
      lambda named: (go.wait(60), copy(named)),
  )
  assert not manager.is_copying
  manager.save(0, {'x': jnp.arange(4.0)}, {}, metric=None)
  assert manager.is_copying
  go.set()
  manager.wait_for_copy()
  assert not manager.is_copying


def test_a_copy_that_fails_is_told_and_waited_for_no_longer(manager):
  state = {'x': jnp.arange(4.0)}
  state['x'].delete()
  manager.save(0, state, {}, metric=None)
  manager.wait_for_copy()
  with pytest.raises(RuntimeError, match='step 0 was not saved.*deleted'):
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
