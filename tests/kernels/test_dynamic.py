"""Recipes whose scales come from the values themselves."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.core.collectives import Axes
from jetrl_jax.core.compilation import exact_jit
from jetrl_jax.fp8 import QTensor, Recipe, health, scaling_state
from jetrl_jax.fp8.quantization import quantize_groups, scale_of_elements
from jetrl_jax.kernels.quantized_dot import linear, per_token
from jetrl_jax.kernels.quantized_dot.weights import prepare_weights

NAMES = ('fp8_token', 'fp8_block', 'int8')
ROWS, INNER, OUTER = 32, 256, 128


def recipe_of(name, **changes: Any):
  return Recipe(name=name, **({'compute_dtype': 'float32'} | changes))


@functools.cache
def _prepared(recipe):
  def run(master):
    params = {'dot': {'kernel': master}}
    dot_state = scaling_state.init_state(params, recipe)
    return prepare_weights(params, dot_state, recipe)['dot']['kernel']

  return exact_jit(run)


@functools.cache
def _sampled(recipe):
  """As the rollout calls it: no master, and no dot state either."""
  return exact_jit(
      lambda x, w: linear.dot(recipe, x, None, w, None, jnp.ones(x.shape[0]))
  )


@functools.cache
def _trained(recipe):
  """Result and cotangents of (x, master, dot state)."""

  def run(x, master, weight, dy, mask):
    def forward(x, master, dot_state):
      return linear.dot(recipe, x, master, weight, dot_state, mask)

    y, pull = jax.vjp(
        forward, x, master, scaling_state.init_dynamic_dot_state()
    )
    return y, *pull(dy.astype(y.dtype))

  return exact_jit(run)


def forward(recipe, x, master):
  """Returns (result, weight) of the rollout's call."""
  weight = _prepared(recipe)(master)
  y = _sampled(recipe)(x.astype(recipe.dtype), weight)
  return np.asarray(y), jax.tree.map(np.asarray, weight)


def train(recipe, x, master, dy, mask=None):
  """Returns result and cotangents of (x, master, dot state)."""
  mask = np.ones(x.shape[0], np.float32) if mask is None else mask
  weight = _prepared(recipe)(master)
  found = _trained(recipe)(
      x.astype(recipe.dtype), master, weight, dy.astype(recipe.dtype), mask
  )
  return jax.tree.map(np.asarray, found)


def data(seed=0):
  """Rows, channels and gradients whose sizes differ by powers of ten."""
  rng = np.random.default_rng(seed)

  def make(m, n):
    sizes = 10.0 ** rng.uniform(-2, 2, (m, 1))
    return (rng.normal(size=(m, n)) * sizes).astype(np.float32)

  return make(ROWS, INNER), make(OUTER, INNER), make(ROWS, OUTER)


def padded(values, shape):
  x = np.zeros(shape, np.float32)
  x[0, : len(values)] = values
  return x


def restored(q):
  return np.asarray(q.values, np.float64) * np.asarray(scale_of_elements(q))


# --- by hand ---------------------------------------------------------------


@pytest.mark.parametrize(
    'name, power_of_two, expected',
    [
        # Row: amax 3, 3/448 -> 2^-7: 1 -> 128, -3 -> -384, 0.1 -> 12.8 -> 13.
        # Channel: amax 1 -> 2^-8: 256, 128, 256. All but 0.1 are exact.
        ('fp8_token', True, 1 - 1.5 + 13 / 128),
        # Row: 3/127 -> 2^-5: 32, -96, 3.2 -> 3. Channel: 1/127 -> 2^-6.
        ('int8', True, 1 - 1.5 + 3 / 32),
        # 3/127: 42.33 -> 42, -127, 4.23 -> 4. 1/127: 127, 63.5 -> 64, 127.
        ('int8', False, (42 * 127 - 127 * 64 + 4 * 127) * (3 / 127) / 127),
    ],
)
def test_a_row_times_a_channel_by_hand(name, power_of_two, expected):
  x = padded([1, -3, 0.1], (ROWS, INNER))
  w = padded([1, 0.5, 1], (OUTER, INNER))
  recipe = recipe_of(name, power_of_two_scales=power_of_two)
  y = forward(recipe, x, w)[0]
  np.testing.assert_allclose(
      y[0, 0], expected, rtol=0 if power_of_two else 1e-6
  )
  assert not np.any(y[1:]) and not np.any(y[:, 1:])


def test_blocks_by_hand():
  # Groups of a row: amax 448 -> scale 1; 448/1024 -> 2^-10. 17 -> 16 in both
  # (E4M3 steps by 2 from 16 on, ties to even). W's blocks: amax 224 -> 2^-1,
  # 1 -> 2^-8; all exact. With one scale for the row, 3/1024 would be stored
  # as 1 or 2 of E4M3's smallest step 2^-9.
  x, w = (np.zeros((n, INNER), np.float32) for n in (ROWS, OUTER))
  x[0, :2], x[0, 128:131] = (448, 17), (448 / 1024, 17 / 1024, 3 / 1024)
  w[5, :2], w[5, 128:131] = (1, 224), (1, 1, 1)
  y, weight = forward(recipe_of('fp8_block'), x, w)
  assert weight.scale.tolist() == [[2.0**-1, 2.0**-8]]
  assert y[0, 5] == 448 + 16 * 224 + (448 + 16 + 3) / 1024
  assert np.count_nonzero(y) == 1


def test_groups_are_added_in_order_in_float32():
  # 2^24 + 1 is 2^24 in float32, so in order the sum is 0; with the first and
  # the last joined first it would be 1.
  x, w = np.zeros((16, 384), np.float32), np.zeros((128, 384), np.float32)
  x[0, ::128], w[0, ::128] = (4096, 1, -4096), (4096, 1, 4096)
  assert forward(recipe_of('fp8_block'), x, w)[0][0, 0] == 0
  x[0, ::128], w[0, ::128] = (4096, -4096, 1), (4096, 4096, 1)
  assert forward(recipe_of('fp8_block'), x, w)[0][0, 0] == 1


def test_int8_rounds_to_nearest_even_and_stays_within_127():
  q = quantize_groups(
      jnp.asarray([[127.0, 2.5, 3.5, -0.5, -127.0]]),
      jnp.int8,
      (1, 5),
      margin=0,
      power_of_two=True,
  )
  assert q.scale.tolist() == [[1.0]]
  assert q.values.tolist() == [[127, 2, 4, 0, -127]]


@pytest.mark.parametrize(
    'name, shape',
    [
        ('fp8_token', (OUTER, 1)),
        ('int8', (OUTER, 1)),
        ('fp8_block', (OUTER // 128, INNER // 128)),
    ],
)
def test_the_weight_has_one_scale_per_group(name, shape):
  x, w, _ = data()
  weight = forward(recipe_of(name), x, w)[1]
  assert weight.scale.shape == shape and weight.values.shape == w.shape
  assert weight.values.dtype == ('int8' if name == 'int8' else 'float8_e4m3fn')
  # Rounding up: an amax lies in the upper half of the range, never beyond.
  limit = 127 if name == 'int8' else 448
  groups = np.abs(np.asarray(weight.values, np.float32)).reshape(
      shape[0], -1, shape[1], INNER // shape[1]
  )
  largest = groups.max((1, 3))
  assert largest.max() <= limit and largest.min() >= 0.46 * limit


# --- the contract ----------------------------------------------------------


@pytest.mark.parametrize('power_of_two', [True, False])
@pytest.mark.parametrize('name', NAMES)
def test_a_row_does_not_see_the_others(name, power_of_two):
  recipe = recipe_of(name, power_of_two_scales=power_of_two)
  x, w, _ = data()
  alone = forward(recipe, x, w)[0]
  other = np.concatenate([x[:16], 1e4 * x[16:], x, x])
  np.testing.assert_array_equal(forward(recipe, other, w)[0][:16], alone[:16])


@pytest.mark.parametrize('name', NAMES)
def test_a_dot_without_master_has_the_bits_of_the_one_with(name):
  x, w, dy = data()
  trained = train(recipe_of(name), x, w, dy)[0]
  np.testing.assert_array_equal(forward(recipe_of(name), x, w)[0], trained)


@pytest.mark.parametrize('name', NAMES)
def test_powers_of_two_pass_through_exactly(name):
  # Row r is doubled and channel c halved: the result is, too, in every bit.
  # Nothing else of the program depends on such a factor.
  x, w, _ = data()
  y = forward(recipe_of(name), x, w)[0]
  doubled, halved = x.copy(), w.copy()
  doubled[3] *= 2
  halved[:] *= 0.5
  again = forward(recipe_of(name), doubled, halved)[0]
  expected = 0.5 * y
  expected[3] *= 2
  np.testing.assert_array_equal(again, expected)


# --- errors ----------------------------------------------------------------


def _quantising_error(q):
  """Per value, at most: half a step, as |x| 2^-4 or half the smallest step."""
  scale = np.asarray(scale_of_elements(q), np.float64)
  if q.values.dtype == np.int8:
    return 0.5 * np.broadcast_to(scale, q.values.shape)
  return np.maximum(np.abs(restored(q)) * 2.0**-4 * 1.07, scale * 2.0**-10)


@pytest.mark.parametrize('power_of_two', [True, False])
@pytest.mark.parametrize('name', NAMES)
def test_the_result_errs_by_what_quantising_loses(name, power_of_two):
  x, w, _ = data()
  recipe = recipe_of(name, power_of_two_scales=power_of_two)
  y, weight = forward(recipe, x, w)
  w64, x64 = restored(weight), x.astype(np.float64)
  group = 128 if name == 'fp8_block' else INNER
  x8 = quantize_groups(
      jnp.asarray(x),
      weight.values.dtype,
      (1, group),
      margin=0,
      power_of_two=power_of_two,
  )
  bound = _quantising_error(x8) @ np.abs(w64.T)
  bound += INNER * 2.0**-23 * (np.abs(x64) @ np.abs(w64.T))
  error = np.abs(y - x64 @ w64.T)
  assert np.all(error <= bound)
  assert np.all(np.abs(w64 - w) <= _quantising_error(weight) * 1.001)
  assert error.max() > 1e-3 * bound.max()  # It does quantise.


@pytest.mark.parametrize('name', ['fp8_token', 'fake_int4'])
def test_bfloat16_results_are_those_of_float32_rounded_once(name):
  # Scales that are no powers of two have more bits than bfloat16.
  narrow, wide = (
      recipe_of(name, power_of_two_scales=False, compute_dtype=dtype)
      for dtype in ('bfloat16', 'float32')
  )
  x, w, dy = data()
  x, dy = (a.astype(jnp.bfloat16) for a in (x, dy))
  if name == 'fake_int4':  # Its backward restores the operands in bfloat16.
    y, y32 = (forward(recipe, x, w)[0] for recipe in (narrow, wide))
  else:
    (y, dx, dw, _), (y32, dx32, dw32, _) = (
        train(recipe, x, w, dy) for recipe in (narrow, wide)
    )
    np.testing.assert_array_equal(dx, dx32.astype(jnp.bfloat16))
    # That of the master is not rounded.
    np.testing.assert_array_equal(dw, dw32)
  np.testing.assert_array_equal(y, y32.astype(jnp.bfloat16))


def _relative(found, expected):
  return np.linalg.norm(found - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize(
    'name, grad_format, least, most',
    [
        # Two E4M3 operands: a step of 2^-3 relative to the binade's floor, an
        # error uniform in half of it, gives 2^-4 / sqrt(3) / 1.5 = 2.4% each
        # (1.5: mean of a binade), 3.4% together; measured 3.6 to 3.8%.
        ('fp8_token', 'e4m3', 0.03, 0.045),
        ('fp8_block', 'e4m3', 0.03, 0.045),
        # E5M2 for dY: twice its share, 5.4% together.
        ('fp8_token', 'e5m2', 0.045, 0.07),
        ('fp8_block', 'e5m2', 0.045, 0.07),
        # One operand in INT8, the other not quantised.
        ('int8', 'e4m3', 1e-4, 0.012),
    ],
)
def test_gradients_are_those_of_float32_within_the_formats(
    name, grad_format, least, most
):
  rng = np.random.default_rng(2)
  x, w, dy = (
      rng.normal(size=shape).astype(np.float32)
      for shape in ((ROWS, INNER), (OUTER, INNER), (ROWS, OUTER))
  )
  recipe = recipe_of(name, grad_format=grad_format)
  _, dx, dw, _ = train(recipe, x, w, dy)
  assert least < _relative(dx, dy @ w) < most
  assert least < _relative(dw, dy.T @ x) < most


@pytest.mark.parametrize('name', NAMES)
def test_sizes_of_channels_and_tokens_do_not_coarsen_the_gradients(name):
  # Rows and channels over four powers of ten, as one scale could not hold.
  x, w, dy = data()
  _, dx, dw, _ = train(recipe_of(name), x, w, dy)
  for found, expected in ((dx, dy @ w), (dw, dy.T @ x)):
    assert _relative(found, expected) < 0.06


def test_the_weight_gradient_takes_any_number_of_rows():
  # 144 tokens are a group of 128 and a part: zeros fill it up, add nothing.
  rng = np.random.default_rng(3)
  x = rng.normal(size=(144, 128)).astype(np.float32)
  dy = rng.normal(size=(144, 128)).astype(np.float32)
  w = np.ones((128, 128), np.float32)
  recipe = recipe_of('fp8_block', compute_dtype='bfloat16')
  dw = train(recipe, x, w, dy)[2]
  assert _relative(dw, dy.T @ x) < 0.045
  # And keeps float32's bits.
  assert np.mean(dw != dw.astype(jnp.bfloat16)) > 0.9


# --- what is observed ------------------------------------------------------


@pytest.mark.parametrize('name', NAMES)
def test_the_dot_state_observes_amax_and_health_of_valid_rows(name):
  x, w, dy = data()
  x[-1], dy[-1] = 1e6, 1e6
  mask = np.ones(ROWS, np.float32)
  mask[-1] = 0
  seen = train(recipe_of(name), x, w, dy, mask)[3]
  assert seen['input']['amax'] == np.abs(x[:-1]).max()
  assert seen['output_grad']['amax'] == np.abs(dy[:-1]).max()
  elements, saturated, flushed, signal, noise = seen['input']['health']
  assert (elements, saturated) == ((ROWS - 1) * INNER, 0)
  assert flushed < 0.03 * elements and 0 < noise < 2e-3 * signal
  # The backward of INT8 quantises nothing.
  elements, saturated, _, signal, noise = seen['output_grad']['health']
  assert elements == (0 if name == 'int8' else (ROWS - 1) * OUTER)
  assert saturated == 0
  # What is measured is what was quantised, with the scales folded in.
  assert 0 < noise < 2e-3 * signal or name == 'int8'


def test_a_state_of_dynamic_dot_states_only_looks():
  recipe = recipe_of('fp8_token')
  params = {'a': {'kernel': jnp.ones((128, 128))}}
  state = scaling_state.init_state(params, recipe)
  assert not recipe.needs_calibration
  assert set(state['a']['input']) == {'amax', 'health'}
  rolled = scaling_state.roll(state, recipe, operands=scaling_state.OPERANDS)
  jax.tree.map(np.testing.assert_array_equal, rolled, state)
  seen, more = (
      scaling_state.stack_observations(
          jax.tree.map(lambda x, by=by: x + by, state)
      )
      for by in (3.0, 1.0)
  )
  joined = scaling_state.combine(seen, more)
  state = scaling_state.observe(state, joined)
  assert state['a']['input']['amax'] == 3
  assert state['a']['input']['health'].tolist() == [4.0] * 5
  # The next step replaces both: nothing is carried on.
  state = scaling_state.observe(state, jax.tree.map(jnp.zeros_like, seen))
  assert state['a']['input']['amax'] == 0
  state = scaling_state.observe_kernels(state, params, recipe, Axes())
  weights = prepare_weights(params, state, recipe)
  state = scaling_state.measure_kernels(state, params, weights, Axes())
  summary = health.summarize(
      jax.device_get(state), scaling_state.dot_paths(state)
  )
  assert summary['a']['kernel'] == {
      'amax': 1.0,
      'saturated_frac': 0.0,
      'flushed_frac': 0.0,
  }


@pytest.mark.parametrize('name', NAMES)
def test_nan_in_a_row_is_nan_in_its_result(name):
  # INT8 has no NaN: a loss that came out finite would be applied.
  x, w, _ = data()
  x[3, 5] = np.nan
  y = forward(recipe_of(name), x, w)[0]
  assert np.all(np.isnan(y[3])) and np.all(np.isfinite(np.delete(y, 3, 0)))
  w[7, 5] = np.nan
  assert np.all(np.isnan(forward(recipe_of(name), data()[0], w)[0][:, 7]))


@pytest.mark.parametrize('name', NAMES)
def test_zeros_and_the_smallest_numbers_give_finite_results(name):
  x, w, dy = data()
  for factor in (0.0, 1e-38, 1e-44):
    for found in train(recipe_of(name), x * np.float32(factor), w, dy)[:3]:
      assert np.all(np.isfinite(found))


# --- refusals --------------------------------------------------------------


def test_blocks_that_do_not_divide_a_kernel_are_refused_by_name():
  recipe = Recipe(name='fp8_block')
  params = {'layers_0': {'mlp': {'down': {'kernel': jnp.ones((128, 192))}}}}
  message = 'layers_0/mlp/down has [out, in] = [128, 192]; out must be a'
  with pytest.raises(ValueError, match=re.escape(message)):
    scaling_state.init_state(params, recipe)
  kept = Recipe(name='fp8_block', high_precision_layers=('.*/down',))
  assert scaling_state.init_state(params, kept) == {}
  with pytest.raises(ValueError, match='192 is no multiple'):
    linear.dot(
        recipe,
        jnp.ones((16, 192)),
        None,
        QTensor(values=jnp.ones((128, 192)), scale=jnp.ones((1, 1))),
        None,
        jnp.ones(16),
    )


def test_the_longest_sum_of_int8_is_exact_and_a_longer_one_is_refused():
  def largest(inner):
    full = QTensor(
        values=np.full((16, inner), 127, np.int8),
        scale=np.ones((16, 1), np.float32),
    )
    return per_token.forward_int8(full, full, 'float32')

  # 133144 * 127^2 is 2147479576, and the next would be beyond 2^31.
  assert np.all(np.asarray(largest(133_144)) == np.float32(2_147_479_576))
  with pytest.raises(ValueError, match='133145 products in int32, .* 133144;'):
    largest(133_145)


def test_a_sum_of_int8_is_rounded_once():
  # Beyond 2^24, where float32 sums would round at every addition.
  values = np.random.default_rng(0).integers(64, 128, (16, 16384))
  scale = np.ones((16, 1), np.float32)
  full = QTensor(values=values.astype(np.int8), scale=scale)
  found = per_token.forward_int8(full, full, 'float32')
  np.testing.assert_array_equal(found, (values @ values.T).astype(np.float32))


def test_blocks_that_straddle_devices_are_refused():
  recipe = Recipe(name='fp8_block')
  recipe.check_kernel('layers_0/attn/qkv', (1024, 128), 4)
  with pytest.raises(ValueError, match='a multiple of 256 .*2 devices'):
    recipe.check_kernel('layers_0/attn/qkv', (1152, 896), 2)
  # Not split, because 4 does not divide it: whole on every device.
  recipe.check_kernel('layers_0/attn/qkv', (1152 + 128, 896), 3)
