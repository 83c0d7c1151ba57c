"""Attention's training kernels in Mosaic's form, interpreted, beside others."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.kernels import attention, dispatch, kv_storage
from jetrl_jax.kernels.attention import reference
from tests.hurry import fast_compile_jit
from tests.kernels_in_use import needs_mosaic

_FP8 = 'float8_e4m3fn'


def _spans(tokens, group):
  """First and last key of two segments with padding behind each."""
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


def _beside():
  """Forward and backward of Triton's form, or plain where it is not."""
  if not dispatch.has_triton():
    return reference.forward, None
  from jetrl_jax.kernels.attention import triton, triton_backward

  how = dict(interpret=True)
  return (
      functools.partial(triton.forward, **how),
      functools.partial(triton_backward.backward, **how),
  )


# Heads of Qwen2.5-0.5B and SmolLM2, and the quickstart's. More tiles than are
# on their way at a time, so that some are written over.
@needs_mosaic
@pytest.mark.parametrize(
    'kind, head_dim, tile',
    [
        (None, 64, 64),
        (_FP8, 64, 64),
        (None, 64, 32),
        pytest.param(_FP8, 64, 32, marks=pytest.mark.slow),
        pytest.param(None, 64, 16, marks=pytest.mark.slow),
        pytest.param(None, 16, 16, marks=pytest.mark.slow),
    ],
)
def test_the_forward_has_the_bits_of_the_other_forms(kind, head_dim, tile):
  from jetrl_jax.kernels.attention import mosaic_sm90

  tokens, group = 4 * tile, 2
  operands = *_whole_numbers(tokens, group, head_dim, kind), *_spans(
      tokens, group
  )
  assert mosaic_sm90.fits(operands[0], tile)

  @fast_compile_jit
  def others(*args):
    return _beside()[0](*args, tile), reference.forward(*args, tile)

  program = mosaic_sm90.Program(groups=2, stages=2, ahead=True)
  run = functools.partial(
      mosaic_sm90.forward, tile=tile, program=program, interpret=True
  )
  out, lse = jax.jit(run)(*operands)
  for wanted, wanted_lse in others(*operands):
    assert np.array_equal(_bits(out), _bits(wanted))
    # The logarithm is the compiler's.
    np.testing.assert_allclose(lse, wanted_lse, rtol=2.0**-20, atol=2.0**-20)
  has_keys = np.asarray(operands[-1] >= 0)
  values = np.asarray(out, np.float32)[0, 0].any(axis=-1)
  assert np.array_equal(values, has_keys[0])


@needs_mosaic
@pytest.mark.parametrize(
    'tokens, head_dim, tile',
    [
        (192, 64, 64),
        # Its last tile of 64 keys is not whole.
        pytest.param(144, 16, 16, marks=pytest.mark.slow),
        pytest.param(320, 64, 32, marks=pytest.mark.slow),
    ],
)
def test_the_gradients_are_those_of_the_other_forms(tokens, head_dim, tile):
  from jetrl_jax.kernels.attention import mosaic_backward_sm90

  group, rng = 2, np.random.default_rng(0)

  def draw(rows):
    return jnp.asarray(rng.normal(size=(1, 1, rows, head_dim)), jnp.bfloat16)

  q, dout, k, v = (draw(tokens * n) for n in (group, group, 1, 1))
  operands = q, k, v, *_spans(tokens, group)
  out, lse = fast_compile_jit(functools.partial(reference.forward, tile=tile))(
      *operands
  )
  operands = *operands, out, lse, dout
  run = functools.partial(
      mosaic_backward_sm90.backward, tile=tile, interpret=True
  )
  found = jax.jit(run)(*operands)

  @fast_compile_jit
  def others(*args):
    backward = _beside()[1]
    plain = reference.backward(*args)
    return plain, backward(*args, tile) if backward else plain

  def norm(x):
    return np.linalg.norm(np.asarray(x, np.float64))

  plain, beside = others(*operands)
  for grad, wanted, near in zip(found, plain, beside, strict=True):
    assert grad.dtype == wanted.dtype and grad.shape == wanted.shape
    # Weights and results are rounded to bfloat16.
    assert norm(grad - wanted) < 2.0**-7 * norm(wanted)
    # They round the same numbers, but for sums in another order.
    assert norm(grad - near) < 2.0**-10 * norm(near)


_HOPPER = dispatch.Hardware('gpu', (9, 0), has_triton=True, has_mosaic=True)


# By name all that it takes; else only what a GPU has run.
@pytest.mark.parametrize(
    'dtype, head_dim, tile, by_default, by_name',
    [
        ('bfloat16', 128, 64, True, True),
        ('float16', 128, 64, True, True),
        ('bfloat16', 64, 64, False, True),
        ('bfloat16', 128, 32, False, True),
        ('bfloat16', 16, 16, False, True),
        ('bfloat16', 96, 64, False, False),
        ('bfloat16', 128, 128, False, False),
        ('float32', 128, 64, False, False),
    ],
)
def test_what_the_kernels_do_not_take_is_left_to_tritons(
    dtype, head_dim, tile, by_default, by_name
):
  q = jax.ShapeDtypeStruct((1, 1, 64, head_dim), dtype)
  for setting, is_taken in (
      ('auto', by_default),
      ('decode_attention=triton', by_default),
      ('attention=mosaic_sm90', by_name),
      ('attention=triton', False),
  ):
    with dispatch.using(dispatch.select(setting, _HOPPER)):
      assert attention._in_mosaic(q, tile) is is_taken, setting


def test_a_jax_without_triton_says_what_takes_heads_that_no_gpu_has_run(
    monkeypatch,
):
  monkeypatch.setattr(dispatch, 'has_triton', lambda: False)
  few, odd = (
      jax.ShapeDtypeStruct((1, 1, 64, width), 'bfloat16') for width in (64, 96)
  )
  with dispatch.using(dispatch.select('auto', _HOPPER)):
    with pytest.raises(ValueError, match="or, not tried .*=mosaic_sm90'"):
      attention._triton(few, 64)
    with pytest.raises(ValueError, match="'attention=reference'$"):
      attention._triton(odd, 64)
