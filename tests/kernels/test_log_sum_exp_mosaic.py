"""Log-sum-exps as Mosaic's kernel, interpreted, beside float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels import block
from tests.kernels_in_use import needs_mosaic

pytestmark = needs_mosaic


@pytest.fixture
def kernel():
  from jetrl_jax.kernels.log_sum_exp import mosaic_sm90

  return mosaic_sm90


def _stats(kernel, logits, inverse=0.5):
  """Returns both results, with as many programs as the test has asked for."""
  inverse_M = jnp.full((len(logits),), inverse, jnp.float32)
  return [
      np.asarray(x)
      for x in kernel.row_stats.__wrapped__(logits, inverse_M, interpret=True)
  ]


def _float64(z):
  z = np.asarray(z, np.float64)
  top = z.max(1, keepdims=True)
  p = np.exp(z - top)
  total = p.sum(1, keepdims=True)
  return (top + np.log(total))[:, 0], (p * z).sum(1) / total[:, 0]


def test_a_row_has_its_bits_among_any_others(kernel, monkeypatch):
  # Three chunks of 5 rows: four programs write over what they have read, and
  # the last chunks end within.
  logits = 10 * np.random.default_rng(0).normal(size=(5, 8200))
  logits = jnp.asarray(logits, jnp.float32)
  alone = _stats(kernel, logits[3:4])
  monkeypatch.setattr(kernel, '_core_count', lambda: 1)
  found = _stats(kernel, logits)
  for some, one in zip(found, alone, strict=True):
    assert np.array_equal(some[3:4], one)
  for some, exact in zip(found, _float64(0.5 * logits), strict=True):
    np.testing.assert_allclose(some, exact, rtol=1e-6)


@pytest.mark.parametrize('vocab', [7, 4097])
def test_it_does_not_read_past_the_vocabulary(kernel, vocab):
  # The tail of the last chunk counts as -inf, also for a row below zero.
  lse, mean = _stats(kernel, np.full((2, vocab), -50.0, np.float32), 1.0)
  np.testing.assert_allclose(lse, -50 + np.log(vocab), rtol=1e-6)
  np.testing.assert_allclose(mean, -50, rtol=1e-6)


def test_masked_logits_count_as_probability_zero(kernel):
  # A whole chunk of them, and some of another.
  z = np.random.default_rng(1).normal(size=(1, 8192)).astype(np.float32)
  z[:, 4000:] = -np.inf
  found = _stats(kernel, z, 1.0)
  for a, b in zip(found, _float64(z[:, :4000]), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('vocab', [50, 152064])
def test_it_lowers_for_a_gpu_where_there_is_none(kernel, vocab):
  shapes = (128, vocab), (128,)
  args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
  text = block.lowered_for_gpu(kernel.row_stats, *args)
  # Bulk copies start at multiples of 16 bytes.
  assert 'mosaic_gpu' in text and ('stablehlo.pad' in text) is (vocab % 4 > 0)
