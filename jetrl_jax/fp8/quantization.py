"""Scales and the quantiser.

One meaning of `scale` in the whole package: x ~ values * scale. Quantising
always saturates: JAX's own cast turns 500.0 into NaN in float8_e4m3fn (max
448) and 70000.0 into inf in float8_e5m2 (max 57344).
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jetrl_jax.fp8 import formats
from jetrl_jax.typing import Array

# Scales stay within these powers of two: an amax below 1.3e-36 would give a
# scale whose reciprocal is infinite in float32, and 0 * inf is NaN.
_MIN_SCALE = 2.0**-100
_MAX_SCALE = 2.0**100


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class QTensor:
  """A quantised tensor: x ~ values * scale.

  Attributes:
    values: float8 array.
    scale: float32 scalar, positive and finite.
  """

  values: Array
  scale: Array


def is_recordable(amax: Array) -> Array:
  """True where an amax may enter a history: finite and above zero."""
  return jnp.isfinite(amax) & (amax > 0)


def scale_from_amax(
    amax: Array, dtype, *, margin: int, power_of_two: bool
) -> Array:
  """Returns the scale that maps `amax` to the format's maximum.

      scale = 2^margin * amax / format_max,  rounded up to a power of two

  Rounding up keeps `amax` itself from saturating. Powers of two make the
  multiplication by a scale exact, so that it commutes with every rounding.

  Args:
    amax: float32, any shape; 0, NaN and inf mean "nothing known" and give 1.
    dtype: the 8-bit format.
    margin: head-room in bits.
    power_of_two: round up to a power of two.

  Returns:
    float32 scales in [2^-100, 2^100], same shape.
  """
  amax = amax.astype(jnp.float32)
  factor = jnp.float32(2.0**margin / formats.format_max(dtype))
  scale = jnp.clip(
      jnp.where(is_recordable(amax), amax, 1.0) * factor, _MIN_SCALE, _MAX_SCALE
  )
  if power_of_two:
    # Exact on every backend: exp2(ceil(log2(x))) is not.
    bits = lax.bitcast_convert_type(scale, jnp.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
    scale = lax.bitcast_convert_type(exponent << 23, jnp.float32)
  return jnp.where(is_recordable(amax), scale, jnp.float32(1.0))


def quantize(x: Array, scale: Array, dtype) -> Array:
  """Returns the 8-bit values of x / scale, saturated, round to nearest even.

  Args:
    x: float array, finite; NaN stays NaN.
    scale: float32 scalar, see `scale_from_amax`.
    dtype: the 8-bit format.
  """
  limit = formats.format_max(dtype)
  scaled = x.astype(jnp.float32) * (1.0 / scale)
  return jnp.clip(scaled, -limit, limit).astype(dtype)


def dequantize(q: QTensor, dtype) -> Array:
  """Returns values * scale in `dtype`."""
  return (q.values.astype(jnp.float32) * q.scale).astype(dtype)
