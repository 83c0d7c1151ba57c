import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.core.compilation import exact_jit
from jetrl_jax.fp8 import DeferredScale, formats
from jetrl_jax.fp8.quantization import quantize
from jetrl_jax.kernels import add_norm_quantize as norm
from jetrl_jax.kernels import dispatch
from jetrl_jax.kernels.row_sum import row_sum
from tests.kernels_in_use import needs_mosaic

EPS = 1e-6
if dispatch.has_mosaic():
  from jetrl_jax.kernels.add_norm_quantize import mosaic_sm90


@functools.cache
def _norm(eps=EPS):
  return exact_jit(lambda x, scale: norm.rms_norm(x, scale, eps)[0])


def _rows(rows, dim, dtype=jnp.float32):
  rng = np.random.default_rng(0)
  x = 3 * rng.normal(size=(rows, dim))
  return x.astype(dtype), (1 + 0.1 * rng.normal(size=dim)).astype(dtype)


def _float64(x, scale):
  x, scale = np.asarray(x, np.float64), np.asarray(scale, np.float64)
  return x / np.sqrt((x * x).mean(1, keepdims=True) + EPS) * scale


def test_the_norm_by_hand():
  # Mean square of (3, 4) is 12.5; with eps 12.5 the root is 5.
  x = jnp.tile(jnp.asarray([[3.0, 4.0]]), (16, 1))
  y = _norm(12.5)(x, jnp.asarray([1.0, 10.0]))
  np.testing.assert_allclose(y[0], [0.6, 8.0], rtol=4 * 2.0**-24)


@pytest.mark.parametrize('dim', [16, 64, 96, 1000])
def test_the_norm_equals_float64_within_rounding(dim):
  x, scale = _rows(32, dim)
  # The sum errs by at most dim 2^-24 relative, its root by half of that; four
  # more roundings of the result.
  np.testing.assert_allclose(
      _norm()(x, scale), _float64(x, scale), rtol=(dim / 2 + 4) * 2.0**-24
  )


def test_a_bfloat16_norm_rounds_twice_before_and_after_the_gain():
  x, scale = _rows(32, 64, jnp.bfloat16)
  y = _norm()(x, scale)
  assert y.dtype == jnp.bfloat16
  # Half a step is 2^-9 of the next power of two, 2^-8 of the value.
  expected = _float64(x, scale)
  np.testing.assert_allclose(
      np.asarray(y, np.float64), expected, rtol=2 * 2.0**-8 + 2.0**-15
  )
  # With the gain 1 there is one rounding only, that of the normed value; the
  # gain then multiplies what was rounded.
  plain = np.asarray(_norm()(x, np.ones(64, jnp.bfloat16)))
  np.testing.assert_allclose(
      plain.astype(np.float64),
      _float64(x, np.ones(64)),
      rtol=2.0**-8 + 2.0**-17,
  )
  np.testing.assert_array_equal(y, plain * scale)


def test_zero_rows_give_zeros():
  assert not np.any(_norm()(jnp.zeros((16, 64)), jnp.ones(64)))


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize('dim', [16, 64, 896])
def test_the_bits_of_a_row_do_not_depend_on_the_number_of_rows(dim, dtype):
  x, scale = _rows(1024, dim, dtype)
  whole = np.asarray(_norm()(x, scale))
  for rows in (16, 112):
    np.testing.assert_array_equal(_norm()(x[:rows], scale), whole[:rows])
  np.testing.assert_array_equal(_norm()(x[-16:], scale), whole[-16:])


def test_the_sum_of_a_row_does_not_depend_on_the_number_of_rows():
  x = _rows(1024, 1000)[0]
  total = exact_jit(row_sum)
  whole = np.asarray(total(x))
  assert whole.shape == (1024, 1)
  np.testing.assert_array_equal(total(x[:16]), whole[:16])
  x64 = np.asarray(x, np.float64)
  bound = 1000 * 2.0**-24 * np.abs(x64).sum(1)
  assert np.all(np.abs(whole[:, 0] - x64.sum(1)) <= bound)


def test_the_gradient_is_that_of_the_plain_formula():
  x, scale = _rows(16, 64)
  dy = np.random.default_rng(3).normal(size=x.shape).astype(np.float32)

  def plain(x, scale):
    mean_square = jnp.mean(x * x, axis=1, keepdims=True)
    return jnp.sum(dy * (x * jax.lax.rsqrt(mean_square + EPS) * scale[None]))

  def ours(x, scale):
    return jnp.sum(dy * norm.rms_norm(x, scale, EPS)[0])

  found = exact_jit(jax.grad(ours, argnums=(0, 1)))(x, scale)
  expected = exact_jit(jax.grad(plain, argnums=(0, 1)))(x, scale)
  for a, b in zip(found, expected, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_the_gradient_agrees_with_differences_in_float64():
  x, scale = _rows(16, 8)
  dy = np.random.default_rng(3).normal(size=x.shape).astype(np.float32)

  def ours(x, scale):
    return jnp.sum(dy * norm.rms_norm(x, scale, EPS)[0])

  dx, dscale = exact_jit(jax.grad(ours, argnums=(0, 1)))(x, scale)
  x64, scale64 = np.asarray(x, np.float64), np.asarray(scale, np.float64)

  def loss(x, scale):
    return (dy.astype(np.float64) * _float64(x, scale)).sum()

  # The central difference of step h errs by h^2 f'''/6, here about 1e-10.
  h = 1e-5
  step = np.zeros_like(x64)
  step[3, 5] = h
  slope = (loss(x64 + step, scale64) - loss(x64 - step, scale64)) / (2 * h)
  np.testing.assert_allclose(dx[3, 5], slope, rtol=1e-4)
  step = np.zeros_like(scale64)
  step[5] = h
  slope = (loss(x64, scale64 + step) - loss(x64, scale64 - step)) / (2 * h)
  np.testing.assert_allclose(dscale[5], slope, rtol=1e-4)


# The last channels of a row in each warp, and of one in a whole program.
@pytest.mark.parametrize('dim', [192, 1024])
@needs_mosaic
def test_the_gpu_kernel_quantises_what_it_normed(dim):
  x, scale = _rows(16, dim, jnp.bfloat16)
  step = jnp.float32(2.0**-6)  # 448 / 64: some values saturate
  kernel = exact_jit(
      lambda x, s: mosaic_sm90.forward(8 * x, s, EPS, step, interpret=True)
  )
  _, high, low = kernel(x, 8 * scale)
  wanted = quantize(high, step, formats.E4M3)
  np.testing.assert_array_equal(low.view(jnp.uint8), wanted.view(jnp.uint8))
  assert np.any(np.abs(np.asarray(low, np.float32)) == 448.0)


@pytest.mark.parametrize('scales', [(), (2.0**-3,), (2.0**-9, 2.0**4)])
@needs_mosaic
def test_the_gpu_kernel_norms_what_a_gemm_would_have_added(scales):
  x, gain = _rows(16, 192, jnp.bfloat16)
  product, _ = _rows(16, 192)
  product = 5 * product[::-1]
  added = DeferredScale(
      values=jnp.asarray(product), scales=tuple(map(jnp.float32, scales))
  )
  step = jnp.float32(2.0**-6)

  def kernel(x, gain, added=None, copies=1):
    return mosaic_sm90.forward(
        x, gain, EPS, step, added, copies=copies, interpret=True
    )

  found = kernel(x, gain, added)
  exact = np.asarray(x, np.float64) + np.asarray(product, np.float64) * np.prod(
      scales
  )
  wanted = exact.astype(np.float32).astype(jnp.bfloat16)
  np.testing.assert_array_equal(found[0], wanted)
  assert found[1] is None
  alone = kernel(wanted, gain)[2]
  np.testing.assert_array_equal(found[2].view(jnp.uint8), alone.view(jnp.uint8))
  twice = kernel(x, gain, added, copies=2)[2]
  assert twice.shape == (2, *x.shape)
  for copy in twice:
    np.testing.assert_array_equal(
        copy.view(jnp.uint8), found[2].view(jnp.uint8)
    )


@needs_mosaic
@pytest.mark.parametrize(
    'dim, is_taken',
    [
        *((192, True), (576, True), (896, True), (3584, True), (8192, True)),
        # No two channels for each lane; too many for a thread's registers.
        *((96, False), (2176, False), (16384, False)),
    ],
)
def test_the_widths_that_the_kernel_takes(dim, is_taken):
  assert mosaic_sm90.fits(dim) is is_taken
  kernels = dispatch.select('reference').replace(
      add_norm_quantize='mosaic_sm90'
  )
  with dispatch.using(kernels):
    name = norm._implementation(dim)
  assert name == ('mosaic_sm90' if is_taken else 'reference')
