"""Corrections for a behaviour policy mu that differs from pi_old.

Let rho = pi_old / mu for each token. A correction is a weight that multiplies
the token's policy loss (after the dual clip). A rejection is a weight of 0 or
1. No gradient flows through either. In the unified flow without truncated
sampling, mu equals pi_old to the bit and every weight is exactly 1. mu must be
the distribution that was sampled (after temperature, top-k, top-p, min-p), and
the training forward must compute pi_old. If pi_old is a copy of the rollout's
log-probs, no correction can act.

Every correction has the same signature once its settings are bound
(`Correction`). A rejected token still counts in the denominators of
`loss_agg_mode`, as in TRL and verl's default trainer; verl also drops it from
the KL and entropy terms.
"""

import functools
import math
from typing import Protocol

import jax
import jax.numpy as jnp

from jetrl_jax.core.typing import Array, Float, Int
from jetrl_jax.rl import segments
from jetrl_jax.rl.losses import MAX_LOG_RATIO

# rollout_is -> default rollout_is_threshold, see `docs/algorithms.md`.
DEFAULT_THRESHOLD = {
    'none': 2.0,
    'token': 2.0,
    'sequence': 2.0,
    'icepop': 5.0,
    'mis': 3.0,
    'acr': 2.0,
}


class Correction(Protocol):
  """A function from log rho to detached weights, for one packed row."""

  def __call__(
      self,
      log_rho_T: Float[Array, ' T'],
      mask_T: Float[Array, ' T'],
      segment_ids_T: Int[Array, ' T'],
  ) -> Float[Array, ' T']:
    """Returns the weights.

    Args:
      log_rho_T: log pi_old - log mu, nats; not read where the mask is 0.
      mask_T: the loss mask.
      segment_ids_T: see `TrainBatch`.
    """
    ...


def no_correction(
    log_rho_T: Float[Array, ' T'],
    mask_T: Float[Array, ' T'],
    segment_ids_T: Int[Array, ' T'],
) -> Float[Array, ' T']:
  """Gives every token weight 1, as if the rollout were on-policy."""
  del mask_T, segment_ids_T
  return jnp.ones_like(log_rho_T)


def _ratio(log_ratio_T: Float[Array, ' T']) -> Float[Array, ' T']:
  """Returns exp of a clamped log-ratio, without a gradient."""
  clamped_T = jnp.clip(log_ratio_T, -MAX_LOG_RATIO, MAX_LOG_RATIO)
  return jax.lax.stop_gradient(jnp.exp(clamped_T))


def _sequence_ratio(
    log_rho_T: Float[Array, ' T'],
    mask_T: Float[Array, ' T'],
    segment_ids_T: Int[Array, ' T'],
) -> Float[Array, ' T']:
  """Returns rho_seq = exp(sum of log rho), at every token of the sequence."""
  kept_T = jnp.where(mask_T > 0, log_rho_T, 0.0)
  return _ratio(segments.segment_sum(kept_T, segment_ids_T))


def token_tis(
    log_rho_T: Float[Array, ' T'],
    mask_T: Float[Array, ' T'],
    segment_ids_T: Int[Array, ' T'],
    *,
    threshold: float,
) -> Float[Array, ' T']:
  """Truncated importance sampling, token by token.

      w = min(rho, C)

  There is no lower bound. log rho is clamped to +-20 first.

  Args:
    log_rho_T: see `Correction`.
    mask_T: not read, because each token has its own weight.
    segment_ids_T: not read.
    threshold: the cap C, above 0. Usual: 2; 8 for DAPO at 32B.

  Returns:
    Weights in (0, C].

  References:
    Yao et al. 2025, "Your efficient RL framework secretly brings you
    off-policy RL training" (FlashRL). verl: rollout_is=token; TRL:
    token_truncate.
  """
  del mask_T, segment_ids_T
  return jnp.minimum(_ratio(log_rho_T), threshold)


def icepop(
    log_rho_T: Float[Array, ' T'],
    mask_T: Float[Array, ' T'],
    segment_ids_T: Int[Array, ' T'],
    *,
    low: float,
    threshold: float,
) -> Float[Array, ' T']:
  """Drops tokens whose ratio is outside a band, above or below.

      w = rho if low <= rho <= C, else 0

  Args:
    log_rho_T: see `Correction`.
    mask_T: not read.
    segment_ids_T: not read.
    low: lower end of the band, in [0, C). Usual: 0.5.
    threshold: upper end C. Usual: 5.

  Returns:
    Weights, 0 or in [low, C].

  References:
    Ling team 2025, "Every step evolves" (Ring-1T), arXiv:2510.18855, IcePop.
    verl: rollout_is=token with a 'low_high' threshold; TRL: token_mask.
  """
  del mask_T, segment_ids_T
  rho_T = _ratio(log_rho_T)
  return jnp.where((rho_T >= low) & (rho_T <= threshold), rho_T, 0.0)


def sequence_tis(
    log_rho_T: Float[Array, ' T'],
    mask_T: Float[Array, ' T'],
    segment_ids_T: Int[Array, ' T'],
    *,
    threshold: float,
) -> Float[Array, ' T']:
  """Truncated importance sampling of whole responses.

      w = min(rho_seq, C),  rho_seq = exp(sum_t log rho_t)

  The sum runs over the loss mask and is clamped to +-20. The weight is unbiased
  up to the cap, but it is a product over the response: with 1000 tokens and a
  mean log rho of -0.01 it is e^-10.

  Args:
    log_rho_T: see `Correction`.
    mask_T: the tokens of the product.
    segment_ids_T: the sequences.
    threshold: the cap C, above 0. Usual: 2 to 10.

  Returns:
    Weights in (0, C], one number per sequence.

  References:
    Liu, Li et al. 2025, "When speed kills stability: demystifying RL collapse
    from the training-inference mismatch", richardli.xyz/rl-collapse. verl:
    rollout_is=sequence; TRL: sequence_truncate.
  """
  return jnp.minimum(
      _sequence_ratio(log_rho_T, mask_T, segment_ids_T), threshold
  )


def mis(
    log_rho_T: Float[Array, ' T'],
    mask_T: Float[Array, ' T'],
    segment_ids_T: Int[Array, ' T'],
    *,
    threshold: float,
) -> Float[Array, ' T']:
  """Masked importance sampling: weights responses, drops those above the cap.

      w = rho_seq if rho_seq <= C, else 0

  Args:
    log_rho_T: see `Correction`.
    mask_T: the tokens of the product.
    segment_ids_T: the sequences.
    threshold: C, above 0. Usual: 3.

  Returns:
    Weights in [0, C], one number per sequence.

  References:
    See `sequence_tis`. verl: rollout_is=sequence with bounds (its preset
    Seq-MIS also has a lower bound); TRL: sequence_mask, its default.
  """
  rho_T = _sequence_ratio(log_rho_T, mask_T, segment_ids_T)
  return jnp.where(rho_T <= threshold, rho_T, 0.0)


def geometric_rejection(
    log_rho_T: Float[Array, ' T'],
    mask_T: Float[Array, ' T'],
    segment_ids_T: Int[Array, ' T'],
    *,
    low: float,
    high: float,
) -> Float[Array, ' T']:
  """Keeps the responses whose geometric mean of rho is within a band.

      w = 1 if low <= exp(mean_t log rho_t) <= high, else 0

  Kept responses have weight 1. Unlike a product, the mean does not reject long
  responses because of their length. The comparison is in logs.

  Args:
    log_rho_T: see `Correction`.
    mask_T: the tokens of the mean.
    segment_ids_T: the sequences.
    low: lower end of the band, in (0, 1].
    high: upper end, at least 1.

  Returns:
    0 or 1, one number per sequence; 1 for an empty mask.

  References:
    Li et al. 2025, "When math meets reality: toxic tails and length traps",
    richardli.xyz/rl-collapse-3. verl: rollout_rs=seq_mean_k1, whose band is for
    1 / rho.
  """
  mean_T = jax.lax.stop_gradient(
      segments.segment_mean(log_rho_T, mask_T, segment_ids_T)
  )
  inside_T = (mean_T >= math.log(low)) & (mean_T <= math.log(high))
  return inside_T.astype(log_rho_T.dtype)


def acr_widening(
    log_rho_T: Float[Array, ' T'], *, threshold: float
) -> Float[Array, ' T']:
  """Returns the factor by which QuRL's adaptive range raises the upper clip.

      1 + eps_high  becomes  (1 + eps_high) / q,  q = min(1, C / rho)
      so the factor is  1 / q = max(1, rho / C)

  The matching weight is `token_tis`. The factor is exactly 1 where rho <= C.

  Args:
    log_rho_T: log pi_old - log mu, nats; clamped to +-20.
    threshold: the cap C of the weight.

  Returns:
    Factors, at least 1; no gradient flows through them.

  References:
    QuRL, arXiv:2602.13953, eq. 9.
  """
  return jnp.maximum(1.0, _ratio(log_rho_T) / threshold)


def make_correction(
    rollout_is: str, *, threshold: float, low: float
) -> Correction:
  """Chooses the importance weight by its config name.

  Args:
    rollout_is: a key of `DEFAULT_THRESHOLD`; 'acr' has the weights of 'token'.
    threshold: C; 'none' does not read it.
    low: lower end of IcePop's band; the others do not read it.

  Returns:
    The correction with its settings bound.

  Raises:
    ValueError: the name is unknown, or a threshold is out of range.
  """
  if rollout_is not in DEFAULT_THRESHOLD:
    raise ValueError(
        f'rollout_is is {rollout_is!r}; allowed are'
        f' {", ".join(map(repr, DEFAULT_THRESHOLD))}.'
    )
  if rollout_is != 'none' and not threshold > 0.0:
    raise ValueError(
        f'rollout_is_threshold is {threshold}; it caps a weight and must be'
        f' above 0 (usual: {DEFAULT_THRESHOLD[rollout_is]}).'
    )
  match rollout_is:
    case 'token' | 'acr':
      return functools.partial(token_tis, threshold=threshold)
    case 'sequence':
      return functools.partial(sequence_tis, threshold=threshold)
    case 'mis':
      return functools.partial(mis, threshold=threshold)
    case 'icepop':
      if not 0.0 <= low < threshold:
        raise ValueError(
            f'rollout_is_threshold_low is {low}; IcePop keeps rho in'
            f' [rollout_is_threshold_low, rollout_is_threshold={threshold}], so'
            ' it must be at least 0 and below that (usual: 0.5 and 5.0).'
        )
      return functools.partial(icepop, low=low, threshold=threshold)
    case 'none':
      return no_correction
    case name:  # Without this case, a missing correction would go unnoticed.
      raise NotImplementedError(f'rollout_is {name!r} has no case here')


def make_rejection(rollout_rs: str, *, low: float, high: float) -> Correction:
  """Chooses the rejection of whole responses, in addition to any weight.

  Args:
    rollout_rs: 'none' or 'geometric'.
    low: lower end of the band of the geometric mean of rho.
    high: its upper end.

  Returns:
    The rejection with its settings bound; its weights are 0 or 1.

  Raises:
    ValueError: the name is unknown, or the band does not contain 1.
  """
  match rollout_rs:
    case 'none':
      return no_correction
    case 'geometric':
      if not 0.0 < low <= 1.0 <= high < math.inf:
        raise ValueError(
            f'rollout_rs_threshold is [{low}, {high}]; the band must be finite,'
            ' above 0 and contain 1, the ratio of equal policies (usual: 0.999'
            ' and 1.001).'
        )
      return functools.partial(geometric_rejection, low=low, high=high)
    case _:
      raise ValueError(
          f"rollout_rs is {rollout_rs!r}; allowed are 'none' and 'geometric'."
      )
