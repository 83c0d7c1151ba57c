"""The noise of the kernel sample_token, interpreted; tests/gpu has a GPU."""

import functools
import math

import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.kernels.log_sum_exp import triton as log_sum_exp_kernel
from jetrl_jax.kernels.sample_token import noise
from jetrl_jax.kernels.sample_token import triton as sample_token
from tests.hurry import fast_compile_jit

# 99.9% quantile of chi-square with 4 degrees of freedom.
_CHI2_999 = 18.47


@fast_compile_jit
def _kernel(*args):
  return sample_token.draw(*args, interpret=True)


def _draw(logits_BV, seed=0, greedy=False, inverse=1.0):
  return _draw_and_sum(logits_BV, seed, greedy, inverse)[0]


def _draw_and_sum(logits_BV, seed=0, greedy=False, inverse=1.0):
  rows = len(logits_BV)
  keys = np.random.default_rng(seed).integers(2**32, size=(rows, 2))
  found = _kernel(
      jnp.asarray(logits_BV, jnp.float32),
      jnp.full((rows,), inverse, jnp.float32),
      jnp.asarray(keys, jnp.uint32),
      jnp.full((rows,), greedy),
  )
  return [np.asarray(x) for x in found]


@pytest.mark.parametrize(
    ('counter', 'key', 'expected'),
    [
        ((0,) * 4, (0, 0), '6627e8d5 e169c58d bc57ac4c 9b00dbd8'),
        (
            (2**32 - 1,) * 4,
            (2**32 - 1,) * 2,
            '408f276d 41c83b0e a20bc7c6 6d5451fd',
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            'd16cfe09 94fdcceb 5001e420 24126ea1',
        ),
    ],
)
def test_philox_gives_the_words_of_its_reference(counter, key, expected):
  # The three vectors for philox4x32-10 that Random123 is published with.
  words = noise.philox(
      [jnp.uint32(x) for x in counter], [jnp.uint32(x) for x in key]
  )
  assert ' '.join(f'{int(word):08x}' for word in words) == expected


def _gumbel(bits):
  log2_e = noise.log2_exponential(
      jnp.asarray(bits), jnp.log2, lambda x, y, z: x * y + z
  )
  return -math.log(2) * np.asarray(log2_e)


def test_noise_is_that_of_the_formula_from_the_smallest_bits_to_the_largest():
  bits = [0, 1, 2, 1000, 2**25, 2**26, 2**27, 2**31, 2**32 - 2**14]
  found = _gumbel(np.asarray(bits, np.uint32))
  wanted = [-math.log(-math.log1p(-(x // 2 + 0.5) / 2**31)) for x in bits]
  np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=2e-6)
  assert wanted[0] > 22 and np.isfinite(_gumbel(np.uint32(2**32 - 1)))


def test_drawn_frequencies_pass_a_chi_square_test_over_several_chunks():
  # Tokens of a chunk's quarters, and one of the next chunk with most of the
  # probability; the others are out of reach.
  vocabulary, count = log_sum_exp_kernel.CHUNK + 100, 400
  tokens = np.array([0, 1, 2048, 4095, vocabulary - 1])
  logits = np.log([1.0, 1.0, 2.0, 0.5, 12.0])
  # Twice the logits at temperature 2 are drawn like the logits.
  doubled_V = np.full(vocabulary, -400.0)
  doubled_V[tokens] = 2 * logits
  seen = _draw(np.tile(doubled_V, (count, 1)), inverse=0.5)
  counts = np.array([np.sum(seen == token) for token in tokens])
  assert counts.sum() == count
  expected = count * np.exp(logits) / np.exp(logits).sum()
  assert ((counts - expected) ** 2 / expected).sum() < _CHI2_999


def test_neighbouring_tokens_have_noise_of_their_own():
  # All four words of many counters, and two keys.
  zeros, lanes = jnp.zeros(4096, jnp.uint32), jnp.arange(4096, dtype=jnp.uint32)
  found = np.concatenate(
      [
          _gumbel(word)
          for key in (1, 2)
          for word in noise.philox(
              (lanes, zeros, zeros, zeros),
              (jnp.uint32(key), jnp.uint32(0)),
          )
      ]
  ).reshape(8, 4096)
  # Mean: Euler's constant; variance: pi^2 / 6.
  assert abs(found.mean() - 0.5772) < 0.03
  assert abs(found.var() - math.pi**2 / 6) < 0.1
  correlated = np.corrcoef(found) - np.eye(8)
  assert np.abs(correlated).max() < 0.07
  assert (
      abs(np.corrcoef(found[:, 1:].ravel(), found[:, :-1].ravel())[0, 1]) < 0.03
  )


@pytest.mark.parametrize('vocab', [50, log_sum_exp_kernel.CHUNK + 1])
def test_the_log_sum_exp_beside_a_draw_is_that_of_the_stats(vocab):
  logits_BV = np.random.default_rng(1).normal(size=(16, vocab)) * 5
  _, found = _draw_and_sum(logits_BV, inverse=0.7)
  wanted, _ = fast_compile_jit(
      functools.partial(log_sum_exp_kernel.row_stats, interpret=True)
  )(logits_BV.astype(np.float32), jnp.full((16,), 0.7, jnp.float32))
  np.testing.assert_array_equal(found, wanted)


def test_a_greedy_row_takes_the_first_most_probable_token():
  z_V = np.zeros(5000)
  z_V[[70, 4200]] = 1.0
  assert _draw([z_V] * 3, greedy=True).tolist() == [70] * 3
  assert set(_draw([30 * z_V] * 20).tolist()) == {70, 4200}


def test_a_row_that_is_not_finite_still_gives_a_token():
  z_BV = np.zeros((2, 50))
  z_BV[1] = np.nan
  assert (_draw(z_BV) < 50).all()
