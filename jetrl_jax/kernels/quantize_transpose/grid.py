"""An 8-bit format on a scale, inside a kernel of any backend.

A tile has four numbers: its amax, two counts in one, the sum of squares, and
that of the squares of what is lost.
"""

import dataclasses
from typing import Any, Self

import jax.numpy as jnp
from jax import lax

from jetrl_jax.core.typing import Array
from jetrl_jax.fp8 import formats

TILE = 128  # What both dims of a matrix are multiples of.
# A tile's two counts share one number.
FLUSHED = 1 << 16
NUMBERS = (jnp.float32, jnp.int32, jnp.float32, jnp.float32)


def fits(shape: tuple[int, ...]) -> bool:
  """Whether a matrix has whole tiles only."""
  return all(size % TILE == 0 for size in shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
  """The values of an 8-bit format on a scale, inside a kernel.

  Attributes:
    dtype: the format, a float.
    limit: its largest value.
    scale: float32 scalar.
    inverse: the inverse of the scale.
    largest: limit * scale.
    clips: values before they are cast; a GPU's conversion does it by itself.
  """

  dtype: Any
  limit: float
  scale: Array
  inverse: Array
  largest: Array
  clips: bool = True

  @classmethod
  def of(cls, scale: Array, dtype, **more) -> Self:
    """Returns it; before the loop over rows, as stores fence loads."""
    limit = formats.format_max(dtype)
    return cls(
        dtype=dtype,
        limit=limit,
        scale=scale,
        inverse=1.0 / scale,
        largest=limit * scale,
        **more,
    )

  def look(self, x: Array) -> tuple[Array, tuple[Array, ...]]:
    """Returns (8-bit values of float32 x, what goes into four numbers)."""
    scaled = x * self.inverse
    low = self.cast(scaled)
    stored = low.astype(jnp.float32)
    error = self.error(x, stored)
    count = self.count(x, scaled, stored)
    return low, (jnp.abs(x), count, x * x, error * error)

  def cast(self, scaled: Array) -> Array:
    """Returns the 8-bit values."""
    if self.clips:
      scaled = jnp.clip(scaled, -self.limit, self.limit)
    return scaled.astype(self.dtype)

  def error(self, x: Array, stored: Array) -> Array:
    """Returns what is lost."""
    return x - stored * self.scale

  def count(self, x: Array, scaled: Array, stored: Array) -> Array:
    """Returns 1 for each value that saturated, `FLUSHED` for one flushed."""
    del scaled
    count = (jnp.abs(x) > self.largest).astype(jnp.int32)
    return count + ((x != 0) & (stored == 0)).astype(jnp.int32) * FLUSHED


def join_tiles(
    amax: Array, counts: Array, signal: Array, noise: Array
) -> tuple[Array, Array]:
  """Joins the four numbers of all tiles, in one reduction.

  XLA would make a kernel of each of several reductions. The order of addition
  is the same.

  Args:
    amax: of each tile, as all that follow; two dims.
    counts: see `Grid.count`.
    signal: sums of squares.
    noise: sums of the squares of what is lost.

  Returns:
    (the matrix's amax, `QuantizedPair.quantization_error`)
  """
  both = counts % FLUSHED, counts // FLUSHED
  of_tiles = amax, *(c.astype(jnp.float32) for c in both), signal, noise

  def join(left, right):
    return jnp.maximum(left[0], right[0]), *map(jnp.add, left[1:], right[1:])

  zeros = (jnp.float32(0.0),) * len(of_tiles)
  amax, *sums = lax.reduce(of_tiles, zeros, join, dimensions=(0, 1))
  return amax, jnp.stack(sums)
