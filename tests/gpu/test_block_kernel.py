"""The kernel of `fp8_block` on tensor cores, at the widths of the 7B."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax import kernels
from jetrl_jax.core.compilation import exact_jit, on_gpu
from jetrl_jax.fp8 import formats, scaling_state
from jetrl_jax.fp8.quantization import quantize_groups
from jetrl_jax.fp8.recipes import Recipe
from jetrl_jax.kernels.block_scaled_dot.mosaic_sm90 import block_dot
from jetrl_jax.kernels.block_scaled_dot.reference import grouped_dot
from jetrl_jax.kernels.quantize_transpose import (
    mosaic_per_block_sm90 as transpose_blocks,
)
from tests.kernels import block

pytestmark = pytest.mark.gpu

_HOW = {} if on_gpu() else {'interpret': True}
_INNER, _OUTER = (3584, 4608) if on_gpu() else (256, 384)
_MANY = 8192 if on_gpu() else 1024


def _normal(seed: int, *shape: int, dtype=jnp.bfloat16):
  return jax.random.normal(jax.random.key(seed), shape, dtype)


def _quantized(x, group):
  return quantize_groups(x, formats.E4M3, group, margin=0, power_of_two=True)


@pytest.mark.parametrize('a_dtype', [formats.E4M3, formats.E5M2])
@pytest.mark.parametrize('blocks', [True, False])
@pytest.mark.parametrize('rows', [16, 192, 1024])
def test_exact_sums_are_those_of_the_definition(rows, blocks, a_dtype):
  # Integers and powers of two: every order and every width gives one sum.
  random = np.random.default_rng(0)
  a, b = (
      jnp.asarray(random.integers(-2, 3, (count, _INNER))).astype(dtype)
      for count, dtype in ((rows, a_dtype), (_OUTER, formats.E4M3))
  )
  counts = (rows, _OUTER // 128 if blocks else _OUTER)
  scale_a, scale_b = (
      jnp.asarray(2.0 ** random.integers(-1, 2, (count, _INNER // 128)), 'f4')
      for count in counts
  )
  args = a, scale_a, b, scale_b
  wanted = exact_jit(
      lambda a, s, b, t: grouped_dot(
          a.astype('bfloat16'),
          s,
          b.astype('bfloat16'),
          t,
          jnp.float32,
          power_of_two=True,
      )
  )(*args)
  for exact in (True, False):
    found = block_dot(*args, 'float32', power_of_two=exact, **_HOW)
    assert np.array_equal(found, wanted) and np.any(found != 0)


@pytest.mark.parametrize('power_of_two', [True, False])
def test_a_row_has_its_bits_with_any_number_of_rows(power_of_two):
  x8 = _quantized(_normal(0, _MANY, _INNER), (1, 128))
  w8 = _quantized(_normal(1, _OUTER, _INNER), (128, 128))

  def product(rows):
    values, scale = x8.values[-rows:], x8.scale[-rows:]
    return np.asarray(
        block_dot(
            values,
            scale,
            w8.values,
            w8.scale,
            'bfloat16',
            power_of_two=power_of_two,
            **_HOW,
        )
    )

  whole = product(_MANY)
  for rows in (16, 64, 80, 128, 256, 512, 1024):
    assert np.array_equal(product(rows), whole[-rows:])


@pytest.mark.parametrize('dtype', [formats.E4M3, formats.E5M2])
def test_the_backwards_operands_are_those_of_xlas_passes(dtype):
  how = dict(margin=0, power_of_two=True)
  x = block.matrix(1024, 640).astype(jnp.bfloat16)
  mask_M = jnp.asarray(np.arange(1024) % 5 != 0, 'f4')
  found = transpose_blocks.quantize_both_ways(x, mask_M, dtype, **how, **_HOW)
  block.assert_both_ways(found, x, mask_M, dtype, how)
  x8 = _quantized(x, (1, 128))
  found = transpose_blocks.regroup_and_transpose(x8, **how, **_HOW)
  block.assert_regrouped(found, x8, how)


# Whole tiles, whose operands kernels make, and others.
@pytest.mark.parametrize('rows', [1024, 1040])
def test_a_dot_and_its_gradients_are_those_of_float32_within_the_format(rows):
  recipe = Recipe(name='fp8_block')
  x, dy = _normal(0, rows, _INNER), _normal(1, rows, _OUTER)
  master = _normal(2, _OUTER, _INNER)
  params = {'dot': {'kernel': master}}
  state = scaling_state.init_state(params, recipe)
  weight = kernels.prepare_weights(params, state, recipe)['dot']['kernel']

  def forward(x, master):
    dot_state, mask = scaling_state.init_dynamic_dot_state(), jnp.ones(
        x.shape[0]
    )
    return kernels.dot(recipe, x, master, weight, dot_state, mask)

  @exact_jit
  def train(x, master, dy):
    y, pull = jax.vjp(forward, x, master)
    return y, *pull(dy)

  def wanted(a, b):
    a, b = (t.astype(jnp.float32) for t in (a, b))
    return np.asarray(jnp.matmul(a, b, precision='highest'))

  y, dx, dw = train(x, master, dy)
  sampled = exact_jit(
      lambda x: kernels.dot(recipe, x, None, weight, None, jnp.ones(16))
  )(x[:16])
  assert np.array_equal(sampled.astype('f4'), y[:16].astype('f4'))
  for found, expected in (
      (y, wanted(x, master.T)),
      (dx, wanted(dy, master)),
      (dw, wanted(dy.T, x)),
  ):
    error = np.asarray(found, 'f4') - expected
    assert np.linalg.norm(error) < 0.045 * np.linalg.norm(expected)
