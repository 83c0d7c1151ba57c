"""Every recipe in the decoder: the same bits on both sides."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.fp8 import Recipe
from tests.models import build

TEMPERATURE = jnp.float32(build.TEMPERATURE)
SLOTS, LENGTH = 16, 48
NAMES = ('fp8_token', 'fp8_block', 'int8')


@functools.cache
def _stepped(recipe):
  """Log-probs, gradients and what slots saw, of a training step of Qwen2."""
  trees, tokens = build.trees('qwen2', recipe), build.tokens(SLOTS, LENGTH)
  found, grads, seen = build.compiled_step('qwen2', recipe, remat=True)(
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


@pytest.mark.parametrize('name', NAMES)
def test_decode_has_the_bits_of_the_training_step(name):
  _assert_same_bits(Recipe(name=name))


@pytest.mark.slow
@pytest.mark.parametrize('power_of_two', [True, False])
@pytest.mark.parametrize('dtype', ['bfloat16', 'float32'])
@pytest.mark.parametrize('name', NAMES)
def test_decode_has_those_bits_with_any_scales_and_dtype(
    name, dtype, power_of_two
):
  _assert_same_bits(
      Recipe(name=name, compute_dtype=dtype, power_of_two_scales=power_of_two)
  )
