"""Tests of an optimiser step: what it compiles, computes and refuses."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jetrl_jax.core import sharding
from jetrl_jax.fp8 import scaling_state
from jetrl_jax.metrics.writer import Mean
from jetrl_jax.optim.adamw import OptimizerConfig
from jetrl_jax.optim.apply import Apply, Gradients
from jetrl_jax.optim.types import TrainState, merge
from jetrl_jax.rl.run import train_state
from tests.rl import tiny_run, tiny_updates


def _shapes(
    layers: int, recipe=tiny_run.FP8, config=None, optimizer=None
) -> tuple[Apply, TrainState, Gradients]:
  """Returns (Apply, state, gradients) of shapes: nothing is compiled."""
  mesh = sharding.make_mesh()
  policy = tiny_run.policy(recipe, mesh, layers=layers)
  config = config or OptimizerConfig()
  optimizer = optimizer or config.build()
  state = tiny_run.state_shapes(policy)
  state = dataclasses.replace(
      state, opt_state=jax.eval_shape(optimizer.init, state.trainable)
  )
  scalar: Any = jax.ShapeDtypeStruct((), jnp.float32)
  gradients = Gradients(
      trainable=state.trainable,
      fp8=jax.eval_shape(scaling_state.stack_observations, state.fp8_state),
      metrics={'actor/pg_loss': Mean(sum=scalar, weight=scalar)},
  )
  made = Apply(policy, optimizer, config, mesh, state)
  return made, state, gradients


def test_all_layers_share_one_program():
  made, state, gradients = _shapes(layers=5)
  calls = {name: count for name, count, _ in made.lowered(state, gradients)}
  assert calls == {
      'check_and_clip': 1,
      'update embed': 1,
      'update final_norm': 1,
      'update layers_0': 5,
  }


def test_a_layer_in_high_precision_has_a_program_of_its_own():
  recipe = dataclasses.replace(
      tiny_run.FP8, high_precision_layers=('layers_1/.*',)
  )
  made, state, gradients = _shapes(3, recipe)
  calls = [count for _, count, _ in made.lowered(state, gradients)]
  assert sorted(calls) == [1, 1, 1, 1, 2]


def test_with_float32_moments_the_programs_are_those_of_optax_adamw():
  config = OptimizerConfig(lr=1e-3, moments='float32')
  theirs = optax.adamw(
      config.learning_rate,
      *config.betas,
      config.eps,
      weight_decay=config.weight_decay,
      mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params),
  )
  programs = []
  for optimizer in (config.build(), theirs):
    made, state, gradients = _shapes(1, optimizer=optimizer, config=config)
    lowered = made.lowered(state, gradients)
    programs.append([program.as_text() for _, _, program in lowered])
  # The same operations on the same shapes: the same bits.
  assert programs[0] == programs[1]


def test_merge_joins_what_partition_split():
  trainable = {'a': {'x': 1}, 'b': {'c': {'y': 2}}}
  frozen = {'b': {'c': {'z': 3}, 'd': 4}, 'e': 5}
  assert merge(trainable, frozen) == {
      'a': {'x': 1},
      'b': {'c': {'y': 2, 'z': 3}, 'd': 4},
      'e': 5,
  }
  assert trainable == {'a': {'x': 1}, 'b': {'c': {'y': 2}}}


@functools.cache
def _applied():
  run = tiny_run.fp8_run()
  return run.apply(run.start, tiny_updates.whole()[0])


@pytest.mark.parametrize('made', [tiny_run.fp8_run, tiny_run.bf16_run])
def test_nothing_that_apply_was_given_stays_in_memory(made):
  run = made()
  state = tiny_run.copy(run.start)
  gradients = run.step.zero_gradients(state)
  after, _ = run.step.apply(state, gradients)
  passed_on = {id(leaf) for leaf in jax.tree.leaves(after)}
  stays = [
      jax.tree_util.keystr(path)
      for path, leaf in jax.tree_util.tree_leaves_with_path((state, gradients))
      if leaf.ndim and id(leaf) not in passed_on and not leaf.is_deleted()
  ]
  assert not stays


def test_apply_counts_its_steps():
  state, info = _applied()
  assert int(state.opt_step) == 1
  assert bool(info.applied)
  assert float(info.lr) == np.float32(1e-3)
  assert float(info.metrics['actor/pg_loss'].weight) == 1.0


def test_the_gradient_norm_is_over_all_masters():
  _, info = _applied()
  squares = sum(
      np.square(leaf.astype(np.float64)).sum()
      for leaf in tiny_run.leaves(tiny_updates.whole()[0].trainable)
  )
  np.testing.assert_allclose(
      float(info.grad_norm), math.sqrt(squares), rtol=1e-6
  )


def test_the_optimiser_does_not_see_the_fp8_state():
  run = tiny_run.fp8_run()
  moments = jax.tree.structure(
      run.start.opt_state[0].mu,
      is_leaf=lambda x: not isinstance(x, dict),
  )
  assert moments == jax.tree.structure(run.start.trainable)
  names = {
      str(key)
      for path, _ in jax.tree_util.tree_leaves_with_path(run.start.opt_state)
      for key in path
  }
  assert not [n for n in names if 'amax' in n or 'output_grad' in n]
  # Nor do its observations reach the masters, the moments or the norm.
  gradients = tiny_updates.whole()[0]
  louder = dataclasses.replace(
      gradients, fp8=jax.tree.map(lambda x: 3 * x, gradients.fp8)
  )
  state, info = run.apply(run.start, louder)
  expected, expected_info = _applied()
  tiny_run.assert_same_bits(state.trainable, expected.trainable)
  tiny_run.assert_same_bits(state.opt_state, expected.opt_state)
  assert info.grad_norm == expected_info.grad_norm


def _slots(state, operand, key):
  return {
      (name, dot): slot[operand][key]
      for name, part in state.fp8_state['layers_0'].items()
      for dot, slot in part.items()
  }


def test_input_scales_move_in_roll_inputs_and_not_in_apply():
  run = tiny_run.fp8_run()
  gradients = tiny_updates.whole()[0]
  # Inputs eight times as large as those the scales were made for.
  louder = dataclasses.replace(
      gradients, fp8=jax.tree.map(lambda x: 8 * x, gradients.fp8)
  )
  state, _ = run.apply(run.start, louder)
  rolled = dataclasses.replace(
      state, fp8_state=run.step.roll_inputs(state.fp8_state)
  )
  for place, scale in _slots(run.start, 'input', 'scale').items():
    assert _slots(state, 'input', 'scale')[place] == scale
    assert _slots(rolled, 'input', 'scale')[place] == 8 * scale
    waiting = _slots(state, 'input', 'amax_history')[place]
    shifted = _slots(rolled, 'input', 'amax_history')[place]
    assert waiting[0] > 0 and shifted[0] == 0
    assert shifted[1] == waiting[0]
  for operand in ('kernel', 'output_grad'):
    for key in ('scale', 'amax_history'):
      tiny_run.assert_same_bits(
          list(_slots(rolled, operand, key).values()),
          list(_slots(state, operand, key).values()),
      )


def test_output_gradient_scales_move_in_apply():
  run = tiny_run.fp8_run()
  gradients = tiny_updates.whole()[0]
  louder = dataclasses.replace(
      gradients, fp8=jax.tree.map(lambda x: 64 * x, gradients.fp8)
  )
  state, _ = run.apply(run.start, louder)
  quiet, _ = _applied()
  for place, scale in _slots(quiet, 'output_grad', 'scale').items():
    assert _slots(state, 'output_grad', 'scale')[place] == 64 * scale
    history = _slots(state, 'output_grad', 'amax_history')[place]
    assert history[0] == 0 and history[1] > 0


def test_kernels_never_saturate_after_an_update():
  for update in tiny_updates.updates('fp8'):
    state = update.after
    masters = state.trainable['layers_0']
    for (name, dot), scale in _slots(state, 'kernel', 'scale').items():
      largest = float(jnp.abs(masters[name][dot]['kernel']).max())
      # E4M3 ends at 448; the scale is the next power of two.
      assert largest <= 448 * float(scale) < 2 * largest * (1 + 1e-6) or (
          # An older amax of the history may be larger.
          float(_slots(state, 'kernel', 'amax_history')[name, dot].max())
          > largest
      )


def _poison_leaf(tree, value):
  leaves, structure = jax.tree.flatten(tree)
  leaves[-1] = leaves[-1].at[(0,) * leaves[-1].ndim].set(value)
  return structure.unflatten(leaves)


@pytest.mark.parametrize('value', [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize('recipe', ['fp8', 'bf16'])
def test_a_gradient_that_is_not_finite_changes_nothing(recipe, value):
  run, (update, *_) = (
      {'fp8': tiny_run.fp8_run, 'bf16': tiny_run.bf16_run}[recipe](),
      tiny_updates.updates(recipe),
  )
  gradients = dataclasses.replace(
      update.gradients,
      trainable=_poison_leaf(update.gradients.trainable, value),
  )
  for before in (update.before, update.after):
    state, info = run.apply(before, gradients)
    assert not bool(info.applied)
    tiny_run.assert_same_bits(state, before)
    assert not any(leaf.any() for leaf in tiny_run.leaves(info.changed_bytes))
  # The next one goes through as if nothing had been.
  state, info = run.apply(state, update.gradients)
  assert bool(info.applied) and int(state.opt_step) == 2


@pytest.mark.parametrize('value', [np.nan, np.inf])
def test_a_loss_that_is_not_finite_changes_nothing(value):
  run = tiny_run.fp8_run()
  batch = tiny_updates.batches(tiny_run.completions())[0]
  place = tuple(np.argwhere(batch.loss_mask > 0)[3])
  advantages = batch.advantages.copy()
  advantages[place] = value
  gradients, _ = run.accumulate(
      run.start, [dataclasses.replace(batch, advantages=advantages)]
  )
  state, info = run.apply(run.start, gradients)
  assert not np.isfinite(float(info.metrics['actor/pg_loss'].sum))
  assert not bool(info.applied)
  tiny_run.assert_same_bits(state, run.start)


def test_a_loss_alone_that_is_not_finite_is_enough():
  run = tiny_run.fp8_run()
  gradients = tiny_updates.whole()[0]
  metrics = dict(gradients.metrics)
  loss = metrics['actor/pg_loss']
  metrics['actor/pg_loss'] = dataclasses.replace(loss, sum=loss.sum * np.nan)
  state, info = run.apply(
      run.start, dataclasses.replace(gradients, metrics=metrics)
  )
  assert not bool(info.applied)
  tiny_run.assert_same_bits(state, run.start)


def test_the_reported_learning_rate_is_the_one_that_moves_the_masters():
  mesh = sharding.make_mesh()
  policy = tiny_run.policy(tiny_run.BF16, mesh)
  config = OptimizerConfig(
      lr=2.0**-6,
      weight_decay=0.0,
      grad_clip=1e9,
      lr_warmup_steps=4,
      moments='float32',
  )
  optimizer, masters = config.build(), {'layers_0': {'norm': jnp.zeros(16)}}
  masters = jax.device_put(masters, sharding.tree_shardings(masters, mesh))
  state = train_state.create(policy, masters, optimizer, mesh)
  apply = Apply(policy, optimizer, config, mesh, state)
  rates, places = [], [0.0]
  # The second update is skipped, and the third has its rate.
  for value in (1.0, np.nan, 1.0, 1.0):
    loss = Mean(sum=jnp.zeros(()), weight=jnp.zeros(()))
    gradients = Gradients(
        trainable={'layers_0': {'norm': jnp.full(16, value)}},
        fp8={},
        metrics={'actor/pg_loss': loss},
    )
    state, info = apply(tiny_run.copy(state), gradients)
    rates.append(float(info.lr))
    places.append(float(state.trainable['layers_0']['norm'][0]))
  quarter = 2.0**-6 / 4
  np.testing.assert_allclose(rates, quarter * np.array([1, 2, 2, 3]), rtol=1e-6)
  # Of equal gradients Adam moves by the rate itself.
  moved = -np.diff(places)
  np.testing.assert_allclose(moved, quarter * np.array([1, 0, 2, 3]), rtol=1e-4)


def test_frozen_masters_stay_and_have_no_moments():
  first, *_, last = tiny_updates.updates('bf16')
  assert list(first.before.frozen) == ['embed']
  tiny_run.assert_same_bits(last.after.frozen, first.before.frozen)
  tiny_run.assert_same_bits(
      last.after.weights['embed'], first.before.weights['embed']
  )
  assert 'embed' not in last.after.trainable
  assert 'embed' not in last.after.opt_state[0].mu
  for old, new in zip(
      tiny_run.leaves(first.before.trainable),
      tiny_run.leaves(last.after.trainable),
      strict=True,
  ):
    assert np.any(old != new)


@pytest.mark.parametrize('factor', [1e-2, 1.0, 1e3])
def test_the_clip_bounds_the_global_norm_and_leaves_small_ones(factor):
  run, (update, *_) = tiny_run.bf16_run(), tiny_updates.updates('bf16')
  gradients = jax.tree.map(lambda x: x * factor, update.gradients.trainable)
  state, info = run.apply(
      run.start, dataclasses.replace(update.gradients, trainable=gradients)
  )
  norm = float(info.grad_norm)
  # mu = (1 - 0.9) * what the optimiser saw.
  seen = [leaf / 0.1 for leaf in tiny_run.leaves(state.opt_state[0].mu)]
  total = math.sqrt(sum(np.square(leaf).sum() for leaf in seen))
  clip = run.config.grad_clip
  assert (norm > clip) == (factor >= 1.0)
  np.testing.assert_allclose(total, min(norm, clip), rtol=2e-5)
  shrink = min(1.0, clip / norm)
  for leaf, gradient in zip(seen, tiny_run.leaves(gradients), strict=True):
    np.testing.assert_allclose(
        leaf, gradient * shrink, rtol=2e-5, atol=1e-9 * factor
    )


def test_the_weights_are_quantised_from_the_masters_once():
  for update in tiny_updates.updates('fp8'):
    state = update.after
    masters = state.trainable['layers_0']
    for (name, dot), scale in _slots(state, 'kernel', 'scale').items():
      weight = state.weights['layers_0'][name][dot]['kernel']
      assert float(weight.scale) == float(scale)
      quantised = (masters[name][dot]['kernel'] / scale).astype(
          jnp.float8_e4m3fn
      )
      tiny_run.assert_same_bits(weight.values, quantised)
