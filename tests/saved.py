"""A state of all kinds of leaves that a run saves, and what equals it."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jetrl_jax.core import rng

Pair = collections.namedtuple('Pair', ['first', 'second'])


def state(seed=0):
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


def like(state):
  """Returns the shapes and shardings to ask for."""
  return jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
      state,
  )


def bits(leaf):
  """Returns the bytes of an array or of a key."""
  if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
    leaf = jax.random.key_data(leaf)
  return np.asarray(leaf).tobytes()


def assert_same(found, expected):
  """Structure, dtypes, shapes, bits and shardings."""
  assert jax.tree.structure(found) == jax.tree.structure(expected)
  paths = jax.tree_util.tree_flatten_with_path(expected)[0]
  for (path, want), have in zip(paths, jax.tree.leaves(found), strict=True):
    assert have.dtype == want.dtype, path
    assert have.shape == want.shape, path
    assert bits(have) == bits(want), path
    assert have.sharding.is_equivalent_to(want.sharding, want.ndim), path
