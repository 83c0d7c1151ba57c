import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.core.compilation import exact_jit
from jetrl_jax.fp8 import scaling_state
from jetrl_jax.fp8.products import scale_late
from jetrl_jax.fp8.quantization import QTensor, dequantize, quantize
from jetrl_jax.fp8.recipes import Recipe
from jetrl_jax.kernels.quantized_dot import linear
from tests import kernels_in_use

ROWS, INNER, OUTER = 32, 48, 24
BF16 = Recipe(name='bf16')


def make_dot_state(input_scale=2.0**-6, grad_scale=2.0**-4):
  dot_state = scaling_state.init_dot_state(4)
  dot_state['input']['scale'] = np.float32(input_scale)
  dot_state['output_grad']['scale'] = np.float32(grad_scale)
  return dot_state


def to_e4m3(x, scale):
  """As `quantize`, on the host: the cast is that of ml_dtypes."""
  scaled = np.asarray(x, np.float32) * (np.float32(1) / np.float32(scale))
  return np.clip(scaled, -448, 448).astype('float8_e4m3fn')


def operands(dtype=jnp.bfloat16, kernel_scale=2.0**-7, rows=ROWS):
  """Rows, master, quantised kernel and a cotangent of the result."""
  rng = np.random.default_rng(0)

  def make(*shape):
    return rng.normal(size=shape).astype(np.float32)

  x, master, dy = make(rows, INNER), make(OUTER, INNER), make(rows, OUTER)
  weight = QTensor(
      values=to_e4m3(master, kernel_scale), scale=np.float32(kernel_scale)
  )
  return (2 * x).astype(dtype), master, weight, (9 * dy).astype(dtype)


def changed(x, at, value):
  x = x.copy()
  x[at] = value
  return x


@functools.cache
def _both(recipe, out_dtype=None):
  """Compiled: result and cotangents of (x, master, dot state)."""

  def run(x, master, weight, dot_state, mask, dy):
    def forward(x, master, dot_state):
      return linear.dot(
          recipe, x, master, weight, dot_state, mask, out_dtype=out_dtype
      )

    y, pull = jax.vjp(forward, x, master, dot_state)
    return y, *pull(dy.astype(y.dtype))

  return exact_jit(run)


def run(recipe, x, master, weight, dot_state, dy, mask=None, out_dtype=None):
  mask = np.ones(x.shape[0], np.float32) if mask is None else mask
  found = _both(recipe, out_dtype)(x, master, weight, dot_state, mask, dy)
  return jax.tree.map(np.asarray, found)


def restored(x, scale, dtype='float8_e4m3fn'):
  """Quantised and dequantised, in float64."""
  limit = {'float8_e4m3fn': 448, 'float8_e5m2': 57344}[dtype]
  scaled = np.asarray(x, np.float32) * (np.float32(1) / np.float32(scale))
  values = np.clip(scaled, -limit, limit).astype(dtype)
  return values.astype(np.float64) * float(scale)


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
  dot_state = make_dot_state(odd * 2.0**-6, odd * 2.0**-4)
  y, dx, dw, _ = run(recipe, x, master, weight, dot_state, dy)
  x64 = restored(x, dot_state['input']['scale'])
  w64 = np.asarray(weight.values, np.float64) * float(weight.scale)
  name = {'e4m3': 'float8_e4m3fn', 'e5m2': 'float8_e5m2'}[grad_format]
  dy64 = restored(dy, dot_state['output_grad']['scale'], name)
  # Scales that are no power of two cost three more float32 roundings.
  extra = 0.0 if power_of_two else 3 * 2.0**-23
  assert y.dtype == dx.dtype == jnp.bfloat16 and dw.dtype == jnp.float32
  assert_dot(y, x64, w64, 2.0**-7 + extra)
  assert_dot(dx, dy64, w64.T, 2.0**-7 + extra)
  assert_dot(dw, dy64.T, x64.T, 2.0**-23 + extra)
  narrow = run(recipe, x, master.astype(jnp.bfloat16), weight, dot_state, dy)[2]
  assert_dot(narrow, dy64.T, x64.T, 2.0**-7 + extra)


def test_the_result_may_be_float32_and_then_keeps_its_bits():
  x, master, weight, dy = operands()
  dot_state = make_dot_state()
  y, *_ = run(Recipe(), x, master, weight, dot_state, dy, out_dtype='float32')
  assert y.dtype == jnp.float32
  w64 = np.asarray(weight.values, np.float64) * float(weight.scale)
  assert_dot(y, restored(x, dot_state['input']['scale']), w64, 2.0**-23)


def test_products_of_the_largest_values_do_not_overflow():
  # 448 * 448 = 200704 is beyond float16, to which a backend might upcast.
  x = np.full((16, 64), 448, jnp.bfloat16)
  weight = QTensor(
      values=np.full((16, 64), 448, 'float8_e4m3fn'), scale=np.float32(1)
  )
  dy = np.full((16, 16), 57344, jnp.bfloat16)
  recipe = Recipe(grad_format='e5m2')
  y, dx, dw, _ = run(
      recipe,
      x,
      np.ones((16, 64), np.float32),
      weight,
      make_dot_state(1.0, 1.0),
      dy,
  )
  # 64 * 448^2 = 12845056 = 49 * 2^18: exact in bfloat16.
  assert np.all(np.asarray(y, np.float64) == 64 * 448**2)
  # 16 * 57344 * 448 = 49 * 2^23.
  assert np.all(np.asarray(dx, np.float64) == 16 * 57344 * 448)
  assert np.all(np.asarray(dw, np.float64) == 16 * 57344 * 448)


def test_the_format_of_output_gradients_is_the_recipes():
  x, master, weight, _ = operands(rows=16)
  dy = np.full((16, OUTER), 500, jnp.bfloat16)
  dot_state = make_dot_state(1.0, 1.0)
  w = np.asarray(weight.values, np.float64).sum(0) * float(weight.scale)
  for name, value in (('e4m3', 448), ('e5m2', 512)):
    dx = run(Recipe(grad_format=name), x, master, weight, dot_state, dy)[1]
    np.testing.assert_allclose(
        np.asarray(dx[0], np.float64), value * w, rtol=2.0**-8, atol=1e-6
    )


@pytest.mark.parametrize('recipe', [Recipe(), Recipe(calibrating=True), BF16])
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_the_weight_gradient_has_the_dtype_of_the_master(recipe, dtype):
  x, master, weight, dy = operands()
  weight = master.astype(jnp.bfloat16) if recipe is BF16 else weight
  dot_state = None if recipe is BF16 else make_dot_state()
  dw = run(recipe, x, master.astype(dtype), weight, dot_state, dy)[2]
  assert dw.dtype == dtype


def test_the_values_of_the_master_are_never_read():
  x, master, weight, dy = operands()
  for recipe, kernel, dot_state in (
      (Recipe(), weight, make_dot_state()),
      (BF16, master.astype(jnp.bfloat16), None),
  ):
    first = run(recipe, x, master, kernel, dot_state, dy)
    other = run(recipe, x, np.full_like(master, np.nan), kernel, dot_state, dy)
    jax.tree.map(np.testing.assert_array_equal, first, other)


@pytest.mark.parametrize('recipe', [Recipe(), Recipe(calibrating=True), BF16])
def test_a_dot_without_master_has_the_bits_of_the_one_with(recipe):
  x, master, weight, dy = operands()
  weight = master.astype(jnp.bfloat16) if recipe is BF16 else weight
  dot_state = None if recipe is BF16 else make_dot_state()
  rollout = exact_jit(
      lambda x, w, s: linear.dot(recipe, x, None, w, s, jnp.ones(ROWS))
  )(x, weight, dot_state)
  train = run(recipe, x, master, weight, dot_state, dy)[0]
  np.testing.assert_array_equal(rollout, train)


@pytest.mark.parametrize('calibrating', [False, True])
def test_the_cotangent_of_a_dot_state_holds_the_amax_of_valid_rows_alone(
    calibrating,
):
  x, master, weight, dy = operands()
  x, dy = changed(x, -3, 1e6), changed(dy, -3, 1e6)
  x, dy = changed(x, -2, np.nan), changed(dy, -2, np.inf)
  mask = changed(np.ones(ROWS, np.float32), np.s_[-3:], 0)
  recipe = Recipe(calibrating=calibrating)
  dot_state_ct = run(recipe, x, master, weight, make_dot_state(), dy, mask)[3]
  for operand, array in (('input', x), ('output_grad', dy)):
    expected = np.abs(np.asarray(array[:-3], np.float32)).max()
    found = dot_state_ct[operand]['amax_history']
    assert found.tolist() == [expected, 0, 0, 0]
    assert dot_state_ct[operand]['scale'] == 0
    assert dot_state_ct[operand]['health'][0] == (ROWS - 3) * array.shape[1]
    assert np.all(np.isfinite(dot_state_ct[operand]['health']))
  assert all(
      not np.any(leaf) for leaf in jax.tree.leaves(dot_state_ct['kernel'])
  )


def test_a_batch_of_padding_observes_nothing():
  x, master, weight, dy = operands()
  mask = np.zeros(ROWS, np.float32)
  dot_state_ct = run(Recipe(), x, master, weight, make_dot_state(), dy, mask)[3]
  assert all(not np.any(leaf) for leaf in jax.tree.leaves(dot_state_ct))


def test_a_nan_in_a_valid_row_reaches_the_observed_amax():
  # It must not be recorded, and must not be mistaken for a small amax.
  x, master, weight, dy = operands()
  x = changed(x, (3, 5), np.nan)
  dot_state_ct = run(Recipe(), x, master, weight, make_dot_state(), dy)[3]
  assert not np.isfinite(dot_state_ct['input']['amax_history'][0])


def test_the_health_sums_by_hand():
  # On scale 2: limit 896, E4M3 flushes |x| / 2 <= 2^-10, so |x| <= 2^-9.
  # x         restored  saturated  flushed  noise
  # 1000      896       1          0        104^2 = 10816
  # -900      -896      1          0        16
  # 2^-10     0         0          1        2^-20
  # 0         0         0          0        0
  # 17        16        0          0        1       (8.5 ties to even 8)
  x = np.zeros((16, 5), np.float32)
  x[0] = 1000, -900, 2.0**-10, 0, 17
  x[15] = 5000  # Padding.
  mask = changed(np.ones(16, np.float32), 15, 0)
  recipe = Recipe(compute_dtype='float32')
  weight = QTensor(
      values=np.ones((16, 5), 'float8_e4m3fn'), scale=np.float32(1)
  )
  dot_state = make_dot_state(2.0, 1.0)
  dy = np.full((16, 16), 0.5, np.float32)
  dot_state_ct = run(
      recipe, x, np.ones((16, 5), np.float32), weight, dot_state, dy, mask
  )[3]
  signal = 1000**2 + 900**2 + 2.0**-20 + 17**2
  np.testing.assert_allclose(
      dot_state_ct['input']['health'],
      [15 * 5, 2, 1, signal, 10816 + 16 + 2.0**-20 + 1],
      rtol=1e-6,
  )
  # 0.5 is exact: 15 rows of 16 elements, power 0.25 each, no noise.
  np.testing.assert_array_equal(
      dot_state_ct['output_grad']['health'], [240, 0, 0, 60, 0]
  )


def test_calibrating_computes_in_high_precision_but_observes():
  x, master, weight, dy = operands()
  dot_state = make_dot_state(1.0, 1.0)
  y, dx, dw, dot_state_ct = run(
      Recipe(calibrating=True), x, master, weight, dot_state, dy
  )
  kernel = np.asarray(dequantize(weight, jnp.bfloat16))
  high = run(BF16, x, master, kernel, None, dy)
  for found, expected in zip((y, dx, dw), high, strict=False):
    np.testing.assert_array_equal(found, expected)
  assert dot_state_ct['input']['amax_history'][0] == np.abs(x).max()
  assert dot_state_ct['output_grad']['amax_history'][0] == np.abs(dy).max()


def test_a_dot_in_high_precision_equals_float64_within_rounding():
  x, master, _, dy = operands()
  kernel = master.astype(jnp.bfloat16)
  y, dx, dw, _ = run(BF16, x, master, kernel, None, dy)
  x64, w64, dy64 = (np.asarray(a, np.float64) for a in (x, kernel, dy))
  assert_dot(y, x64, w64, 2.0**-7)
  assert_dot(dx, dy64, w64.T, 2.0**-7)
  assert_dot(dw, dy64.T, x64.T, 2.0**-23)


@pytest.mark.parametrize('recipe', [Recipe(), BF16])
def test_the_float32_cotangent_of_logits_is_rounded_to_the_compute_dtype(
    recipe,
):
  x, master, weight, dy = operands()
  weight = master.astype(jnp.bfloat16) if recipe is BF16 else weight
  dot_state = None if recipe is BF16 else make_dot_state()
  fine = dy.astype(np.float32) * np.float32(1 + 2.0**-12)
  coarse = run(recipe, x, master, weight, dot_state, dy, out_dtype='float32')
  found = run(recipe, x, master, weight, dot_state, fine, out_dtype='float32')
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


@kernels_in_use.needs_mosaic
@pytest.mark.parametrize('rows, kernels', [(128, 3), (144, 0)])
def test_on_a_gpu_the_backward_turns_whole_tiles_round_and_no_others(
    monkeypatch, rows, kernels
):
  kernels_in_use.use(monkeypatch, 'quantize_transpose')
  x, dy = (jnp.ones((rows, n), jnp.bfloat16) for n in (128, 256))
  master = jnp.ones((256, 128))
  weight = QTensor(values=jnp.ones((256, 128), 'float8_e4m3fn'), scale=1.0)

  def run(x, master, dot_state):
    return linear.dot(Recipe(), x, master, weight, dot_state, jnp.ones(rows))

  def both(dot_state, dy):
    return jax.vjp(run, x, master, dot_state)[1](dy)

  # Of x and dy as they are quantised, and of the kernel.
  text = str(jax.make_jaxpr(both)(make_dot_state(), dy))
  assert text.count(f'= {kernels_in_use.CALL}[') == kernels


@pytest.mark.parametrize(
    'kind, inner',
    [
        ('fp8', 64),
        ('fp8', 512),
        ('fp8', 2048),
        ('fp8 odd scales', 2048),
        ('bf16', 512),
        ('bf16', 2048),
        ('logits', 2048),
    ],
)
def test_the_bits_of_a_row_do_not_depend_on_the_number_of_rows(kind, inner):
  # Holds under exact_jit's options on this backend: without them the CPU
  # splits the contraction by the number of rows.
  rng = np.random.default_rng(inner)
  x = rng.normal(size=(1024, inner)).astype(jnp.bfloat16)
  master = rng.normal(size=(48, inner)).astype(np.float32)
  scale = 2.0**-6 * (1.3 if 'odd' in kind else 1.0)
  recipe, weight, dot_state = BF16, master.astype(jnp.bfloat16), None
  if 'fp8' in kind:
    recipe = Recipe(power_of_two_scales='odd' not in kind)
    weight = QTensor(values=to_e4m3(master, scale), scale=np.float32(scale))
    dot_state = make_dot_state(scale)
  out_dtype = 'float32' if kind == 'logits' else None

  @exact_jit
  def forward(x, weight, dot_state):
    mask = jnp.ones(x.shape[0])
    return linear.dot(
        recipe, x, None, weight, dot_state, mask, out_dtype=out_dtype
    )

  whole = np.asarray(forward(x, weight, dot_state))
  for rows in (np.s_[:16], np.s_[-16:], np.s_[:112]):
    np.testing.assert_array_equal(
        forward(x[rows], weight, dot_state), whole[rows]
    )


def test_an_unscaled_product_is_what_the_dot_scales():
  recipe, dot_state = Recipe(), make_dot_state()
  x, _, weight, _ = operands()
  args = recipe, x, None, weight, dot_state, np.ones(ROWS, np.float32)
  wanted = exact_jit(lambda: linear.dot(*args, late_scale=True))()

  @functools.partial(exact_jit, static_argnums=0)
  def found(copies):
    low = quantize(x, dot_state['input']['scale'], jnp.float8_e4m3fn)
    product = linear.unscaled_dot(
        recipe,
        x,
        weight,
        dot_state,
        late_scale=True,
        fp8_MI=jnp.stack([low] * copies) if copies else None,
    )
    assert product is not None
    return scale_late(product.values, product.scales)

  whole, parts = found(0), found(2)
  np.testing.assert_array_equal(whole, wanted)
  np.testing.assert_array_equal(jnp.concatenate([*parts], axis=1), wanted)


@pytest.mark.parametrize(
    'recipe',
    [
        Recipe(name='fp8_token'),
        Recipe(power_of_two_scales=False),
        Recipe(calibrating=True),
    ],
)
def test_scales_that_no_kernel_could_take_are_applied_by_the_dot(recipe):
  x, _, weight, _ = operands()
  found = linear.unscaled_dot(
      recipe, x, weight, make_dot_state(), late_scale=False
  )
  assert found is None
