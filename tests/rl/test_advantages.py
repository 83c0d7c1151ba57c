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
        np.array([[0.0, 1.0], [np.nan, 1.0]]), norm_by_std=True
    )
