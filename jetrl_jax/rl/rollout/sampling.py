"""Which tokens may be drawn from a row of logits, and with which probability.

`kernels/sample_token` draws the token. Each function here takes one row. Logits
are float32, and z is the logits divided by the temperature (by 1 in greedy
rows). The policy pi is the softmax of z. Truncation (top-k, top-p, min-p) gives
another distribution, mu, from which the token is drawn.

A row's result depends only on its own logits and key. Sums run in a fixed tree
of additions (`lax.associative_scan`), which the compiler cannot reorder for
another number of rows.
"""

import math

import jax.numpy as jnp
from jax import lax

from jetrl_jax.core.typing import Array, Bool, Float, Int
from jetrl_jax.kernels.sample_token import truncate


def check_settings(*, top_k: int, top_p: float, min_p: float) -> None:
  """Raises an error for settings that define no distribution.

  Args:
    top_k: tokens; 0 or -1 is off.
    top_p: probability in (0, 1]; 1 is off.
    min_p: share of the largest probability, in [0, 1]; 0 is off.

  Raises:
    ValueError: a setting is outside its range.
  """
  if top_k < -1:
    raise ValueError(f'top_k is {top_k}; allowed are 0 or -1 (off) and above.')
  if not 0.0 < top_p <= 1.0:
    raise ValueError(f'top_p is {top_p}; it must be in (0, 1], 1 is off.')
  if not 0.0 <= min_p <= 1.0:
    raise ValueError(f'min_p is {min_p}; it must be in [0, 1], 0 is off.')


def truncation_mask(
    z_V: Float[Array, ' V'],
    *,
    top_k: int,
    top_p: float,
    min_p: float,
) -> Bool[Array, ' V'] | None:
  """Marks the tokens that may be drawn.

  The filters apply in this order, as in transformers: the top_k most probable
  tokens; of the distribution over those, the smallest set of most probable
  tokens whose mass reaches top_p; of these, the tokens with at least min_p
  times the largest probability. The most probable token always stays. Among
  equal logits the lower token id comes first.

  One difference: transformers keeps all ties at the k-th place.

  Args:
    z_V: tempered logits, float32.
    top_k: static; 0 or -1 is off.
    top_p: static, in (0, 1]; 1 is off.
    min_p: static, in [0, 1]; 0 is off.

  Returns:
    True for the tokens that are kept; None if all settings are off, and then mu
    is pi.

  Raises:
    ValueError: see `check_settings`.
  """
  check_settings(top_k=top_k, top_p=top_p, min_p=min_p)
  sorts = 0 < top_k < z_V.shape[0] or top_p < 1.0
  if not sorts and min_p == 0.0:
    return None
  mask_V = jnp.ones(z_V.shape, jnp.bool_)
  if sorts:
    mask_V &= _ranked_mask(z_V, top_k=top_k, top_p=top_p)
  if min_p > 0.0:
    # p >= min_p p_max, in log space. The normaliser cancels, so it does not
    # matter that top-k and top-p changed it.
    mask_V &= z_V - jnp.max(z_V) >= math.log(min_p)
  return mask_V


def top_p_mask(
    z_V: Float[Array, ' V'], top_p: Float[Array, '']
) -> Bool[Array, ' V']:
  """Returns the mask of `truncation_mask` for a top_p that is not static.

  Args:
    z_V: tempered logits, float32.
    top_p: in (0, 1). At 1 rounding may leave out tokens at the end of the tail:
      the caller draws without a mask.
  """
  return _ranked_mask(z_V, top_k=0, top_p=top_p)


def _ranked_mask(
    z_V: Float[Array, ' V'], *, top_k: int, top_p: float | Float[Array, '']
) -> Bool[Array, ' V']:
  """Marks the top_k most probable tokens, up to a mass of top_p."""
  vocabulary = z_V.shape[0]
  kept = top_k if 0 < top_k < vocabulary else vocabulary
  # The sort distinguishes -0.0 from 0.0, but == does not, so make both 0.0.
  z_V = jnp.where(z_V == 0.0, 0.0, z_V)
  values_K, _ = lax.top_k(z_V, kept)
  count = jnp.int32(kept)
  if not isinstance(top_p, float) or top_p < 1.0:
    mass_K = lax.associative_scan(jnp.add, jnp.exp(values_K - values_K[0]))
    # A token stays while the mass before it has not reached p.
    reached_K = mass_K[:-1] >= top_p * mass_K[-1]
    count = 1 + jnp.sum(~reached_K, dtype=jnp.int32)
  # Go back from ranks to ids by value, so that the sort's order of ties does
  # not matter: keep all values above the last one, then its first few ties.
  last = values_K[count - 1]
  above_V, tied_V = z_V > last, z_V == last
  ties_kept = count - jnp.sum(above_V, dtype=jnp.int32)
  return above_V | (tied_V & (jnp.cumsum(tied_V) <= ties_kept))


def log_mu(
    z_V: Float[Array, ' V'],
    mask_V: Bool[Array, ' V'],
    token: Int[Array, ''],
    *,
    greedy: Bool[Array, ''] | bool = False,
) -> Float[Array, '']:
  """Returns the log-prob of a token under the truncated distribution.

      log mu(v) = z_v - log sum_{u in mask} exp(z_u)

  Without a mask mu is pi, and the caller uses the log-prob that it already has.
  It is the same number, but this sum might differ in its last bits.

  Args:
    z_V: tempered logits, float32.
    mask_V: tokens that could be drawn.
    token: the token drawn.
    greedy: whether the row is greedy; its token then has probability 1.

  Returns:
    Nats; 0 for a greedy row, -inf for a token outside the mask.
  """
  kept_V = truncate(z_V, mask_V)
  largest = jnp.max(kept_V)
  sums_V = lax.associative_scan(jnp.add, jnp.exp(kept_V - largest))
  logprob = (kept_V[token] - largest) - jnp.log(sums_V[-1])
  return jnp.where(greedy, 0.0, logprob)
