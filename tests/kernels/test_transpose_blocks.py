"""The kernels of `fp8_block`'s backward, interpreted, beside XLA's passes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.fp8 import Recipe, scaling_state
from jetrl_jax.kernels.quantized_dot import linear, per_block
from jetrl_jax.kernels.quantized_dot.weights import prepare_weights
from tests import kernels_in_use
from tests.hurry import fast_compile_jit
from tests.kernels import block
from tests.models import build

ROWS, COLUMNS = 384, 256
HOW = dict(margin=0, power_of_two=True)


def matrix(seed=0, dtype=jnp.bfloat16):
  """Values over many powers of ten, as tokens' gradients are."""
  return block.matrix(ROWS, COLUMNS, seed).astype(dtype)


def _kernels_of_gradient(monkeypatch, rows: int, inner: int) -> list[str]:
  """Names of the kernels that a GPU starts for a dot's gradient."""
  recipe = Recipe(name='fp8_block')
  x = jax.ShapeDtypeStruct((rows, inner), 'bfloat16')
  master = jax.ShapeDtypeStruct((128, inner), 'float32')

  def loss(x, master, weight):
    dot_state, mask = scaling_state.init_dynamic_dot_state(), jnp.ones(rows)
    return linear.dot(recipe, x, master, weight, dot_state, mask).sum()

  def prepare(master):
    return prepare_weights({'dot': {'kernel': master}}, {}, recipe)['dot']

  weight = jax.eval_shape(prepare, master)['kernel']
  kernels_in_use.use(monkeypatch, 'block_scaled_dot', 'quantize_transpose')
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  traced = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(x, master, weight)
  return [
      str(eqn.params['name'])
      for eqn in build.equations(traced.jaxpr)
      if eqn.primitive.name == kernels_in_use.CALL
  ]


@kernels_in_use.needs_mosaic
def test_a_gpus_gradient_is_made_of_the_kernels(monkeypatch):
  names = _kernels_of_gradient(monkeypatch, 128, 256)
  made = ['quantize_both_ways', 'regroup_and_turn', 'turn']
  assert sorted(names) == sorted([*['block_dot'] * 3, *made])


@kernels_in_use.needs_mosaic
@pytest.mark.parametrize(
    'rows, inner, made',
    [
        (144, 256, set()),
        # 2^31 values are still counted in 32 bits with a sign.
        (2**17, 2**14, {'quantize_both_ways', 'regroup_and_turn'}),
        (2**17, 2**14 + 128, {'quantize_both_ways'}),
    ],
)
def test_parts_of_tiles_and_what_cannot_be_counted_are_left_to_xla(
    monkeypatch, rows, inner, made
):
  names = set(_kernels_of_gradient(monkeypatch, rows, inner))
  assert names - {'block_dot', 'turn'} == made


@kernels_in_use.needs_mosaic
def test_an_output_gradient_shows_the_same_with_and_without_kernels(
    monkeypatch,
):
  # Padding has no gradient: a kernel reads such rows as zeros.
  mask_M = jnp.asarray(np.arange(128) % 5 != 0, 'f4')
  dy = matrix()[:128] * mask_M[:, None].astype('bfloat16')

  def seen():
    recipe = Recipe(name='fp8_block')
    run = functools.partial(per_block.quantize_grad, recipe)
    amax, sums = fast_compile_jit(run)(dy, mask_M)[1]
    return float(amax), *map(float, sums)

  wanted = seen()
  kernels_in_use.use(monkeypatch, 'quantize_transpose', 'block_scaled_dot')
  kernels_in_use.interpret(monkeypatch)
  np.testing.assert_allclose(seen(), wanted, rtol=1e-4)
