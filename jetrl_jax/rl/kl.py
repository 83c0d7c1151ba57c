"""Estimators of KL(pi || pi_ref) from the log-probs of sampled tokens.

With x = log pi - log pi_ref at a token drawn from pi, k2 and k3 estimate the
KL. Both are exactly 0 at x = 0, with a zero gradient. This holds at step 0 if
the reference runs the same recipe.

k1 = x estimates it too, but as a loss its expected on-policy gradient is zero
for any pi_ref (E[d log pi] = 0), so `make_kl_loss` refuses it. It belongs into
the reward (`rl/scoring/kl_reward.py`).

References:
  Schulman 2020, "Approximating KL divergence", joschu.net/blog/kl-approx.html.
"""

from typing import Protocol

import jax.numpy as jnp

from jetrl_jax.core.typing import Array, Float
from jetrl_jax.rl.losses import MAX_LOG_RATIO

MAX_K3 = 10.0


class KlLoss(Protocol):
  """A function from two log-probs to a penalty, per token."""

  def __call__(
      self,
      log_pi_T: Float[Array, ' T'],
      log_pi_ref_T: Float[Array, ' T'],
  ) -> Float[Array, ' T']:
    """Returns the penalty in nats."""
    ...


def _log_ratio(
    log_pi_T: Float[Array, ' T'], log_pi_ref_T: Float[Array, ' T']
) -> Float[Array, ' T']:
  return jnp.clip(log_pi_T - log_pi_ref_T, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def k2(
    log_pi_T: Float[Array, ' T'], log_pi_ref_T: Float[Array, ' T']
) -> Float[Array, ' T']:
  """Estimates the KL by x^2 / 2, in nats; its expected gradient is the KL's.

  Differs from verl: x is clamped to +-20 here as in the other estimators.
  """
  return 0.5 * jnp.square(_log_ratio(log_pi_T, log_pi_ref_T))


def k3(
    log_pi_T: Float[Array, ' T'], log_pi_ref_T: Float[Array, ' T']
) -> Float[Array, ' T']:
  """Estimates the KL by exp(-x) - 1 + x, in nats (verl: 'low_var_kl').

  The estimate is in [0, 10]. Where x < -2.61 or x > 11 it is constant and has
  no gradient.
  """
  x_T = _log_ratio(log_pi_T, log_pi_ref_T)
  # expm1, because exp(-x) - 1 would round away the value x^2 / 2 near 0 (at
  # x = 1e-4 it is 5e-9, but the spacing of float32 at 1 is 1.2e-7).
  return jnp.minimum(jnp.expm1(-x_T) + x_T, MAX_K3)


def make_kl_loss(kl_loss_type: str) -> KlLoss:
  """Chooses the KL penalty by its config name.

  Args:
    kl_loss_type: 'k2', or 'k3' (also called 'low_var_kl').

  Returns:
    The penalty per token.

  Raises:
    ValueError: 'k1', which cannot work as a loss, or an unknown name.
  """
  match kl_loss_type:
    case 'k2':
      return k2
    case 'k3' | 'low_var_kl':
      return k3
    case 'k1':
      raise ValueError(
          "kl_loss_type is 'k1', but k1 as a loss has zero expected gradient"
          " on-policy; use 'k2' or 'k3'."
      )
    case _:
      raise ValueError(
          f'kl_loss_type is {kl_loss_type!r}; allowed are'
          " 'k2', 'k3' and 'low_var_kl'."
      )
