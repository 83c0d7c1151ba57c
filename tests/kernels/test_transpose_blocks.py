"""The kernels of `fp8_block`'s backward, interpreted, beside XLA's passes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.fp8 import Recipe, formats, scaling_state
from jetrl_jax.fp8.quantization import dequantize, quantize_groups
from jetrl_jax.kernels.quantize_transpose import (
    triton_per_block as transpose_blocks,
)
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


@pytest.mark.parametrize(
    'dtype, power_of_two',
    [
        (formats.E4M3, True),
        (formats.E5M2, False),
        pytest.param(formats.E4M3, False, marks=pytest.mark.slow),
        pytest.param(formats.E5M2, True, marks=pytest.mark.slow),
    ],
)
def test_one_pass_is_both_groupings_of_xla(dtype, power_of_two):
  how = HOW | {'power_of_two': power_of_two}
  x, mask_M = matrix(), jnp.asarray(np.arange(ROWS) % 5 != 0, 'f4')
  found = transpose_blocks.quantize_both_ways(
      x, mask_M, dtype, **how, interpret=True
  )
  block.assert_both_ways(found, x, mask_M, dtype, how)


def test_a_group_of_zeros_and_one_with_nan():
  x = matrix(dtype=jnp.float32)
  x = x.at[:128, :128].set(0).at[200, 200].set(jnp.nan)
  row_major, transposed, *_ = transpose_blocks.quantize_both_ways(
      x, jnp.ones(ROWS), formats.E4M3, **HOW, interpret=True
  )
  for q in (row_major, transposed):
    assert np.all(np.isfinite(q.scale)) and np.all(np.asarray(q.scale) > 0)
  rows, columns = dequantize(row_major, 'float32'), dequantize(
      transposed, 'float32'
  )
  assert np.all(rows[:128, :128] == 0) and np.all(columns[:128, :128] == 0)
  assert np.isnan(rows[200, 200]) and np.isnan(columns[200, 200])


def test_a_kept_input_is_grouped_along_its_tokens():
  x8 = quantize_groups(matrix(), formats.E4M3, (1, 128), **HOW)
  found = transpose_blocks.regroup_and_transpose(x8, **HOW, interpret=True)
  block.assert_regrouped(found, x8, HOW)


def test_they_lower_for_a_gpu_where_there_is_none():
  x, mask_M = matrix(), jnp.ones(ROWS)
  x8 = quantize_groups(x, formats.E4M3, (1, 128), **HOW)
  both = functools.partial(
      transpose_blocks.quantize_both_ways, dtype=formats.E4M3, **HOW
  )
  again = functools.partial(transpose_blocks.regroup_and_transpose, **HOW)
  for run, args in ((both, (x, mask_M)), (again, (x8,))):
    assert 'triton' in block.lowered_for_gpu(run, *args)


def _kernels_of_gradient(monkeypatch, rows: int, inner: int) -> list[str]:
  """Names of the kernels that a GPU starts for a dot's gradient."""
  recipe = Recipe(name='fp8_block')
  x = jax.ShapeDtypeStruct((rows, inner), 'bfloat16')
  master = jax.ShapeDtypeStruct((128, inner), 'float32')

  def loss(x, master, weight):
    slot, mask = scaling_state.init_dynamic_record(), jnp.ones(rows)
    return linear.dot(recipe, x, master, weight, slot, mask).sum()

  def prepare(master):
    return prepare_weights({'dot': {'kernel': master}}, {}, recipe)['dot']

  weight = jax.eval_shape(prepare, master)['kernel']
  kernels_in_use.use(monkeypatch, 'block_scaled_dot', 'quantize_transpose')
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  traced = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(x, master, weight)
  return [
      str(eqn.params['name'])
      for eqn in build.equations(traced.jaxpr)
      if eqn.primitive.name == 'pallas_call'
  ]


def test_a_gpus_gradient_is_made_of_the_kernels(monkeypatch):
  names = _kernels_of_gradient(monkeypatch, 128, 256)
  made = ['quantize_both_ways', 'regroup_and_turn', 'turn']
  assert sorted(names) == sorted([*['block_dot'] * 3, *made])


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
