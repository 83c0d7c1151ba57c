import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
  assert all(x.dtype == jnp.float32 for x in found)
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
  # Each an answer of its own.
  gspo = functools.partial(
      losses.gspo_loss,
      advantage_T=jnp.array([-1.0, 1.0, -1.0, 1.0]),
      mask_T=jnp.ones(4),
      segment_ids_T=jnp.arange(1, 5),
      clip_low=0.2,
      clip_high=0.28,
  )
  assert np.isfinite(gspo(huge_T).loss_T).all()
  np.testing.assert_array_equal(_slope(gspo, huge_T), np.zeros(4))


def test_a_nan_log_ratio_stays_visible():
  found = _loss(jnp.array([jnp.nan]), jnp.array([1.0]))
  assert np.isnan(found.loss_T[0])


def test_a_wider_upper_bound_lets_a_token_through():
  # Ratio 2 at A = 1: clipped at 1.28, or at 1.28 * 1.5 = 1.92, or not at all.
  log_ratio_T, advantage_T = jnp.log(jnp.full(3, 2.0)), jnp.ones(3)
  found = _loss(log_ratio_T, advantage_T, widening_T=jnp.array([1.0, 1.5, 2.0]))
  np.testing.assert_allclose(found.loss_T, [-1.28, -1.92, -2.0], rtol=1e-6)
  np.testing.assert_array_equal(found.clipped_T, [1, 1, 0])
  # The lower bound does not move: ratio 0.5 at A = -1 is held at 0.8.
  found = _loss(
      jnp.log(jnp.full(3, 0.5)), -advantage_T, widening_T=jnp.full(3, 9.0)
  )
  np.testing.assert_allclose(found.loss_T, [0.8, 0.8, 0.8], rtol=1e-6)


_gspo = jax.jit(losses.gspo_loss)
_GSPO_CLIP = {'clip_low': 0.2, 'clip_high': 0.28}


def _slope(loss, log_ratio_T):
  """Gradient of the summed loss with respect to log pi."""
  return jax.grad(lambda x: loss(x).loss_T.sum())(log_ratio_T)


def test_no_gradient_flows_into_the_advantages():
  x_T = jnp.full(3, 0.1)
  for loss in (
      lambda a: _loss(x_T, a),
      lambda a: _gspo(x_T, a, jnp.ones(3), jnp.array([1, 1, 2]), **_GSPO_CLIP),
      lambda a: losses.cispo_loss(x_T, x_T, a, cap=5.0),
      lambda a: losses.gpg_loss(x_T, a),
  ):
    slope_T = jax.grad(lambda a, loss=loss: loss(a).loss_T.sum())(
        jnp.array([1.0, -1.0, 2.0])
    )
    np.testing.assert_array_equal(slope_T, np.zeros(3))


def test_gspo_of_two_answers_by_hand():
  # One answer with ratios 2, 1 and 1/4: s = (1/2)^(1/3) = 0.7937, held at 0.8
  # where A < 0; one with ratios 1.5 and 1.5: s = 1.5, held at 1.28 for A > 0.
  log_ratio_T = jnp.log(jnp.array([1.0, 2.0, 1.0, 0.25, 1.0, 1.5, 1.5]))
  mask_T = jnp.array([0.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0])
  ids_T = jnp.array([1, 1, 1, 1, 2, 2, 2])

  def loss(advantage):
    def of(x):
      return _gspo(x, jnp.full(7, advantage), mask_T, ids_T, **_GSPO_CLIP)

    return of

  s = 0.5 ** (1 / 3)
  found = loss(2.0)(log_ratio_T)
  np.testing.assert_allclose(
      found.loss_T[1:4], [-2 * s, -2 * s, -2 * s], rtol=1e-6
  )
  np.testing.assert_allclose(found.loss_T[5:], [-2.56, -2.56], rtol=1e-6)
  np.testing.assert_array_equal(found.clipped_T[5:], [1, 1])
  assert all(x.dtype == jnp.float32 for x in found)
  # Each token of an answer has the same slope, -s A, or none at all.
  np.testing.assert_allclose(
      _slope(loss(2.0), log_ratio_T)[jnp.array([1, 2, 3, 5, 6])],
      [-2 * s, -2 * s, -2 * s, 0, 0],
      rtol=1e-6,
  )
  found = loss(-2.0)(log_ratio_T)
  np.testing.assert_allclose(found.loss_T[1:4], [1.6, 1.6, 1.6], rtol=1e-6)
  # No dual clip: 1.5 * 2 stays, as 40 * 2 would.
  np.testing.assert_allclose(found.loss_T[5:], [3.0, 3.0], rtol=1e-6)
  far = loss(-2.0)(log_ratio_T.at[5:].set(jnp.log(40.0)))
  np.testing.assert_allclose(far.loss_T[5:], [80.0, 80.0], rtol=1e-6)
  assert not far.clipped_lower_T.any()


@settings(max_examples=30, deadline=None)
@given(st.floats(-1, 1, width=32), st.floats(-2, 2, width=32))
def test_for_an_answer_of_one_token_gspo_is_ppo(log_ratio, advantage):
  # PPO's dual clip at c = 1e9 never holds.
  arguments = jnp.full(2, log_ratio), jnp.full(2, advantage)
  ids_T = jnp.array([1, 2])
  found = _gspo(*arguments, jnp.ones(2), ids_T, **_GSPO_CLIP)
  expected = losses.clipped_pg_loss(*arguments, clip_c=1e9, **_GSPO_CLIP)
  np.testing.assert_allclose(found.loss_T, expected.loss_T, rtol=1e-6)
  np.testing.assert_array_equal(found.clipped_T, expected.clipped_T)


def test_gspo_with_equal_ratios_in_an_answer_is_ppo():
  log_ratio_T = jnp.full(6, 0.125)
  advantage_T = jnp.full(6, 1.5)
  ids_T = jnp.array([1, 1, 1, 1, 2, 2])

  def gspo(x):
    return _gspo(x, advantage_T, jnp.ones(6), ids_T, **_GSPO_CLIP)

  def ppo(x):
    return _loss(x, advantage_T)

  np.testing.assert_allclose(
      gspo(log_ratio_T).loss_T, ppo(log_ratio_T).loss_T, rtol=1e-6
  )
  np.testing.assert_allclose(
      _slope(gspo, log_ratio_T), _slope(ppo, log_ratio_T), rtol=1e-6
  )


def test_cispo_of_three_tokens_by_hand():
  # Ratios 1, 8 and 0.1, cap 5: weights 1, 5 and 0.1.
  log_pi_T = jnp.array([-1.0, -2.0, -3.0])
  log_old_T = log_pi_T - jnp.log(jnp.array([1.0, 8.0, 0.1]))
  advantage_T = jnp.array([2.0, 2.0, -2.0])

  def loss(x):
    return losses.cispo_loss(x, x - log_old_T, advantage_T, cap=5.0)

  found = loss(log_pi_T)
  np.testing.assert_allclose(found.loss_T, [2.0, 20.0, -0.6], rtol=1e-6)
  np.testing.assert_array_equal(found.clipped_T, [0, 1, 0])
  assert all(x.dtype == jnp.float32 for x in found)
  # -w A: the capped token still learns, where PPO's gradient is 0.
  np.testing.assert_allclose(
      _slope(loss, log_pi_T), [-2.0, -10.0, 0.2], rtol=1e-6
  )
  # At the lowest cap what is on-policy is not counted as clipped.
  on_policy = losses.cispo_loss(log_pi_T, jnp.zeros(3), advantage_T, cap=1.0)
  np.testing.assert_array_equal(on_policy.clipped_T, np.zeros(3))
