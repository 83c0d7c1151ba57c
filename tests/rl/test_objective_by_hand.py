"""The objective of a few tokens, beside sums written out."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.rl import objective
from jetrl_jax.rl.objective import LossConfig, policy_loss, supervised_loss
from jetrl_jax.rl.types import TrainBatch


def _batch(**fields):
  zeros = np.zeros((1, 4), np.float32)
  made = {f.name: zeros for f in dataclasses.fields(TrainBatch)}
  made |= {
      'loss_mask': np.asarray([[0, 1, 1, 1]], np.float32),
      'loss_weight': np.asarray([[9, 0.5, 0.25, 0.25]], np.float32),
      'advantages': np.asarray([[7, 2, 1, -1]], np.float32),
      'old_logprobs': np.asarray([[0, -1, -2, -1.5]], np.float32),
      'log_mu': np.asarray([[0, -1, -2, -1.5]], np.float32),
      'segment_ids': np.ones((1, 4), np.int32),
  }
  return TrainBatch(**(made | fields))


# Ratios 1, 1.5 and 0.5; the first token is not in the loss.
LOGPROBS = jnp.asarray(
    [[jnp.nan, -1.0, -2 + math.log(1.5), -1.5 + math.log(0.5)]]
)
ENTROPY = jnp.asarray([[jnp.nan, 1.0, 1.0, 1.0]])


def test_the_objective_of_three_tokens_by_hand():
  loss, metrics = policy_loss(LossConfig(), _batch(), LOGPROBS, ENTROPY)
  # 0.5 * (-1 * 2) + 0.25 * (-1.2 * 1) + 0.25 * (0.8 * 1): the second token is
  # clipped at 1.2, the third, whose advantage is -1, at 0.8.
  np.testing.assert_allclose(loss, -1.0 - 0.3 + 0.2, rtol=1e-6)
  assert metrics['actor/pg_clipfrac'].value() == pytest.approx(2 / 3)
  assert metrics['actor/pg_clipfrac_lower'].value() == 0.0
  assert metrics['actor/entropy'].value() == 1.0
  assert metrics['actor/ppo_kl'].value() == pytest.approx(
      -(math.log(1.5) + math.log(0.5)) / 3, rel=1e-6
  )
  assert float(metrics['actor/pg_loss'].sum) == pytest.approx(-1.1, rel=1e-6)
  assert 'actor/kl_loss' not in metrics


def test_the_clip_distances_and_the_dual_clip_are_the_config_s():
  config = LossConfig(clip_ratio_low=0.4, clip_ratio_high=0.3, clip_ratio_c=1.5)
  batch = _batch(advantages=np.asarray([[0, 2, 1, -1]], np.float32))
  logprobs = LOGPROBS.at[0, 1].set(-1 + math.log(4.0))
  loss, _ = policy_loss(config, batch, logprobs, ENTROPY)
  # 0.5 * -1.3 * 2 - 0.25 * 1.3 + 0.25 * 0.6
  np.testing.assert_allclose(loss, -1.3 - 0.325 + 0.15, rtol=1e-6)
  batch = _batch(advantages=np.asarray([[0, -2, 0, 0]], np.float32))
  loss, metrics = policy_loss(config, batch, logprobs, ENTROPY)
  # Ratio 4 at advantage -2: 8, but at most 1.5 * 2.
  np.testing.assert_allclose(loss, 0.5 * 3.0, rtol=1e-6)
  assert metrics['actor/pg_clipfrac_lower'].value() == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ('kl_loss_type', 'kl'),
    [
        # x = -log 2: exp(-x) - 1 + x = 2 - 1 - log 2, and x^2 / 2.
        ('k3', 1 - math.log(2)),
        ('k2', math.log(2) ** 2 / 2),
    ],
)
def test_the_kl_term_by_hand(kl_loss_type, kl):
  config = LossConfig(kl_loss_coef=0.1, kl_loss_type=kl_loss_type)
  batch = _batch(ref_logprobs=np.asarray(LOGPROBS + math.log(2), np.float32))
  loss, metrics = policy_loss(config, batch, LOGPROBS, ENTROPY)
  # The weights add up to 1.
  np.testing.assert_allclose(loss, -1.1 + 0.1 * kl, rtol=1e-5)
  assert metrics['actor/kl_loss'].value() == pytest.approx(kl, rel=1e-5)


def test_the_entropy_bonus_lowers_the_loss():
  loss, _ = policy_loss(
      LossConfig(entropy_coeff=0.01), _batch(), LOGPROBS, ENTROPY
  )
  np.testing.assert_allclose(loss, -1.1 - 0.01, rtol=1e-6)


def test_the_correction_multiplies_the_policy_term_alone():
  mu = np.asarray([[0, -1, -2, -1.5]], np.float32) - np.float32(math.log(4))
  batch = _batch(log_mu=mu)
  config = LossConfig(
      rollout_is='token', rollout_is_threshold=2.0, entropy_coeff=0.01
  )
  loss, _ = policy_loss(config, batch, LOGPROBS, ENTROPY)
  # pi_old / mu = 4, capped at 2.
  np.testing.assert_allclose(loss, 2 * -1.1 - 0.01, rtol=1e-5)
  loss, _ = policy_loss(LossConfig(), batch, LOGPROBS, ENTROPY)
  np.testing.assert_allclose(loss, -1.1, rtol=1e-5)


def test_a_new_loss_without_a_case_is_no_ppo(monkeypatch):
  monkeypatch.setattr(objective, 'POLICY_LOSSES', ('mine',))
  config = LossConfig(policy_loss='mine')
  with pytest.raises(NotImplementedError, match="'mine' has no case here"):
    policy_loss(config, _batch(), LOGPROBS, ENTROPY)


def test_no_gradient_reaches_a_masked_token_even_from_nan():
  config = LossConfig(kl_loss_coef=0.1, entropy_coeff=0.1)

  def of(logprobs, entropy):
    return policy_loss(config, _batch(), logprobs, entropy)[0]

  by_logprobs, by_entropy = jax.grad(of, (0, 1))(
      LOGPROBS.at[0, 0].set(-3.0), ENTROPY.at[0, 0].set(5.0)
  )
  assert by_logprobs[0, 0] == 0 and by_entropy[0, 0] == 0
  # Ratio 1, advantage 2, weight 0.5, and the KL against ref_logprobs 0.
  expected = 0.5 * (-2 + 0.1 * (1 - math.exp(1)))
  np.testing.assert_allclose(by_logprobs[0, 1], expected, rtol=1e-5)


def test_the_supervised_loss_is_the_weighted_likelihood():
  loss, metrics = supervised_loss(_batch(), LOGPROBS, ENTROPY)
  second, third = -2 + math.log(1.5), -1.5 + math.log(0.5)
  np.testing.assert_allclose(
      loss, 0.5 - 0.25 * second - 0.25 * third, rtol=1e-6
  )
  assert metrics['sft/loss'].value() == pytest.approx(
      (1 - second - third) / 3, rel=1e-6
  )


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'clip_ratio_low': 1.0}, r'clip_ratio_low is 1\.0; allowed: \[0, 1\)'),
        ({'clip_ratio_high': -0.1}, r'clip_ratio_high is -0\.1; allowed: >= 0'),
        ({'clip_ratio_c': 1.0}, r'clip_ratio_c is 1\.0; allowed: > 1'),
        ({'kl_loss_coef': -1.0}, r'kl_loss_coef is -1\.0; allowed: >= 0'),
        ({'entropy_coeff': -1.0}, r'entropy_coeff is -1\.0; allowed: >= 0'),
        ({'kl_loss_type': 'k1'}, "use 'k2' or 'k3'"),
        ({'rollout_is': 'word'}, "'word'; allowed are 'none', 'token'"),
        ({'rollout_is': 'token', 'rollout_is_threshold': 0.0}, 'above 0'),
    ],
)
def test_objectives_that_cannot_work_are_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    LossConfig(**changes)
