"""What is concluded from curves, by hand."""

import math

import pytest

from study.statistics import Paired, collapse, final, paired, verdict


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
  # d = 0.1, 0.2, 0.3: mean 0.2, std 0.1, t(2) = 4.303.
  found = paired({1: 0.5, 2: 0.6, 3: 0.7, 4: 0.9}, {1: 0.4, 2: 0.4, 3: 0.4})
  assert found.mean == pytest.approx(0.2)
  assert found.half_width == pytest.approx(4.303 * 0.1 / math.sqrt(3))
  low, high = found.interval
  assert low == pytest.approx(-0.048, abs=1e-3) and high > 0.44


def test_one_pair_has_no_interval_and_none_is_an_error():
  assert paired({1: 0.5}, {1: 0.4}).half_width == math.inf
  with pytest.raises(ValueError, match='no pair: one arm has the seeds'):
    paired({1: 0.5}, {2: 0.5})


def _of(mean, half_width, count=3):
  return Paired(differences=(mean,) * count, mean=mean, half_width=half_width)


def test_a_verdict_needs_an_interval_and_three_pairs():
  assert verdict(_of(-0.1, 0.05)) == 'worse'
  assert verdict(_of(0.1, 0.05)) == 'better'
  assert verdict(_of(0.0, 0.02)) == 'no difference'
  assert verdict(_of(-0.1, 0.2)) == 'inconclusive'
  # Surely different, by less than the margin: neither claim holds.
  assert verdict(_of(-0.029, 0.005)) == 'inconclusive'
  assert verdict(_of(-0.1, 0.05, count=2)) == 'inconclusive'
