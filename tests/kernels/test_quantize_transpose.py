import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.fp8 import formats, health
from jetrl_jax.fp8.quantization import QTensor, quantize
from jetrl_jax.kernels.quantize_transpose import grid
from jetrl_jax.kernels.quantize_transpose import triton as transpose
from tests.hurry import fast_compile_jit


def _bytes(x):
  return np.asarray(x).view(np.uint8)


@pytest.fixture(scope='module')
def matrix():
  # Over 20 powers of two: some values saturate, some become zeros.
  random = np.random.default_rng(0)
  spread = np.exp(4 * random.standard_normal((256, 384)))
  values = random.standard_normal((256, 384)) * spread
  return jnp.asarray(values, jnp.bfloat16)


def _transposed(matrix, scale, mask_M, dtype, **options):
  @fast_compile_jit
  def run(*args):
    return vars(
        transpose.quantize_and_transpose(
            *args, dtype, **options, interpret=True
        )
    )

  return transpose.QuantizedPair(**run(matrix, scale, mask_M))


@pytest.mark.parametrize('dtype', [formats.E4M3, formats.E5M2])
def test_one_pass_gives_what_quantising_transposing_and_measuring_give(
    matrix, dtype
):
  scale = jnp.float32(0.25)
  mask_M = jnp.asarray(np.arange(256) % 7 != 0, jnp.float32)
  valid = jnp.where(mask_M[:, None] > 0, matrix, 0)
  wanted = quantize(valid, scale, dtype)
  out = _transposed(matrix, scale, mask_M, dtype, row_major=True)
  assert np.array_equal(_bytes(out.row_major_MN), _bytes(wanted))
  assert np.array_equal(_bytes(out.transposed_NM), _bytes(wanted).T)
  amax, sums = health.measure(
      matrix, QTensor(values=wanted, scale=scale), mask_M
  )
  assert out.amax == amax
  # Counts exactly, sums in another order.
  assert (
      np.array_equal(out.quantization_error[:2], sums[1:3])
      and out.quantization_error[0] > 0
  )
  np.testing.assert_allclose(out.quantization_error[2:], sums[3:], rtol=1e-5)


def test_values_that_are_not_asked_for_are_not_written(matrix):
  ones = jnp.ones((256,), jnp.float32)
  out = _transposed(matrix, jnp.float32(1), ones, formats.E4M3, row_major=False)
  assert out.row_major_MN is None


def test_tiles_are_joined_by_the_largest_amax_and_by_sums():
  counts = jnp.asarray([[3, grid.FLUSHED], [2 * grid.FLUSHED + 1, 0]])
  amax = jnp.asarray([[1.0, 5.0], [2.0, 0.0]])
  signal, noise = jnp.full((2, 2), 8.0), jnp.full((2, 2), 0.5)
  amax, lost = grid.join_tiles(amax, counts, signal, noise)
  assert amax == 5
  assert lost.tolist() == [4, 3, 32, 2]  # Saturated, flushed, signal, noise.


def test_only_whole_tiles_fit():
  assert grid.fits((256, 128))
  assert not grid.fits((256, 192))
