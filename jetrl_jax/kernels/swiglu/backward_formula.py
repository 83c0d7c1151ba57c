"""The arithmetic of SwiGLU's backward inside a kernel, for every backend."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp

from jetrl_jax.core.typing import Array
from jetrl_jax.kernels.quantize_transpose import grid
from jetrl_jax.kernels.swiglu.formula import Function


@dataclasses.dataclass(frozen=True, kw_only=True)
class Maths:
  """How some functions are computed.

  Attributes:
    sigmoid: see `formula.sigmoid`.
    product: x y, rounded whatever follows.
    multiply_add: x y + z.
    share: x y + z, but 0 below 0 and 1 above 1; y and z are numbers.
    saturates: whether a cast to 8 bits does.
  """

  sigmoid: Function
  product: Callable[..., Array]
  multiply_add: Callable[..., Array]
  share: Callable[[Array, float, float], Array]
  saturates: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid(grid.Grid):
  """The same in fewer instructions, and half as many on the integer pipe.

  On a scale that is a power of two, bfloat16 values are 2^-7 or more apart from
  the limit and from the largest value that is stored as 0, so the distance,
  made large enough, is 0 or 1 when it is cut there. Counts are float32, whose
  instructions have two pipes more.
  """

  maths: Maths

  def cast(self, scaled: Array) -> Array:
    """See `Grid`."""
    return (
        scaled.astype(self.dtype)
        if self.maths.saturates
        else super().cast(scaled)
    )

  def error(self, x: Array, stored: Array) -> Array:
    """See `Grid`."""
    return self.maths.multiply_add(stored, -self.scale, x)

  def count(self, x: Array, scaled: Array, stored: Array) -> Array:
    """See `Grid`."""
    size, share = jnp.abs(scaled), self.maths.share
    # Half of the smallest value goes to 0, as the even one.
    zero = float(jnp.finfo(self.dtype).smallest_subnormal) / 2
    flushed = share(size, 2.0**126, 0.0) - share(size, 2.0**8 / zero, -(2.0**8))
    saturated = share(size, 1.0, -self.limit)
    return self.maths.multiply_add(flushed, float(grid.FLUSHED), saturated)


def derivatives(
    gate: Array, up: Array, dh: Array, maths: Maths
) -> tuple[Array, Array, Array]:
  """Returns (h, dgate, dup), all float32, as XLA differentiates silu."""
  sigmoid, product = maths.sigmoid(gate), maths.product
  silu = gate * sigmoid
  dsilu = dh * up
  dgate = product(dsilu, sigmoid) + product(
      dsilu * gate * (1.0 - sigmoid), sigmoid
  )
  return silu * up, dgate, dh * silu
