"""The rotation of a pair of halves, in plain JAX."""

import jax.numpy as jnp

from jetrl_jax.core.compilation import on_gpu
from jetrl_jax.core.typing import Array
from jetrl_jax.fp8.products import fence


def rotate_halves(
    first: Array, second: Array, cos: Array, sin: Array
) -> tuple[Array, Array]:
  """Returns both halves rotated; cosines and sines broadcast against them."""
  dtype = first.dtype
  first, second = first.astype(jnp.float32), second.astype(jnp.float32)

  def product(x, y):
    # Of two products one would join the addition, and which one is left to
    # the compiler: decode's kernel has another one than training.
    return fence(x * y) if on_gpu() else x * y

  return (
      (product(first, cos) - product(second, sin)).astype(dtype),
      (product(second, cos) + product(first, sin)).astype(dtype),
  )
