"""AdamW's arithmetic inside a kernel, for every backend.

The formulas are those of `reference.py`, written for few instructions, because
instructions and not bytes are the limit. Logarithm, power of two, root and
inverse are the device's own: they are good for 22 bits, and 4 are stored. Bias
corrections are multiplied by their inverse. Work that is the same for a whole
group is done once per group. So float32 numbers differ from XLA's by a few of
their last bits, and fewer than one stored value in five hundred differs by one
step. A group that spans 2^252 or more loses its smallest values.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax import lax

from jetrl_jax.core.typing import Array
from jetrl_jax.fp8 import formats
from jetrl_jax.kernels.adamw import random_bits, reference
from jetrl_jax.kernels.adamw.reference import GROUP


@dataclasses.dataclass(frozen=True, kw_only=True)
class Maths:
  """How some functions of float32 arrays are computed.

  Attributes:
    log2: logarithm of what is not negative; of 0 minus infinity.
    exp2: power of two.
    sqrt: root of what is not negative.
    inverse: the inverse of a positive number.
    floor: the largest whole number that is not above.
    across: function of groups' numbers [groups] and values [groups, 128] to the
      numbers as the values lie.
  """

  log2: Callable[[Array], Array]
  exp2: Callable[[Array], Array]
  sqrt: Callable[[Array], Array]
  inverse: Callable[[Array], Array]
  floor: Callable[[Array], Array]
  across: Callable[[Array, Array], Array]


def _with_sign(magnitude: Array, like: Array) -> Array:
  """Gives float32 magnitudes the signs of others, in one instruction."""
  bits = functools.partial(lax.bitcast_convert_type, new_dtype=jnp.uint32)
  word = bits(magnitude) | (bits(like) & jnp.uint32(0x80000000))
  return lax.bitcast_convert_type(word, jnp.float32)


def _decoded(
    moment: Sequence[Array], decay: float, maths: Maths, signed: bool
) -> Array:
  """Returns decayed values of groups: their 8-bit values, scale, k and c."""
  values, scale, k, c = moment
  values = values.astype(jnp.float32)

  def across(numbers: Array) -> Array:
    return maths.across(numbers, values)

  log = maths.log2(jnp.abs(values) * across(scale))
  magnitude = maths.exp2(log * across(1.0 / k)) * across(decay * c)
  return _with_sign(magnitude, values) if signed else magnitude


def encoded(x: Array, maths: Maths, *, signed: bool) -> tuple[Array, ...]:
  """Returns groups' 8-bit values, scale, k and c.

  Values below float32's normal range become 0.

  Args:
    x: float32 [groups, 128].
    maths: functions.
    signed: whether x may be negative.
  """
  magnitude = jnp.abs(x) if signed else x
  largest = jnp.max(magnitude, axis=1)
  counts = jnp.where(magnitude < reference.TINY, jnp.inf, magnitude)
  scale, k, c = reference.expansion(
      largest, jnp.min(counts, axis=1), maths.log2, maths.floor
  )

  def across(numbers: Array) -> Array:
    return maths.across(numbers, x)

  # In powers of two, the division by the scale is a subtraction.
  shift, inverse = -maths.log2(scale), 1.0 / c
  log = maths.log2(magnitude * across(inverse))
  stored = maths.exp2(log * across(k) + across(shift))
  stored = _with_sign(stored, x) if signed else stored
  return stored.astype(formats.E4M3), scale, k, c


def step(
    gradient: Array,
    master: Array,
    mu: Sequence[Array],
    nu: Sequence[Array],
    numbers: Sequence[Array],
    maths: Maths,
    *,
    b1: float,
    b2: float,
    eps: float,
    decay: float,
) -> tuple[Array, Array, Array]:
  """Returns (master, first moment, second moment) of groups, float32.

  Args:
    gradient: [groups, 128].
    master: the same.
    mu: the first moment's 8-bit values, scale, k and c.
    nu: the second moment's.
    numbers: the clip factor; the learning rate; i1; i2, see the package.
    maths: functions.
    b1: see the package, as all that follow.
    b2: decay of the second moment.
    eps: added to the root.
    decay: of weights.
  """
  clip_factor, rate, inverse1, inverse2 = numbers
  g = gradient.astype(jnp.float32) * clip_factor
  master = master.astype(jnp.float32)
  first = (1 - b1) * g + _decoded(mu, b1, maths, signed=True)
  second = (1 - b2) * (g * g) + _decoded(nu, b2, maths, signed=False)
  root = maths.sqrt(second) * jnp.sqrt(inverse2) + eps
  update = first * maths.inverse(root) * inverse1
  if decay:
    update = update + decay * master
  return master - rate * update, first, second


def rounded(
    x: Array,
    start: Array,
    words: Sequence[Array] | None,
    dtype,
    iota: Callable[[int], Array],
) -> Array:
  """Returns moved masters in their dtype.

  Args:
    x: float32 [groups, 128].
    start: uint32, the number of x's first value in the leaf.
    words: a key's two words, and the index of the leaf's first element, to
      round at random; None rounds to the nearest.
    dtype: of the master.
    iota: from an axis to uint32 indices along it, of x's shape.
  """
  if words is None:
    return x.astype(dtype)
  first_word, second_word, of_leaf = words
  index = iota(0) * jnp.uint32(GROUP)
  index += iota(1)
  index += of_leaf + start
  bits = random_bits.bits_of(index, first_word, second_word)
  return random_bits.stochastic_bfloat16(x, bits)
