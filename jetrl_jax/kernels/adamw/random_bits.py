"""Random bits of an element by its address, and what they round."""

import jax.numpy as jnp
from jax import lax

from jetrl_jax.core import rng
from jetrl_jax.core.typing import Array

_DROPPED_BITS = 16  # of a float32, to make it a bfloat16


_LARGEST = 0x7F7F  # the bits of the largest finite bfloat16


def bits_of(index: Array, first_word: Array, second_word: Array) -> Array:
  """Returns the random bits of elements, given a key's two words.

  Args:
    index: uint32, in the whole parameter, modulo 2^32.
    first_word: uint32 [], of the parameter's key.
    second_word: uint32 [].
  """
  return rng.hashed(index, first_word, second_word) >> _DROPPED_BITS


def stochastic_bfloat16(x: Array, bits: Array) -> Array:
  """Rounds float32 to a neighbouring bfloat16, by chance and without bias.

  The lower 16 bits of a float32 are the part that is cut off, in 2^-16 of the
  step to the next bfloat16, whatever the sign and also among subnormals. Adding
  a number in [0, 2^16) carries into the upper half with just that probability.

  Args:
    x: float32.
    bits: uint32 in [0, 2^16), uniform and independent of x.

  Returns:
    bfloat16, of mean x over `bits`. What bfloat16 holds stays itself, infinity
    and NaN too. Finite values stay finite: those beyond the largest bfloat16
    become it, the only ones that are not unbiased.

  References:
    Gupta et al. 2015, arXiv:1502.02551, section 3; Zamirai et al. 2020,
    arXiv:2010.06192, for masters in bfloat16.
  """
  word = lax.bitcast_convert_type(x, jnp.uint32)
  upper = (word + bits) >> _DROPPED_BITS
  # The carry out of the largest exponent's last mantissa would be infinity.
  overflows = (upper & 0x7FFF) > _LARGEST
  upper = jnp.where(overflows, word >> _DROPPED_BITS, upper)
  rounded = lax.bitcast_convert_type(upper.astype(jnp.uint16), jnp.bfloat16)
  # A carry would make NaN anything, -0 among others. Mosaic lacks `isfinite`.
  is_finite = jnp.abs(x) < jnp.inf
  return jnp.where(is_finite, rounded, x.astype(jnp.bfloat16))
