import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jetrl_jax.core.collectives import Axes
from jetrl_jax.core.compilation import exact_jit
from jetrl_jax.fp8 import scaling_state
from jetrl_jax.fp8.recipes import Recipe
from jetrl_jax.kernels.quantized_dot import linear
from jetrl_jax.kernels.quantized_dot.weights import prepare_weights

RECIPE = Recipe(amax_history_length=4)
PARAMS = {
    'embed': {'embedding': jnp.ones((8, 4))},
    'layers_0': {
        'attn': {'qkv': {'kernel': jnp.ones((12, 4)), 'bias': jnp.ones(12)}},
        'attn_norm': {'scale': jnp.ones(4)},
    },
    'layers_1': {'mlp': {'down': {'kernel': jnp.full((4, 6), -7.0)}}},
    'lm_head': {'kernel': jnp.ones((8, 4))},
}
QKV = ('layers_0', 'attn', 'qkv')


def at(tree, path=QKV):
  for key in path:
    tree = tree[key]
  return tree


def one_dot_state():
  return {'dot': scaling_state.init_dot_state(4)}


def shown(amax_in, amax_out, health=0.0):
  """The cotangent that a dot would return."""
  dot_state = jax.tree.map(jnp.zeros_like, scaling_state.init_dot_state(4))
  for operand, amax in (('input', amax_in), ('output_grad', amax_out)):
    dot_state[operand]['amax_history'] = jnp.zeros(4).at[0].set(amax)
    dot_state[operand]['health'] = jnp.full((5,), health)
  return dot_state


def seen(*numbers, **more):
  return scaling_state.stack_observations({'dot': shown(*numbers, **more)})


def history(state, operand='input'):
  return state['dot'][operand]['amax_history'].tolist()


def assert_equal_trees(left, right):
  assert jax.tree.structure(left) == jax.tree.structure(right)
  jax.tree.map(np.testing.assert_array_equal, left, right)


def test_dot_states_exist_for_the_kernels_of_the_blocks_and_nothing_else():
  state = scaling_state.init_state(PARAMS, RECIPE)
  assert scaling_state.dot_paths(state) == [
      'layers_0/attn/qkv',
      'layers_1/mlp/down',
  ]
  assert at(state)['input']['amax_history'].shape == (4,)
  assert at(state)['kernel']['scale'] == 1


def test_layers_in_high_precision_have_no_dot_state():
  recipe = Recipe(high_precision_layers=('layers_0/.*',))
  state = scaling_state.init_state(PARAMS, recipe)
  assert scaling_state.dot_paths(state) == ['layers_1/mlp/down']
  assert scaling_state.init_state(PARAMS, Recipe(name='bf16')) == {}


def test_paths_come_in_the_order_of_the_layers():
  params = {f'layers_{i}': {'kernel': jnp.ones((1, 1))} for i in (10, 2, 1)}
  state = scaling_state.init_state(params, RECIPE)
  assert scaling_state.dot_paths(state) == [
      'layers_1',
      'layers_2',
      'layers_10',
  ]


@pytest.mark.parametrize('amax', [0.0, np.nan, np.inf])
def test_an_amax_that_says_nothing_is_never_recorded(amax):
  state = scaling_state.observe(one_dot_state(), seen(2.0, 3.0))
  state = scaling_state.observe(state, seen(amax, amax))
  assert history(state) == [2, 0, 0, 0]
  assert history(state, 'output_grad') == [3, 0, 0, 0]
  rolled = scaling_state.roll(
      one_dot_state(), RECIPE, operands=scaling_state.OPERANDS
  )
  assert_equal_trees(rolled, one_dot_state())


def test_a_kernel_of_zeros_or_nan_leaves_its_dot_state_alone():
  for value in (0.0, np.nan):
    params = {'dot': {'kernel': jnp.full((2, 2), value)}}
    state = scaling_state.observe_kernels(
        one_dot_state(), params, RECIPE, Axes()
    )
    assert_equal_trees(state, one_dot_state())


def test_entry_0_is_the_maximum_of_all_observations_until_the_roll():
  state = one_dot_state()
  for amax in (2.0, 5.0, 3.0):
    state = scaling_state.observe(state, seen(amax, 1.0))
  assert history(state) == [5, 0, 0, 0]


def test_a_layer_shows_one_array_in_which_each_dot_finds_its_numbers():
  layer = {'mlp': {'down': shown(1.0, 2.0, 7.0), 'gate_up': shown(3.0, 4.0)}}
  observed = scaling_state.stack_observations({'layers_0': layer})['layers_0']
  assert observed[..., 0].tolist() == [[1, 3], [2, 4]]
  assert observed[..., 1:].tolist() == [[[7] * 5, [0] * 5]] * 2
  empty = jax.tree.map(jnp.zeros_like, layer)
  assert_equal_trees(scaling_state.observe(empty, observed), layer)


def test_a_roll_shifts_and_forgets_the_oldest():
  state = one_dot_state()
  expected = [
      [0, 1, 0, 0],
      [0, 2, 1, 0],
      [0, 3, 2, 1],
      # Entry 0 is being filled, so a history of 4 remembers 3 rolls.
      [0, 4, 3, 2],
  ]
  for i, row in enumerate(expected):
    state = scaling_state.observe(state, seen(i + 1.0, 1.0))
    state = scaling_state.roll(state, RECIPE, operands=('input',))
    assert history(state) == row


def test_a_scale_waits_for_the_roll_and_covers_the_whole_history():
  state = scaling_state.observe(one_dot_state(), seen(1000.0, 1.0))
  assert state['dot']['input']['scale'] == 1
  state = scaling_state.roll(state, RECIPE, operands=('input',))
  assert state['dot']['input']['scale'] == 4  # 1000 / 448 = 2.23, up to 4.
  scales = []
  for _ in range(4):
    state = scaling_state.observe(state, seen(1.0, 1.0))
    state = scaling_state.roll(state, RECIPE, operands=('input',))
    scales.append(float(state['dot']['input']['scale']))
  # A history of 4: the entry just filled and the three before it.
  assert scales == [4, 4, 4, 2.0**-8]  # 1 / 448, up.


def test_a_roll_touches_only_the_operands_it_names():
  before = scaling_state.observe(one_dot_state(), seen(1000.0, 1000.0))
  after = scaling_state.roll(before, RECIPE, operands=('output_grad',))
  assert_equal_trees(after['dot']['input'], before['dot']['input'])
  assert_equal_trees(after['dot']['kernel'], before['dot']['kernel'])
  assert after['dot']['output_grad']['scale'] == 4


def test_output_gradients_are_scaled_for_their_own_format():
  state = scaling_state.observe(one_dot_state(), seen(57344.0, 57344.0))
  recipe = Recipe(amax_history_length=4, grad_format='e5m2')
  state = scaling_state.roll(state, recipe, operands=('input', 'output_grad'))
  assert state['dot']['output_grad']['scale'] == 1
  assert state['dot']['input']['scale'] == 128  # 57344 / 448


def test_a_layer_that_was_not_reached_keeps_its_history():
  state = scaling_state.observe(one_dot_state(), seen(1000.0, 1.0))
  state = scaling_state.roll(state, RECIPE, operands=scaling_state.OPERANDS)
  for _ in range(10):
    state = scaling_state.observe(state, seen(0.0, 0.0))
    state = scaling_state.roll(state, RECIPE, operands=scaling_state.OPERANDS)
  assert history(state) == [0, 1000, 0, 0]
  assert state['dot']['input']['scale'] == 4
  # Also where the amax that the scale is made of has left the history.
  for _ in range(3):
    state = scaling_state.observe(state, seen(1.0, 1.0))
    state = scaling_state.roll(state, RECIPE, operands=scaling_state.OPERANDS)
  assert history(state) == [0, 1, 1, 1]
  assert_equal_trees(
      scaling_state.roll(state, RECIPE, operands=scaling_state.OPERANDS), state
  )


def test_observing_changes_inputs_and_output_gradients_only():
  before = one_dot_state()
  after = scaling_state.observe(before, seen(2.0, 3.0, health=7.0))
  assert_equal_trees(after['dot']['kernel'], before['dot']['kernel'])
  for operand in ('input', 'output_grad'):
    assert after['dot'][operand]['scale'] == before['dot'][operand]['scale']
    assert after['dot'][operand]['health'].tolist() == [7] * 5


def test_what_is_forgotten_is_one_history_and_no_scale():
  state = scaling_state.observe(one_dot_state(), seen(1000.0, 3.0))
  state = scaling_state.roll(state, RECIPE, operands=scaling_state.OPERANDS)
  forgot = scaling_state.forget(state, operand='input')
  assert history(forgot) == [0, 0, 0, 0]
  assert forgot['dot']['input']['scale'] == 4
  for operand in ('kernel', 'output_grad'):
    assert_equal_trees(forgot['dot'][operand], state['dot'][operand])
  # A dynamic recipe has none.
  dynamic = {'dot': scaling_state.init_dynamic_dot_state()}
  assert_equal_trees(scaling_state.forget(dynamic, operand='input'), dynamic)


def test_health_is_that_of_the_last_step():
  state = scaling_state.observe(one_dot_state(), seen(1.0, 1.0, health=7.0))
  state = scaling_state.observe(state, seen(1.0, 1.0, health=2.0))
  assert state['dot']['input']['health'].tolist() == [2] * 5


def _dot_observations():
  """A compiled (rows, output gradients, mask) -> [operand, amax|health]."""
  kernel = np.random.default_rng(1).normal(size=(24, 32)).astype(np.float32)
  params, dot_state = {'dot': {'kernel': kernel}}, one_dot_state()
  dot_state = scaling_state.observe_kernels(dot_state, params, RECIPE, Axes())
  weight = prepare_weights(params, dot_state, RECIPE)['dot']['kernel']

  def observed(x, dy, mask):
    def run(state):
      return linear.dot(RECIPE, x, kernel, weight, state['dot'], mask)

    return scaling_state.stack_observations(jax.vjp(run, dot_state)[1](dy)[0])

  return exact_jit(observed)


def test_one_to_sixteen_micro_batches_join_to_what_one_batch_sees():
  observed, combine = _dot_observations(), exact_jit(scaling_state.combine)
  rng = np.random.default_rng(0)
  x, dy = rng.normal(size=(256, 32)), rng.normal(size=(256, 24))
  # The largest are neither in the first nor in the last micro-batch.
  x[100, 3], dy[150, 5] = 2000, -1000

  def seen_by(rows):
    """Rows padded to the compiled shape."""

    def pad(a):
      a = np.pad(a[rows], ((0, 256 - len(rows)), (0, 0)))
      return a.astype(jnp.bfloat16)

    mask = (np.arange(256) < len(rows)).astype(np.float32)
    return observed(pad(x), pad(dy), mask)

  whole = seen_by(np.arange(256))['dot']
  assert whole[:, 0, 0].tolist() == [2000, 1000]
  for parts in range(1, 17):
    split = [seen_by(rows) for rows in np.array_split(np.arange(256), parts)]
    joined = functools.reduce(combine, split)['dot']
    # Amaxes and counts are exact; powers are float32 sums in another order.
    np.testing.assert_array_equal(joined[..., :4], whole[..., :4])
    np.testing.assert_allclose(joined, whole, rtol=256 * 32 * 2.0**-24)
    if parts > 2:
      # What a sum, or keeping the first or last one only, would have given.
      amaxes = [piece['dot'][0, 0, 0] for piece in split]
      assert sum(amaxes) > 2000 > max(amaxes[0], amaxes[-1])


def test_joining_does_not_depend_on_the_order():
  pieces = [seen(a, b, a) for a, b in ((3.0, 1.0), (0.0, 9.0), (5.0, 4.0))]
  forward = scaling_state.combine(
      scaling_state.combine(pieces[0], pieces[1]), pieces[2]
  )
  backward = scaling_state.combine(
      scaling_state.combine(pieces[2], pieces[1]), pieces[0]
  )
  assert_equal_trees(forward, backward)
  assert forward['dot'][:, 0].tolist() == [[5, *[8] * 5], [9, *[8] * 5]]


def test_a_kernel_never_saturates_however_it_jumps():
  state, rng = one_dot_state(), np.random.default_rng(0)
  for growth in (1.0, 1e3, 1e-6, 0.0, 1e9, 1e-20, 1e20):
    kernel = growth * rng.normal(size=(16, 8)).astype(np.float32)
    params = {'dot': {'kernel': kernel}}
    state = scaling_state.observe_kernels(state, params, RECIPE, Axes())
    q = prepare_weights(params, state, RECIPE)['dot']['kernel']
    assert np.abs(kernel).max() <= 448 * q.scale
    assert state['dot']['kernel']['scale'] == q.scale


def test_the_health_of_a_kernel_by_hand():
  # amax 449 gives scale 2. 449 is stored as 224 (spacing 16): noise 1. 2^-10
  # becomes 0: noise 2^-20. 16 is exact.
  params = {'dot': {'kernel': jnp.asarray([[449.0, 2.0**-10], [16.0, 0.0]])}}
  state = scaling_state.observe_kernels(one_dot_state(), params, RECIPE, Axes())
  weights = prepare_weights(params, state, RECIPE)
  state = scaling_state.measure_kernels(state, params, weights, Axes())
  noise = 1 + 2.0**-20
  np.testing.assert_allclose(
      state['dot']['kernel']['health'],
      [4, 0, 1, 449**2 + 16**2 + 2.0**-20, noise],
      rtol=1e-6,
  )
  assert not np.any(state['dot']['input']['health'])


def test_the_current_kernel_is_on_its_own_scale_at_once():
  params = {'dot': {'kernel': jnp.full((2, 2), -449.0)}}
  state = scaling_state.observe_kernels(one_dot_state(), params, RECIPE, Axes())
  assert state['dot']['kernel']['scale'] == 2
  assert history(state, 'kernel') == [0, 449, 0, 0]
  assert state['dot']['input']['scale'] == 1


def test_the_optimiser_has_no_leaf_of_the_dot_states():
  moments = optax.adam(1e-3).init(PARAMS)
  names = {
      str(getattr(key, 'key', key))
      for path, _ in jax.tree_util.tree_leaves_with_path(moments)
      for key in path
  }
  assert 'kernel' in names
  assert not names & {'amax_history', 'health', 'input', 'output_grad'}
  slotted = {
      jax.tree_util.keystr(path)
      for path, _ in jax.tree_util.tree_leaves_with_path(
          scaling_state.init_state(PARAMS, RECIPE)
      )
  }
  masters = {
      jax.tree_util.keystr(path)
      for path, _ in jax.tree_util.tree_leaves_with_path(PARAMS)
  }
  assert slotted and not slotted & masters


def test_adding_two_uses_in_one_derivative_would_be_wrong():
  # Why micro-batches are differentiated one by one: two uses of a dot state
  # within one jax.grad add their amaxes.
  state, kernel = one_dot_state(), jnp.ones((16, 16))
  weight = prepare_weights({'dot': {'kernel': kernel}}, state, RECIPE)
  x = jnp.full((16, 16), 3.0, jnp.bfloat16)

  def twice(s):
    args = (kernel, weight['dot']['kernel'], s['dot'], jnp.ones(16))
    return jnp.sum(linear.dot(RECIPE, x, *args) + linear.dot(RECIPE, x, *args))

  found = exact_jit(jax.grad(twice))(state)['dot']['input']['amax_history'][0]
  assert found == 6.0
