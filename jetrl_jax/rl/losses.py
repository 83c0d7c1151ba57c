"""Policy losses: per token, unbatched, unreduced and independent of the model.

A loss takes the log-ratios of one packed row and returns a number per token.
`rl/objective.py` vmaps it, multiplies by the correction's weight
(`rl/corrections.py`) and by `TrainBatch.loss_weight`, and sums. Masked tokens
have weight 0; only a loss over whole sequences needs the mask.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jetrl_jax.core.typing import Array, Float, Int
from jetrl_jax.rl import segments

# All of rl/ clamps log-ratios to +-20 before exp. exp(20) is 4.9e8; a larger
# ratio carries no information, and exp(89) is inf.
MAX_LOG_RATIO = 20.0

# (clip_ratio_low, clip_ratio_high) where the config says None. A sequence's
# ratio is a geometric mean over its tokens, hence GSPO's narrow range.
DEFAULT_CLIP = (0.2, 0.2)
GSPO_CLIP = (3e-4, 4e-4)


class PolicyLoss(NamedTuple):
  """A loss per token, and where it was clipped.

  Attributes:
    loss_T: the unreduced loss, to be minimised.
    clipped_T: float32, 1 where the clipped term is the larger one. Its mean
      over response tokens is `actor/pg_clipfrac`.
    clipped_lower_T: float32, 1 where A < 0 and the loss reached its upper bound
      -c A. Its mean over response tokens is `actor/pg_clipfrac_lower`. It is 0
      in losses without a dual clip.
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
    widening_T: Float[Array, ' T'] | float = 1.0,
) -> PolicyLoss:
  """PPO's clipped surrogate with two clip distances and the dual clip.

      r = exp(clip(log_ratio, -20, 20))
      loss = max(-r A, -clip(r, 1 - clip_low, (1 + clip_high) widening) A)
      loss = min(loss, -clip_c A)                                 where A < 0

  The gradient is 0 where the clipped term or the bound was chosen. At a ratio
  of exactly 1 (the first update after a rollout) it is -A d log pi.

  Args:
    log_ratio_T: log pi(y_t) - log pi_old(y_t), in nats.
    advantage_T: advantages; no gradient flows into them.
    clip_low: lower distance of the clip range from 1, in [0, 1).
    clip_high: upper distance of the clip range from 1, at least 0.
    clip_c: bound of the loss in units of |A|, above 1. It keeps a token with a
      negative advantage and an exploding ratio from dominating the batch.
    widening_T: factor of the upper clip bound, at least 1, without a gradient;
      see `corrections.acr_widening`.

  Returns:
    The unreduced loss and the two indicators.

  References:
    Schulman et al. 2017, arXiv:1707.06347, eq. 7. clip_high > clip_low: DAPO,
    arXiv:2503.14476, eq. 10. Dual clip: Ye et al. 2020, arXiv:1912.09729, eq.
    5. Widening: QuRL, arXiv:2602.13953, eq. 9.
  """
  advantage_T = jax.lax.stop_gradient(advantage_T)
  loss_T, clipped_T = _clipped_surrogate(
      log_ratio_T, advantage_T, 1.0 - clip_low, (1.0 + clip_high) * widening_T
  )
  bound_T = -clip_c * advantage_T
  clipped_lower_T = (advantage_T < 0) & (loss_T > bound_T)
  return PolicyLoss(
      loss_T=jnp.where(clipped_lower_T, bound_T, loss_T),
      clipped_T=clipped_T.astype(jnp.float32),
      clipped_lower_T=clipped_lower_T.astype(jnp.float32),
  )


def _clipped_surrogate(
    log_ratio_T: Float[Array, ' T'],
    advantage_T: Float[Array, ' T'],
    lower: float,
    upper_T: Float[Array, ' T'] | float,
) -> tuple[Array, Array]:
  """Returns (max(-r A, -clip(r, lower, upper) A), where the clip is chosen)."""
  ratio_T = jnp.exp(jnp.clip(log_ratio_T, -MAX_LOG_RATIO, MAX_LOG_RATIO))
  free_T = -ratio_T * advantage_T
  held_T = -jnp.clip(ratio_T, lower, upper_T) * advantage_T
  clipped_T = held_T > free_T
  return jnp.where(clipped_T, held_T, free_T), clipped_T


def gspo_loss(
    log_ratio_T: Float[Array, ' T'],
    advantage_T: Float[Array, ' T'],
    mask_T: Float[Array, ' T'],
    segment_ids_T: Int[Array, ' T'],
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
  """Group sequence policy optimisation: one ratio and one clip per response.

      s = exp(mean over the response of log_ratio)      = (pi / pi_old)^(1/len)
      s_t = stop_grad(s) pi_t / stop_grad(pi_t)
      loss_t = max(-s_t A, -clip(s_t, 1 - clip_low, 1 + clip_high) A)

  s_t has the value of s and the gradient of token t. With one advantage per
  response and 'seq-mean-token-mean' the gradient is that of the sequence-level
  objective. There is no dual clip. For a response of one token it is PPO.

  Args:
    log_ratio_T: log pi(y_t) - log pi_old(y_t), in nats; 0 where masked.
    advantage_T: advantages; no gradient flows into them.
    mask_T: 1 on the tokens of the response.
    segment_ids_T: the sequences of the packed row, see `TrainBatch`.
    clip_low: lower distance of the clip range from 1, in [0, 1). Usual: 3e-4.
    clip_high: upper distance, at least 0. Usual: 4e-4.

  Returns:
    The unreduced loss; a response is clipped as a whole.

  References:
    Zheng et al. 2025, arXiv:2507.18071, eq. 5 and 7; per token: eq. 13 and 14.

  One difference from verl: the mean log-ratio is clamped to +-20, not to at
  most 10.
  """
  mean_T = segments.segment_mean(
      jax.lax.stop_gradient(log_ratio_T), mask_T, segment_ids_T
  )
  # Its value is exactly 0 and its gradient is that of log pi.
  own_T = log_ratio_T - jax.lax.stop_gradient(log_ratio_T)
  advantage_T = jax.lax.stop_gradient(advantage_T)
  loss_T, clipped_T = _clipped_surrogate(
      mean_T + own_T, advantage_T, 1.0 - clip_low, 1.0 + clip_high
  )
  return PolicyLoss(
      loss_T=loss_T,
      clipped_T=clipped_T.astype(jnp.float32),
      clipped_lower_T=jnp.zeros_like(loss_T),
  )


def cispo_loss(
    log_pi_T: Float[Array, ' T'],
    log_ratio_T: Float[Array, ' T'],
    advantage_T: Float[Array, ' T'],
    *,
    cap: float,
) -> PolicyLoss:
  """Clipped importance-sampling policy optimisation: no token is dropped.

      loss = -stop_grad(min(r, cap)) A log pi

  The ratio weights REINFORCE's gradient and has only an upper cap. PPO's clip
  stops a token's gradient; this cap only limits it.

  Args:
    log_pi_T: log pi(y_t), in nats; the gradient flows through it.
    log_ratio_T: log pi(y_t) - log pi_old(y_t), in nats, clamped to +-20.
    advantage_T: advantages; no gradient flows into them.
    cap: the largest weight, not a distance from 1. Usual: 5.

  Returns:
    The unreduced loss; only its gradient has a meaning, not its value.
    `clipped_T` is 1 where r > cap.

  References:
    MiniMax-M1, arXiv:2506.13585, eq. 4 and 5 (it sets no lower bound). The
    default of cap is from ScaleRL, arXiv:2510.13786. TRL's epsilon_high is this
    cap; verl's cap is 1 + clip_ratio_high, and verl also clips below.
  """
  advantage_T = jax.lax.stop_gradient(advantage_T)
  ratio_T = jnp.exp(jnp.clip(log_ratio_T, -MAX_LOG_RATIO, MAX_LOG_RATIO))
  weight_T = jax.lax.stop_gradient(jnp.minimum(ratio_T, cap))
  return PolicyLoss(
      loss_T=-weight_T * advantage_T * log_pi_T,
      clipped_T=(ratio_T > cap).astype(jnp.float32),
      clipped_lower_T=jnp.zeros_like(ratio_T),
  )


def gpg_loss(
    log_pi_T: Float[Array, ' T'], advantage_T: Float[Array, ' T']
) -> PolicyLoss:
  """The plain policy gradient: no ratio, and nothing is clipped.

      loss = -A log pi

  At a ratio of 1 its gradient is that of the other losses. With several updates
  a rollout it takes later mini-batches as if the policy had not moved, so
  nothing holds it near the one that sampled.

  Args:
    log_pi_T: log pi(y_t), in nats; the gradient flows through it.
    advantage_T: advantages; no gradient flows into them.

  Returns:
    The unreduced loss; only its gradient has a meaning, not its value.

  References:
    Chu et al. 2025, arXiv:2504.02546, without its scaling of advantages; verl's
    loss_mode 'gpg'.
  """
  loss_T = -jax.lax.stop_gradient(advantage_T) * log_pi_T
  never_T = jnp.zeros_like(loss_T)
  return PolicyLoss(loss_T=loss_T, clipped_T=never_T, clipped_lower_T=never_T)
