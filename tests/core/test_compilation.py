import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jetrl_jax.core import compilation
from jetrl_jax.core.compilation import exact_jit
from jetrl_jax.kernels.row_sum import row_sum

# Shapes at which plain jit returns garbage in jax 0.10.2 and 0.11.2.
GARBAGE_SHAPES = [(512, 96), (32, 1000)]


def _partition_function(z):
  """max, subtract, exp and a dot with a constant: one YNN fusion by default."""
  return row_sum(jnp.exp(z - jnp.max(z, axis=1, keepdims=True)))


def _logits(shape):
  return 3 * np.random.default_rng(0).normal(size=shape).astype(np.float32)


def _ynn_bodies(text):
  """The instructions of each computation that YNN runs."""
  called = re.findall(r'fusion\([^\n]*__ynn_fusion[^\n]*', text)
  names = {re.search(r'calls=(%[\w.\-]+)', line).group(1) for line in called}
  return [
      re.search(re.escape(name) + r' \([^\n]*\{\n(.*?)\n\}', text, re.S).group(
          1
      )
      for name in names
  ]


@pytest.mark.parametrize('shape', GARBAGE_SHAPES)
def test_a_fusion_that_is_garbage_by_default_is_right(shape):
  z = _logits(shape)
  found = np.asarray(exact_jit(_partition_function)(z), np.float64)[:, 0]
  z = z.astype(np.float64)
  expected = np.exp(z - z.max(axis=1, keepdims=True)).sum(axis=1)
  np.testing.assert_allclose(found, expected, rtol=shape[1] * 2.0**-24)


@pytest.mark.parametrize('shape', GARBAGE_SHAPES)
def test_no_element_wise_instruction_is_handed_to_ynn(shape):
  z = _logits(shape)
  text = exact_jit(_partition_function).lower(z).compile().as_text()
  bodies = _ynn_bodies(text)
  assert bodies  # Single dots do go there.
  for body in bodies:
    assert ' dot(' in body
    assert not re.search(r' (exponential|maximum|subtract|multiply)\(', body)
  # The same search finds them where the options are left out.
  plain = jax.jit(_partition_function).lower(z).compile().as_text()
  assert any(' exponential(' in body for body in _ynn_bodies(plain))


def test_a_bfloat16_rounding_is_never_skipped():
  # (1 + 2^-8) ties to 1 in bfloat16; the 2^-8 lives in float32 only. A sum of
  # bfloat16 that float32 reads, as a norm reads the residual stream.
  one = jnp.ones((8,), jnp.bfloat16)
  small = jnp.full((8,), 2.0**-8, jnp.bfloat16)

  def excess(one, small):
    return jnp.sum((one + small).astype(jnp.float32)) - 8

  assert exact_jit(excess)(one, small) == 0
  # The same program without the option skips all eight roundings.
  assert jax.jit(excess)(one, small) == 8 * 2.0**-8


def test_the_options_of_a_gpu_pin_its_kernels():
  options = compilation.compiler_options('gpu')
  assert options == compilation.compiler_options('cuda')
  assert options['xla_gpu_enable_triton_gemm'] is False
  assert options['xla_gpu_autotune_level'] == 0
  assert options['xla_gpu_deterministic_ops'] is True
  assert options['xla_allow_excess_precision'] is False


def test_in_order_changes_what_a_gpu_may_move_and_nothing_else():
  for exact in (True, False):
    plain, in_order = (
        compilation.compiler_options('gpu', exact=exact, in_order=in_order)
        for in_order in (False, True)
    )
    name = 'xla_gpu_enable_latency_hiding_scheduler'
    assert in_order == plain | {name: False} != plain


def test_the_options_are_those_of_the_backend_in_use():
  here = compilation.compiler_options()
  assert here == compilation.compiler_options('cpu')
  assert not any('gpu' in name for name in here)


def test_an_exact_function_is_refused_within_another_one():
  # Which is why building blocks stay plain. Up to jax 0.11 grad refuses too.
  exact = exact_jit(lambda x: jnp.sum(x * x))
  with pytest.raises(ValueError, match='compiler_options.*top-level'):
    jax.jit(lambda x: exact(x))(jnp.ones(3))
  # vmap alone keeps it the outermost jit.
  np.testing.assert_array_equal(jax.vmap(exact)(jnp.ones((2, 3))), [3, 3])


def test_a_derivative_within_an_exact_function_is_fine():
  run = exact_jit(jax.grad(lambda x: jnp.sum(x * x)))
  np.testing.assert_array_equal(run(jnp.arange(3.0)), [0, 2, 4])


def test_donated_and_static_arguments_are_passed_on():
  run = exact_jit(
      lambda x, power: x**power, donate_argnums=(0,), static_argnums=(1,)
  )
  x = jnp.arange(4.0)
  np.testing.assert_array_equal(run(x, 3), [0, 1, 8, 27])
  assert x.is_deleted()


@pytest.mark.parametrize('inner', [64, 1000, 2048])
def test_the_rows_of_a_float32_dot_do_not_depend_on_their_number(inner):
  rng = np.random.default_rng(0)
  x = rng.normal(size=(1024, inner)).astype(np.float32)
  kernel = rng.normal(size=(48, inner)).astype(np.float32)
  run = exact_jit(
      lambda x, kernel: lax.dot_general(x, kernel, (((1,), (1,)), ((), ())))
  )
  whole = np.asarray(run(x, kernel))
  for rows in (16, 112):
    np.testing.assert_array_equal(run(x[:rows], kernel), whole[:rows])


def test_an_inexact_function_leaves_bits_to_xla_and_keeps_numbers_right():
  found = compilation.compiler_options('gpu', exact=False)
  assert found == {}
  # YNN's larger fusions do not compute other bits but garbage.
  found = compilation.compiler_options('cpu', exact=False)
  assert list(found) == ['xla_cpu_experimental_ynn_fusion_type']
  z = _logits(GARBAGE_SHAPES[0])
  np.testing.assert_allclose(
      compilation.inexact_jit(_partition_function)(z),
      exact_jit(_partition_function)(z),
      rtol=GARBAGE_SHAPES[0][1] * 2.0**-24,
  )


def test_an_inexact_function_may_skip_a_bfloat16_rounding():
  # 1 + 2^-8 ties to 1 in bfloat16, whose steps are 2^-7 there.
  one = jnp.ones((8,), jnp.bfloat16)
  small = jnp.full((8,), 2.0**-8, jnp.bfloat16)

  def run(one, small):
    return (one + small).astype(jnp.float32)

  np.testing.assert_array_equal(exact_jit(run)(one, small), np.ones(8))
  found = compilation.inexact_jit(run)(one, small)
  np.testing.assert_array_equal(found, np.full(8, 1 + 2.0**-8))
