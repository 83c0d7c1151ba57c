"""Attention of packed rows, forward and backward, and its GPU kernels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.core.compilation import exact_jit
from jetrl_jax.kernels import attention
from jetrl_jax.kernels.attention import layout
from jetrl_jax.kernels.attention import triton as attention_forward
from jetrl_jax.kernels.attention import triton_backward as attention_backward
from tests.hurry import fast_compile_jit
from tests.kernels import attention_inputs as inputs
from tests.kernels.attention_inputs import FIRST, LAST, TILE, H


@functools.cache
def _kernel_and_plain():
  """Compiled: (out, lse, gradients) of the GPU kernel and of the CPU form."""

  def both(q, k, v, dout, first, last):
    out, lse = attention_forward.forward(
        q, k, v, first, last, TILE, interpret=True
    )
    grads = attention_backward.backward(
        q, k, v, first, last, out, lse, dout, TILE, interpret=True
    )
    residuals = attention._fwd(q, k, v, first, last, TILE, None)[1]
    plain = *residuals[-2:], *attention._bwd(TILE, None, residuals, dout)[:3]
    return (out, lse, *grads), plain

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


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_the_gpu_kernels_compute_what_the_cpu_form_does(dtype):
  q, k, v, dout = inputs.qkv(dtype=dtype)
  kernel, plain = _kernel_and_plain()(q, k, v, dout, FIRST, LAST)
  # bfloat16: a value that float32 sums in another order may round to its
  # neighbour, in the weights and in the result.
  tolerance = 1e-5 if dtype == jnp.float32 else 2.0**-6
  for found, expected in zip(kernel, plain, strict=True):
    assert found.dtype == expected.dtype
    found, expected = (np.asarray(x, np.float64) for x in (found, expected))
    scale = np.abs(np.where(expected > -1e29, expected, 0)).max()
    np.testing.assert_allclose(
        found, expected, rtol=1e-6, atol=tolerance * scale
    )


def test_tiles_that_all_rows_see_are_computed_without_a_mask():
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
  q, k, v, dout = inputs.qkv(length=192)
  kernel, plain = _kernel_and_plain()(q, k, v, dout, first, last)
  for found, expected in zip(kernel, plain, strict=True):
    scale = np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-5 * scale)


def test_gradients_are_those_of_dense_attention():
  q, k, v, dout = inputs.qkv()

  def ours(q, k, v):
    out = attention.flash_attention(q, k, v, FIRST, LAST, TILE, None)
    return jnp.sum(dout * out)

  def plain(q, k, v):
    return jnp.sum(dout * inputs.dense(q, k, v, FIRST, LAST))

  found = exact_jit(jax.grad(ours, argnums=(0, 1, 2)))(q, k, v)
  expected = exact_jit(jax.grad(plain, argnums=(0, 1, 2)))(q, k, v)
  for a, b in zip(found, expected, strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=2e-5)


def test_padding_rows_are_exact_zeros_and_have_no_gradient():
  q, k, v, dout = inputs.qkv()
  kernel, plain = _kernel_and_plain()(q, k, v, dout, FIRST, LAST)
  padding = LAST[1] < 0
  assert padding.any()
  for out, _, dq, _, _ in (kernel, plain):
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
  for grads in _kernel_and_plain()(q, k, v, alone, FIRST, LAST):
    assert not np.any(np.asarray(grads[3])[1, :, 16:32])
    assert not np.any(np.asarray(grads[4])[1, :, 16:32])


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
