"""The 8-bit formats and their limits, and coarser grids within them."""

import dataclasses
from typing import Any

import jax.numpy as jnp

E4M3 = jnp.float8_e4m3fn
E5M2 = jnp.float8_e5m2
# Values are -127 to 127, so that the range is symmetric.
INT8 = jnp.int8

# Formats of output gradients, by their config names.
FORMATS = {'e4m3': E4M3, 'e5m2': E5M2}
_MAX = {
    jnp.dtype(E4M3): 448.0,
    jnp.dtype(E5M2): 57344.0,
    jnp.dtype(INT8): 127.0,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
  """The values of a format, before the scale.

  Attributes:
    dtype: an 8-bit type that holds them.
    limit: the largest value.
  """

  dtype: Any
  limit: float


# INT-b has 2^b - 1 values, symmetric around 0.
FAKE = {
    'e4m3': Grid(dtype=E4M3, limit=_MAX[jnp.dtype(E4M3)]),
    'e5m2': Grid(dtype=E5M2, limit=_MAX[jnp.dtype(E5M2)]),
    'int6': Grid(dtype=INT8, limit=31.0),
    'int5': Grid(dtype=INT8, limit=15.0),
    'int4': Grid(dtype=INT8, limit=7.0),
    'int3': Grid(dtype=INT8, limit=3.0),
}


def format_max(dtype) -> float:
  """Returns the largest value that quantising to an 8-bit format gives."""
  return _MAX[jnp.dtype(dtype)]
