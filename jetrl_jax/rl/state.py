"""Builds and restores training states; calibrates a cold start."""

import dataclasses
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import traverse_util
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jetrl_jax import fp8, sharding
from jetrl_jax.compilation import exact_jit
from jetrl_jax.fp8 import slots
from jetrl_jax.rl.policy import Policy
from jetrl_jax.rl.train_step import TrainStep, merge
from jetrl_jax.rl.types import TrainBatch, TrainState
from jetrl_jax.typing import PyTree


def partition(
    params: PyTree, frozen_patterns: tuple[str, ...]
) -> tuple[PyTree, PyTree]:
  """Splits masters into (trainable, frozen) by regular expressions.

  Args:
    params: nested dict of masters.
    frozen_patterns: matched in full against paths like 'embed/embedding'.

  Raises:
    ValueError: a pattern matches nothing, or everything is frozen.
  """
  flat = traverse_util.flatten_dict(params, sep='/')
  matches = {
      pattern: {p for p in flat if re.fullmatch(pattern, p)}
      for pattern in frozen_patterns
  }
  empty = [pattern for pattern, paths in matches.items() if not paths]
  if empty:
    raise ValueError(
        f'model.freeze: {empty} match no parameter; paths look like'
        f' {sorted(flat)[:3]}'
    )
  frozen = set().union(*matches.values())
  if len(frozen) == len(flat):
    raise ValueError('model.freeze matches every parameter; nothing to train')
  build = lambda paths: traverse_util.unflatten_dict(
      {p: flat[p] for p in flat if p in paths}, sep='/'
  )
  return build(set(flat) - frozen), build(frozen)


def create(
    policy: Policy,
    params: PyTree,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    frozen_patterns: tuple[str, ...] = (),
) -> TrainState:
  """Returns the state of a cold start: slots empty but for the kernels.

  Args:
    policy: its recipe decides what is quantised.
    params: masters on their devices; the state takes them over.
    optimizer: its moments start at zero.
    mesh: where new leaves go.
    frozen_patterns: see `partition`.
  """
  trainable, frozen = partition(params, frozen_patterns)
  whole = NamedSharding(mesh, P())
  fp8_state = jax.device_put(slots.init_state(params, policy.recipe), whole)
  opt_shapes = jax.eval_shape(optimizer.init, trainable)
  opt_state = jax.jit(
      optimizer.init, out_shardings=sharding.tree_shardings(opt_shapes, mesh)
  )(trainable)
  state = TrainState(
      trainable=trainable,
      frozen=frozen,
      fp8_state=fp8_state,
      opt_state=opt_state,
      weights={},
      opt_step=jax.device_put(jnp.zeros((), jnp.int32), whole),
  )
  return with_weights(policy, state, mesh, record=True)


def with_weights(
    policy: Policy, state: TrainState, mesh: Mesh, *, record: bool
) -> TrainState:
  """Returns the state with `weights` made from its masters.

  Args:
    policy: its recipe.
    state: whose `weights` are replaced.
    mesh: devices.
    record: first record the kernels' amaxes (a cold start). A restored state
      has its kernel scales already, and recording would be a second time.
  """

  def make(trainable, frozen, fp8_state):
    params = merge(trainable, frozen)
    if record:
      fp8_state = slots.observe_kernels(
          fp8_state, params, policy.recipe, policy.axes
      )
    return fp8_state, fp8.prepare_weights(params, fp8_state, policy.recipe)

  specs = [
      sharding.tree_specs(tree, mesh)
      for tree in (state.trainable, state.frozen, state.fp8_state)
  ]
  # Shapes outside shard_map: the axes' collectives must not be traced there.
  shapes = jax.eval_shape(
      lambda t, f, s: fp8.prepare_weights(merge(t, f), s, policy.recipe),
      state.trainable,
      state.frozen,
      state.fp8_state,
  )
  run = sharding.per_device(
      make, mesh, tuple(specs), (specs[2], sharding.tree_specs(shapes, mesh))
  )
  fp8_state, weights = exact_jit(run)(
      state.trainable, state.frozen, state.fp8_state
  )
  return dataclasses.replace(state, fp8_state=fp8_state, weights=weights)


def calibrate(
    policy: Policy,
    state: TrainState,
    batches: list[TrainBatch],
    temperature: float,
    mesh: Mesh,
    loss_function: Callable,
) -> TrainState:
  """Fills the input and output-gradient slots from one discarded backward.

  The pass computes in the compute dtype with the weights that training will
  use, so that what one layer's empty slot would do to the next is never
  measured. Nothing but the slots changes.

  Args:
    policy: the flow's policy.
    state: whose slots are filled; kernel slots are filled already.
    batches: micro-batches of real tokens.
    temperature: of pi.
    mesh: devices.
    loss_function: the objective, for the size of its gradients.
  """
  recipe = dataclasses.replace(policy.recipe, calibrating=True)
  step = TrainStep(
      dataclasses.replace(policy, recipe=recipe),
      loss_function,
      optax.identity(),
      None,
      mesh,
      state,
  )
  gradients = step.zero_gradients(state)
  for batch in batches:
    gradients, _, _ = step.accumulate(
        state, gradients, batch, jnp.float32(temperature)
    )

  def take_effect(fp8_state, cotangents):
    observed = slots.observe(fp8_state, cotangents)
    return slots.roll(
        observed, policy.recipe, operands=('input', 'output_grad')
    )

  fp8_state = exact_jit(take_effect)(state.fp8_state, gradients.fp8)
  return dataclasses.replace(state, fp8_state=fp8_state)
