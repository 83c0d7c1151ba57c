import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.rl import corrections


def test_the_weight_is_the_ratio_up_to_the_cap():
  # log-ratios ln 1, ln 1.5, ln 4, ln 0.25: capped above at 2, not below.
  log_mu_T = jnp.array([-1.0, -2.0, -3.0, -0.5])
  log_pi_old_T = log_mu_T + jnp.log(jnp.array([1.0, 1.5, 4.0, 0.25]))
  found = corrections.token_tis(log_pi_old_T, log_mu_T, threshold=2.0)
  np.testing.assert_allclose(found, [1.0, 1.5, 2.0, 0.25], rtol=1e-6)


def test_equal_bits_give_a_weight_of_exactly_one():
  log_mu_T = jnp.asarray(
      -np.random.default_rng(0).exponential(3.0, 100), jnp.float32
  )
  found = corrections.token_tis(log_mu_T, log_mu_T, threshold=2.0)
  np.testing.assert_array_equal(found, np.ones(100))


@pytest.mark.parametrize('name', ['none', 'token'])
def test_no_gradient_flows_through_the_weight(name):
  correction = corrections.make_correction(name, threshold=2.0)
  log_mu_T = jnp.array([-1.0, -2.0])
  slopes = jax.grad(lambda a, b: correction(a, b).sum(), argnums=(0, 1))(
      log_mu_T + 0.1, log_mu_T
  )
  for slope_T in slopes:
    np.testing.assert_array_equal(slope_T, np.zeros(2))


def test_random_tokens_agree_with_the_formula():
  rng = np.random.default_rng(1)
  log_pi_T = (-rng.exponential(2.0, 200)).astype(np.float32)
  log_mu_T = (log_pi_T + rng.normal(size=200)).astype(np.float32)
  found = corrections.make_correction('token', threshold=1.5)(
      jnp.asarray(log_pi_T), jnp.asarray(log_mu_T)
  )
  ratio_T = np.exp(log_pi_T.astype(np.float64) - log_mu_T.astype(np.float64))
  np.testing.assert_allclose(found, np.minimum(ratio_T, 1.5), rtol=2e-6)


def test_a_token_that_mu_could_hardly_have_drawn_keeps_a_finite_weight():
  found = corrections.token_tis(
      jnp.array([0.0, -1e4]), jnp.array([-1e4, 0.0]), threshold=np.inf
  )
  np.testing.assert_allclose(found, [np.exp(20.0), np.exp(-20.0)], rtol=1e-6)


def test_without_a_correction_every_weight_is_one():
  correction = corrections.make_correction('none', threshold=2.0)
  found = correction(jnp.array([-1.0, -9.0]), jnp.array([-3.0, -0.1]))
  np.testing.assert_array_equal(found, [1.0, 1.0])


def test_an_unknown_correction_is_answered_with_the_known_ones():
  with pytest.raises(ValueError, match="'tokens'; allowed are 'none' and"):
    corrections.make_correction('tokens', threshold=2.0)


@pytest.mark.parametrize('threshold', [0.0, -1.0, float('nan')])
def test_a_cap_that_is_not_positive_is_refused(threshold):
  with pytest.raises(ValueError, match='rollout_is_threshold.*above 0'):
    corrections.make_correction('token', threshold=threshold)
