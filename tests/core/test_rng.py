"""Tests of the addressed keys."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.core import rng


def _words(key):
  return tuple(jax.random.key_data(key).tolist())


def test_a_key_is_the_chain_of_fold_ins_of_its_address():
  by_hand = jax.random.key(7, impl='threefry2x32')
  for word in (rng.ROLLOUT, 3, 11, 2, 5):
    by_hand = jax.random.fold_in(by_hand, word)
  assert _words(rng.key(7, rng.ROLLOUT, 3, 11, 2, 5)) == _words(by_hand)


def test_a_key_keeps_its_bits_for_ever():
  # Written down once: a change of these words breaks every recorded run.
  assert _words(rng.key(0, rng.INIT)) == (1797259609, 2579123966)
  assert _words(rng.key(2**32 - 1, rng.ROLLOUT, 1, 2, 3, 4)) == (
      111623963,
      1155677170,
  )


def test_hashed_bits_are_those_of_the_published_mix_for_ever():
  def mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D % 2**32
    x = (x ^ (x >> 15)) * 0x846CA68B % 2**32
    return x ^ (x >> 16)

  index = [0, 1, 2**31]
  found = rng.hashed(
      jnp.asarray(index, jnp.uint32), jnp.uint32(5), jnp.uint32(9)
  )
  assert found.tolist() == [mix(mix(i ^ 5) ^ 9) for i in index]


def test_an_element_is_numbered_in_the_whole_array():
  # Rows 4 and 5 of an array of three columns.
  found = rng.element_index((2, 3), 4)
  assert found.tolist() == [[12, 13, 14], [15, 16, 17]]
  assert rng.element_index((3,), 4).tolist() == [4, 5, 6]


def test_a_host_generator_has_the_whole_address_and_nothing_else():
  def drawn(step, *address):
    key = rng.key(0, rng.ROLLOUT, step)
    return rng.host_generator(key, *address).integers(2**60)

  assert drawn(3, 5, 6) == drawn(3, 5, 6)
  assert (
      len({drawn(3, 5, 6), drawn(3, 5, 7), drawn(3, 4, 6), drawn(2, 5, 6)}) == 4
  )


def test_fold_continues_an_address():
  whole = rng.key(1, rng.ROLLOUT, 4, 5, 6)
  assert _words(rng.fold(rng.key(1, rng.ROLLOUT, 4), 5, 6)) == _words(whole)


def test_traced_addresses_of_any_integer_dtype_give_the_host_key():
  expected = _words(rng.key(5, rng.EVALUATION, 3, 2**31 - 1, 0))
  traced = jax.jit(lambda a, b, c: rng.key(5, rng.EVALUATION, a, b, c))
  for dtype in (jnp.int32, jnp.uint32):
    words = [jnp.asarray(word, dtype) for word in (3, 2**31 - 1, 0)]
    assert _words(traced(*words)) == expected


def test_a_batch_of_addresses_gives_each_sequence_its_own_key():
  prompt_B = jnp.asarray([9, 2, 9])
  sample_B = jnp.asarray([0, 1, 1])
  keys_B = jax.vmap(lambda p, s: rng.key(0, rng.ROLLOUT, 6, p, s))(
      prompt_B, sample_B
  )
  alone = [
      _words(rng.key(0, rng.ROLLOUT, 6, p, s))
      for p, s in ((9, 0), (2, 1), (9, 1))
  ]
  assert [_words(key) for key in keys_B] == alone


def test_keys_of_different_addresses_differ():
  keys = [
      _words(rng.key(seed, stream, step, prompt))
      for seed in (0, 1, 2**32 - 1)
      for stream in (rng.INIT, rng.ROLLOUT, rng.EVALUATION, rng.ROUNDING)
      for step in range(4)
      for prompt in range(4)
  ]
  assert len(set(keys)) == len(keys)


def test_streams_have_distinct_numbers():
  streams = [
      value
      for name, value in vars(rng).items()
      if name.isupper() and not name.startswith('_')
  ]
  assert len(streams) >= 5
  assert len(set(streams)) == len(streams)


@pytest.mark.parametrize('seed', [-1, 2**32, 2**40, 1.0, '3', True, None])
def test_a_seed_outside_32_bits_is_refused(seed):
  message = f'seed is {seed!r}; allowed: integers in [0, 2**32)'
  with pytest.raises(ValueError, match=re.escape(message)):
    rng.key(seed, rng.INIT)


def test_numpy_integers_are_seeds_and_addresses_too():
  host = rng.key(3, rng.INIT, 4)
  assert _words(rng.key(np.int64(3), rng.INIT, np.uint8(4))) == _words(host)


def test_an_address_that_is_no_32_bit_integer_is_refused():
  with pytest.raises(ValueError, match=r'address part is -1; allowed'):
    rng.key(0, rng.ROLLOUT, -1)
  with pytest.raises(ValueError, match=r'address part is 4294967296'):
    rng.key(0, rng.ROLLOUT, 2**32)
  with pytest.raises(ValueError, match=r'dtype float32; allowed: integers'):
    rng.key(0, rng.ROLLOUT, jnp.float32(1))
