import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.core.compilation import exact_jit
from jetrl_jax.fp8 import Recipe, scaling_state
from jetrl_jax.kernels.quantized_dot.weights import prepare_weights
from jetrl_jax.models import layers
from jetrl_jax.models.attention import PackedAttention
from tests.models import build, tiny

FP8, BF16 = Recipe(), Recipe(name='bf16')
TEMPERATURE = jnp.float32(build.TEMPERATURE)
SLOTS, LENGTH = 16, 48


@functools.cache
def _decoded(family, recipe, batch=SLOTS):
  """Tokens and their log-probs as the rollout computes them."""
  trees, tokens = build.trees(family, recipe), build.tokens(batch, LENGTH)
  run = build.compiled_decode(family, recipe)
  found = run(trees.weights, trees.state, tokens, TEMPERATURE)
  # The last token of a row has no next one.
  return tokens, np.asarray(found)[:, :-1]


@functools.cache
def _stepped(recipe):
  """Log-probs, gradients and what dots saw, of a training step of Qwen2.

  Blocks are rematerialised, as in training; `compiled_forward` keeps them.
  """
  trees, tokens = build.trees('qwen2', recipe), build.tokens(SLOTS, LENGTH)
  found, grads, seen = build.compiled_step('qwen2', recipe, remat='full')(
      trees.params,
      trees.state,
      trees.weights,
      tokens,
      build.unpacked(tokens),
      TEMPERATURE,
  )
  return np.asarray(found)[:, :-1], grads, seen


def _leaves(tree):
  return [
      (jax.tree_util.keystr(path), leaf)
      for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  ]


def _dot_state(state, path):
  for key in path.split('/'):
    state = state[key]
  return jax.tree.map(np.asarray, state)


@pytest.mark.parametrize(
    'family, recipe',
    [
        *((family, FP8) for family in tiny.FORWARDS),
        # Qwen2 in BF16 is held to its training step below.
        pytest.param('qwen3', BF16, marks=pytest.mark.slow),
        pytest.param('llama', BF16, marks=pytest.mark.slow),
    ],
)
def test_decode_has_the_bits_of_the_teacher_forced_forward(family, recipe):
  tokens, decoded = _decoded(family, recipe)
  trees = build.trees(family, recipe)
  forward = build.compiled_forward(family, recipe)(
      trees.weights, trees.state, tokens, build.unpacked(tokens), TEMPERATURE
  )
  np.testing.assert_array_equal(decoded, np.asarray(forward)[:, :-1])
  # Log-probs that say something: neither uniform nor certain.
  assert decoded.std() > 0.05 and np.all(decoded < 0)


@pytest.mark.parametrize('recipe', [FP8, BF16], ids=lambda r: r.name)
def test_decode_has_the_bits_of_the_training_step_itself(recipe):
  # With derivatives, rematerialised blocks and other fusions around.
  np.testing.assert_array_equal(
      _decoded('qwen2', recipe)[1], _stepped(recipe)[0]
  )


def test_the_number_of_slots_does_not_show():
  # The tokens of all 32 slots, and the first 16 alone.
  tokens, many = _decoded('qwen2', FP8, 32)
  trees = build.trees('qwen2', FP8)
  few = build.compiled_decode('qwen2', FP8)(
      trees.weights, trees.state, tokens[:16], TEMPERATURE
  )
  np.testing.assert_array_equal(many[:16], np.asarray(few)[:, :-1])


def test_packed_rows_have_the_bits_of_rows_alone():
  # Three sequences in a row of 48 plus padding: lengths 16, 9 and 13, from
  # tiles 0, 1 and 2. The same three alone, each from index 0.
  trees, tokens = build.trees('qwen2', FP8), build.tokens(SLOTS, LENGTH)
  run = build.compiled_forward('qwen2', FP8)
  starts, lengths = (0, 16, 32), (16, 9, 13)

  def rows(starts, lengths):
    index = np.arange(LENGTH)
    first, last = np.zeros(LENGTH, np.int32), np.full(LENGTH, -1, np.int32)
    for start, length in zip(starts, lengths, strict=True):
      own = (index >= start) & (index < start + length)
      first[own], last[own] = start, index[own]
    return tuple(
        np.broadcast_to(a, (SLOTS, LENGTH))
        for a in (first, last, np.maximum(index - first, 0))
    )

  packed = np.asarray(
      run(
          trees.weights, trees.state, tokens, rows(starts, lengths), TEMPERATURE
      )
  )
  for start, length in zip(starts, lengths, strict=True):
    alone = run(
        trees.weights,
        trees.state,
        np.roll(tokens, -start, axis=1),
        rows([0], [length]),
        TEMPERATURE,
    )
    np.testing.assert_array_equal(
        np.asarray(alone)[:, : length - 1],
        packed[:, start : start + length - 1],
    )


def test_one_step_in_one_gain_shows_up():
  # The comparison of bits is not blind: the smallest change of one number of
  # the weights is seen.
  tokens, decoded = _decoded('qwen2', FP8)
  trees = build.trees('qwen2', FP8)
  gain = trees.weights['layers_1']['mlp_norm']['scale']
  other = np.asarray(gain).copy()
  other.view(np.uint16)[5] += 1
  weights = jax.tree.map(lambda x: x, trees.weights)
  weights['layers_1']['mlp_norm']['scale'] = other
  changed = build.compiled_forward('qwen2', FP8)(
      weights, trees.state, tokens, build.unpacked(tokens), TEMPERATURE
  )
  assert np.mean(np.asarray(changed)[:, :-1] != decoded) > 0.01


@pytest.mark.parametrize('recipe', [FP8, BF16], ids=lambda r: r.name)
def test_gradients_reach_every_master_in_its_dtype(recipe):
  _, grads, _ = _stepped(recipe)
  masters = _leaves(build.masters('qwen2'))
  assert [name for name, _ in _leaves(grads)] == [name for name, _ in masters]
  for (name, grad), (_, master) in zip(_leaves(grads), masters, strict=True):
    assert grad.dtype == master.dtype and grad.shape == master.shape
    assert np.all(np.isfinite(grad)) and np.any(grad), name


def test_every_dot_observes_its_input_and_output_gradient():
  _, _, seen = _stepped(FP8)
  paths = scaling_state.dot_paths(seen)
  assert len(paths) == 8
  for path in paths:
    dot_state = _dot_state(seen, path)
    for operand in ('input', 'output_grad'):
      assert dot_state[operand]['amax_history'][0] > 0, (path, operand)
      assert not np.any(dot_state[operand]['amax_history'][1:])
    # The kernel's amax comes from its master, not from the backward pass.
    assert not np.any(dot_state['kernel']['amax_history'])


def test_fp8_gradients_point_where_those_of_bf16_do():
  _, fp8, _ = _stepped(FP8)
  _, bf16, _ = _stepped(BF16)
  for (name, a), (_, b) in zip(_leaves(fp8), _leaves(bf16), strict=True):
    a, b = (np.asarray(x, np.float64).ravel() for x in (a, b))
    cosine = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
    assert cosine > 0.95, (name, cosine)


def test_the_derivative_does_not_pass_through_the_quantiser():
  # The weights handed over, or made of the masters within the derivative: the
  # same gradient. A leak would count dW twice, or round it to 8 bits. And one
  # of the two keeps the blocks that the other recomputes.
  trees, tokens = build.trees('qwen2', FP8), build.tokens(SLOTS, LENGTH)
  model = build.decoder('qwen2', FP8)

  @exact_jit
  def inside(params, state, tokens, rows, temperature):
    def loss(params):
      weights = prepare_weights(params, state, FP8)
      found = build.forward(
          model, weights, state, params, tokens, rows, temperature
      )
      return -jnp.mean(found), found

    return jax.grad(loss, has_aux=True)(params)

  grads, found = inside(
      trees.params, trees.state, tokens, build.unpacked(tokens), TEMPERATURE
  )
  expected, expected_grads, _ = _stepped(FP8)
  np.testing.assert_array_equal(np.asarray(found)[:, :-1], expected)
  for (name, a), (_, b) in zip(
      _leaves(grads), _leaves(expected_grads), strict=True
  ):
    scale = np.abs(np.asarray(b)).max()
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-3 * scale, err_msg=name)


@pytest.mark.parametrize('family', tiny.FORWARDS)
def test_the_modules_make_masters_and_no_dot_states(family):
  model = build.decoder(family, FP8)

  def init(key, rows):
    line = jnp.zeros((1, 16), jnp.int32)
    attend = PackedAttention(first_BT=line, last_BT=line, tile=build.TILE)
    return model.init(key, rows, rows, jnp.ones(16), attend)

  made = jax.eval_shape(init, jax.random.key(0), jnp.zeros(16, jnp.int32))
  assert set(made) == {'params'}
  count = sum(leaf.size for leaf in jax.tree.leaves(made))
  assert count == model.config.num_params
  assert ('lm_head' in made['params']) == (family != 'qwen2')
  kernels = [n for n, leaf in _leaves(made) if leaf.ndim == 2]
  assert scaling_state.dot_paths(
      scaling_state.init_state(made['params'], FP8)
  ) == [
      f'layers_{i}/{dot}'
      for i in range(2)
      for dot in ('attn/o', 'attn/qkv', 'mlp/down', 'mlp/gate_up')
  ]
  assert len(kernels) == 2 * 4 + (1 if family == 'qwen2' else 2)


def test_rows_of_equal_tokens_add_up_once_each():
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, 7, 40).astype(np.int32)
  rows = rng.normal(size=(40, 3)).astype(np.float32)
  found, sums = map(np.asarray, exact_jit(layers.sum_equal)(tokens, rows))
  # Beyond the vocabulary each index occurs once: a scatter drops it.
  assert len(set(found.tolist())) == 40
  kept = found < 7
  assert sorted(found[kept].tolist()) == sorted(set(tokens.tolist()))
  for token, row in zip(found[kept], sums[kept], strict=True):
    expected = rows[tokens == token].sum(0)
    np.testing.assert_allclose(row, expected, rtol=1e-5, atol=1e-6)
