"""The product of operands in scaled groups, in plain JAX."""

import jax.numpy as jnp
from jax import lax

from jetrl_jax.core.typing import Array
from jetrl_jax.fp8.products import NT, fence, times


def grouped_dot(
    a_MK: Array,
    scale_a_MG: Array,
    b_NK: Array,
    scale_b_NG: Array,
    out_dtype,
    *,
    power_of_two: bool,
) -> Array:
  """See the package's `block_dot`, whose definition this is."""

  def add(total_MN, group):
    a, b, scale_a, scale_b = group
    part = lax.dot_general(a, b, NT, preferred_element_type=jnp.float32)
    part = times(part, (scale_a[:, None], scale_b[None, :]))
    return total_MN + (part if power_of_two else fence(part)), None

  (rows, columns), groups = (a_MK.shape[0], b_NK.shape[0]), scale_a_MG.shape[1]
  block = columns // scale_b_NG.shape[0]
  a_GMC, b_GNC = (
      jnp.swapaxes(x.reshape(x.shape[0], groups, -1), 0, 1)
      for x in (a_MK, b_NK)
  )
  scale_b_GN = jnp.repeat(scale_b_NG, block, axis=0).T
  start = jnp.zeros((rows, columns), jnp.float32)
  operands = (a_GMC, b_GNC, scale_a_MG.T, scale_b_GN)
  total_MN, _ = lax.scan(add, start, operands)
  return total_MN.astype(out_dtype)
