"""What is concluded from curves, by hand."""

import math

import numpy as np
import pytest

from study.statistics import (
    Paired,
    carried,
    collapse,
    endpoint,
    final,
    holm,
    is_as_good,
    paired,
    verdict,
)


def test_the_final_accuracy_is_the_mean_of_three():
  assert final([0.1, 0.3, 0.6, 0.9]) == pytest.approx(0.6)
  assert final([0.5]) == 0.5


@pytest.mark.parametrize(
    'values, index',
    [
        # 80% of 0.5 is 0.4: 0.39 is below, 0.41 is not.
        ([0.5, 0.39, 0.39, 0.39], 3),
        ([0.5, 0.39, 0.39, 0.41, 0.39, 0.39], None),
        # It never rose: below no best of its own.
        ([0.1, 0.1, 0.1, 0.1], None),
        ([0.4, 0.5, 0.2, 0.1, 0.0, 0.0], 4),
        # The best so far counts, not the best of the run.
        ([0.2, 0.2, 0.2, 0.9], None),
    ],
)
def test_a_collapse_is_three_in_a_row_below_80_percent_of_the_best(
    values, index
):
  assert collapse(values) == index


def test_the_paired_interval_by_hand():
  # d = 0.1, 0.2, 0.3: mean 0.2, std 0.1, t(2) = 4.302653.
  found = paired({1: 0.5, 2: 0.6, 3: 0.7, 4: 0.9}, {1: 0.4, 2: 0.4, 3: 0.4})
  assert found.mean == pytest.approx(0.2)
  assert found.half_width == pytest.approx(4.302653 * 0.1 / math.sqrt(3))
  low, high = found.interval
  assert low == pytest.approx(-0.048, abs=1e-3) and high > 0.44
  # t = 0.2 / (0.1 / sqrt(3)) = 3.464; with 2 degrees of freedom
  # p = 1 - t / sqrt(2 + t^2).
  t = 2 * math.sqrt(3)
  assert found.p_value == pytest.approx(1 - t / math.sqrt(2 + t * t))


def test_one_pair_has_no_interval_and_none_is_an_error():
  one = paired({1: 0.5}, {1: 0.4})
  assert one.half_width == math.inf and one.p_value == 1
  with pytest.raises(ValueError, match='no pair: one arm has the seeds'):
    paired({1: 0.5}, {2: 0.5})


def _of(mean, half_width, count=3):
  return Paired(
      differences=(mean,) * count,
      mean=mean,
      half_width=half_width,
      p_value=1.0,
  )


def test_a_verdict_needs_an_interval_and_three_pairs():
  assert verdict(_of(-0.1, 0.05)) == 'worse'
  assert verdict(_of(0.1, 0.05)) == 'better'
  assert verdict(_of(0.0, 0.02)) == 'no difference'
  assert verdict(_of(-0.1, 0.2)) == 'inconclusive'
  # Surely different, by less than the margin: neither claim holds.
  assert verdict(_of(-0.029, 0.005)) == 'inconclusive'
  assert verdict(_of(-0.1, 0.05, count=2)) == 'inconclusive'


def test_the_endpoint_is_the_mean_after_step_50():
  points = [(0, 0.2), (40, 0.3), (50, 0.9), (60, 0.4), (80, 0.5)]
  assert endpoint(points) == pytest.approx(0.45)
  assert endpoint(points[:3]) is None


def test_holms_correction_by_hand():
  found = holm({'a': 0.01, 'b': 0.04, 'c': 0.03, 'd': 0.9})
  # 4 x 0.01, 3 x 0.03, then never below the one before; at most 1.
  assert found == pytest.approx({'a': 0.04, 'c': 0.09, 'b': 0.09, 'd': 0.9})
  assert holm({'a': 0.7, 'b': 0.8}) == {'a': 1.0, 'b': 1.0}


def test_as_good_needs_the_whole_interval_above_the_margin():
  assert is_as_good(_of(0.0, 0.009), 3) == 'yes'
  assert is_as_good(_of(0.03, 0.02), 3) == 'yes'
  assert is_as_good(_of(0.0, 0.011), 3) == 'not decided'
  assert is_as_good(_of(-0.03, 0.02), 3) == 'no'
  assert is_as_good(_of(-0.009, 0.005), 3) == 'not decided'
  # Four of five pairs are a look before the end.
  assert is_as_good(_of(0.0, 0.001, count=4), 5) == 'not decided'
  assert is_as_good(_of(0.0, 0.001, count=5), 5) == 'yes'


def test_the_last_evaluation_of_a_failed_run_stands_for_later_ones():
  points = [(0, 0.2), (60, 0.4)]
  found = carried(points, [0, 20, 40, 60, 80, 100])
  assert found == [(0, 0.2), (60, 0.4), (80, 0.4), (100, 0.4)]
  assert carried(points, [0, 20, 40, 60]) == points


def test_the_primary_question_has_the_power_that_the_page_names():
  rng = np.random.default_rng(0)
  draws = 4000
  noise = rng.standard_normal((draws, 20))
  for mean, deviation, seeds, power in (
      (0, 0.5, 5, 0.91),
      (0, 0.6, 5, 0.79),
      (0, 0.8, 5, 0.56),
      (0, 1.0, 5, 0.40),
      (-1, 0.8, 5, 0.025),
      # The deviation that the main cell turned out to have.
      (0, 1.5, 5, 0.21),
      (0, 1.5, 20, 0.81),
  ):
    yes = 0
    for d in (mean + deviation * noise[:, :seeds]) / 100:
      pairs = paired(dict(enumerate(d)), dict.fromkeys(range(seeds), 0.0))
      yes += is_as_good(pairs, seeds) == 'yes'
    # Three standard errors of a share.
    assert abs(yes / draws - power) < 3 * (power * (1 - power) / draws) ** 0.5
