"""Log-sum-exp and mean of rows of logits, in plain JAX."""

import jax.numpy as jnp

from jetrl_jax.core.typing import Array
from jetrl_jax.kernels.row_sum import row_sum

LOWEST = float(jnp.finfo(jnp.float32).min)


def temper(logits: Array, inverse: Array) -> Array:
  """Returns logits z = logits * inverse, not below float32's lowest number."""
  # The maximum changes no finite value. Without it the product and the
  # subtraction of the row's maximum are fused into one multiply-add, which
  # skips the product's rounding - in some programs and not in others.
  return jnp.maximum(logits * inverse, LOWEST)


def row_stats(logits_MV: Array, inverse_M: Array) -> tuple[Array, Array]:
  """See the package's `row_stats`."""
  z_MV = temper(logits_MV, inverse_M[:, None])
  top_M1 = jnp.max(z_MV, axis=1, keepdims=True)
  p_MV = jnp.exp(z_MV - top_M1)
  total_M1 = row_sum(p_MV)
  mean_M1 = row_sum(p_MV * z_MV) / total_M1
  return (top_M1 + jnp.log(total_M1))[:, 0], mean_M1[:, 0]
