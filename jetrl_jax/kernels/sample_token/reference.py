"""Draws a token per row in plain JAX, with noise on every logit."""

import jax
import jax.numpy as jnp

from jetrl_jax.core.typing import Array, Bool, Float, Int, PRNGKey
from jetrl_jax.kernels.log_sum_exp.reference import temper


def truncate(
    z_V: Float[Array, ' V'], mask_V: Bool[Array, ' V'] | None
) -> Float[Array, ' V']:
  """Returns the logits of mu: -inf where the mask is False."""
  return z_V if mask_V is None else jnp.where(mask_V, z_V, -jnp.inf)


def gumbel_argmax(
    z_V: Float[Array, ' V'],
    mask_V: Bool[Array, ' V'] | None,
    key: PRNGKey,
    *,
    greedy: Bool[Array, ''] | bool = False,
) -> Int[Array, '']:
  """Draws a token from softmax(z) restricted to the mask.

      token = argmax_v (z_v + g_v),   g_v ~ Gumbel(0, 1), independent

  The noise is drawn with 'high' resolution: the default's 23 bits end at
  g = 16, and in a vocabulary of 150000 the tail would never be drawn, though
  log mu says that it is.

  Args:
    z_V: tempered logits, float32.
    mask_V: tokens that may be drawn; None for all.
    key: this row's and this token's own key.
    greedy: take the most probable token and no noise (temperature 0).

  Returns:
    int32 token id; of equal values the lowest.
  """
  z_V = truncate(z_V, mask_V)
  noise_V = jax.random.gumbel(key, z_V.shape, jnp.float32, mode='high')
  noisy_V = jnp.where(greedy, z_V, z_V + noise_V)
  return jnp.argmax(noisy_V).astype(jnp.int32)


def draw(
    logits_BV: Array,
    inverse_B: Array,
    mask_BV: Array | None,
    keys_B: PRNGKey,
    greedy_B: Array,
) -> Array:
  """Returns int32 tokens [B], see the package's `draw`."""

  def one(z_V, mask_V, key, greedy):
    return gumbel_argmax(z_V, mask_V, key, greedy=greedy)

  z_BV = temper(logits_BV, inverse_B[:, None])
  axes = (0, None if mask_BV is None else 0, 0, 0)
  return jax.vmap(one, in_axes=axes)(z_BV, mask_BV, keys_B, greedy_B)
