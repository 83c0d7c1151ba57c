import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetrl_jax.core.compilation import exact_jit
from jetrl_jax.fp8 import quantization
from jetrl_jax.fp8.formats import E4M3, E5M2, format_max

FORMATS = [E4M3, E5M2]
# Relative spacing at 1, and the smallest value above zero.
EPS = {E4M3: 2.0**-3, E5M2: 2.0**-2}
TINY = {E4M3: 2.0**-9, E5M2: 2.0**-16}
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
# XLA's CPU backend takes float32 subnormals for zero.
SMALLEST = float(np.finfo(np.float32).tiny)


@functools.cache
def _scale_of(dtype, power_of_two=True, margin=0):
  return exact_jit(
      functools.partial(
          quantization.scale_from_amax,
          dtype=dtype,
          margin=margin,
          power_of_two=power_of_two,
      )
  )


@functools.cache
def _round_trip(dtype, power_of_two=True):
  """[M, N] tensors to (scales [M], 8-bit values, restored values)."""

  def one(x):
    scale = quantization.scale_from_amax(
        jnp.max(jnp.abs(x)), dtype, margin=0, power_of_two=power_of_two
    )
    values = quantization.quantize(x, scale, dtype)
    q = quantization.QTensor(values=values, scale=scale)
    return scale, values, quantization.dequantize(q, jnp.float32)

  return exact_jit(jax.vmap(one))


@functools.cache
def _quantize(dtype):
  return exact_jit(lambda x, s: quantization.quantize(x, s, dtype))


def _bulk(tensors=100_000, size=8):
  """Tensors of every magnitude that float32 has, zeros and subnormals too."""
  rng = np.random.default_rng(0)
  x = rng.integers(0, 2**32, (tensors, size), dtype=np.uint32)
  # Half of the tensors share an exponent up to 12 bits, as real ones do.
  half = tensors // 2
  exponent = rng.integers(0, 255, (half, 1)) - rng.integers(0, 12, (half, size))
  mantissa = x[:half] & np.uint32(0x807FFFFF)
  x[:half] = mantissa | (np.maximum(exponent, 0).astype(np.uint32) << 23)
  x = x.view(np.float32)
  x = np.where(np.isfinite(x), x, np.float32(0))
  x[-1] = 0
  x[-2] = np.finfo(np.float32).max
  x[-3] = -np.finfo(np.float32).smallest_subnormal
  return x


def _assert_within_half_a_step(x, scale, restored, dtype, slack=0.0):
  """|x - restored| <= max(|x| eps / 2, scale * tiny / 2), below saturation."""
  x, restored = x.astype(np.float64), restored.astype(np.float64)
  scale = np.asarray(scale, np.float64)[:, None]
  bound = np.maximum(
      np.abs(x) * (EPS[dtype] / 2 + slack), scale * TINY[dtype] / 2
  )
  inside = np.abs(x) <= format_max(dtype) * scale
  error = np.where(inside, np.abs(x - restored) - bound, 0.0)
  # What float32 itself cannot hold: subnormals are zero on this backend.
  assert error.max() <= SMALLEST


@pytest.mark.parametrize('dtype', FORMATS)
@pytest.mark.parametrize('power_of_two', [True, False])
def test_finite_values_of_any_size_stay_finite(dtype, power_of_two):
  x = _bulk()
  scale, values, restored = map(np.asarray, _round_trip(dtype, power_of_two)(x))
  assert np.all(np.isfinite(scale)) and np.all(scale > 0)
  assert np.all(np.isfinite(values.astype(np.float32)))
  assert np.all(np.isfinite(restored))
  # Three float32 roundings (1 / scale, the product, the product back) come on
  # top of the format's where the scale is no power of two.
  slack = 0.0 if power_of_two else 3 * 2.0**-24
  _assert_within_half_a_step(x, scale, restored, dtype, slack)


@pytest.mark.parametrize('dtype', FORMATS)
@given(row=st.lists(FLOATS, min_size=8, max_size=8))
def test_any_finite_row_stays_finite_and_near(dtype, row):
  x = np.asarray([row], np.float32)
  scale, values, restored = map(np.asarray, _round_trip(dtype)(x))
  assert np.all(np.isfinite(values.astype(np.float32)))
  assert np.all(np.isfinite(restored))
  _assert_within_half_a_step(x, scale, restored, dtype)


@pytest.mark.parametrize('dtype', FORMATS)
def test_the_cast_agrees_with_ml_dtypes_to_the_bit(dtype):
  # All ties between neighbours, what lies next to them, and a sweep of all
  # float32. A cast through float16 would round ties twice.
  every = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
  every = np.sort(every[np.isfinite(every)])
  tie = (every[1:] + every[:-1]) / 2
  sweep = np.arange(0, 2**32, 40_009, dtype=np.uint64).astype(np.uint32)
  sweep = sweep.view(np.float32)
  x = np.concatenate(
      [
          every,
          tie,
          np.nextafter(tie, np.float32(np.inf)),
          np.nextafter(tie, np.float32(-np.inf)),
          sweep[np.isfinite(sweep)],
      ]
  )
  limit = format_max(dtype)
  found = np.asarray(_quantize(dtype)(x, jnp.float32(1)))
  expected = np.clip(x, -limit, limit).astype(dtype)
  np.testing.assert_array_equal(found.view(np.uint8), expected.view(np.uint8))


def test_values_beyond_the_format_saturate():
  one = jnp.float32(1)
  x = jnp.asarray([500.0, -500.0, 3e38, 70000.0])
  assert _quantize(E4M3)(x, one).tolist() == [448, -448, 448, 448]
  assert _quantize(E5M2)(x, one).tolist() == [512, -512, 57344, 57344]


def test_without_the_clip_the_same_values_would_be_lost():
  assert np.isnan(np.float32(jnp.float32(500).astype(E4M3)))
  assert np.isinf(np.float32(jnp.float32(70000).astype(E5M2)))


@pytest.mark.parametrize('dtype', FORMATS)
def test_a_nan_stays_a_nan(dtype):
  q = _quantize(dtype)(jnp.asarray([jnp.nan, 1.0]), jnp.float32(1))
  assert np.isnan(np.asarray(q, np.float32)).tolist() == [True, False]


@pytest.mark.parametrize('dtype', FORMATS)
def test_powers_of_two_are_exact_on_any_power_of_two_scale(dtype):
  low, high = {E4M3: (-9, 8), E5M2: (-16, 15)}[dtype]
  for shift in (-90, -8, 0, 13, 90):
    x = np.float32(2.0) ** np.arange(low + shift, high + shift + 1)
    q = _quantize(dtype)(x, jnp.float32(2.0**shift))
    restored = np.asarray(q, np.float32) * np.float32(2.0**shift)
    np.testing.assert_array_equal(restored, x)


@pytest.mark.parametrize('dtype', FORMATS)
@pytest.mark.parametrize('amax', [0.0, np.nan, np.inf, -1.0, -np.inf])
def test_an_amax_that_says_nothing_gives_scale_one(dtype, amax):
  for power_of_two in (True, False):
    assert _scale_of(dtype, power_of_two)(jnp.float32(amax)) == 1.0


@pytest.mark.parametrize('amax', [1e-38, 2e-38, 1e-36])
def test_a_tiny_amax_gives_a_scale_that_can_be_inverted(amax):
  scale = np.float32(_scale_of(E4M3)(jnp.float32(amax)))
  # 1e-38 is subnormal: zero for a backend that flushes, else the lower limit.
  assert scale in (2.0**-100, 1.0)
  assert np.isfinite(np.float32(1) / scale)
  q = np.asarray(_quantize(E4M3)(jnp.float32([amax, 0.0]), scale), np.float32)
  assert np.all(np.isfinite(q)) and q[1] == 0


def test_scales_end_at_the_powers_of_two_that_bound_them():
  for power_of_two in (True, False):
    found = _scale_of(E4M3, power_of_two)(jnp.float32([1e-30, 3e38]))
    assert found.tolist() == [2.0**-100, 2.0**100]


@pytest.mark.parametrize('dtype', FORMATS)
def test_a_scale_maps_the_amax_into_the_upper_half_of_the_format(dtype):
  limit = format_max(dtype)
  rng = np.random.default_rng(1)
  exact = (limit * 2.0 ** np.arange(-90, 90)).astype(np.float32)
  amax = np.concatenate(
      [
          exact,
          np.nextafter(exact, np.float32(np.inf)),
          np.nextafter(exact, np.float32(0)),
          2.0 ** rng.uniform(-80, 90, 20_000).astype(np.float32),
      ]
  )
  scale = np.asarray(_scale_of(dtype)(amax), np.float64)
  assert np.all(np.frexp(scale)[0] == 0.5)  # Powers of two.
  ratio = amax / scale / limit
  assert ratio.max() <= 1.0 and ratio.min() > 0.5
  # Not rounded up, amax lands on the limit, give or take three roundings (1 /
  # limit, the product, and the division, which is in float64 here).
  plain = np.asarray(_scale_of(dtype, power_of_two=False)(amax), np.float64)
  np.testing.assert_allclose(amax / plain, limit, rtol=2 * 2.0**-24)


def test_the_scale_by_hand():
  # 448 fits with 1. 449 needs 449/448, rounded up 2. 3 bits of head-room: 8.
  assert _scale_of(E4M3)(jnp.float32([448, 449, 1])).tolist() == [1, 2, 2**-8]
  assert _scale_of(E4M3, margin=3)(jnp.float32(448)) == 8
  assert _scale_of(E5M2)(jnp.float32(57345)) == 2
  plain = _scale_of(E4M3, power_of_two=False)(jnp.float32(224))
  assert plain == 0.5


def test_a_scale_keeps_the_shape_of_the_amax():
  assert _scale_of(E4M3)(jnp.ones((3, 2))).shape == (3, 2)


def test_recordable_means_finite_and_above_zero():
  amax = jnp.float32([0, -1, np.nan, np.inf, 1e-30, 3e38])
  found = quantization.is_recordable(amax)
  assert found.tolist() == [False, False, False, False, True, True]


def test_a_qtensor_is_a_pytree_of_values_and_scale():
  q = quantization.QTensor(values=jnp.zeros((2, 2), E4M3), scale=jnp.ones(()))
  paths = [
      jax.tree_util.keystr(path)
      for path, _ in jax.tree_util.tree_leaves_with_path(q)
  ]
  assert paths == ['.values', '.scale']


def test_dequantising_multiplies_by_the_scale_and_rounds_once():
  # 1.125 * 0.3 = 0.3375; float32's 0.3 times 1.125, then to bfloat16.
  q = quantization.QTensor(
      values=jnp.asarray([1.125], E4M3), scale=jnp.float32(0.3)
  )
  found = quantization.dequantize(q, jnp.bfloat16)
  assert found.dtype == jnp.bfloat16
  expected = (np.float32(1.125) * np.float32(0.3)).astype(jnp.bfloat16)
  assert found[0] == expected
