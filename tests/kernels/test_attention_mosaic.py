"""Attention's training kernels, interpreted, beside their reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.kernels import attention, dispatch, kv_storage
from jetrl_jax.kernels.attention import reference
from tests.hurry import fast_compile_jit
from tests.kernels_in_use import HOPPER, needs_mosaic

_FP8 = 'float8_e4m3fn'
_TILE = 64


def _spans(tokens, group):
  """First and last key of two segments with padding after each."""
  index, start = np.arange(tokens), tokens // 4
  first = np.where(index < start, 0, start)
  is_padding = (index < start) & (index >= start - 9) | (index >= tokens - 3)
  last = np.where(is_padding, -1, index)
  spans = (np.repeat(x, group)[None] for x in (first, last))
  return [jnp.asarray(x, jnp.int32) for x in spans]


def _whole_numbers(tokens, group, head_dim, kind):
  """Operands of a forward whose sums are the same in any order.

  Scores are multiples of 1/2. They are small, so that the weights of a tile,
  times whole numbers, add up in float32 without rounding.
  """
  rng = np.random.default_rng(0)

  def draw(least, rows):
    values = rng.integers(least, -least + 1, (1, 1, rows, head_dim))
    return jnp.asarray(values, jnp.bfloat16)

  q, k, v = draw(-1, tokens * group) / 2, draw(-1, tokens), draw(-7, tokens)
  return q, kv_storage.store(k, kind), kv_storage.store(v, kind)


def _bits(x):
  return np.asarray(x).view(np.uint8)


# More tiles than are on their way at a time, so that some are written over.
@needs_mosaic
@pytest.mark.parametrize('kind', [None, _FP8])
def test_the_forward_has_the_bits_of_its_reference(kind):
  from jetrl_jax.kernels.attention import mosaic_sm90

  tokens, group, head_dim = 4 * _TILE, 2, 64
  operands = *_whole_numbers(tokens, group, head_dim, kind), *_spans(
      tokens, group
  )
  program = mosaic_sm90.Program(groups=2, stages=2)
  run = functools.partial(mosaic_sm90.forward, program=program, interpret=True)
  out, lse = jax.jit(run)(*operands)
  plain = functools.partial(reference.forward, tile=_TILE)
  wanted, wanted_lse = fast_compile_jit(plain)(*operands)
  assert np.array_equal(_bits(out), _bits(wanted))
  # The logarithm is the compiler's.
  np.testing.assert_allclose(lse, wanted_lse, rtol=2.0**-20, atol=2.0**-20)
  has_keys = np.asarray(operands[-1] >= 0)
  values = np.asarray(out, np.float32)[0, 0].any(axis=-1)
  assert np.array_equal(values, has_keys[0])


@needs_mosaic
@pytest.mark.parametrize(
    'head_dim', [64, pytest.param(128, marks=pytest.mark.slow)]
)
def test_the_gradients_are_those_of_the_reference(head_dim):
  from jetrl_jax.kernels.attention import mosaic_backward_sm90

  tokens, group, rng = 192, 2, np.random.default_rng(0)

  def draw(rows):
    return jnp.asarray(rng.normal(size=(1, 1, rows, head_dim)), jnp.bfloat16)

  q, dout, k, v = (draw(tokens * n) for n in (group, group, 1, 1))
  operands = q, k, v, *_spans(tokens, group)
  forward = functools.partial(reference.forward, tile=_TILE)
  out, lse = fast_compile_jit(forward)(*operands)
  operands = *operands, out, lse, dout
  run = functools.partial(mosaic_backward_sm90.backward, interpret=True)
  found = jax.jit(run)(*operands)

  def norm(x):
    return np.linalg.norm(np.asarray(x, np.float64))

  plain = fast_compile_jit(reference.backward)(*operands)
  for grad, wanted in zip(found, plain, strict=True):
    assert grad.dtype == wanted.dtype and grad.shape == wanted.shape
    # Weights and results are rounded to bfloat16.
    assert norm(grad - wanted) < 2.0**-7 * norm(wanted)


@pytest.mark.parametrize(
    'dtype, head_dim, group, tile, is_taken',
    [
        ('bfloat16', 128, 1, 64, True),
        ('float16', 128, 7, 64, True),
        ('bfloat16', 64, 16, 64, True),
        ('bfloat16', 64, 17, 64, False),
        ('bfloat16', 128, 1, 32, False),
        ('bfloat16', 16, 1, 64, False),
        ('bfloat16', 96, 1, 64, False),
        ('bfloat16', 256, 1, 64, False),
        ('bfloat16', 128, 1, 128, False),
        ('float32', 128, 1, 64, False),
    ],
)
def test_what_the_kernels_do_not_take_is_the_references(
    dtype, head_dim, group, tile, is_taken
):
  for setting, wanted in (
      ('auto', is_taken),
      ('attention=mosaic_sm90', is_taken),
      ('attention=reference', False),
      ('decode_attention=reference', False),
  ):
    with dispatch.using(dispatch.select(setting, HOPPER)):
      found = attention.has_kernel(jnp.dtype(dtype), head_dim, group, tile)
    assert found is wanted, setting
