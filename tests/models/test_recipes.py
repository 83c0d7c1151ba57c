"""Every recipe in the decoder: the same bits on both sides."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.core.compilation import exact_jit
from jetrl_jax.fp8 import Recipe
from jetrl_jax.kernels.quantized_dot.weights import prepare_weights
from jetrl_jax.models import invariant_scaling
from tests.models import build

TEMPERATURE = jnp.float32(build.TEMPERATURE)
SLOTS, LENGTH = 16, 48
NAMES = ('fp8_token', 'fp8_block', 'int8', 'fake_int4')


@functools.cache
def _stepped(recipe):
  """Log-probs, gradients and what dots saw, of a training step of Qwen2."""
  trees, tokens = build.trees('qwen2', recipe), build.tokens(SLOTS, LENGTH)
  found, grads, seen = build.compiled_step('qwen2', recipe, remat='selective')(
      trees.params,
      trees.state,
      trees.weights,
      tokens,
      build.unpacked(tokens),
      TEMPERATURE,
  )
  return np.asarray(found)[:, :-1], grads, seen


def _assert_same_bits(recipe):
  trees, tokens = build.trees('qwen2', recipe), build.tokens(SLOTS, LENGTH)
  decoded = build.compiled_decode('qwen2', recipe)(
      trees.weights, trees.state, tokens, TEMPERATURE
  )
  decoded = np.asarray(decoded)[:, :-1]
  np.testing.assert_array_equal(decoded, _stepped(recipe)[0])
  assert decoded.std() > 0.05 and np.all(decoded < 0)


@pytest.mark.parametrize(
    'name',
    [
        'fp8_token',
        'fp8_block',
        # The scales of fp8_token, of other values.
        pytest.param('int8', marks=pytest.mark.slow),
        pytest.param('fake_int4', marks=pytest.mark.slow),
    ],
)
def test_decode_has_the_bits_of_the_training_step(name):
  _assert_same_bits(Recipe(name=name))


@pytest.mark.slow
# Every two of the three settings meet.
@pytest.mark.parametrize(
    'name, dtype, power_of_two',
    [
        (name, dtype, (i + (dtype == 'float32')) % 2 == 0)
        for i, name in enumerate(NAMES)
        for dtype in ('bfloat16', 'float32')
    ],
)
def test_decode_has_those_bits_with_any_scales_and_dtype(
    name, dtype, power_of_two
):
  _assert_same_bits(
      Recipe(name=name, compute_dtype=dtype, power_of_two_scales=power_of_two)
  )


@pytest.mark.parametrize('name', ['fp8_token', 'int8'])
def test_invariant_scaling_by_a_power_of_two_changes_no_bit(name):
  recipe, tokens = Recipe(name=name), build.tokens(SLOTS, LENGTH)
  trees = build.trees('qwen2', recipe)
  params = jax.tree.map(jnp.asarray, trees.params)
  scaled = invariant_scaling.fold(params, 2.0)
  weights = exact_jit(lambda p: prepare_weights(p, {}, recipe))(scaled)
  run = build.compiled_decode('qwen2', recipe)
  found = run(weights, trees.state, tokens, TEMPERATURE)
  expected = run(trees.weights, trees.state, tokens, TEMPERATURE)
  np.testing.assert_array_equal(found, expected)
  kernels = [t['layers_0']['attn']['qkv'] for t in (weights, trees.weights)]
  # The same 8-bit values on half the scales.
  np.testing.assert_array_equal(
      kernels[0]['kernel'].values, kernels[1]['kernel'].values
  )
  assert np.all(2 * kernels[0]['kernel'].scale == kernels[1]['kernel'].scale)
