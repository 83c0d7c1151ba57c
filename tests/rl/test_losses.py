import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.rl import losses

_loss = functools.partial(
    losses.clipped_pg_loss, clip_low=0.2, clip_high=0.28, clip_c=3.0
)


def _reference(log_ratio, advantage, *, low, high, c):
  """One token, in Python floats, from the formulas of the papers."""
  ratio = np.exp(min(max(log_ratio, -20.0), 20.0))
  free = ratio * advantage
  clipped = min(max(ratio, 1.0 - low), 1.0 + high) * advantage
  objective = min(free, clipped)
  clipfrac = float(clipped < free)
  lower = 0.0
  if advantage < 0.0 and objective < c * advantage:
    objective, lower = c * advantage, 1.0
  return -objective, clipfrac, lower


def test_every_branch_by_hand():
  cases = [
      # ratio, A, loss, clipped, clipped_lower, d loss / d log pi
      (1.0, 2.0, -2.0, 0, 0, -2.0),  # on-policy: -A, gradient -A
      (1.5, 2.0, -2.56, 1, 0, 0.0),  # min(3, 1.28 * 2)
      (0.5, 2.0, -1.0, 0, 0, -1.0),  # min(1, 0.8 * 2): not clipped
      (0.5, -2.0, 1.6, 1, 0, 0.0),  # max(1, 0.8 * 2)
      (1.5, -2.0, 3.0, 0, 0, 3.0),  # max(3, 2.56), below 3 * 2
      (4.0, -2.0, 6.0, 0, 1, 0.0),  # 8 would exceed c |A| = 6
      (4.0, 0.0, 0.0, 0, 0, 0.0),
  ]
  ratio_T, advantage_T, loss_T, clipped_T, lower_T, slope_T = np.array(
      cases, np.float32
  ).T
  log_ratio_T = jnp.log(jnp.asarray(ratio_T))
  found = _loss(log_ratio_T, jnp.asarray(advantage_T))
  np.testing.assert_allclose(found.loss_T, loss_T, rtol=1e-6)
  np.testing.assert_array_equal(found.clipped_T, clipped_T)
  np.testing.assert_array_equal(found.clipped_lower_T, lower_T)
  slope = jax.grad(lambda x: _loss(x, jnp.asarray(advantage_T)).loss_T.sum())
  np.testing.assert_allclose(slope(log_ratio_T), slope_T, rtol=1e-6)


@pytest.mark.parametrize('scale', [0.01, 0.3, 3.0, 30.0])
def test_random_tokens_agree_with_the_formulas(scale):
  rng = np.random.default_rng(0)
  log_ratio_T = (scale * rng.normal(size=200)).astype(np.float32)
  advantage_T = rng.normal(size=200).astype(np.float32)
  found = _loss(jnp.asarray(log_ratio_T), jnp.asarray(advantage_T))
  expected = np.array(
      [
          _reference(float(x), float(a), low=0.2, high=0.28, c=3.0)
          for x, a in zip(log_ratio_T, advantage_T, strict=True)
      ]
  )
  # exp in float32 of numbers up to 20: |x| eps / 2 of the argument.
  np.testing.assert_allclose(found.loss_T, expected[:, 0], rtol=3e-6)
  np.testing.assert_array_equal(found.clipped_T, expected[:, 1])
  np.testing.assert_array_equal(found.clipped_lower_T, expected[:, 2])


def test_on_policy_the_loss_is_minus_the_advantage_to_the_bit():
  advantage_T = jnp.asarray(
      np.random.default_rng(1).normal(size=64), jnp.float32
  )
  found = _loss(jnp.zeros(64), advantage_T)
  np.testing.assert_array_equal(found.loss_T, -advantage_T)
  slope = jax.grad(lambda x: _loss(x, advantage_T).loss_T.sum())(jnp.zeros(64))
  np.testing.assert_array_equal(slope, -advantage_T)
  assert not found.clipped_T.any()


def test_the_loss_never_exceeds_the_dual_clip():
  log_ratio_T = jnp.linspace(-30.0, 30.0, 301)
  found = _loss(log_ratio_T, jnp.full(301, -1.5))
  assert found.loss_T.max() == 4.5


def test_a_huge_log_ratio_gives_finite_loss_and_no_gradient():
  def total(log_ratio_T, advantage):
    return _loss(log_ratio_T, jnp.full(4, advantage)).loss_T.sum()

  huge_T = jnp.array([1e4, -1e4, 88.8, -200.0])
  for advantage in (1.0, -1.0):
    value, slope_T = jax.value_and_grad(total)(huge_T, advantage)
    assert np.isfinite(value)
    np.testing.assert_array_equal(slope_T, np.zeros(4))


def test_no_gradient_flows_into_the_advantages():
  slope_T = jax.grad(lambda a: _loss(jnp.full(3, 0.1), a).loss_T.sum())(
      jnp.array([1.0, -1.0, 2.0])
  )
  np.testing.assert_array_equal(slope_T, np.zeros(3))


def test_a_nan_log_ratio_stays_visible():
  found = _loss(jnp.array([jnp.nan]), jnp.array([1.0]))
  assert np.isnan(found.loss_T[0])
