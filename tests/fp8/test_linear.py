import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.compilation import exact_jit
from jetrl_jax.fp8 import linear, slots
from jetrl_jax.fp8.quantization import QTensor, dequantize, quantize
from jetrl_jax.fp8.recipes import Recipe

M, I, O = 32, 48, 24
BF16 = Recipe(name='bf16')


def make_slot(input_scale=2.0**-6, grad_scale=2.0**-4):
  slot = slots.init_slot(4)
  slot['input']['scale'] = jnp.float32(input_scale)
  slot['output_grad']['scale'] = jnp.float32(grad_scale)
  return slot


def operands(dtype=jnp.bfloat16, kernel_scale=2.0**-7, rows=M):
  keys = jax.random.split(jax.random.key(0), 3)
  x = 2 * jax.random.normal(keys[0], (rows, I), dtype)
  master = jax.random.normal(keys[1], (O, I), jnp.float32)
  scale = jnp.float32(kernel_scale)
  values = quantize(master, scale, jnp.float8_e4m3fn)
  dy = 9 * jax.random.normal(keys[2], (rows, O), dtype)
  return x, master, QTensor(values=values, scale=scale), dy


@functools.cache
def _both(recipe, out_dtype=None):
  """Compiled: result and cotangents of (x, master, slot)."""

  def run(x, master, weight, slot, mask, dy):
    forward = lambda x, master, slot: linear.dot(
        recipe, x, master, weight, slot, mask, out_dtype=out_dtype
    )
    y, pull = jax.vjp(forward, x, master, slot)
    return y, *pull(dy.astype(y.dtype))

  return exact_jit(run)


def run(recipe, x, master, weight, slot, dy, mask=None, out_dtype=None):
  mask = jnp.ones(x.shape[0]) if mask is None else mask
  return _both(recipe, out_dtype)(x, master, weight, slot, mask, dy)


def restored(x, scale, dtype='float8_e4m3fn'):
  """Quantised and dequantised, in float64."""
  values = quantize(x, jnp.float32(scale), jnp.dtype(dtype))
  return np.asarray(values, np.float64) * float(scale)


def assert_dot(found, left, right, eps):
  """|found - left right^T| within the rounding of sum and result.

  A float32 sum of K products, each exact in float32 (4 by 4 bits), errs by at
  most K 2^-24 sum |a b|; the result is rounded once by eps / 2 relative.
  """
  expected = left @ right.T
  bound = left.shape[1] * 2.0**-24 * (np.abs(left) @ np.abs(right.T))
  bound += eps / 2 * (np.abs(expected) + bound)
  assert np.all(np.abs(np.asarray(found, np.float64) - expected) <= bound)
  assert np.abs(expected).max() > 100 * bound.min()  # The bound says something.


@pytest.mark.parametrize('power_of_two', [True, False])
@pytest.mark.parametrize('grad_format', ['e4m3', 'e5m2'])
def test_all_three_products_equal_those_of_the_restored_operands(
    power_of_two, grad_format
):
  recipe = Recipe(power_of_two_scales=power_of_two, grad_format=grad_format)
  odd = 1.0 if power_of_two else 1.3
  x, master, weight, dy = operands(kernel_scale=odd * 2.0**-7)
  slot = make_slot(odd * 2.0**-6, odd * 2.0**-4)
  y, dx, dw, _ = run(recipe, x, master, weight, slot, dy)
  x64 = restored(x, slot['input']['scale'])
  w64 = np.asarray(weight.values, np.float64) * float(weight.scale)
  name = {'e4m3': 'float8_e4m3fn', 'e5m2': 'float8_e5m2'}[grad_format]
  dy64 = restored(dy, slot['output_grad']['scale'], name)
  # Scales that are no power of two cost three more float32 roundings.
  extra = 0.0 if power_of_two else 3 * 2.0**-23
  assert y.dtype == dx.dtype == jnp.bfloat16 and dw.dtype == jnp.float32
  assert_dot(y, x64, w64, 2.0**-7 + extra)
  assert_dot(dx, dy64, w64.T, 2.0**-7 + extra)
  assert_dot(dw, dy64.T, x64.T, 2.0**-23 + extra)


def test_the_result_may_be_float32_and_then_keeps_its_bits():
  x, master, weight, dy = operands()
  slot = make_slot()
  y, *_ = run(Recipe(), x, master, weight, slot, dy, out_dtype='float32')
  assert y.dtype == jnp.float32
  w64 = np.asarray(weight.values, np.float64) * float(weight.scale)
  assert_dot(y, restored(x, slot['input']['scale']), w64, 2.0**-23)


def test_products_of_the_largest_values_do_not_overflow():
  # 448 * 448 = 200704 is beyond float16, to which a backend might upcast.
  x = jnp.full((16, 64), 448.0, jnp.bfloat16)
  weight = QTensor(
      values=jnp.full((16, 64), 448, jnp.float8_e4m3fn), scale=jnp.float32(1)
  )
  dy = jnp.full((16, 16), 57344.0, jnp.bfloat16)
  recipe = Recipe(grad_format='e5m2')
  y, dx, dw, _ = run(
      recipe, x, jnp.ones((16, 64)), weight, make_slot(1.0, 1.0), dy
  )
  # 64 * 448^2 = 12845056 = 49 * 2^18: exact in bfloat16.
  assert np.all(np.asarray(y, np.float64) == 64 * 448**2)
  # 16 * 57344 * 448 = 49 * 2^23.
  assert np.all(np.asarray(dx, np.float64) == 16 * 57344 * 448)
  assert np.all(np.asarray(dw, np.float64) == 16 * 57344 * 448)


def test_the_format_of_output_gradients_is_the_recipes():
  x, master, weight, _ = operands(rows=16)
  dy = jnp.full((16, O), 500.0, jnp.bfloat16)
  slot = make_slot(1.0, 1.0)
  w = np.asarray(weight.values, np.float64).sum(0) * float(weight.scale)
  for name, value in (('e4m3', 448), ('e5m2', 512)):
    dx = run(Recipe(grad_format=name), x, master, weight, slot, dy)[1]
    np.testing.assert_allclose(
        np.asarray(dx[0], np.float64), value * w, rtol=2.0**-8, atol=1e-6
    )


@pytest.mark.parametrize('recipe', [Recipe(), Recipe(calibrating=True), BF16])
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_the_weight_gradient_has_the_dtype_of_the_master(recipe, dtype):
  x, master, weight, dy = operands()
  weight = master.astype(jnp.bfloat16) if recipe is BF16 else weight
  slot = None if recipe is BF16 else make_slot()
  dw = run(recipe, x, master.astype(dtype), weight, slot, dy)[2]
  assert dw.dtype == dtype


def test_the_values_of_the_master_are_never_read():
  x, master, weight, dy = operands()
  for recipe, kernel, slot in (
      (Recipe(), weight, make_slot()),
      (BF16, master.astype(jnp.bfloat16), None),
  ):
    first = run(recipe, x, master, kernel, slot, dy)
    other = run(recipe, x, jnp.full_like(master, jnp.nan), kernel, slot, dy)
    jax.tree.map(np.testing.assert_array_equal, first, other)


@pytest.mark.parametrize('recipe', [Recipe(), Recipe(calibrating=True), BF16])
def test_a_dot_without_master_has_the_bits_of_the_one_with(recipe):
  x, master, weight, dy = operands()
  weight = master.astype(jnp.bfloat16) if recipe is BF16 else weight
  slot = None if recipe is BF16 else make_slot()
  rollout = exact_jit(
      lambda x, w, s: linear.dot(recipe, x, None, w, s, jnp.ones(M))
  )(x, weight, slot)
  train = run(recipe, x, master, weight, slot, dy)[0]
  np.testing.assert_array_equal(rollout, train)


@pytest.mark.parametrize('calibrating', [False, True])
def test_the_cotangent_of_a_slot_holds_the_amax_of_valid_rows_alone(
    calibrating,
):
  x, master, weight, dy = operands()
  x, dy = x.at[-3].set(1e6), dy.at[-3].set(1e6)
  x, dy = x.at[-2].set(jnp.nan), dy.at[-2].set(jnp.inf)
  mask = jnp.ones(M).at[-3:].set(0)
  recipe = Recipe(calibrating=calibrating)
  slot_ct = run(recipe, x, master, weight, make_slot(), dy, mask)[3]
  for operand, array in (('input', x), ('output_grad', dy)):
    expected = np.abs(np.asarray(array[:-3], np.float32)).max()
    found = slot_ct[operand]['amax_history']
    assert found.tolist() == [expected, 0, 0, 0]
    assert slot_ct[operand]['scale'] == 0
    assert slot_ct[operand]['health'][0] == (M - 3) * array.shape[1]
    assert np.all(np.isfinite(slot_ct[operand]['health']))
  assert all(not np.any(leaf) for leaf in jax.tree.leaves(slot_ct['kernel']))


def test_a_batch_of_padding_observes_nothing():
  x, master, weight, dy = operands()
  mask = jnp.zeros(M)
  slot_ct = run(Recipe(), x, master, weight, make_slot(), dy, mask)[3]
  assert all(not np.any(leaf) for leaf in jax.tree.leaves(slot_ct))


def test_a_nan_in_a_valid_row_reaches_the_observed_amax():
  # It must not be recorded, and must not be mistaken for a small amax.
  x, master, weight, dy = operands()
  x = x.at[3, 5].set(jnp.nan)
  slot_ct = run(Recipe(), x, master, weight, make_slot(), dy)[3]
  assert not np.isfinite(slot_ct['input']['amax_history'][0])


def test_the_health_sums_by_hand():
  # On scale 2: limit 896, E4M3 flushes |x| / 2 <= 2^-10, so |x| <= 2^-9.
  # x         restored  saturated  flushed  noise
  # 1000      896       1          0        104^2 = 10816
  # -900      -896      1          0        16
  # 2^-10     0         0          1        2^-20
  # 0         0         0          0        0
  # 17        16        0          0        1       (8.5 ties to even 8)
  x = jnp.zeros((16, 5), jnp.float32)
  x = x.at[0].set(jnp.asarray([1000, -900, 2.0**-10, 0, 17]))
  x = x.at[15].set(5000.0)  # Padding.
  mask = jnp.ones(16).at[15].set(0)
  recipe = Recipe(compute_dtype='float32')
  weight = QTensor(
      values=jnp.ones((16, 5), jnp.float8_e4m3fn), scale=jnp.float32(1)
  )
  slot = make_slot(2.0, 1.0)
  dy = jnp.full((16, 16), 0.5)
  slot_ct = run(recipe, x, jnp.ones((16, 5)), weight, slot, dy, mask)[3]
  signal = 1000**2 + 900**2 + 2.0**-20 + 17**2
  np.testing.assert_allclose(
      slot_ct['input']['health'],
      [15 * 5, 2, 1, signal, 10816 + 16 + 2.0**-20 + 1],
      rtol=1e-6,
  )
  # 0.5 is exact: 15 rows of 16 elements, power 0.25 each, no noise.
  np.testing.assert_array_equal(
      slot_ct['output_grad']['health'], [240, 0, 0, 60, 0]
  )


def test_calibrating_computes_in_high_precision_but_observes():
  x, master, weight, dy = operands()
  slot = make_slot(1.0, 1.0)
  y, dx, dw, slot_ct = run(
      Recipe(calibrating=True), x, master, weight, slot, dy
  )
  kernel = dequantize(weight, jnp.bfloat16)
  high = run(BF16, x, master, kernel, None, dy)
  for found, expected in zip((y, dx, dw), high, strict=False):
    np.testing.assert_array_equal(found, expected)
  assert slot_ct['input']['amax_history'][0] == jnp.max(jnp.abs(x))
  assert slot_ct['output_grad']['amax_history'][0] == jnp.max(jnp.abs(dy))


def test_a_dot_in_high_precision_equals_float64_within_rounding():
  x, master, _, dy = operands()
  kernel = master.astype(jnp.bfloat16)
  y, dx, dw, _ = run(BF16, x, master, kernel, None, dy)
  x64, w64, dy64 = (np.asarray(a, np.float64) for a in (x, kernel, dy))
  assert_dot(y, x64, w64, 2.0**-7)
  assert_dot(dx, dy64, w64.T, 2.0**-7)
  assert_dot(dw, dy64.T, x64.T, 2.0**-23)


def test_the_float32_cotangent_of_logits_is_rounded_to_the_compute_dtype():
  x, master, _, dy = operands()
  kernel = master.astype(jnp.bfloat16)
  fine = dy.astype(jnp.float32) * (1 + 2.0**-12)
  coarse = run(BF16, x, master, kernel, None, dy, out_dtype='float32')
  found = run(BF16, x, master, kernel, None, fine, out_dtype='float32')
  np.testing.assert_array_equal(found[1], coarse[1])
  np.testing.assert_array_equal(found[2], coarse[2])


@pytest.mark.parametrize('rows', [1, 8, 17, 31])
def test_a_number_of_rows_that_is_no_multiple_of_16_is_refused(rows):
  message = f'a dot has {rows} rows; pad to a multiple of 16'
  with pytest.raises(ValueError, match=re.escape(message)):
    linear.dot(
        BF16,
        jnp.ones((rows, 4)),
        None,
        jnp.ones((4, 4)),
        None,
        jnp.ones(rows),
    )


@pytest.mark.parametrize('inner', [64, 512, 2048])
@pytest.mark.parametrize('kind', ['fp8', 'fp8 odd scales', 'bf16', 'logits'])
def test_the_bits_of_a_row_do_not_depend_on_the_number_of_rows(kind, inner):
  # Holds under exact_jit's options on this backend: without them the CPU
  # splits the contraction by the number of rows.
  keys = jax.random.split(jax.random.key(inner), 2)
  x = jax.random.normal(keys[0], (1024, inner), jnp.bfloat16)
  master = jax.random.normal(keys[1], (48, inner), jnp.float32)
  scale = 2.0**-6 * (1.3 if 'odd' in kind else 1.0)
  recipe, weight, slot = BF16, master.astype(jnp.bfloat16), None
  if 'fp8' in kind:
    recipe = Recipe(power_of_two_scales='odd' not in kind)
    values = quantize(master, jnp.float32(scale), jnp.float8_e4m3fn)
    weight = QTensor(values=values, scale=jnp.float32(scale))
    slot = make_slot(scale)
  out_dtype = 'float32' if kind == 'logits' else None

  @exact_jit
  def forward(x, weight, slot):
    mask = jnp.ones(x.shape[0])
    return linear.dot(recipe, x, None, weight, slot, mask, out_dtype=out_dtype)

  whole = np.asarray(forward(x, weight, slot))
  for rows in (16, 32, 112):
    np.testing.assert_array_equal(forward(x[:rows], weight, slot), whole[:rows])
  np.testing.assert_array_equal(forward(x[-16:], weight, slot), whole[-16:])
