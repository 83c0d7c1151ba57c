"""Adam whose moments are stored in 8 bits between two steps.

A moment is decoded, updated by optax's own Adam arithmetic, and encoded again.
Plain E4M3 with one scale spans a factor of 2^18 between its largest and its
smallest value. Second moments are squares, so the values of one group easily
span more; the small ones become 0, the update divides by eps instead of their
root, and the run explodes. COAT's dynamic range expansion raises a group to a
power k first, which makes its range fit. Per group of 128 values:

    M = max |x|,  m = min nonzero |x|,  c = sqrt(M m)
    k = floor(16 log2(448^2 / 2) / log2(M / m)) / 16   clamped to [1/16, 16]
    scale = (M / c)^k / 448
    encode: q = E4M3(sign(x) (|x| / c)^k / scale)
    decode: sign(q) |q scale|^(1/k) c

M lands on 448 and m on 448 (m / M)^k >= 448 * 2 / 448^2 = 1/224, which is
above E4M3's smallest value 2^-9: nothing that was nonzero becomes 0.

Worked example: M = 2^-10, m = 2^-34. Scaled so that M is 448, plain E4M3 holds
m as 448 * 2^-24 = 0.00003, which is 0. Expanded: log2(M / m) = 24 and
log2(448^2 / 2) = 16.61, so k = floor(11.08) / 16 = 11/16; c = 2^-22;
scale = 2^(12 * 11/16) / 448 = 2^8.25 / 448 = 0.6796. m is stored as
2^-8.25 / 0.6796 = 0.00483, rounded to 2 * 2^-9 = 0.00391, and decodes to
(0.00391 * 0.6796)^(16/11) 2^-22 = 2^-34.45, 0.73 of what it was.

Error of one encoding. With u = |q| before rounding, E4M3 changes u by a factor
1 + d, |d| <= max(2^-4, 2^-10 / u) (half a step of the normal range, half a step
of the subnormal one), hence the value by (1 + d)^(1/k). A group that spans
2^16 has k = 1: at most 6% for u from 2^-6 on, and 22% at u = 1/224, below which
none is. Wider groups pay with coarser steps. An element moves relative to the
largest of its group only by whole steps; a common decay of the group is
followed exactly, by the scale.

Values below float32's smallest normal, 2^-126, count as 0, because backends
disagree on whether they are. Their root is below 1.1e-19 and invisible beside
eps. Without them M / m < 2^254, so the lower clamp of k never binds.

Memory: 1 byte a value and 12 a group, 1 + 12/128 = 1.09 bytes a value where the
last axis is a multiple of 128, against 4 in float32. While a leaf is updated,
both of its moments are in memory decoded, 8 bytes a value. A program over all
leaves would hold all of them decoded at once, so `optim/apply.py` runs one
program per parameter group.

Time: both powers are exp(log(x) k). x is a ratio to the group's centre, so the
product is at most 9 in size for encoding, where it is rounded to three bits
anyway; a library's pow(x, k) carries more bits than that, at several times the
instructions.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jetrl_jax.core import rng
from jetrl_jax.core.typing import Array, PyTree
from jetrl_jax.fp8 import formats
from jetrl_jax.kernels.adamw import random_bits

GROUP = 128  # values of a moment that share an expansion
_FORMAT_MAX = formats.format_max(formats.E4M3)
TINY = float(jnp.finfo(jnp.float32).tiny)
_HUGE = float(jnp.finfo(jnp.float32).max)
# The range that a group is expanded or compressed to, in bits: E4M3 from
# 2 / 448 to 448.
_RANGE_BITS = math.log2(_FORMAT_MAX**2 / 2)
_K_STEPS = 16
_K_MAX = 16.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodedMoment:
  """One leaf of a moment, in groups of consecutive values of its last axis.

  Groups never cross a row: a leaf sharded on any axis but the last keeps its
  groups on one device, and all four arrays have the leaf's rank, so that the
  leaf's PartitionSpec serves them all. A last axis may be sharded too where
  every device holds whole groups. The last group of a row may be shorter.

  Attributes:
    values: float8_e4m3fn, the leaf's shape.
    scale: float32 [..., ceil(last axis / group_size)], in [1/448, 1].
    k: float32, like `scale`: exponent of the expansion, in [1/16, 16].
    c: float32, like `scale`: geometric mean of the group's extremes.
  """

  values: Array
  scale: Array
  k: Array
  c: Array


class Codec(NamedTuple):
  """How a moment rests between two steps.

  Attributes:
    encode: array to what the optimiser state holds: a tree of arrays with the
      array's axes, the last of any length, no row dependent on another.
    decode: the inverse, up to the codec's error.
    zeros: a leaf to what `encode` gives for zeros like it, written down and
      not computed: XLA would fold `encode` of a constant on the host, minutes
      for one large leaf.
  """

  encode: Callable[[Array], Any]
  decode: Callable[[Any], Array]
  zeros: Callable[[Array], Any]


def float32_codec() -> Codec:
  """Returns the codec that stores moments in float32, whatever the leaf is.

  In bfloat16 a second moment would never fall: 0.999 of it rounds back to it.
  """
  return Codec(
      encode=lambda x: x.astype(jnp.float32),
      decode=lambda x: x,
      zeros=lambda x: jnp.zeros_like(x, jnp.float32),
  )


def fp8_codec(group_size: int = GROUP) -> Codec:
  """Returns the codec of the module docstring.

  Args:
    group_size: values that share an expansion, at least 1.

  Returns:
    A codec between float arrays of any shape and `EncodedMoment`; it decodes
    to float32. Finite values give finite ones, zeros give zeros.

  Raises:
    ValueError: `group_size` is below 1.

  References:
    Xi et al. 2024, COAT, arXiv:2410.19313, section 4.
  """
  if group_size < 1:
    raise ValueError(f'group_size is {group_size}; it must be 1 or more')

  def encode(x: Array) -> EncodedMoment:
    groups = _split(x.astype(jnp.float32), group_size)
    values, scale, k, c = _encode_groups(groups)
    group_shape = (*x.shape[:-1], groups.shape[-2]) if x.ndim else ()
    return EncodedMoment(
        values=_join(values, x.shape),
        scale=scale.reshape(group_shape),
        k=k.reshape(group_shape),
        c=c.reshape(group_shape),
    )

  def decode(encoded: EncodedMoment) -> Array:
    values = _split(encoded.values.astype(jnp.float32), group_size)
    group_shape = values.shape[:-1]
    scale, k, c = (
        a.reshape(group_shape)[..., None]
        for a in (encoded.scale, encoded.k, encoded.c)
    )
    magnitude = _power(jnp.abs(values) * scale, 1.0 / k) * c
    # What was near an end of float32's range may come back rounded past it.
    magnitude = jnp.clip(magnitude, TINY, _HUGE)
    return _join(jnp.sign(values) * magnitude, encoded.values.shape)

  def zeros(x: Array) -> EncodedMoment:
    one = jnp.ones_like(jax.eval_shape(encode, x).scale)
    values = jnp.zeros(x.shape, formats.E4M3)
    return EncodedMoment(values=values, scale=one, k=one, c=one)

  return Codec(encode=encode, decode=decode, zeros=zeros)


def _power(x: Array, exponent: Array) -> Array:
  """x^exponent for x >= 0 and a positive exponent; 0 stays 0."""
  return jnp.exp(jnp.log(x) * exponent)


def _split(x: Array, group_size: int) -> Array:
  """[..., I] to [..., groups, group_size], padded with zeros."""
  x = x.reshape(1) if x.ndim == 0 else x
  padding = -x.shape[-1] % group_size
  if padding:
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padding)])
  return x.reshape(*x.shape[:-1], x.shape[-1] // group_size, group_size)


def _join(groups: Array, shape: tuple[int, ...]) -> Array:
  """Inverse of `_split`."""
  rows = groups.reshape(*groups.shape[:-2], -1)
  return rows[..., : shape[-1] if shape else 1].reshape(shape)


def expansion(
    largest: Array,
    smallest: Array,
    log2: Callable[[Array], Array] = jnp.log2,
    floor: Callable[[Array], Array] = jnp.floor,
) -> tuple[Array, Array, Array]:
  """Returns (scale, k, c) of groups, by the formulas of the module.

  Args:
    largest: float32, of the group's magnitudes.
    smallest: the smallest that is not below `TINY`; any number if all are.
    log2: logarithm to base 2, of two numbers whose difference is rounded.
    floor: the largest whole number that is not above.
  """
  # A comparison with NaN is false: NaN stays and is seen by whoever decodes.
  empty = largest < TINY
  largest = jnp.where(empty, 1.0, largest)
  smallest = jnp.where(empty, 1.0, smallest)
  # Both the ratio M / m and the product M m may leave float32's range; the
  # logarithms and the roots do not. The clip is for roots rounded outwards.
  range_bits = log2(largest) - log2(smallest)
  c = jnp.clip(jnp.sqrt(largest) * jnp.sqrt(smallest), smallest, largest)
  # range_bits is 0 where all magnitudes are equal: the floor under it is where
  # k reaches its upper clamp.
  steps = _K_STEPS * _RANGE_BITS / jnp.maximum(range_bits, _RANGE_BITS / _K_MAX)
  k = jnp.clip(floor(steps) / _K_STEPS, 1.0 / _K_STEPS, _K_MAX)
  # Compilers turn x / c into x * (1 / c), which is 0 for c near float32's
  # largest value; the root's inverse is harmless.
  root = jnp.sqrt(c)
  scale = _power(largest / root / root, k) / _FORMAT_MAX
  scale, k, c = (jnp.where(empty, 1.0, a) for a in (scale, k, c))
  return scale, k, c


def _encode_groups(x: Array) -> tuple[Array, Array, Array, Array]:
  """Encodes float32 [..., groups, group_size].

  Zeros, and so the padding, take no part in the minimum.

  Returns:
    float8 values like x, and scale, k, c of shape [..., groups].
  """
  magnitude = jnp.abs(x)
  largest = jnp.max(magnitude, axis=-1)
  smallest = jnp.min(jnp.where(magnitude < TINY, jnp.inf, magnitude), axis=-1)
  scale, k, c = expansion(largest, smallest)
  # Divided once per group, not per value.
  inverse, factor = (1.0 / a[..., None] for a in (jnp.sqrt(c), scale))
  # |x| / c is 2^-127 at the very end of the range, which could be flushed.
  ratio = jnp.maximum(magnitude * inverse * inverse, TINY)
  stored = _power(ratio, k[..., None]) * factor
  # Not the comparison above, which XLA would write to memory for both uses. A
  # NaN becomes 0 here and is restored by its group's scale.
  stored = jnp.where(magnitude >= TINY, jnp.minimum(stored, _FORMAT_MAX), 0.0)
  return (jnp.sign(x) * stored).astype(formats.E4M3), scale, k, c


def scale_by_adam(
    b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, *, codec: Codec
) -> optax.GradientTransformation:
  """Rescales updates by Adam, with the moments encoded between two steps.

      mu = b1 mu + (1 - b1) g,  nu = b2 nu + (1 - b2) g^2
      update = mu / (1 - b1^t) / (sqrt(nu / (1 - b2^t)) + eps)

  The arithmetic is that of `optax.scale_by_adam`, on decoded moments; with
  `float32_codec()` and float32 leaves the two are equal to the bit. The update
  is computed from the moments before they are encoded, so the codec's error
  enters one step later.

  Args:
    b1: decay of the first moment, in [0, 1).
    b2: decay of the second moment, in [0, 1).
    eps: added to the root, above 0.
    codec: how the moments rest.

  Returns:
    A transformation whose state is `optax.ScaleByAdamState(count, mu, nu)` with
    encoded leaves in `mu` and `nu`.
  """
  exact = optax.scale_by_adam(b1=b1, b2=b2, eps=eps)

  def init(params: PyTree) -> optax.ScaleByAdamState:
    state: Any = exact.init(params)
    return optax.ScaleByAdamState(
        count=state.count,
        mu=jax.tree.map(codec.zeros, state.mu),
        nu=jax.tree.map(codec.zeros, state.nu),
    )

  def update(updates, state, params=None):
    del params

    def decoded(moments):
      # The tree of `updates` says where an encoded leaf begins.
      return jax.tree.map(lambda _, e: codec.decode(e), updates, moments)

    moved: Any
    updates, moved = exact.update(
        updates,
        optax.ScaleByAdamState(
            count=state.count, mu=decoded(state.mu), nu=decoded(state.nu)
        ),
    )
    return updates, optax.ScaleByAdamState(
        count=moved.count,
        mu=jax.tree.map(codec.encode, moved.mu),
        nu=jax.tree.map(codec.encode, moved.nu),
    )

  return optax.GradientTransformation(init, update)


class AdamW(optax.GradientTransformationExtraArgs):
  """What `adamw` returns: a transformation that can be asked for its numbers.

  Attributes:
    learning_rate: as given to `adamw`, and so are all others.
    b1: decay of the first moment.
    b2: decay of the second moment.
    eps: added to the root.
    weight_decay: the decay of the leaves in `mask`.
    mask: where weights decay.
  """

  learning_rate: optax.ScalarOrSchedule
  b1: float
  b2: float
  eps: float
  weight_decay: float
  mask: Any | Callable[[PyTree], Any] | None

  def rates(self, state: PyTree) -> tuple[Array, Array, Array]:
    """Returns the learning rate and both moments' inverse bias corrections.

    Args:
      state: before the step that they are for.
    """
    adam, _, schedule = state
    rate = self.learning_rate
    if callable(rate):
      rate = rate(schedule.count)
    count = optax.safe_increment(adam.count)
    rates = rate, 1.0 / (1.0 - self.b1**count), 1.0 / (1.0 - self.b2**count)
    rate, first, second = (jnp.asarray(x, jnp.float32) for x in rates)
    return rate, first, second


def adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-4,
    mask: Any | Callable[[PyTree], Any] | None = None,
    *,
    codec: Codec,
) -> AdamW:
  """Returns AdamW: Adam, plus decayed weights, times -learning_rate.

  Composed as `optax.adamw` is; equal to it to the bit with `float32_codec()`
  and float32 parameters.

  Args:
    learning_rate: a number, or a function of the step counted from 0.
    b1: decay of the first moment, in [0, 1).
    b2: decay of the second moment, in [0, 1).
    eps: added to the root of the second moment, above 0.
    weight_decay: multiplied by the learning rate like the Adam update.
    mask: tree of bools over the parameters, or a function that makes one:
      where weights decay. None is everywhere.
    codec: how the moments rest, see `scale_by_adam`.

  References:
    Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2.
  """
  made = AdamW(
      *optax.chain(
          scale_by_adam(b1, b2, eps, codec=codec),
          optax.add_decayed_weights(weight_decay, mask),
          optax.scale_by_learning_rate(learning_rate),
      )
  )
  made.learning_rate, made.mask = learning_rate, mask
  made.b1, made.b2, made.eps = b1, b2, eps
  made.weight_decay = weight_decay
  return made


def update(
    master: Array,
    gradient: Array,
    mu: EncodedMoment,
    nu: EncodedMoment,
    numbers: Array,
    rounding_keys: Array | None,
    *,
    b1: float,
    b2: float,
    eps: float,
    decay: float,
) -> tuple[Array, EncodedMoment, EncodedMoment, Array]:
  """See the package's `update`."""
  codec = fp8_codec()
  ok, clip_factor, rate, inverse1, inverse2 = (numbers[i] for i in range(5))
  g, x = gradient.astype(jnp.float32) * clip_factor, master.astype(jnp.float32)
  first = (1 - b1) * g + b1 * codec.decode(mu)
  second = (1 - b2) * (g * g) + b2 * codec.decode(nu)
  update = first * inverse1 / (jnp.sqrt(second * inverse2) + eps)
  moved = x - rate * (update + decay * x)
  if rounding_keys is None:
    stored = moved.astype(master.dtype)
  else:
    index = rng.element_index(master.shape, 0) + rounding_keys[2]
    bits = random_bits.bits_of(index, rounding_keys[0], rounding_keys[1])
    stored = random_bits.stochastic_bfloat16(moved, bits)
  new = stored, codec.encode(first), codec.encode(second)
  kept = jax.tree.map(
      lambda a, b: jnp.where(ok > 0, a, b), new, (master, mu, nu)
  )
  return *kept, jnp.max(jnp.abs(stored.astype(jnp.float32)))
