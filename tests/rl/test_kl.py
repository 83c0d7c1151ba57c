import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetrl_jax.rl import kl

_ESTIMATORS = [kl.k2, kl.k3]


@pytest.mark.parametrize('estimator', _ESTIMATORS)
def test_equal_log_probs_give_exactly_zero(estimator):
  log_pi_T = jnp.asarray(
      -np.random.default_rng(0).exponential(3.0, 50), jnp.float32
  )
  np.testing.assert_array_equal(estimator(log_pi_T, log_pi_T), np.zeros(50))


@pytest.mark.parametrize('estimator', [kl.k2, kl.k3])
def test_the_gradient_of_a_penalty_is_zero_at_equal_log_probs(estimator):
  log_pi_T = jnp.array([-0.1, -2.0, -30.0])
  slope_T = jax.grad(lambda x: estimator(x, log_pi_T).sum())(log_pi_T)
  np.testing.assert_array_equal(slope_T, np.zeros(3))


def test_the_two_estimators_by_hand():
  # x = ln 2: k2 = 0.240227, k3 = 1/2 - 1 + 0.693147.
  # x = -ln 2: k2 = 0.240227, k3 = 2 - 1 - 0.693147.
  ref_T = jnp.array([-3.0, -3.0])
  pi_T = ref_T + jnp.log(jnp.array([2.0, 0.5]))
  np.testing.assert_allclose(kl.k2(pi_T, ref_T), [0.240227, 0.240227], 1e-5)
  np.testing.assert_allclose(kl.k3(pi_T, ref_T), [0.193147, 0.306853], 1e-5)


def test_random_log_probs_agree_with_the_formulas():
  rng = np.random.default_rng(1)
  pi_T = (-rng.exponential(4.0, 300)).astype(np.float32)
  ref_T = (pi_T + 2.0 * rng.normal(size=300)).astype(np.float32)
  x_T = (pi_T - ref_T).astype(np.float64)
  k3_T = np.clip(np.exp(-x_T) - x_T * -1.0 - 1.0, -10.0, 10.0)
  found = [e(jnp.asarray(pi_T), jnp.asarray(ref_T)) for e in _ESTIMATORS]
  np.testing.assert_allclose(found[0], 0.5 * x_T**2, rtol=1e-6)
  np.testing.assert_allclose(found[1], k3_T, rtol=1e-5, atol=1e-7)


def test_a_small_difference_is_not_rounded_away_by_k3():
  # x^2 / 2 - x^3 / 6 at 2^-13, where exp(-x) - 1 + x in float32 would be 0.
  x = 2.0**-13
  found = kl.k3(jnp.array([x]), jnp.array([0.0]))
  assert abs(found[0] - x**2 / 2) < 2.0**-36  # half a unit of x in float32


def test_far_apart_policies_are_clamped():
  pi_T, ref_T = jnp.array([0.0, -1e4, 0.0]), jnp.array([-1e4, 0.0, -15.0])
  np.testing.assert_array_equal(kl.k2(pi_T, ref_T), [200.0, 200.0, 112.5])
  np.testing.assert_array_equal(kl.k3(pi_T, ref_T), [10.0, 10.0, 10.0])
  slope_T = jax.grad(lambda x: kl.k3(x, ref_T).sum())(pi_T)
  np.testing.assert_array_equal(slope_T, np.zeros(3))


@given(st.floats(-50.0, 0.0, width=32), st.floats(-50.0, 0.0, width=32))
def test_k3_is_never_negative(log_pi, log_pi_ref):
  found = kl.k3(jnp.array([log_pi]), jnp.array([log_pi_ref]))
  assert found[0] >= 0.0


def test_the_expected_gradient_of_k2_is_that_of_the_kl():
  """Sums over a vocabulary of 5 instead of sampling."""
  logits_V = jnp.array([0.3, -0.2, 1.0, 0.0, -1.5])
  ref_V = jax.nn.log_softmax(jnp.array([0.0, 0.5, 0.2, -0.3, 0.1]))
  weights_V = jax.nn.softmax(logits_V)

  def expected(estimator):
    return jax.grad(
        lambda z: (weights_V * estimator(jax.nn.log_softmax(z), ref_V)).sum()
    )(logits_V)

  def true_kl(z_V):
    log_pi_V = jax.nn.log_softmax(z_V)
    return (jnp.exp(log_pi_V) * (log_pi_V - ref_V)).sum()

  np.testing.assert_allclose(
      expected(kl.k2), jax.grad(true_kl)(logits_V), atol=1e-6
  )


def test_the_names_of_the_config_lead_to_the_estimators():
  assert kl.make_kl_loss('k2') is kl.k2
  assert kl.make_kl_loss('k3') is kl.k3
  assert kl.make_kl_loss('low_var_kl') is kl.k3


def test_k1_is_refused_as_a_loss():
  with pytest.raises(ValueError, match='zero expected gradient'):
    kl.make_kl_loss('k1')


def test_an_unknown_kl_loss_type_is_answered_with_the_known_ones():
  with pytest.raises(ValueError, match="'k4'; allowed are 'k2', 'k3'"):
    kl.make_kl_loss('k4')
