import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.rl import mismatch

_FRAC = 'training/mismatch_token_frac'


def _metrics(rollout, train=None, mu=None, old=None, advantages=None, **kwargs):
  rollout = np.asarray(rollout, np.float32)
  return mismatch.mismatch_metrics(
      rollout_logprobs=rollout,
      train_logprobs=rollout if train is None else train,
      log_mu=rollout if mu is None else np.asarray(mu, np.float32),
      log_pi_old=rollout if old is None else np.asarray(old, np.float32),
      advantages=np.ones_like(rollout)
      if advantages is None
      else np.asarray(advantages, np.float32),
      **kwargs,
  )


def test_equal_bits_give_exact_zeros_and_ones():
  logprobs = -np.random.default_rng(0).exponential(3.0, 1000)
  found = _metrics(logprobs, advantages=np.tile([1.0, -1.0], 500))
  ones = {
      'training/token_mult_prob_error',
      'rollout_corr/rollout_is_mean',
      'rollout_corr/rollout_is_eff_sample_size',
  }
  assert found == {name: float(name in ones) for name in found}
  assert set(found) == ones | {
      'training/rollout_logprob_diff_mean',
      'training/rollout_logprob_diff_max',
      'training/rollout_probs_diff_mean',
      'training/rollout_probs_diff_max',
      'training/mismatch_token_frac',
      'training/logprob_diff_positive_advantage',
      'training/logprob_diff_negative_advantage',
      'rollout_corr/kl',
      'rollout_corr/k3_kl',
  }


def test_one_planted_unit_in_the_last_place_shows():
  rollout = -np.random.default_rng(1).exponential(3.0, 1000).astype(np.float32)
  train = rollout.copy()
  train[123] = np.nextafter(train[123], np.float32(0.0))
  found = _metrics(rollout, train)
  assert found[_FRAC] == 1 / 1000
  ulp = float(train[123]) - float(rollout[123])
  assert found['training/rollout_logprob_diff_max'] == ulp > 0
  assert found['training/rollout_logprob_diff_mean'] == ulp / 1000
  assert found['training/rollout_probs_diff_max'] > 0


def test_bits_are_compared_not_values():
  nan = np.float32('nan')
  assert mismatch.mismatch_token_frac(np.array([nan]), np.array([nan])) == 0
  zeros = np.array([0.0, 0.0], np.float32)
  assert mismatch.mismatch_token_frac(zeros, -zeros) == 1
  denormal = np.array([1e-45, 0.0], np.float32)
  assert mismatch.mismatch_token_frac(zeros, denormal) == 0.5


def test_log_prob_and_probability_differences_by_hand():
  # Probabilities 1/2 -> 1/4 and 1/8 -> 1/8: |d| = ln 2, 0; |dp| = 1/4, 0.
  rollout = np.log(np.array([0.5, 0.125], np.float32))
  train = np.log(np.array([0.25, 0.125], np.float32))
  found = _metrics(rollout, train, advantages=[1.0, -1.0])
  expected = {
      'training/rollout_logprob_diff_mean': np.log(2) / 2,
      'training/rollout_logprob_diff_max': np.log(2),
      'training/rollout_probs_diff_mean': 0.125,
      'training/rollout_probs_diff_max': 0.25,
      'training/logprob_diff_positive_advantage': -np.log(2),
      'training/logprob_diff_negative_advantage': 0.0,
      _FRAC: 0.5,
  }
  for name, value in expected.items():
    np.testing.assert_allclose(found[name], value, rtol=1e-6, err_msg=name)


def test_off_policy_metrics_by_hand():
  # x = log mu - log pi_old = 2 ln 2, -ln 2: w = 1/4, 2.
  old = np.array([-3.0, -3.0])
  found = _metrics(old, mu=old + np.log([4.0, 0.5]), old=old)
  expected = {
      'rollout_corr/kl': np.log(2) / 2,
      # k3: 1/4 - 1 + 2 ln 2 and 2 - 1 - ln 2, together 1/4 + ln 2
      'rollout_corr/k3_kl': 0.125 + np.log(2) / 2,
      'rollout_corr/rollout_is_mean': 1.125,
      # w / mean(w) = 2/9, 16/9; 1 / mean(4/81, 256/81) = 81 / 130
      'rollout_corr/rollout_is_eff_sample_size': 81 / 130,
      'training/token_mult_prob_error': 3.0,
  }
  for name, value in expected.items():
    np.testing.assert_allclose(
        found[name], value, rtol=1e-6, atol=1e-7, err_msg=name
    )


def test_the_threshold_caps_the_weights_that_are_averaged():
  old = np.array([-3.0, -3.0])
  found = _metrics(
      old, mu=old - np.log([1.0, 8.0]), old=old, rollout_is_threshold=2.0
  )
  np.testing.assert_allclose(found['rollout_corr/rollout_is_mean'], 1.5, 1e-6)


def test_a_drift_by_the_sign_of_the_advantage_is_seen():
  """Noise of mean 0 on good answers, a push downwards on bad ones."""
  rollout = np.full(4, -2.0, np.float32)
  train = rollout + np.array([0.25, -0.25, -0.25, -0.25], np.float32)
  found = _metrics(rollout, train, advantages=[1.0, 2.0, -1.0, -2.0])
  assert found['training/logprob_diff_positive_advantage'] == 0.0
  assert found['training/logprob_diff_negative_advantage'] == -0.25


def test_a_sign_that_no_token_has_is_left_out():
  # A token without an advantage is of neither sign.
  train = np.array([-1.5, -1.75], np.float32)
  found = _metrics([-1.0, -2.0], train, advantages=[0.0, 1.0])
  assert found['training/logprob_diff_positive_advantage'] == 0.25
  assert 'training/logprob_diff_negative_advantage' not in found


def test_no_tokens_measure_nothing():
  assert _metrics([]) == {}


def test_what_is_not_finite_shows_and_does_not_raise():
  found = _metrics([-1.0, -np.inf], np.array([np.nan, -np.inf], np.float32))
  assert np.isnan(found['training/rollout_logprob_diff_max'])
  assert found[_FRAC] == 0.5
  far = _metrics([-1.0], old=[-1e5])
  assert np.isfinite(list(far.values())).all()
  np.testing.assert_allclose(
      far['training/token_mult_prob_error'], np.exp(20.0), rtol=1e-12
  )
  # Only what goes into an exponential is clamped.
  assert far['rollout_corr/kl'] == 1e5 - 1


def test_device_arrays_give_the_same_numbers():
  host = -np.random.default_rng(2).exponential(2.0, (5, 64)).astype(np.float32)

  def measure(rows):
    return mismatch.mismatch_metrics(
        rollout_logprobs=rows[0],
        train_logprobs=rows[1],
        log_mu=rows[2],
        log_pi_old=rows[3],
        advantages=rows[4],
    )

  assert measure(jnp.asarray(host)) == measure(host)


def test_sums_are_accumulated_in_float64():
  # In float32 adding 1e-4 to 2000 adds nothing after rounding to 1.2e-4.
  rollout = np.zeros(20001, np.float32)
  train = np.full(20001, -1e-4, np.float32)
  train[0] = -2000.0
  found = _metrics(rollout, train, mu=rollout, old=train)
  for name in ('training/rollout_logprob_diff_mean', 'rollout_corr/kl'):
    np.testing.assert_allclose(found[name], 2002 / 20001, rtol=1e-9)


def test_log_probs_that_are_not_float32_are_refused():
  with pytest.raises(ValueError, match='train_logprobs is float64'):
    _metrics([-1.0], np.array([-1.0]))


def test_k3_of_two_policies_by_hand():
  before, after = np.log([0.5, 0.25]), np.log([0.25, 0.5])
  # x = log 2: 1/2 - 1 + log 2. x = -log 2: 2 - 1 - log 2. Together 1/2.
  assert mismatch.k3_divergence(before, after) == pytest.approx(0.25)
  assert mismatch.k3_divergence(before, before) == 0
  assert mismatch.k3_divergence(before[:0], after[:0]) is None
  # A token that became impossible is bounded, as all log-ratios are.
  far = mismatch.k3_divergence(np.zeros(1), np.full(1, -1e30))
  assert far == pytest.approx(19, abs=1e-3)
