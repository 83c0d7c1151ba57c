"""The 8-bit formats and their limits."""

import jax.numpy as jnp

E4M3 = jnp.float8_e4m3fn
E5M2 = jnp.float8_e5m2
# -127 to 127: without -128 the range is symmetric, as scales are.
INT8 = jnp.int8

# What output gradients may be stored in.
FORMATS = {'e4m3': E4M3, 'e5m2': E5M2}
_MAX = {
    jnp.dtype(E4M3): 448.0,
    jnp.dtype(E5M2): 57344.0,
    jnp.dtype(INT8): 127.0,
}


def format_max(dtype) -> float:
  """Returns the largest value of an 8-bit format that quantising gives."""
  return _MAX[jnp.dtype(dtype)]


def format_named(name: str):
  """Returns the dtype called `name`.

  Raises:
    ValueError: `name` is none of the formats.
  """
  if name not in FORMATS:
    raise ValueError(
        f'unknown 8-bit format {name!r}; allowed: {sorted(FORMATS)}'
    )
  return FORMATS[name]
