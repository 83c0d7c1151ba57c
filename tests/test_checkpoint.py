"""Tests of saving, finding, restoring and retiring checkpoints."""

import collections
import json
import os
import pathlib
import resource
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jetrl_jax import checkpoint
from jetrl_jax import rng
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


def test_a_fresh_directory_has_nothing_to_restore(manager, tmp_path):
  assert manager.restore(_like(_state())) is None
  assert manager.latest_step() is None
  assert manager.best_step() is None
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


def test_the_newest_and_the_best_steps_stay(tmp_path):
  manager = CheckpointManager(tmp_path, keep_latest=2, keep_best=2)
  # Steps with metric: best two are 1 (0.9) and 3 (0.8); newest two 5 and 6.
  # Step 4 equals step 3 and is newer, so from step 4 on it takes 3's place.
  metrics = {0: 0.1, 1: 0.9, 2: None, 3: 0.8, 4: 0.8, 5: float('nan'), 6: 0.2}
  for step, metric in metrics.items():
    manager.save(step, {'x': jnp.int32(step)}, {}, metric=metric)
  manager.wait()
  assert manager.all_steps() == [1, 4, 5, 6]
  assert manager.best_step() == 1
  assert manager.latest_step() == 6
  folders = {path.name for path in tmp_path.iterdir()}
  assert folders == {'1', '4', '5', '6', '.lock'}
  like = {'x': _like(jnp.int32(0))}
  assert int(manager.restore(like, step=4).state['x']) == 4
  manager.close()


def test_a_synchronous_save_is_done_when_it_returns(tmp_path):
  manager = CheckpointManager(
      tmp_path, keep_latest=1, keep_best=0, asynchronous=False
  )
  manager.save(0, {'x': jnp.ones(3)}, {}, metric=None)
  assert checkpoint.all_steps(tmp_path) == [0]
  manager.close()
