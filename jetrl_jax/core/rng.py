"""Random keys with an address: key = f(seed, stream, step, prompt, sample).

No code carries a key along and splits it. Code that needs randomness names its
purpose, and gets the same key after a resume, in another slot, in another batch
order or on another number of devices. The data is shuffled on the host, see
`data/`.
"""

import operator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jetrl_jax.core.typing import Array, PRNGKey

# Streams separate uses that would otherwise share an address. The numbers are
# part of every recorded run: give a new use a new number, and never reuse or
# renumber one. All addresses of a stream have the same length; do not draw from
# the key of a prefix.
INIT = 0  # (leaf,): random master weights.
ROLLOUT = 1  # (step, prompt, sample, token): sampled training responses.
EVALUATION = 2  # (step, prompt, sample, token): sampled evaluation responses.
CALIBRATION = 3  # (prompt, sample, token): the rollout that fills FP8 slots.
# 4 and 5 belonged to streams that nothing draws from any more.
ROUNDING = 6  # (optimiser step, parameter): masters rounded at random.

_LIMIT = 2**32


def key(seed: int | np.integer, stream: int, *address: int | Array) -> PRNGKey:
  """Makes the key of one use: threefry(seed), folded with stream and address.

      key = fold_in(... fold_in(fold_in(threefry(seed), stream), a_1) ..., a_n)

  Args:
    seed: the run's seed, in [0, 2**32); a Python or NumPy integer.
    stream: one of this module's constants.
    *address: the place in the run, e.g. (step, prompt, sample, token): integers
      in [0, 2**32), or scalar integer arrays, which may be traced.

  Returns:
    A typed threefry key, scalar.

  Raises:
    ValueError: seed, stream or a host integer of the address is outside
      [0, 2**32), or is not an integer.
  """
  seed = _checked(seed, 'seed')
  root = jax.random.key(np.uint32(seed), impl='threefry2x32')
  return fold(root, stream, *address)


def fold(base: PRNGKey, *address: int | Array) -> PRNGKey:
  """Extends the address of a key.

      fold(key(seed, stream, a), b) = key(seed, stream, a, b)

  A compiled function takes the key with the fixed part of the address as an
  argument and folds in the rest (a slot's prompt, sample and token), so that
  neither seed nor step is compiled into it.

  Args:
    base: the result of `key` or `fold`.
    *address: as for `key`.

  Returns:
    A typed threefry key, scalar.

  Raises:
    ValueError: as for `key`.
  """
  for part in address:
    if isinstance(part, jax.Array):
      if not jnp.issubdtype(part.dtype, jnp.integer):
        raise ValueError(
            f'address part has dtype {part.dtype}; allowed: integers'
        )
      word = part.astype(jnp.uint32)
    else:
      word = np.uint32(_checked(part, 'address part'))
    base = jax.random.fold_in(base, word)
  return base


def host_generator(base: PRNGKey, *address: int) -> np.random.Generator:
  """Makes the generator of one use on the host.

  Args:
    base: the result of `key` or `fold`.
    *address: the rest of the address, integers in [0, 2**32).

  Returns:
    A NumPy generator: PCG64, seeded by the key's two words and the address.
  """
  words = np.asarray(jax.random.key_data(base)).tolist()
  return np.random.default_rng([*words, *address])


def element_index(shape: tuple[int, ...], first_row: int | Array = 0) -> Array:
  """Returns each element's row-major index in its array, modulo 2^32.

  Args:
    shape: shape of this device's rows; the first axis is the split one.
    first_row: index of the first of these rows in the whole array.

  Returns:
    uint32, of `shape`.
  """
  index, stride = jnp.zeros(shape, jnp.uint32), 1
  for axis in reversed(range(len(shape))):
    along = lax.broadcasted_iota(jnp.uint32, shape, axis)
    if axis == 0:
      along = along + jnp.asarray(first_row, jnp.uint32)
    index = index + along * jnp.uint32(stride % 2**32)
    stride *= shape[axis]
  return index


def hashed(index: Array, first_word: Array, second_word: Array) -> Array:
  """Returns 32 random bits per element, given the two words of a key.

      bits_i = mix(mix(i xor key[0]) xor key[1])

  `mix` is a permutation, so no two of the first 2^32 elements get the same
  bits. It takes about ten integer instructions; threefry takes a hundred.

  Args:
    index: uint32, see `element_index`.
    first_word: uint32 [], the key's first word.
    second_word: uint32 [], the key's second word.

  Returns:
    uint32, of the index's shape.
  """
  return _mix(_mix(index ^ first_word) ^ second_word)


def _mix(x: Array) -> Array:
  """Permutes the 32-bit words; every output bit depends on all bits of x.

  References:
    Wellons 2018, "Prospecting for Hash Functions" (lowbias32).
  """
  x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
  x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
  return x ^ (x >> 16)


def _checked(value: int | np.integer, what: str) -> int:
  """Returns a host integer, after checking that it can be a key's word."""
  try:
    number = operator.index(value)
  except TypeError:
    raise ValueError(
        f'{what} is {value!r}; allowed: integers in [0, 2**32)'
    ) from None
  # Without this a seed of 2**32 would silently be seed 0 again.
  if isinstance(value, bool) or not 0 <= number < _LIMIT:
    raise ValueError(f'{what} is {value!r}; allowed: integers in [0, 2**32)')
  return number
