"""Scales and the quantisers.

`scale` has one meaning in the whole package: x ~ values * scale. Quantising
always saturates. JAX's cast would turn 500.0 into NaN in float8_e4m3fn (max
448) and 70000.0 into inf in float8_e5m2 (max 57344).
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jetrl_jax.core.typing import Array
from jetrl_jax.fp8 import formats

# The scope of `quantize`; `fp8/flow/walk.py` looks for it.
QUANTIZE = 'quantize'
# Scales stay within these powers of two. An amax below 1.3e-36 would give a
# scale whose reciprocal is infinite in float32, and 0 * inf is NaN.
_MIN_SCALE = 2.0**-100
_MAX_SCALE = 2.0**100


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class QTensor:
  """A quantised tensor: x ~ values * scale.

  Attributes:
    values: 8-bit array.
    scale: float32, positive and finite: a scalar, or of the values' rank, with
      one entry per group of equal size along each axis. A kernel [O, I] has
      [] (per tensor), [O, 1] (per output channel) or [O/128, I/128] (per
      block); rows [M, I] have [], [M, 1] or [M, I/128]. Arrays have two axes,
      so that `core/sharding.py` splits a kernel's scales like its values.
  """

  values: Array
  scale: Array


def is_recordable(amax: Array) -> Array:
  """Returns whether an amax may enter a history: finite and above zero."""
  # Not `isfinite`, which kernels lack. NaN fails both comparisons.
  return (amax > 0) & (amax < jnp.inf)


def scale_from_amax(
    amax: Array,
    dtype,
    *,
    margin: int,
    power_of_two: bool,
    limit: float | None = None,
) -> Array:
  """Returns the scale that maps `amax` to the format's maximum.

      scale = 2^margin * amax / limit,  rounded up to a power of two

  Rounding up keeps `amax` itself from saturating. Multiplication by a power of
  two is exact, so it commutes with every rounding.

  Args:
    amax: float32, any shape; 0, NaN and inf mean "not known" and give 1.
    dtype: the 8-bit format.
    margin: headroom in bits.
    power_of_two: whether to round up to a power of two.
    limit: largest value of a grid within the format; None is the format's.

  Returns:
    float32 scales in [2^-100, 2^100], same shape.
  """
  amax = amax.astype(jnp.float32)
  factor = jnp.float32(2.0**margin / (limit or formats.format_max(dtype)))
  scale = jnp.clip(
      jnp.where(is_recordable(amax), amax, 1.0) * factor, _MIN_SCALE, _MAX_SCALE
  )
  if power_of_two:
    # This is exact on every backend; exp2(ceil(log2(x))) is not.
    bits = lax.bitcast_convert_type(scale, jnp.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
    scale = lax.bitcast_convert_type(exponent << 23, jnp.float32)
  return jnp.where(is_recordable(amax), scale, jnp.float32(1.0))


def quantize(x: Array, scale: Array, dtype) -> Array:
  """Returns the 8-bit values of x / scale, saturated, rounded to nearest even.

  Args:
    x: float array, finite; NaN stays NaN in a float format.
    scale: float32, a scalar or broadcasting against x, see `scale_from_amax`.
    dtype: the 8-bit format.
  """
  limit = formats.format_max(dtype)
  with jax.named_scope(QUANTIZE):
    scaled = x.astype(jnp.float32) * (1.0 / scale)
    if jnp.issubdtype(dtype, jnp.integer):
      # A cast from float to integer would truncate.
      scaled = lax.round(scaled, lax.RoundingMethod.TO_NEAREST_EVEN)
    return jnp.clip(scaled, -limit, limit).astype(dtype)


def quantize_groups(
    x_MI: Array,
    dtype,
    group: tuple[int, int],
    *,
    margin: int,
    power_of_two: bool,
    limit: float | None = None,
) -> QTensor:
  """Quantises a matrix with one scale per group, from the group's own amax.

  Nothing saturates, because each scale maps its group's amax into the format.
  A group (1, I) is one row, (1, 128) is 128 values of a row, (128, 128) is a
  square block, (M, 1) is a column.

  Args:
    x_MI: finite; a group with a NaN dequantises to NaN.
    dtype: the 8-bit format.
    group: rows and columns of a group; they divide the matrix.
    margin: headroom in bits.
    power_of_two: whether to round scales up to powers of two.
    limit: largest value of a grid within the format; None is the format's.

  Returns:
    values [M, I] and scale [M / rows, I / columns].
  """
  # The barrier makes everything below read the rounded array. Otherwise one
  # program might recompute x in higher precision and get another scale.
  x_MI = lax.optimization_barrier(x_MI)
  shape, within = [], []
  for size, step in zip(x_MI.shape, group, strict=True):
    whole = step == size
    shape += [size] if whole or step == 1 else [size // step, step]
    if step > 1:
      within.append(len(shape) - 1)
  grouped = x_MI.reshape(shape)
  amax = jnp.max(
      jnp.abs(grouped.astype(jnp.float32)), axis=within, keepdims=True
  )
  scale = scale_from_amax(
      amax, dtype, margin=margin, power_of_two=power_of_two, limit=limit
  )
  if jnp.issubdtype(dtype, jnp.integer):
    # An integer cannot be NaN, so the scale must carry it to the loss.
    scale = jnp.where(jnp.isnan(amax), jnp.float32(jnp.nan), scale)
  counts = [size // step for size, step in zip(x_MI.shape, group, strict=True)]
  return QTensor(
      values=quantize(grouped, scale, dtype).reshape(x_MI.shape),
      scale=scale.reshape(counts),
  )


def scale_of_elements(q: QTensor) -> Array:
  """Returns each value's scale, as an array that broadcasts."""
  scale = q.scale
  for axis in range(scale.ndim):
    times = q.values.shape[axis] // scale.shape[axis]
    if scale.shape[axis] > 1 and times > 1:
      scale = jnp.repeat(scale, times, axis=axis)
  return scale


def dequantize(q: QTensor, dtype) -> Array:
  """Returns values * scale in `dtype`."""
  return (q.values.astype(jnp.float32) * scale_of_elements(q)).astype(dtype)
