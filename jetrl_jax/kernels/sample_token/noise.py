"""The noise of a draw, as every backend's kernel makes it.

Philox4x32-10 makes bits of a key and a counter, and `log2_exponential` makes
Gumbel noise of the bits.

References:
  Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
"""

import math
from collections.abc import Callable

import jax.numpy as jnp

_ROUNDS = 10
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
# Below it, -log(1 - u) is a series.
_LOW = 2.0**-6


def _product(a, b: int) -> tuple:
  """Returns the upper and the lower 32 bits of a * b, of uint32."""
  a_low, a_high = a & 0xFFFF, a >> 16
  b_low, b_high = jnp.uint32(b & 0xFFFF), jnp.uint32(b >> 16)
  middle = a_high * b_low + ((a_low * b_low) >> 16)
  high = (
      a_high * b_high
      + (middle >> 16)
      + (((middle & 0xFFFF) + a_low * b_high) >> 16)
  )
  return high, a * jnp.uint32(b)


def philox(counter, key):
  """Returns four words of Philox4x32-10.

  Args:
    counter: four uint32 arrays of one shape.
    key: two uint32 numbers.
  """
  a, b, c, d = counter
  one, two = key
  for _ in range(_ROUNDS):
    high_a, low_a = _product(a, _MULTIPLIERS[0])
    high_c, low_c = _product(c, _MULTIPLIERS[1])
    a, b, c, d = high_c ^ b ^ one, low_c, high_a ^ d ^ two, low_a
    one, two = one + jnp.uint32(_WEYL[0]), two + jnp.uint32(_WEYL[1])
  return a, b, c, d


def log2_exponential(bits, log2: Callable, multiply_add: Callable):
  """Returns log2(e) of Exponential(1) numbers e, of uint32 bits.

      e = -log(1 - u),    u = (floor(bits / 2) + 1/2) / 2^31

  So -log(2) times it is Gumbel(0, 1) noise. Small e, which make the large ones,
  have all of float32's relative precision: noise reaches 22.2, where a u of 23
  bits ends at 16.

  Args:
    bits: uint32.
    log2: the backend's logarithm, of float32 to 2^-22.
    multiply_add: the backend's x * y + z, of x and of y and z like x or scalar.
  """
  # 31 bits, as a signed number: GPUs convert these in one instruction.
  number = (bits >> 1).astype(jnp.int32).astype(jnp.float32)
  u = multiply_add(number, 2.0**-31, 2.0**-32)
  series = jnp.full(u.shape, 0.25, jnp.float32)
  for factor in (1.0 / 3.0, 0.5, 1.0):
    series = multiply_add(series, u, factor)
  # The largest u rounds to 1.
  large = log2(jnp.maximum(1.0 - u, 2.0**-25)) * -math.log(2.0)
  return log2(jnp.where(u < _LOW, u * series, large))


def first_largest(places, values, last):
  """Returns the lowest place of the largest value, or the last: of NaN."""
  return jnp.min(jnp.where(values == jnp.max(values), places, last))
