"""The kernels of `fp8_block`'s backward, interpreted, beside XLA's passes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.fp8 import (
    Recipe,
    block_turning,
    formats,
    linear,
    prepare_weights,
    slots,
)
from jetrl_jax.fp8.quantization import dequantize, quantize_groups
from tests.fp8 import block
from tests.models import build

ROWS, COLUMNS = 384, 256
HOW = dict(margin=0, power_of_two=True)


def matrix(seed=0, dtype=jnp.bfloat16):
  """Values over many powers of ten, as tokens' gradients are."""
  return block.matrix(ROWS, COLUMNS, seed).astype(dtype)


@pytest.mark.parametrize('power_of_two', [True, False])
@pytest.mark.parametrize('dtype', [formats.E4M3, formats.E5M2])
def test_one_pass_is_both_groupings_of_xla(dtype, power_of_two):
  how = HOW | {'power_of_two': power_of_two}
  x, mask_M = matrix(), jnp.asarray(np.arange(ROWS) % 5 != 0, 'f4')
  found = block_turning.quantize_both_ways(
      x, mask_M, dtype, **how, interpret=True
  )
  block.assert_both_ways(found, x, mask_M, dtype, how)


def test_a_group_of_zeros_and_one_with_nan():
  x = matrix(dtype=jnp.float32)
  x = x.at[:128, :128].set(0).at[200, 200].set(jnp.nan)
  straight, turned, *_ = block_turning.quantize_both_ways(
      x, jnp.ones(ROWS), formats.E4M3, **HOW, interpret=True
  )
  for q in (straight, turned):
    assert np.all(np.isfinite(q.scale)) and np.all(np.asarray(q.scale) > 0)
  rows, columns = dequantize(straight, 'float32'), dequantize(turned, 'float32')
  assert np.all(rows[:128, :128] == 0) and np.all(columns[:128, :128] == 0)
  assert np.isnan(rows[200, 200]) and np.isnan(columns[200, 200])


def test_a_kept_input_is_grouped_along_its_tokens():
  x8 = quantize_groups(matrix(), formats.E4M3, (1, 128), **HOW)
  found = block_turning.regroup_and_turn(x8, **HOW, interpret=True)
  block.assert_regrouped(found, x8, HOW)


@pytest.mark.filterwarnings('ignore:The Pallas Triton backend')
def test_they_lower_for_a_gpu_where_there_is_none():
  x, mask_M = matrix(), jnp.ones(ROWS)
  x8 = quantize_groups(x, formats.E4M3, (1, 128), **HOW)
  both = functools.partial(
      block_turning.quantize_both_ways, dtype=formats.E4M3, **HOW
  )
  again = functools.partial(block_turning.regroup_and_turn, **HOW)
  for run, args in ((both, (x, mask_M)), (again, (x8,))):
    assert 'triton' in block.lowered_for_gpu(run, *args)


def test_a_gpus_gradient_is_made_of_the_kernels(monkeypatch):
  recipe = Recipe(name='fp8_block')
  x, master = jnp.zeros((128, 256), 'bfloat16'), jnp.zeros((128, 256))
  params = {'dot': {'kernel': master}}
  state = slots.init_state(params, recipe)
  weight = prepare_weights(params, state, recipe)['dot']['kernel']

  def loss(x, master):
    slot, mask = slots.init_dynamic_slot(), jnp.ones(128)
    return linear.dot(recipe, x, master, weight, slot, mask).sum()

  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  traced = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(x, master)
  names = [
      str(eqn.params['name'])
      for eqn in build.equations(traced.jaxpr)
      if eqn.primitive.name == 'pallas_call'
  ]
  made = ['quantize_both_ways', 'regroup_and_turn', 'turn']
  assert sorted(names) == sorted([*['block_dot'] * 3, *made])
