"""Row sums in plain JAX, in one order for every number of rows."""

import jax.numpy as jnp
from jax import lax

from jetrl_jax.core.compilation import on_gpu
from jetrl_jax.core.typing import Array, Float


def row_sum(x_MD: Float[Array, 'M D']) -> Float[Array, 'M 1']:
  """Sums float32 rows in an order that does not depend on M.

  On a CPU as a product with a matrix of ones: the order of its dot does not
  depend on the number of rows when that is a multiple of 16, and XLA's own row
  reduction changes its order with whatever it is fused with. On a GPU such a
  product is cuBLAS's, which splits the contraction by the number of rows. There
  XLA's reduction stands alone, between barriers, and has one order: compiled
  for 16 to 18432 rows it is the same code, but for addresses.
  """
  if on_gpu():
    alone_MD = lax.optimization_barrier(x_MD)
    return lax.optimization_barrier(jnp.sum(alone_MD, axis=1, keepdims=True))
  ones = jnp.ones((16, x_MD.shape[1]), jnp.float32)
  return lax.dot_general(
      x_MD,
      ones,
      (((1,), (1,)), ((), ())),
      precision=lax.Precision.HIGHEST,
      preferred_element_type=jnp.float32,
  )[:, :1]
