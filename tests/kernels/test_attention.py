"""Attention of packed rows, forward and backward, in plain JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.core.compilation import exact_jit
from jetrl_jax.kernels import attention
from jetrl_jax.kernels.attention import layout
from tests.hurry import fast_compile_jit
from tests.kernels import attention_inputs as inputs
from tests.kernels.attention_inputs import FIRST, LAST, TILE, H


@functools.cache
def _gradients():
  """Compiled: the output's rows and the gradients of queries, keys, values."""

  def both(q, k, v, dout, first, last):
    out, residuals = attention._fwd(q, k, v, first, last, 1, TILE, None)
    return out, *attention._bwd(1, TILE, None, residuals, dout)[:3]

  return fast_compile_jit(both)


def test_two_keys_by_hand():
  # Scores (log 3, 0) after the scale H^-1/2 = 1/4: weights 3/4 and 1/4.
  zeros = np.zeros((1, 1, 16, H), np.float32)
  q = inputs.changed(zeros, np.s_[..., 0], 4 * np.log(3.0))
  k = inputs.changed(zeros, (0, 0, 0, 0), 1.0)
  v = inputs.changed(zeros, np.s_[0, 0, :2, 0], [4.0, 8.0])
  first = np.zeros((1, 16), np.int32)
  out = np.asarray(inputs.flash()(q, k, v, first, first + 1))
  np.testing.assert_allclose(out[0, 0, :, 0], 0.75 * 4 + 0.25 * 8, rtol=1e-6)


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_attention_equals_a_dense_float64_softmax(dtype):
  q, k, v, _ = inputs.qkv(dtype=dtype)
  out = np.asarray(inputs.flash()(q, k, v, FIRST, LAST), np.float64)
  expected = inputs.dense64(q, k, v, FIRST, LAST)
  if dtype == jnp.float32:
    np.testing.assert_allclose(out, expected, rtol=0, atol=5e-6)
    return
  # The weights are rounded to bfloat16 (2^-8 at most, of terms that add up to
  # less than max |v|) and so is the result.
  bound = 2.0**-8 * (np.abs(np.asarray(v, np.float64)).max() + np.abs(expected))
  assert np.all(np.abs(out - expected) <= bound)


def test_tiles_that_all_rows_see_need_no_mask():
  # Three row tiles of 64; the second row's segments start at 0 and 96.
  rows = [inputs.rows([0], [192], 192), inputs.rows([0, 96], [96, 96], 192)]
  first, last = (np.stack(a) for a in zip(*rows, strict=True))
  bounds = np.asarray(layout.row_tiles_of(first, last, 12, TILE, 64))
  # Key tile 0 is attended by row tiles 0, 1, 2 and seen whole by 1 and 2;
  # tile 7 (keys 112 to 127) by 1, 2 and 2; tile 11 by 2, and by no rows whole.
  assert bounds[0, [0, 7, 11]].tolist() == [
      [0, 1, 3, 3],
      [1, 2, 3, 3],
      [2, 3, 3, 3],
  ]
  # The second segment's first tile is behind row tile 1's first rows.
  assert bounds[1, 6].tolist() == [1, 2, 3, 3]


def test_gradients_are_those_of_dense_attention():
  q, k, v, dout = inputs.qkv()

  def ours(q, k, v):
    out = attention.flash_attention(q, k, v, FIRST, LAST, 1, TILE, None)
    return jnp.sum(dout * out)

  def plain(q, k, v):
    return jnp.sum(dout * inputs.dense(q, k, v, FIRST, LAST))

  found = exact_jit(jax.grad(ours, argnums=(0, 1, 2)))(q, k, v)
  expected = exact_jit(jax.grad(plain, argnums=(0, 1, 2)))(q, k, v)
  for a, b in zip(found, expected, strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=2e-5)


def test_padding_rows_are_exact_zeros_and_have_no_gradient():
  q, k, v, dout = inputs.qkv()
  out, dq, _, _ = _gradients()(q, k, v, dout, FIRST, LAST)
  padding = LAST[1] < 0
  assert padding.any()
  assert not np.any(np.asarray(out)[1][:, padding])
  assert not np.any(np.asarray(dq)[1][:, padding])
  # What stands in padding rows reaches no other row.
  other = inputs.changed(q, np.s_[1, :, padding], 1e9)
  np.testing.assert_array_equal(
      np.asarray(inputs.flash()(other, k, v, FIRST, LAST))[1][:, ~padding],
      np.asarray(inputs.flash()(q, k, v, FIRST, LAST))[1][:, ~padding],
  )


def test_segments_do_not_see_each_other_nor_the_future():
  q, k, v, dout = inputs.qkv()
  before = np.asarray(inputs.flash()(q, k, v, FIRST, LAST))
  # Row 1 has segments 0..12, 16..31, 32..51: change keys and values of the
  # second from its tenth token on.
  k, v = (
      inputs.changed(x, np.s_[1, :, 26:32], 7 + x[1, :, 26:32]) for x in (k, v)
  )
  after = np.asarray(inputs.flash()(q, k, v, FIRST, LAST))
  np.testing.assert_array_equal(after[0], before[0])
  np.testing.assert_array_equal(after[1, :, :26], before[1, :, :26])
  np.testing.assert_array_equal(after[1, :, 32:], before[1, :, 32:])
  assert np.all(np.any(after[1, :, 26:32] != before[1, :, 26:32], axis=-1))
  # And no gradient crosses over: only queries 16..31 pull on keys 16..31.
  alone = inputs.changed(dout, np.s_[1, :, 16:32], 0)
  _, _, dk, dv = _gradients()(q, k, v, alone, FIRST, LAST)
  for grad in (dk, dv):
    assert not np.any(np.asarray(grad)[1, :, 16:32])


@pytest.mark.parametrize('head_dim', [32, 128])
@pytest.mark.parametrize(
    ('dtype', 'kv_dtype'),
    [('float32', None), ('bfloat16', None), ('float32', 'float8_e4m3fn')],
)
def test_a_row_has_the_bits_that_it_has_among_more_rows(
    dtype, kv_dtype, head_dim
):
  rng = np.random.default_rng(0)
  q, k, v = rng.normal(size=(3, 1, 1, 64, head_dim))
  # Of all sizes, so that 8-bit values do not add up exactly in any order.
  v *= 2.0 ** rng.integers(-8, 8, v.shape)
  q, k, v = (x.astype(dtype) for x in (q, k, v))
  first, last = np.zeros((1, 64), np.int32), np.arange(64, dtype=np.int32)[None]
  run = inputs.flash(kv_dtype)
  whole = run(q, k, v, first, last)
  few = run(q[:, :, 48:], k, v, first[:, 48:], last[:, 48:])
  np.testing.assert_array_equal(whole[:, :, 48:], few)


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_a_segment_packed_at_a_tile_has_the_bits_of_one_alone(dtype):
  q, k, v, _ = inputs.qkv(dtype=dtype)
  packed = np.asarray(inputs.flash()(q, k, v, FIRST, LAST))
  for start, length in ((16, 16), (32, 20)):
    first, last = (np.stack([a, a]) for a in inputs.rows([0], [length]))
    shifted = (np.roll(x, -start, axis=2) for x in (q, k, v))
    alone = inputs.flash()(*shifted, first, last)
    np.testing.assert_array_equal(
        np.asarray(alone)[1, :, :length], packed[1, :, start : start + length]
    )


def test_a_segment_off_the_tiles_has_other_bits():
  # Why segments start at multiples of the tile.
  q, k, v, _ = inputs.qkv(dtype=jnp.bfloat16)
  outs = []
  for start in (0, 8):
    first, last = (np.stack([a, a]) for a in inputs.rows([start], [48]))
    shifted = (np.roll(x, start, axis=2) for x in (q, k, v))
    out = inputs.flash()(*shifted, first, last)
    outs.append(np.asarray(out)[:, :, start : start + 48])
  assert np.any(outs[0] != outs[1])
