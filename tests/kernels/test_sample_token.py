"""The noise of the kernel sample_token, interpreted; tests/gpu has a GPU."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.kernels import dispatch
from jetrl_jax.kernels.sample_token import noise
from tests.kernels import block
from tests.kernels_in_use import needs_mosaic

if dispatch.has_mosaic():
  from jetrl_jax.kernels.log_sum_exp import mosaic_sm90 as training
  from jetrl_jax.kernels.sample_token import mosaic_sm90 as kernel

# 99.9% quantile of chi-square with 4 degrees of freedom.
_CHI2_999 = 18.47


def _operands(logits_BV, greedy=False, inverse=1.0):
  rows = len(logits_BV)
  keys = np.random.default_rng(2).integers(2**32, size=(rows, 2))
  return (
      jnp.asarray(logits_BV, jnp.float32),
      jnp.full((rows,), inverse, jnp.float32),
      jnp.asarray(keys, jnp.uint32),
      jnp.full((rows,), greedy),
  )


def _draw(*args, **how):
  token_B, lse_B = kernel.draw(*_operands(*args, **how), interpret=True)
  return np.asarray(token_B), np.asarray(lse_B)


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


@needs_mosaic
@pytest.mark.slow
def test_drawn_frequencies_pass_a_chi_square_test_over_several_chunks():
  # Tokens of a chunk's quarters, and one of the next chunk with most of the
  # probability; the others are out of reach.
  vocabulary, count = training.CHUNK + 100, 160
  tokens = np.array([0, 1, 2048, 4095, vocabulary - 1])
  logits = np.log([1.0, 1.0, 2.0, 0.5, 12.0])
  # Twice the logits at temperature 2 are drawn like the logits.
  doubled_V = np.full(vocabulary, -400.0)
  doubled_V[tokens] = 2 * logits
  seen, _ = _draw(np.tile(doubled_V, (count, 1)), inverse=0.5)
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


def _drawn_by_the_formula(logits_BV, inverse_B, keys_B2):
  """Returns tokens: of the largest noisy sum's chunk the largest noisy one."""
  tokens = []
  for logits_V, inverse, key in zip(logits_BV, inverse_B, keys_B2, strict=True):

    def gumbel(count, stream, key=key):
      zeros = jnp.zeros(count, jnp.uint32)
      counter = (
          jnp.arange(count, dtype=jnp.uint32),
          zeros + stream,
          zeros,
          zeros,
      )
      return [_gumbel(word) for word in noise.philox(counter, key)]

    z_V = np.asarray(logits_V * inverse, np.float64)
    chunks = np.split(z_V, range(training.CHUNK, len(z_V), training.CHUNK))
    sums = np.array([np.log(np.sum(np.exp(z))) for z in chunks])
    chunk = np.argmax(sums + gumbel(len(sums), 0)[0])
    of_chunk = np.concatenate(gumbel(training.LANES, 1))[: len(chunks[chunk])]
    tokens.append(chunk * training.CHUNK + np.argmax(chunks[chunk] + of_chunk))
  return tokens


@needs_mosaic
@pytest.mark.parametrize('vocab', [50, 8200])
def test_a_draw_is_the_formulas_token_with_trainings_log_sum_exp(vocab):
  logits = np.random.default_rng(1).normal(size=(8, vocab))
  operands = _operands(logits, inverse=0.7)
  token, lse = kernel.draw(*operands, interpret=True)
  wanted, _ = training.row_stats(*operands[:2], interpret=True)
  assert np.array_equal(lse, wanted)
  assert token.dtype == jnp.int32 and len(np.unique(token)) > 4
  assert token.tolist() == _drawn_by_the_formula(*operands[:3])
  chunks = np.unique(token // training.CHUNK)
  assert len(chunks) == 1 + (vocab > training.CHUNK)


@needs_mosaic
def test_a_greedy_row_takes_the_first_most_probable_token():
  z_BV = np.zeros((3, 5000))
  z_BV[:, [70, 4200]] = 1.0
  z_BV[1, 4096] = z_BV[2, 4999] = 2.0
  assert _draw(z_BV, greedy=True)[0].tolist() == [70, 4096, 4999]


@needs_mosaic
def test_a_row_that_is_not_finite_still_gives_a_token():
  z_BV = np.zeros((2, 50))
  z_BV[1] = np.nan
  assert (_draw(z_BV)[0] < 50).all()


@needs_mosaic
def test_it_lowers_for_a_gpu_where_there_is_none():
  shapes = ((128, 152064), 'f4'), ((128,), 'f4'), ((128, 2), 'u4')
  shapes += (((128,), 'bool'),)
  args = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
  assert 'mosaic_gpu' in block.lowered_for_gpu(kernel.draw, *args)
