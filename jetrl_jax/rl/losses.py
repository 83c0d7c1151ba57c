"""Policy losses: per token, unbatched, unreduced and free of the model.

A loss takes the log-ratio of one sequence (or of one packed row: tokens do not
see each other here) and returns a number per token. The train step vmaps,
multiplies by the correction's weight (`rl/corrections.py`), then by
`TrainBatch.loss_weight`, and sums. Masked tokens have weight 0, so a loss need
not know the mask.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jetrl_jax.typing import Array, Float

# exp(20) is 4.9e8: beyond it a ratio says nothing, and exp(89) is infinite.
MAX_LOG_RATIO = 20.0


class PolicyLoss(NamedTuple):
  """A loss per token, and where it was clipped.

  Attributes:
    loss_T: to be minimised; unreduced.
    clipped_T: float32, 1 where the clipped term is the larger one. Its mean
      over response tokens is `actor/pg_clipfrac`.
    clipped_lower_T: float32, 1 where A < 0 and the loss met its upper bound
      -c A. Its mean over response tokens is `actor/pg_clipfrac_lower`.
  """

  loss_T: Array
  clipped_T: Array
  clipped_lower_T: Array


def clipped_pg_loss(
    log_ratio_T: Float[Array, ' T'],
    advantage_T: Float[Array, ' T'],
    *,
    clip_low: float,
    clip_high: float,
    clip_c: float,
) -> PolicyLoss:
  """PPO's clipped surrogate with two clip distances and the dual clip.

      r = exp(clip(log_ratio, -20, 20))
      loss = max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A)
      loss = min(loss, -clip_c A)                                 where A < 0

  The gradient vanishes where the clipped term, or the bound, was chosen. At a
  ratio of exactly 1 (the first update after a rollout) it is -A d log pi.

  Args:
    log_ratio_T: log pi(y_t) - log pi_old(y_t), in nats.
    advantage_T: advantages; no gradient flows into them.
    clip_low: lower distance of the clip range from 1, in [0, 1).
    clip_high: upper distance of the clip range from 1, at least 0.
    clip_c: bound of the loss in units of |A|, above 1. It keeps a token with
      a negative advantage and an exploding ratio from ruling the batch.

  Returns:
    The unreduced loss and the two indicators.

  References:
    Schulman et al. 2017, arXiv:1707.06347, eq. 7. clip_high > clip_low: DAPO,
    arXiv:2503.14476, eq. 10. Dual clip: Ye et al. 2020, arXiv:1912.09729, eq.
    5.
  """
  advantage_T = jax.lax.stop_gradient(advantage_T)
  ratio_T = jnp.exp(jnp.clip(log_ratio_T, -MAX_LOG_RATIO, MAX_LOG_RATIO))
  free_T = -ratio_T * advantage_T
  inside_T = jnp.clip(ratio_T, 1.0 - clip_low, 1.0 + clip_high)
  held_T = -inside_T * advantage_T
  clipped_T = held_T > free_T
  loss_T = jnp.where(clipped_T, held_T, free_T)
  bound_T = -clip_c * advantage_T
  clipped_lower_T = (advantage_T < 0) & (loss_T > bound_T)
  return PolicyLoss(
      loss_T=jnp.where(clipped_lower_T, bound_T, loss_T),
      clipped_T=clipped_T.astype(jnp.float32),
      clipped_lower_T=clipped_lower_T.astype(jnp.float32),
  )
