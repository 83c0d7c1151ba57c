import functools

import jax
import jax.numpy as jnp
import numpy as np

from jetrl_jax.core.collectives import Axes
from jetrl_jax.core.compilation import exact_jit
from jetrl_jax.fp8 import scaling_state
from jetrl_jax.fp8.quantization import QTensor, dequantize
from jetrl_jax.fp8.recipes import Recipe
from jetrl_jax.kernels.quantized_dot.weights import prepare_weights

RECIPE = Recipe()


def masters(dtype=np.float32):
  rng = np.random.default_rng(0)

  def make(*shape):
    return rng.normal(size=shape).astype(dtype)

  return {
      'embed': {'embedding': make(8, 4)},
      'layers_0': {
          'mlp': {'down': {'kernel': make(4, 6)}},
          'mlp_norm': {'scale': np.ones(4, dtype)},
      },
      'lm_head': {'kernel': make(8, 4)},
  }


@functools.cache
def _prepare(recipe):
  def run(params):
    state = scaling_state.init_state(params, recipe)
    state = scaling_state.observe_kernels(state, params, recipe, Axes())
    return prepare_weights(params, state, recipe)

  return exact_jit(run)


def prepared(params, recipe=RECIPE):
  return jax.tree.map(np.asarray, _prepare(recipe)(params))


def names(tree):
  return [
      jax.tree_util.keystr(path)
      for path, _ in jax.tree_util.tree_leaves_with_path(
          tree, is_leaf=lambda x: isinstance(x, QTensor)
      )
  ]


def test_the_weights_have_the_paths_of_the_masters():
  params = masters()
  weights = prepared(params)
  assert names(weights) == names(params)


def test_only_kernels_with_a_dot_state_are_8_bit():
  weights = prepared(masters())
  down = weights['layers_0']['mlp']['down']['kernel']
  assert down.values.dtype == jnp.float8_e4m3fn
  assert weights['embed']['embedding'].dtype == jnp.bfloat16
  assert weights['lm_head']['kernel'].dtype == jnp.bfloat16
  assert weights['layers_0']['mlp_norm']['scale'].dtype == jnp.bfloat16


def test_bf16_casts_every_leaf_and_makes_no_qtensor():
  params = masters()
  weights = prepared(params, Recipe(name='bf16'))
  jax.tree.map(
      lambda w, p: np.testing.assert_array_equal(w, p.astype(jnp.bfloat16)),
      weights,
      params,
  )


def test_a_quantised_kernel_is_within_half_a_step_of_its_master():
  params = masters()
  q = prepared(params)['layers_0']['mlp']['down']['kernel']
  master = np.asarray(params['layers_0']['mlp']['down']['kernel'], np.float64)
  restored = np.asarray(dequantize(q, jnp.float32), np.float64)
  bound = np.maximum(np.abs(master) * 2.0**-4, float(q.scale) * 2.0**-10)
  assert np.all(np.abs(master - restored) <= bound)


def test_only_the_scale_of_the_kernel_decides_not_its_history():
  params = masters()
  state = scaling_state.init_state(params, RECIPE)
  state = scaling_state.observe_kernels(state, params, RECIPE, Axes())
  down = state['layers_0']['mlp']['down']
  other = down | {'kernel': down['kernel'] | {'amax_history': np.ones(16) * 9}}
  weights = prepare_weights(
      params, {'layers_0': {'mlp': {'down': other}}}, RECIPE
  )
  jax.tree.map(np.testing.assert_array_equal, weights, prepared(params))


def test_bfloat16_masters_give_the_weights_of_their_float32_copies():
  params = masters(jnp.bfloat16)
  copies = jax.tree.map(lambda p: p.astype(np.float32), params)
  jax.tree.map(
      np.testing.assert_array_equal, prepared(params), prepared(copies)
  )
