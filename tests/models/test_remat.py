"""What is computed again is what the mode says, and changes no gradient."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.core.compilation import exact_jit
from jetrl_jax.fp8 import Recipe
from jetrl_jax.fp8.products import NT
from jetrl_jax.models.attention import PackedAttention
from jetrl_jax.models.decoder import Decoder, variables
from jetrl_jax.models.policy import Policy
from tests.models import build, tiny

FP8, BF16 = Recipe(), Recipe(name='bf16')
BATCH, LENGTH = 2, 48


def _gradients(family, recipe, mode, kv_dtype=None):
  """Returns (function, its arguments) of one layer's gradients."""
  trees = build.trees(family, recipe)
  model = build.decoder(family, recipe, mode)
  config = dataclasses.replace(model.config, num_layers=1)
  model = Decoder(recipe=recipe, axes=model.axes, config=config, remat=mode)
  tokens = build.tokens(BATCH, LENGTH)
  first, last, positions = build.unpacked(tokens)

  def loss(params, state, weights, tokens, positions, first, last):
    attend = PackedAttention(
        first_BT=first, last_BT=last, tile=build.TILE, kv_dtype=kv_dtype
    )
    rows = tokens.reshape(-1)
    hidden, *_ = model.apply(
        variables(weights, state, params),
        *(rows, positions.reshape(-1), jnp.ones(rows.shape), attend),
    )
    # Each number has a gradient of its own.
    return jnp.mean(jnp.sin(hidden.astype(jnp.float32)))

  return jax.grad(loss, argnums=(0, 1)), (
      *(trees.params, trees.state, trees.weights),
      *(tokens, positions, first, last),
  )


def _forwards(family, recipe, mode) -> dict[str, int]:
  """Returns how often a gradient computes each forward of a block."""
  run, arguments = _gradients(family, recipe, mode)
  block = build.masters(family, recipe)['layers_0']
  names = {
      leaf.shape: jax.tree_util.keystr(path)
      for path, leaf in jax.tree_util.tree_leaves_with_path(block)
      if leaf.ndim == 2
  }
  assert len(names) == 4
  found = collections.Counter(dict.fromkeys(names.values(), 0))
  for eqn in build.equations(jax.make_jaxpr(run)(*arguments).jaxpr):
    if eqn.primitive.name == 'dot_general':
      # DGrad and WGrad contract other dims.
      kernel = eqn.invars[1].aval.shape
      if eqn.params['dimension_numbers'] == NT and kernel in names:
        found[names[kernel]] += 1
    # On a CPU attention's forward is the only loop.
    found['attention'] += eqn.primitive.name == 'while'
  return found


@pytest.mark.parametrize('family, recipe', [('qwen3', FP8), ('qwen2', BF16)])
@pytest.mark.parametrize(
    'mode, qkv, attention, o, gate_up',
    [
        ('none', 1, 1, 1, 1),
        ('selective', 1, 1, 1, 2),
        ('full', 2, 2, 2, 2),
    ],
)
def test_a_backward_computes_again_what_its_mode_says(
    family, recipe, mode, qkv, attention, o, gate_up
):
  assert _forwards(family, recipe, mode) == {
      "['attn']['qkv']['kernel']": qkv,
      'attention': attention,
      "['attn']['o']['kernel']": o,
      "['mlp']['gate_up']['kernel']": gate_up,
      # Its result is read by no backward.
      "['mlp']['down']['kernel']": 1,
  }


def _assert_equal_gradients(family, recipe, modes, kv_dtype=None):
  found = {}
  for mode in modes:
    run, arguments = _gradients(family, recipe, mode, kv_dtype)
    found[mode] = jax.tree_util.tree_leaves_with_path(
        exact_jit(run)(*arguments)
    )
  expected = found.pop('full')
  assert any(np.any(leaf) for _, leaf in expected)
  for mode, leaves in found.items():
    for (path, leaf), (_, again) in zip(leaves, expected, strict=True):
      np.testing.assert_array_equal(
          leaf, again, err_msg=mode + jax.tree_util.keystr(path)
      )


def test_gradients_have_the_same_bits_whether_attention_is_kept_or_not():
  _assert_equal_gradients('qwen2', BF16, ('selective', 'full'))


@pytest.mark.slow
# Every two of the four settings meet.
@pytest.mark.parametrize(
    'family, recipe, kv_dtype, mode',
    [
        ('qwen2', FP8, None, 'none'),
        ('qwen2', BF16, 'float8_e4m3fn', 'selective'),
        ('qwen3', FP8, 'float8_e4m3fn', 'selective'),
        ('qwen3', BF16, None, 'none'),
        ('llama', FP8, None, 'selective'),
        ('llama', BF16, 'float8_e4m3fn', 'none'),
    ],
    ids=lambda value: getattr(value, 'name', value),
)
def test_gradients_have_the_same_bits_in_all_modes_and_families(
    family, recipe, kv_dtype, mode
):
  _assert_equal_gradients(family, recipe, (mode, 'full'), kv_dtype)


@pytest.mark.parametrize('mode', [True, False, 'mlp'])
def test_what_is_no_mode_is_refused_with_the_modes(mode):
  allowed = f'remat is {mode!r}; allowed: none, selective, full'
  with pytest.raises(ValueError, match=allowed):
    Policy(model=tiny.config(), recipe=FP8, remat=mode)
