"""Measures how far the rollout's log-probs are from the training forward's.

There are two questions, with different inputs. First: do rollout and training
compute the same function? This compares the rollout's untruncated log-probs bit
by bit with the training forward's at the rollout's weights. A pi_old that was
copied from the rollout must not be used here; it would always agree. Second:
how far is the data from on-policy? This compares log mu with log pi_old.

k3 alone is not a sufficient alarm. It can stay flat for hundreds of steps while
the reward decays. So the largest difference is reported too, and the mean
signed difference by the sign of the advantage: noise has mean 0, but a drift
that lowers tokens of bad answers does not.
"""

import numpy as np

from jetrl_jax.core.typing import Array, Float, NpArray
from jetrl_jax.rl.losses import MAX_LOG_RATIO


def mismatch_metrics(
    *,
    rollout_logprobs: Float[Array | NpArray, ' T'],
    train_logprobs: Float[Array | NpArray, ' T'],
    log_mu: Float[Array | NpArray, ' T'],
    log_pi_old: Float[Array | NpArray, ' T'],
    advantages: Float[Array | NpArray, ' T'],
    rollout_is_threshold: float = float('inf'),
) -> dict[str, float]:
  """Measures the mismatch over response tokens, in float64 on the host.

  With d = train - rollout (untruncated log-probs), x = log mu - log pi_old and
  w = min(exp(-x), rollout_is_threshold), x clamped to +-20 before any exp:

      training/rollout_logprob_diff_{mean,max}    |d|, nats
      training/rollout_probs_diff_{mean,max}      |exp(train) - exp(rollout)|
      training/mismatch_token_frac                share of tokens whose two
                                                  float32 differ in any bit
      training/logprob_diff_positive_advantage    mean of d where A > 0
      training/logprob_diff_negative_advantage    mean of d where A < 0
      training/token_mult_prob_error              mean of exp|x|
      rollout_corr/kl                             mean of x
      rollout_corr/k3_kl                          mean of exp(-x) - 1 + x
      rollout_corr/rollout_is_mean                mean of w
      rollout_corr/rollout_is_eff_sample_size     1 / mean((w / mean w)^2)

  Two NaNs with the same bits agree; -0.0 and 0.0 do not. A NaN or infinity
  gives a NaN in the means and no error.

  Args:
    rollout_logprobs: float32 nats, as the rollout returned them.
    train_logprobs: float32 nats, by the training forward at those weights.
    log_mu: nats, under the distribution that was sampled.
    log_pi_old: nats, the denominator of the policy ratio.
    advantages: their signs group the signed differences.
    rollout_is_threshold: cap of the importance weights; infinity if no
      correction is applied.

  Returns:
    Name -> value. It is empty without a token, and a sign that no token has
    has no key, because what was not measured is not 0.

  Raises:
    ValueError: the log-probs to be compared bit by bit are not float32.
  """
  rollout, train = np.asarray(rollout_logprobs), np.asarray(train_logprobs)
  log_mu_T, log_pi_old_T = np.asarray(log_mu), np.asarray(log_pi_old)
  advantage_T = np.asarray(advantages)
  shapes = {
      x.shape for x in (rollout, train, log_mu_T, log_pi_old_T, advantage_T)
  }
  # Otherwise a single token would broadcast.
  assert len(shapes) == 1, shapes
  if rollout.size == 0:
    return {}
  with np.errstate(invalid='ignore', over='ignore'):
    return {
        'training/mismatch_token_frac': mismatch_token_frac(rollout, train),
        **_logprob_differences(rollout, train, advantage_T),
        **_off_policy(log_mu_T, log_pi_old_T, rollout_is_threshold),
    }


def mismatch_token_frac(
    rollout_logprobs: Float[Array | NpArray, ' T'],
    train_logprobs: Float[Array | NpArray, ' T'],
) -> float:
  """Returns the share of tokens whose two log-probs differ in any bit.

  Args:
    rollout_logprobs: float32 nats, at least one.
    train_logprobs: float32 nats.

  Returns:
    A share in [0, 1]; 0 only if all bits agree.

  Raises:
    ValueError: an input is not float32; a cast could hide a difference.
  """
  rollout, train = np.asarray(rollout_logprobs), np.asarray(train_logprobs)
  for name, x in (('rollout_logprobs', rollout), ('train_logprobs', train)):
    if x.dtype != np.float32:
      raise ValueError(
          f'{name} is {x.dtype}; pass the float32 values as they were computed.'
      )
  return float(np.mean(rollout.view(np.int32) != train.view(np.int32)))


def k3_divergence(
    before_T: Float[Array | NpArray, ' T'],
    after_T: Float[Array | NpArray, ' T'],
) -> float | None:
  """Estimates KL(before || after) from tokens sampled from `before`.

      mean of exp(-x) - 1 + x,   x = log before - log after, clamped to +-20

  Args:
    before_T: log-probs in nats, of the policy that sampled the tokens.
    after_T: log-probs in nats, of another policy for the same tokens.

  Returns:
    Nats per token; None without a token.
  """
  x_T = np.asarray(before_T, np.float64) - np.asarray(after_T, np.float64)
  if not x_T.size:
    return None
  return float(_k3(np.clip(x_T, -MAX_LOG_RATIO, MAX_LOG_RATIO)).mean())


def _k3(x_T: NpArray) -> NpArray:
  return np.expm1(-x_T) + x_T


def _logprob_differences(
    rollout: NpArray, train: NpArray, advantage_T: NpArray
) -> dict[str, float]:
  """Compares log-probs that rollout and training computed."""
  rollout, train = rollout.astype(np.float64), train.astype(np.float64)
  diff = train - rollout
  prob_diff = np.abs(np.exp(train) - np.exp(rollout))
  metrics = {
      'training/rollout_logprob_diff_mean': float(np.abs(diff).mean()),
      'training/rollout_logprob_diff_max': float(np.abs(diff).max()),
      'training/rollout_probs_diff_mean': float(prob_diff.mean()),
      'training/rollout_probs_diff_max': float(prob_diff.max()),
  }
  for sign, chosen in (
      ('positive', advantage_T > 0),
      ('negative', advantage_T < 0),
  ):
    if chosen.any():
      name = f'training/logprob_diff_{sign}_advantage'
      metrics[name] = float(diff[chosen].mean())
  return metrics


def _off_policy(
    log_mu_T: NpArray, log_pi_old_T: NpArray, threshold: float
) -> dict[str, float]:
  """Compares the sampled distribution with pi_old."""
  x_T = log_mu_T.astype(np.float64) - log_pi_old_T.astype(np.float64)
  safe_T = np.clip(x_T, -MAX_LOG_RATIO, MAX_LOG_RATIO)
  weight_T = np.minimum(np.exp(-safe_T), threshold)
  # Divided by the mean first, so that squares of tiny weights do not vanish.
  relative_T = weight_T / weight_T.mean()
  return {
      'training/token_mult_prob_error': float(np.exp(np.abs(safe_T)).mean()),
      'rollout_corr/kl': float(x_T.mean()),
      'rollout_corr/k3_kl': float(_k3(safe_T).mean()),
      'rollout_corr/rollout_is_mean': float(weight_T.mean()),
      'rollout_corr/rollout_is_eff_sample_size': float(
          1.0 / np.square(relative_T).mean()
      ),
  }
