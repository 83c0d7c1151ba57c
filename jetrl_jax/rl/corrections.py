"""Corrections for a behaviour policy mu that is not pi_old.

A correction turns the two log-probs of a token into a weight that multiplies
its policy loss, after the dual clip. In the unified flow without truncated
sampling mu is pi_old to the bit and every weight is exactly 1. mu must be the
distribution really sampled (after temperature, top-k, top-p, min-p), and
pi_old must have been computed by the training forward; with pi_old copied from
the rollout no correction can act.

Every correction has the same signature once its settings are bound
(`Correction`): (log_pi_old_T, log_mu_T) -> weight_T, without a gradient.
"""

import functools
from typing import Protocol

import jax
import jax.numpy as jnp

from jetrl_jax.typing import Array, Float

# As for the policy ratio: exp stays finite.
MAX_LOG_WEIGHT = 20.0


class Correction(Protocol):
  """A function from log-probs to detached weights, per token."""

  def __call__(
      self,
      log_pi_old_T: Float[Array, ' T'],
      log_mu_T: Float[Array, ' T'],
  ) -> Float[Array, ' T']:
    """Returns the weights."""
    ...


def no_correction(
    log_pi_old_T: Float[Array, ' T'], log_mu_T: Float[Array, ' T']
) -> Float[Array, ' T']:
  """Weighs every token with 1: the rollout is taken to be on-policy."""
  del log_mu_T
  return jnp.ones_like(log_pi_old_T)


def token_tis(
    log_pi_old_T: Float[Array, ' T'],
    log_mu_T: Float[Array, ' T'],
    *,
    threshold: float,
) -> Float[Array, ' T']:
  """Truncated importance sampling, token by token.

      w = min(exp(log pi_old - log mu), C)

  Capped above only. The log-ratio is clamped to +-20 first.

  Args:
    log_pi_old_T: nats, by the training forward before the update.
    log_mu_T: nats, under the distribution really sampled.
    threshold: the cap C, above 0. Usual: 2; 8 for DAPO at 32B.

  Returns:
    Weights in (0, C]; no gradient flows through them.

  References:
    Yao et al. 2025, "Your efficient RL framework secretly brings you
    off-policy RL training" (FlashRL).
  """
  log_weight_T = jnp.clip(
      log_pi_old_T - log_mu_T, -MAX_LOG_WEIGHT, MAX_LOG_WEIGHT
  )
  weight_T = jnp.minimum(jnp.exp(log_weight_T), threshold)
  return jax.lax.stop_gradient(weight_T)


def make_correction(rollout_is: str, *, threshold: float) -> Correction:
  """Chooses a correction by its config name.

  Args:
    rollout_is: 'none' or 'token'.
    threshold: the cap C; 'none' does not read it.

  Returns:
    The correction with its settings bound.

  Raises:
    ValueError: an unknown name, or a threshold that is not above 0.
  """
  match rollout_is:
    case 'none':
      return no_correction
    case 'token':
      if not threshold > 0.0:
        raise ValueError(
            f'rollout_is_threshold is {threshold}; it caps a weight and must'
            ' be above 0 (usual: 2.0).'
        )
      return functools.partial(token_tis, threshold=threshold)
    case _:
      raise ValueError(
          f"rollout_is is {rollout_is!r}; allowed are 'none' and 'token'."
      )
