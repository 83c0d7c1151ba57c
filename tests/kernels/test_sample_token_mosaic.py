"""A draw as Mosaic's kernel, interpreted, beside Triton's kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.kernels import dispatch
from tests.hurry import fast_compile_jit
from tests.kernels import block
from tests.kernels_in_use import needs_mosaic

pytestmark = needs_mosaic


@pytest.fixture
def kernel():
  from jetrl_jax.kernels.sample_token import mosaic_sm90

  return mosaic_sm90


def _operands(logits, greedy):
  rows = len(logits)
  keys = np.random.default_rng(2).integers(2**32, size=(rows, 2))
  return (
      jnp.asarray(logits, jnp.float32),
      jnp.full((rows,), 0.7, jnp.float32),
      jnp.asarray(keys, jnp.uint32),
      jnp.full((rows,), greedy),
  )


def test_it_draws_what_tritons_kernel_does(kernel):
  from jetrl_jax.kernels.log_sum_exp import mosaic_sm90 as training

  logits = np.random.default_rng(1).normal(size=(8, 8200))
  operands = _operands(logits, greedy=False)
  token, lse = kernel.draw(*operands, interpret=True)
  # Training's bits.
  wanted, _ = training.row_stats(*operands[:2], interpret=True)
  assert np.array_equal(lse, wanted)
  assert token.dtype == jnp.int32 and len(np.unique(token)) > 4
  if dispatch.has_triton():
    from jetrl_jax.kernels.sample_token import triton

    @fast_compile_jit
    def others(*args):
      return triton.draw(*args, interpret=True)[0]

    assert np.array_equal(token, others(*operands))


def test_a_greedy_row_takes_the_first_most_probable_token(kernel):
  z_BV = np.zeros((3, 5000))
  z_BV[:, [70, 4200]] = 1.0
  z_BV[1, 4096] = z_BV[2, 4999] = 2.0
  token, _ = kernel.draw(*_operands(z_BV, greedy=True), interpret=True)
  assert token.tolist() == [70, 4096, 4999]


def test_a_row_that_is_not_finite_still_gives_a_token(kernel):
  z_BV = np.zeros((2, 50))
  z_BV[1] = np.nan
  token, _ = kernel.draw(*_operands(z_BV, greedy=False), interpret=True)
  assert (np.asarray(token) < 50).all()


def test_it_lowers_for_a_gpu_where_there_is_none(kernel):
  shapes = ((128, 152064), 'f4'), ((128,), 'f4'), ((128, 2), 'u4')
  shapes += (((128,), 'bool'),)
  args = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
  assert 'mosaic_gpu' in block.lowered_for_gpu(kernel.draw, *args)
