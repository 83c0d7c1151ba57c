"""How keys and values are stored: their dtype, and FP8 values in pairs.

Keys and values may be stored in FP8 (`kv_dtype`). Every use then reads what was
stored, also the training forward, and the gradient passes straight through. The
scale is 1, because E4M3's own exponent reaches from 2^-9 to 448. A cache holds
the FP8 values of two neighbouring tokens as one 16-bit word per channel, which
is what a tensor core reads at once.
"""

import jax
import jax.numpy as jnp

from jetrl_jax.core.typing import Array
from jetrl_jax.fp8 import formats
from jetrl_jax.fp8.quantization import quantize


def store(x: Array, kv_dtype) -> Array:
  """Returns keys or values in the dtype that holds them; None leaves them."""
  if kv_dtype is None:
    return x
  if jnp.dtype(kv_dtype) == formats.E4M3:
    return quantize(x, jnp.float32(1.0), formats.E4M3)
  return x.astype(kv_dtype)


def store_values(v: Array, kv_dtype) -> Array:
  """Returns values [..., S, H] as a cache holds them, see `values_shape`."""
  v = store(v, kv_dtype)
  return pair(v) if v.dtype.itemsize == 1 else v


def values_shape(keys: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
  """Returns the shape of a cache's values beside keys [..., S, H].

  The same, or for FP8 [..., S/2, H, 2].
  """
  if keys.dtype.itemsize > 1:
    return keys
  return jax.eval_shape(pair, keys)


def pair(values_SH: Array) -> Array:
  """[..., S, H] to [..., S/2, H, 2]: how FP8 values are stored."""
  *lead, length, head_dim = values_SH.shape
  pairs = values_SH.reshape(*lead, length // 2, 2, head_dim)
  return jnp.swapaxes(pairs, -1, -2)


def unpair(pairs: Array) -> Array:
  """The inverse of `pair`."""
  *lead, half, head_dim, _ = pairs.shape
  return jnp.swapaxes(pairs, -1, -2).reshape(*lead, 2 * half, head_dim)
