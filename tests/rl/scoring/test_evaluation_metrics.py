import itertools
import math

import numpy as np
import pytest

from jetrl_jax.rl.scoring import evaluation_metrics as metrics


def test_mean_at_k_by_hand():
  scores_PG = np.array([[1, 1, 0, 0], [1, 1, 1, 1]])
  np.testing.assert_array_equal(metrics.mean_at_k(scores_PG, 4), [0.5, 1.0])
  # Of the first three.
  np.testing.assert_array_equal(metrics.mean_at_k(scores_PG, 3), [2 / 3, 1.0])


def test_best_at_k_by_hand():
  # One right of 4, pairs: 3 of the 6 contain it. With k = 4: always.
  scores_PG = np.array([[0, 1, 0, 0]])
  np.testing.assert_allclose(metrics.best_at_k(scores_PG, 1), [0.25])
  np.testing.assert_allclose(metrics.best_at_k(scores_PG, 2), [0.5])
  np.testing.assert_allclose(metrics.best_at_k(scores_PG, 4), [1.0])


@pytest.mark.parametrize('k', [1, 2, 3, 6])
def test_best_at_k_is_the_mean_over_all_subsets(k):
  scores_PG = np.random.default_rng(0).normal(size=(3, 6))
  expected = [
      np.mean([max(s) for s in itertools.combinations(row, k)])
      for row in scores_PG
  ]
  np.testing.assert_allclose(metrics.best_at_k(scores_PG, k), expected)


def test_best_at_k_of_many_samples_is_pass_at_k():
  scores_PG = np.zeros((1, 256))
  scores_PG[0, :3] = 1
  expected = 1 - math.comb(253, 128) / math.comb(256, 128)
  np.testing.assert_allclose(metrics.best_at_k(scores_PG, 128), [expected])


def test_the_majority_answer_decides():
  scores_PG = np.array([[0, 1, 1], [0, 0, 1]])
  answers = [['5', '7', '7'], ['4', '4', '8']]
  np.testing.assert_array_equal(
      metrics.maj_at_k(scores_PG, answers, 3), [1.0, 0.0]
  )


def test_of_equally_frequent_answers_the_first_given_wins():
  scores_PG = np.array([[0, 1, 1, 0], [1, 0, 0, 1]])
  answers = [['a', 'b', 'b', 'a'], ['b', 'a', 'a', 'b']]
  np.testing.assert_array_equal(
      metrics.maj_at_k(scores_PG, answers, 4), [0.0, 1.0]
  )


def test_samples_without_an_answer_do_not_vote():
  scores_PG = np.array([[0, 0, 1], [0, 0, 0]])
  answers = [[None, None, '7'], [None, None, None]]
  np.testing.assert_array_equal(
      metrics.maj_at_k(scores_PG, answers, 3), [1.0, 0.0]
  )


def test_only_the_first_k_samples_vote():
  scores_PG = np.array([[1, 0, 0]])
  assert metrics.maj_at_k(scores_PG, [['a', 'b', 'b']], 1) == [1.0]
  assert metrics.maj_at_k(scores_PG, [['a', 'b', 'b']], 3) == [0.0]


def test_the_interval_is_the_normal_one():
  # Values 1, 0, 1, 0: std(ddof=1) = sqrt(1/3); 1.96 sqrt(1/3) / 2.
  found = metrics.half_width_95(np.array([1.0, 0.0, 1.0, 0.0]))
  np.testing.assert_allclose(found, 1.96 * math.sqrt(1 / 3) / 2)
  assert math.isnan(metrics.half_width_95(np.array([1.0])))


def test_the_interval_covers_the_truth_about_95_times_in_100():
  rng = np.random.default_rng(0)
  accuracy_P = rng.beta(2.0, 3.0, size=(2000, 100))  # mean 0.4
  scores_P = rng.binomial(8, accuracy_P) / 8
  hits = [
      abs(values.mean() - 0.4) <= metrics.half_width_95(values)
      for values in scores_P
  ]
  # 95% +- 4 standard errors of 2000 trials.
  assert abs(np.mean(hits) - 0.95) < 4 * math.sqrt(0.95 * 0.05 / 2000)


def test_the_names_are_those_of_val_core():
  found = metrics.evaluation_metrics(
      np.array([[1, 0], [1, 1]]), [['7', '3'], ['1', '1']], source='gsm8k'
  )
  values = {k: v for k, v in found.items() if not k.endswith('/ci95')}
  assert values == {
      'val-core/gsm8k/acc/mean@2': 0.75,
      'val-core/gsm8k/acc/best@2': 1.0,
      'val-core/gsm8k/acc/maj@2': 1.0,
  }
  assert set(found) - set(values) == {f'{name}/ci95' for name in values}
  assert found['val-core/gsm8k/acc/best@2/ci95'] == 0.0


def test_without_any_answer_there_is_no_majority():
  # As rewards of one's own leave it, that only return a number.
  found = metrics.evaluation_metrics(
      np.ones((2, 2)), [[None, None], [None, None]], source='x'
  )
  assert not any('/maj@' in name for name in found)
  assert found['val-core/x/acc/mean@2'] == 1.0


def test_one_problem_has_no_interval():
  found = metrics.evaluation_metrics(np.ones((1, 1)), [['7']], source='x')
  assert not any(name.endswith('ci95') for name in found)


def test_the_mean_reward_of_episodes_by_hand():
  # Means 1/2 and 5/2: std(ddof=1) = sqrt(2), and 1.96 sqrt(2) / sqrt(2).
  found = metrics.reward_metrics(np.array([[1, 0], [3, 2]]), source='game')
  assert found == {
      'val-core/game/reward/mean@2': 1.5,
      'val-core/game/reward/mean@2/ci95': pytest.approx(1.96),
  }
  one = metrics.reward_metrics(np.array([[1, 0]]), source='game')
  assert one == {'val-core/game/reward/mean@2': 0.5}


@pytest.mark.parametrize('k', [0, 5])
def test_k_outside_the_number_of_samples_is_refused(k):
  with pytest.raises(ValueError, match=r'with 4 samples .* in \[1, 4\]'):
    metrics.best_at_k(np.ones((2, 4)), k)


def test_no_problems_are_refused():
  with pytest.raises(ValueError, match='no problems'):
    metrics.mean_at_k(np.ones((0, 4)), 1)


def test_answers_of_another_shape_are_refused():
  with pytest.raises(ValueError, match=r'lengths \[2, 3\] in 2 rows'):
    metrics.maj_at_k(np.ones((2, 3)), [['a', 'b', 'c'], ['a', 'b']], 2)


def test_wilsons_interval_by_hand():
  # 8 of 10, z 1.96: centre 0.8 + 0.19208, half 1.96 sqrt(0.016 + 0.009604),
  # over 1.38416.
  low, high = metrics.wilson_interval_95(np.array([1.0] * 8 + [0.0] * 2), 1)
  half = 1.96 * math.sqrt(0.8 * 0.2 / 10 + 1.96**2 / 400)
  np.testing.assert_allclose(
      [low, high],
      [(0.99208 - half) / 1.38416, (0.99208 + half) / 1.38416],
      rtol=1e-12,
  )
  np.testing.assert_allclose([low, high], [0.4902, 0.9433], atol=5e-5)


def test_wilsons_interval_is_never_empty():
  # 0 of 20 leaves z^2 / (20 + z^2) open.
  low, high = metrics.wilson_interval_95(np.zeros(20), 1)
  np.testing.assert_allclose(
      [low, high], [0, 1.96**2 / (20 + 1.96**2)], atol=1e-15
  )
  np.testing.assert_allclose(
      metrics.wilson_interval_95(np.ones(20), 1), [1 - high, 1]
  )
  # Nor does rounding carry it out of [0, 1].
  for n in range(1, 400):
    assert metrics.wilson_interval_95(np.zeros(n), 1)[0] >= 0.0
    assert metrics.wilson_interval_95(np.ones(n), 1)[1] <= 1.0
  # Four samples of each that all fail are no 80 problems.
  assert metrics.wilson_interval_95(np.zeros(20), 4) == (low, high)


def test_values_between_0_and_1_count_for_more_than_one_each():
  # Ten problems, each half right: no spread, so all 40 samples count.
  flat = metrics.wilson_interval_95(np.full(10, 0.5), 4)
  coins = metrics.wilson_interval_95(np.array([1.0, 0.0] * 20), 1)
  np.testing.assert_allclose(flat, coins)
  # 1/4 and 3/4: n = 10 * 0.25 / 0.0625 = 40 as well.
  spread = metrics.wilson_interval_95(np.array([0.25, 0.75] * 5), 4)
  np.testing.assert_allclose(spread, coins)
  # Nearly flat: n would be 10 * 0.25 / 0.0125 = 200, of 40 samples.
  near = metrics.wilson_interval_95(np.array([0.5] * 8 + [0.25, 0.75]), 4)
  np.testing.assert_allclose(near, coins)


def test_samples_without_a_score_are_left_out_of_their_problem():
  nan = math.nan
  scores_PG = np.array([[1, nan, 0], [nan, nan, nan], [nan, 0, nan]])
  answers = [['a', 'b', 'b'], ['c', 'c', 'c'], [None, None, 'd']]
  found = metrics.by_problem(scores_PG, answers)
  # The second problem counts nowhere; of a and b each has one vote.
  assert {name: list(v) for name, v in found.items()} == {
      'mean': [0.5, 0.0],
      'best': [1.0, 0.0],
      'maj': [1.0, 0.0],
  }
  named = metrics.evaluation_metrics(scores_PG, answers, source='s')
  assert named['val-core/s/acc/mean@3'] == 0.25
  assert metrics.by_problem(np.full((2, 3), nan), answers[:2]) == {}
  # Votes go with the samples that have them: two for 'a', one for 'x'.
  found = metrics.by_problem(np.array([[nan, 0, 1, 1]]), [['x', 'x', 'a', 'a']])
  assert found['maj'] == [1.0]
