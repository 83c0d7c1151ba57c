import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetrl_jax.rl import aggregation


def _reference(loss_BT, mask_BT, mode, factor):
  """The four losses from their definitions: means of means and sums."""
  rows = [row[m > 0] for row, m in zip(loss_BT, mask_BT, strict=True)]
  if mode == 'token-mean':
    return np.concatenate(rows).mean()
  if mode == 'seq-mean-token-mean':
    return np.mean([row.mean() if row.size else 0.0 for row in rows])
  sums = [row.sum() for row in rows]
  return np.mean(sums) / (factor if mode.endswith('norm') else 1.0)


def test_each_mode_by_hand():
  expected = {
      'token-mean': [1 / 4, 1 / 4],
      'seq-mean-token-mean': [1 / 2, 1 / 6],
      'seq-mean-token-sum': [1 / 2, 1 / 2],
      'seq-mean-token-sum-norm': [1 / 20, 1 / 20],
  }
  for mode, weights in expected.items():
    found = aggregation.loss_weights([1, 3], mode, loss_scale_factor=10)
    np.testing.assert_array_equal(found, np.array(weights, np.float32))
    assert found.dtype == np.float32
  assert set(expected) == set(aggregation.MODES)


@pytest.mark.parametrize('mode', aggregation.MODES)
def test_the_weighted_sum_is_the_named_mean(mode):
  rng = np.random.default_rng(0)
  lengths_B = rng.integers(0, 12, size=9)
  loss_BT = rng.normal(size=(9, 12))
  mask_BT = np.arange(12) < lengths_B[:, None]
  weights_B = aggregation.loss_weights(lengths_B, mode, loss_scale_factor=12)
  found = (loss_BT * mask_BT * weights_B[:, None]).sum()
  expected = _reference(loss_BT, mask_BT, mode, 12)
  np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize('mode', aggregation.MODES)
def test_an_empty_mask_weighs_nothing(mode):
  found = aggregation.loss_weights([0, 4, 0], mode, loss_scale_factor=8)
  np.testing.assert_array_equal(found[[0, 2]], [0.0, 0.0])
  assert found[1] > 0


def test_an_empty_mask_counts_as_a_sequence_but_not_as_tokens():
  token = aggregation.loss_weights([0, 4], 'token-mean', loss_scale_factor=None)
  sequence = aggregation.loss_weights(
      [0, 4], 'seq-mean-token-mean', loss_scale_factor=None
  )
  assert token[1] == 1 / 4
  assert sequence[1] == 1 / (2 * 4)


@pytest.mark.parametrize('mode', aggregation.MODES)
def test_a_mini_batch_without_any_token_has_weights_of_zero(mode):
  found = aggregation.loss_weights([0, 0], mode, loss_scale_factor=8)
  np.testing.assert_array_equal(found, [0.0, 0.0])


@given(st.lists(st.integers(0, 10000), min_size=1, max_size=20))
def test_the_means_over_tokens_have_total_weight_one(lengths):
  counted = sum(length > 0 for length in lengths)
  for mode, total in (
      ('token-mean', float(counted > 0)),
      ('seq-mean-token-mean', counted / len(lengths)),
  ):
    found = aggregation.loss_weights(lengths, mode, loss_scale_factor=None)
    np.testing.assert_allclose(found @ np.array(lengths), total, rtol=1e-6)


@pytest.mark.parametrize('factor', [None, 0, -5])
def test_the_normalised_sum_needs_its_factor(factor):
  with pytest.raises(ValueError, match='loss_scale_factor.*above 0'):
    aggregation.loss_weights(
        [3], 'seq-mean-token-sum-norm', loss_scale_factor=factor
    )


def test_a_factor_below_one_is_taken():
  found = aggregation.loss_weights(
      [3, 1], 'seq-mean-token-sum-norm', loss_scale_factor=0.5
  )
  np.testing.assert_array_equal(found, [1.0, 1.0])


@pytest.mark.parametrize('mode', aggregation.MODES)
def test_no_sequence_has_no_weight(mode):
  found = aggregation.loss_weights([], mode, loss_scale_factor=8)
  assert found.shape == (0,)


def test_an_unknown_mode_is_answered_with_the_known_ones():
  with pytest.raises(ValueError, match="'mean'; allowed are token-mean, seq"):
    aggregation.loss_weights([3], 'mean', loss_scale_factor=None)


def test_a_negative_length_is_refused():
  with pytest.raises(ValueError, match='-1, below 0'):
    aggregation.loss_weights([3, -1], 'token-mean', loss_scale_factor=None)
