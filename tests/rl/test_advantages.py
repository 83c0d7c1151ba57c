import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetrl_jax.rl import advantages


def test_two_samples_by_hand():
  # mean 1/2, deviations +-1/2, sample std sqrt(1/4 + 1/4) = 0.70710678;
  # 0.5 / (0.70710678 + 1e-6) = 0.70710578.
  found = advantages.group_advantages(np.array([[1.0, 0.0]]), norm_by_std=True)
  np.testing.assert_allclose(found, [[0.70710578, -0.70710578]], rtol=1e-7)
  assert found.dtype == np.float32


def test_without_the_std_it_is_the_deviation_from_the_mean():
  found = advantages.group_advantages(
      np.array([[1.0, 0.0, 0.0, 0.0], [2.0, 4.0, 2.0, 4.0]]), norm_by_std=False
  )
  np.testing.assert_array_equal(
      found, [[0.75, -0.25, -0.25, -0.25], [-1.0, 1.0, -1.0, 1.0]]
  )


@given(st.floats(-1e6, 1e6), st.integers(2, 16), st.booleans())
def test_a_group_of_equal_rewards_has_zero_advantage(reward, group, norm):
  rewards_PG = np.full((2, group), reward)
  found = advantages.group_advantages(rewards_PG, norm_by_std=norm)
  np.testing.assert_array_equal(found, np.zeros((2, group)))


def test_equal_rewards_whose_float64_mean_is_another_number_give_zero():
  rewards_PG = np.array([[0.1, 0.1, 0.1]])
  assert rewards_PG.mean() != 0.1  # 0.30000000000000004 / 3
  found = advantages.group_advantages(rewards_PG, norm_by_std=True)
  np.testing.assert_array_equal(found, [[0.0, 0.0, 0.0]])


@pytest.mark.parametrize('norm_by_std', [True, False])
def test_random_groups_agree_with_a_loop_over_the_formula(norm_by_std):
  rewards_PG = np.random.default_rng(0).normal(size=(5, 8))
  found = advantages.group_advantages(rewards_PG, norm_by_std=norm_by_std)
  for rewards, row in zip(rewards_PG.tolist(), found, strict=True):
    mean = sum(rewards) / 8
    std = (sum((r - mean) ** 2 for r in rewards) / 7) ** 0.5
    divisor = std + 1e-6 if norm_by_std else 1.0
    expected = [(r - mean) / divisor for r in rewards]
    np.testing.assert_allclose(row, expected, rtol=1e-6)


def test_groups_do_not_see_each_other():
  rewards_PG = np.random.default_rng(1).normal(size=(6, 4))
  whole = advantages.group_advantages(rewards_PG, norm_by_std=True)
  parts = [
      advantages.group_advantages(rewards_PG[p : p + 1], norm_by_std=True)
      for p in range(6)
  ]
  np.testing.assert_array_equal(whole, np.concatenate(parts))


def test_device_arrays_and_integers_are_taken():
  expected = advantages.group_advantages(
      np.array([[1.0, 0.0, 1.0]]), norm_by_std=True
  )
  for rewards_PG in (jnp.array([[1.0, 0.0, 1.0]]), np.array([[1, 0, 1]])):
    found = advantages.group_advantages(rewards_PG, norm_by_std=True)
    np.testing.assert_array_equal(found, expected)


def test_a_group_of_one_is_refused():
  with pytest.raises(ValueError, match='num_generations is 1.*at least 2'):
    advantages.group_advantages(np.ones((3, 1)), norm_by_std=True)


def test_a_reward_that_is_not_finite_is_named():
  with pytest.raises(ValueError, match='prompt 1, sample 0 is nan'):
    advantages.group_advantages(
        np.array([[0.0, 1.0], [np.nan, 1.0], [0.0, np.inf]]), norm_by_std=True
    )


def _estimate(rewards_PG, name, lengths_PG=None):
  rewards_PG = np.asarray(rewards_PG)
  if lengths_PG is None:
    lengths_PG = np.ones(rewards_PG.shape, np.int64)
  return advantages.estimate(
      rewards_PG, lengths_PG, adv_estimator=name, norm_by_std=True
  )


def test_dr_grpo_is_grpo_without_the_division():
  found = _estimate([[1.0, 0.0, 0.5], [2.0, 2.0, 5.0]], 'dr_grpo')
  np.testing.assert_array_equal(found, [[0.5, -0.5, 0.0], [-1.0, -1.0, 2.0]])


def test_grpo_without_norm_by_std_is_dr_grpo():
  rewards_PG, lengths_PG = np.array([[1.0, 0.0, 0.5]]), np.ones((1, 3), int)
  grpo, dr_grpo = (
      advantages.estimate(
          rewards_PG, lengths_PG, adv_estimator=name, norm_by_std=norm_by_std
      )
      for name, norm_by_std in (('grpo', False), ('dr_grpo', True))
  )
  np.testing.assert_array_equal(grpo, [[0.5, -0.5, 0.0]])
  np.testing.assert_array_equal(dr_grpo, grpo)


def test_rloo_of_three_samples_by_hand():
  # Others' means: (0 + 0) / 2, (1 + 0) / 2, (1 + 0) / 2.
  found = _estimate([[1.0, 0.0, 0.0]], 'rloo')
  np.testing.assert_allclose(found, [[1.0, -0.5, -0.5]], rtol=1e-7)


def test_reinforce_plus_plus_baseline_of_three_tokens_by_hand():
  # Rewards 1 and 0 with one and two tokens: a = 0.5, -0.5, -0.5 by token;
  # m = -1/6; the squares add up to (2/3)^2 + 2 (1/3)^2 = 2/3, which divided by
  # N - 1 = 2 gives v = 1/3; A = (2/3) sqrt(3), (-1/3) sqrt(3).
  found = _estimate(
      [[1.0, 0.0]], 'reinforce_plus_plus_baseline', np.array([[1, 2]])
  )
  np.testing.assert_allclose(
      found, [[2 / 3 * 3**0.5, -1 / 3 * 3**0.5]], rtol=1e-6
  )


def test_whitening_needs_two_tokens_and_adds_its_epsilon_to_the_variance():
  # Deviations of +-d, a token each: v = 2 d^2, A = d / sqrt(2 d^2 + 1e-8).
  for d, expected in ((0.5, 0.5**0.5), (1e-4, 1 / 3**0.5)):
    found = _estimate([[2 * d, 0.0]], 'reinforce_plus_plus_baseline')
    np.testing.assert_allclose(found, [[expected, -expected]], rtol=1e-6)


_rewards = st.integers(0, 2**32 - 1).map(
    lambda seed: np.random.default_rng(seed).normal(size=(3, 4))
)


@given(_rewards)
def test_rloo_is_dr_grpo_times_g_over_g_minus_one(rewards_PG):
  np.testing.assert_allclose(
      _estimate(rewards_PG, 'rloo'),
      4 / 3 * _estimate(rewards_PG, 'dr_grpo'),
      rtol=1e-6,
  )


@given(_rewards, st.integers(0, 2**32 - 1))
def test_whitened_advantages_have_mean_0_and_variance_1_over_tokens(
    rewards_PG, seed
):
  lengths_PG = np.random.default_rng(seed).integers(0, 9, (3, 4))
  lengths_PG[0, 0] += 2
  name = 'reinforce_plus_plus_baseline'
  found = _estimate(rewards_PG, name, lengths_PG)
  tokens = np.repeat(found.reshape(-1), lengths_PG.reshape(-1))
  np.testing.assert_allclose(tokens.mean(), 0.0, atol=1e-5)
  if np.ptp(tokens) > 0:
    np.testing.assert_allclose(tokens.var(ddof=1), 1.0, rtol=1e-4)


@pytest.mark.parametrize('name', advantages.ESTIMATORS)
def test_rewards_that_are_equal_everywhere_teach_nothing(name):
  found = _estimate(np.full((2, 3), 0.1), name)
  np.testing.assert_array_equal(found, np.zeros((2, 3)))
  assert found.dtype == np.float32


@pytest.mark.parametrize('name', advantages.ESTIMATORS)
def test_a_constant_added_to_a_group_s_rewards_changes_nothing(name):
  rewards_PG = np.random.default_rng(3).integers(0, 2, (3, 4)).astype(float)
  np.testing.assert_array_equal(
      _estimate(rewards_PG, name),
      _estimate(rewards_PG + np.array([[1.0], [2.0], [-4.0]]), name),
  )


def test_a_rollout_without_tokens_in_the_loss_has_no_advantage():
  found = _estimate(
      [[1.0, 0.0]], 'reinforce_plus_plus_baseline', np.array([[0, 1]])
  )
  np.testing.assert_array_equal(found, [[0.0, 0.0]])


def test_an_unknown_estimator_is_answered_with_the_known_ones():
  with pytest.raises(ValueError, match="'gae'; allowed are grpo, dr_grpo, rl"):
    _estimate([[1.0, 0.0]], 'gae')


@pytest.mark.parametrize('name', advantages.ESTIMATORS)
def test_every_estimator_refuses_a_group_of_one(name):
  with pytest.raises(ValueError, match='num_generations is 1.*at least 2'):
    _estimate([[1.0], [0.0]], name)


NAN = float('nan')


def _of_scored(rewards_PG, lengths_PG, name):
  rewards_PG = np.asarray(rewards_PG)
  return advantages.estimate(
      rewards_PG,
      np.asarray(lengths_PG),
      adv_estimator=name,
      norm_by_std=True,
      scored_PG=~np.isnan(rewards_PG),
  )


@pytest.mark.parametrize('name', advantages.ESTIMATORS)
def test_a_group_is_compared_without_the_responses_that_have_no_score(name):
  found_PG = _of_scored(
      [[1.0, NAN, 0.0, 4.0], [NAN, 2.0, 3.0, 7.0]],
      [[3, 9, 5, 7], [9, 2, 4, 6]],
      name,
  )
  expected_PG = advantages.estimate(
      np.array([[1.0, 0.0, 4.0], [2.0, 3.0, 7.0]]),
      np.array([[3, 5, 7], [2, 4, 6]]),
      adv_estimator=name,
      norm_by_std=True,
  )
  assert found_PG.dtype == np.float32
  np.testing.assert_array_equal(found_PG[0, [0, 2, 3]], expected_PG[0])
  np.testing.assert_array_equal(found_PG[1, 1:], expected_PG[1])
  assert found_PG[0, 1] == found_PG[1, 0] == 0.0


@pytest.mark.parametrize('name', advantages.ESTIMATORS)
def test_a_response_that_is_left_alone_has_no_advantage(name):
  # Of whitening the mean of the batch is left, which is 0 here.
  found_PG = _of_scored([[1.0, NAN], [NAN, NAN]], [[3, 4], [5, 6]], name)
  np.testing.assert_array_equal(found_PG, np.zeros((2, 2), np.float32))


def test_a_reward_that_is_there_must_be_finite_and_a_group_not_of_one():
  with pytest.raises(ValueError, match='is inf; rewards must be finite'):
    _of_scored([[1.0, float('inf'), NAN]], [[1, 1, 1]], 'grpo')
  with pytest.raises(ValueError, match='num_generations is 1'):
    _of_scored([[NAN]], [[1]], 'grpo')


@pytest.mark.parametrize('rewards', [[1.0, 0.5, 0.0], 1.0, [[[1.0, 0.0]]]])
def test_rewards_without_rows_of_prompts_are_refused(rewards):
  with pytest.raises(ValueError, match=r'have the shape \(.*; allowed: \[pro'):
    # Beneath the check of shapes that tests have and a notebook has not.
    advantages._checked(np.asarray(rewards))
