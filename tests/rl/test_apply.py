"""Tests of what one optimiser step compiles, and of its arithmetic."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jetrl_jax import sharding
from jetrl_jax.metrics import Mean
from jetrl_jax.rl.apply import Apply, Gradients
from jetrl_jax.rl.optimizer import OptimizerConfig
from jetrl_jax.rl.types import TrainState
from tests.rl import tiny_run


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
      fp8=state.fp8_state,
      metrics={'actor/pg_loss': Mean(sum=scalar, weight=scalar)},
  )
  made = Apply(policy, optimizer, config, mesh, state, gradients)
  return made, state, gradients


def test_all_layers_share_one_program():
  made, state, gradients = _shapes(layers=5)
  calls = {name: count for name, count, _ in made.lowered(state, gradients)}
  assert calls == {
      'judge': 1,
      'move embed': 1,
      'move final_norm': 1,
      'move layers_0': 5,
      'clear': 1,
  }


def test_a_layer_in_high_precision_has_a_program_of_its_own():
  recipe = dataclasses.replace(
      tiny_run.FP8, high_precision_layers=('layers_1/.*',)
  )
  made, state, gradients = _shapes(3, recipe)
  calls = [count for _, count, _ in made.lowered(state, gradients)]
  assert sorted(calls) == [1, 1, 1, 1, 1, 2]


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
