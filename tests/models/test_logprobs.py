import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.core.compilation import exact_jit
from jetrl_jax.kernels import dispatch
from jetrl_jax.kernels.log_sum_exp import row_stats, temper
from jetrl_jax.models import logprobs
from tests.kernels_in_use import needs_mosaic

if dispatch.has_mosaic():
  from jetrl_jax.kernels.log_sum_exp import mosaic_sm90

_jitted = exact_jit(row_stats)
ROWS, DIM, VOCAB = 96, 32, 200


def _stats(z, inverse=1.0):
  return _jitted(z, np.full(len(z), inverse, np.float32))


def _kernel(z, inverse=1.0):
  return mosaic_sm90.row_stats(
      z, np.full(len(z), inverse, np.float32), interpret=True
  )


def _float64(z):
  z = np.asarray(z, np.float64)
  top = z.max(1, keepdims=True)
  p = np.exp(z - top)
  total = p.sum(1, keepdims=True)
  return (top + np.log(total))[:, 0], (p * z).sum(1) / total[:, 0]


def _normal(*shape):
  seed = shape[-1]
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def _inputs(rows=ROWS):
  targets = np.random.default_rng(0).integers(0, VOCAB, rows, np.int32)
  return _normal(rows, DIM), _normal(VOCAB, DIM), targets


@functools.cache
def _logprobs(chunk_rows, grad=False):
  def run(hidden, kernel, targets, temperature):
    return logprobs.target_logprobs(
        lambda x, *_: x @ kernel.T,
        hidden,
        targets,
        temperature,
        chunk_rows=chunk_rows,
        row_mask_M=jnp.ones(hidden.shape[0]),
        fp8_state={},
    )

  if not grad:
    return exact_jit(run)

  def weight(out):
    return sum(jnp.sum(jnp.cos(jnp.arange(o.size)) * o) for o in out)

  return exact_jit(jax.grad(lambda *a: weight(run(*a)), argnums=(0, 1)))


def test_the_stats_of_two_logits_by_hand():
  # z = (log 3, 0): total 4, so lse = log 4; mean = 3/4 log 3.
  z = np.tile(np.asarray([[np.log(3.0), 0.0]], np.float32), (16, 1))
  lse, mean = _stats(z)
  np.testing.assert_allclose(lse, np.log(4), rtol=1e-6)
  np.testing.assert_allclose(mean, 0.75 * np.log(3), rtol=1e-6)


@pytest.mark.parametrize('vocab', [7, 1024, 2500])
@pytest.mark.parametrize('shift', [0.0, 80.0, -80.0])
def test_log_sum_exp_and_entropy_equal_float64(vocab, shift):
  z = 3 * _normal(16, vocab) + shift
  lse, mean = _stats(z)
  expected_lse, expected_mean = _float64(z)
  # A float32 sum of V positive terms errs by at most V 2^-24 relative; the
  # logits themselves by a few steps of the largest.
  steps = 8 * 2.0**-24 * np.abs(np.asarray(z)).max()
  np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=steps + 1e-5)
  np.testing.assert_allclose(
      mean, expected_mean, rtol=2 * vocab * 2.0**-24, atol=steps
  )


@needs_mosaic
@pytest.mark.parametrize('inverse, vocab', [(1.0, 7), (1.25, 5000)])
def test_the_gpu_kernel_computes_the_same_stats(inverse, vocab):
  logits = 3 * _normal(16, vocab)
  for found, reference, exact in zip(
      _kernel(logits, inverse),
      _stats(logits, inverse),
      _float64(logits * np.float64(inverse)),
      strict=True,
  ):
    np.testing.assert_allclose(found, exact, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found, reference, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('vocab', [40, 8192])
def test_masked_logits_count_as_probability_zero(vocab):
  z = _normal(16, vocab)
  z[:, vocab // 2 :] = -np.inf  # A whole chunk of the larger.
  for a, b in zip(_stats(z), _float64(z[:, : vocab // 2]), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_the_stats_of_a_row_do_not_depend_on_the_number_of_rows():
  z = 3 * _normal(512, 300)
  whole = [np.asarray(a) for a in _stats(z)]
  for rows in (16, 112):
    for part, full in zip(_stats(z[:rows]), whole, strict=True):
      np.testing.assert_array_equal(part, full[:rows])


def test_the_gradient_of_the_stats_is_that_of_plain_softmax():
  logits, inverse = 2 * _normal(16, 50), np.float32(1.25)
  ct = _normal(2, 16)

  def plain(logits):
    z = logits * inverse
    logp = jax.nn.log_softmax(z, axis=1)
    lse = jax.nn.logsumexp(z, axis=1)
    return ct[0] @ lse + ct[1] @ jnp.sum(jnp.exp(logp) * z, axis=1)

  def ours(logits):
    lse, mean = row_stats(logits, jnp.full((16,), inverse))
    return ct[0] @ lse + ct[1] @ mean

  np.testing.assert_allclose(
      exact_jit(jax.grad(ours))(logits),
      exact_jit(jax.grad(plain))(logits),
      atol=2e-6,
  )


def test_tempering_divides_and_zero_leaves_the_logits():
  z = jnp.asarray([[1.0, -2.0, 3.0]])
  for temperature, expected in ((0.5, [[2, -4, 6]]), (0.0, z)):
    inverse = logprobs.inverse_temperature(jnp.float32(temperature))
    np.testing.assert_array_equal(temper(z, inverse), expected)


def test_tempering_keeps_infinite_logits_finite():
  # 0 times an infinite logit would be NaN in the weighted mean.
  low = temper(jnp.asarray([[-jnp.inf, 0.0]]), jnp.float32(1.1))
  assert np.isfinite(np.asarray(low)).all()


@pytest.mark.parametrize('temperature', [1.0, 0.9])
def test_log_probs_and_entropy_equal_float64(temperature):
  hidden, kernel, targets = _inputs()
  found, entropy = _logprobs(32)(
      hidden, kernel, targets, jnp.float32(temperature)
  )
  z = np.asarray(hidden, np.float64) @ np.asarray(kernel, np.float64).T
  z /= temperature
  lse, mean = _float64(z)
  # Logits reach 20: some float32 steps of 2^-20, dots of 32 products.
  np.testing.assert_allclose(
      found, z[np.arange(ROWS), targets] - lse, rtol=0, atol=5e-5
  )
  np.testing.assert_allclose(entropy, lse - mean, rtol=0, atol=5e-5)


@pytest.mark.parametrize('chunk_rows', [16, 32, 64])
def test_chunks_have_the_bits_of_the_whole(chunk_rows):
  # 64 does not divide 96: the last chunk is padded.
  args = (*_inputs(), jnp.float32(0.9))
  for part, whole in zip(
      _logprobs(chunk_rows)(*args), _logprobs(ROWS)(*args), strict=True
  ):
    assert part.shape == (ROWS,)
    np.testing.assert_array_equal(part, whole)


@pytest.mark.parametrize(
    ('rows', 'most', 'expected'),
    [
        (96, 64, 64),  # Two chunks, in steps of 64.
        (96, 80, 48),  # Two, in steps of 16.
        (96, 16, 16),
        (96, 1024, 96),
        (18432, 4096, 3712),  # Five of 3686.4, in steps of 128.
    ],
)
def test_chunks_are_as_equal_as_their_steps_allow(rows, most, expected):
  assert logprobs.chunk_of(rows, most) == expected


def test_the_gradient_is_that_of_plain_log_softmax():
  hidden, kernel, targets = _inputs()
  temperature = jnp.float32(0.9)

  def plain(hidden, kernel):
    logp = jax.nn.log_softmax(hidden @ kernel.T / temperature, axis=1)
    entropy = -jnp.sum(jnp.exp(logp) * logp, axis=1)
    picked = logp[jnp.arange(ROWS), targets]
    weight = jnp.cos(jnp.arange(ROWS))
    return weight @ picked + weight @ entropy

  expected = exact_jit(jax.grad(plain, argnums=(0, 1)))(hidden, kernel)
  for chunk_rows in (ROWS, 64):
    found = _logprobs(chunk_rows, True)(hidden, kernel, targets, temperature)
    for a, b in zip(found, expected, strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-4, atol=5e-5)


def test_the_logits_of_all_rows_are_never_in_memory_at_once():
  args = (*_inputs(rows=1024), np.float32(0.9))
  text = _logprobs(64, True).lower(*args).compile().as_text()
  assert f'[64,{VOCAB}]' in text
  assert f'[1024,{VOCAB}]' not in text and f'[16,64,{VOCAB}]' not in text
