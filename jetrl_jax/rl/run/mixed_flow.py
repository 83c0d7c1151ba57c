"""The rollout's own weights and scales in a mixed flow.

In a unified flow the rollout reads the arrays that the training forward reads.
In a mixed flow (FlashRL, QuRL) it runs another recipe on the same masters. Its
dots are really quantised, and its weights are quantised again after each
training step. There are then three policies: mu, which sampled; pi_old, the
training forward at the same masters; and pi, which the step updates.

Delayed scales need observations of the inputs, and in training the backward
pass returns them. The rollout has no backward pass. So its recipe runs once
more over the step's own sequences, row by row with the same numbers as during
sampling, and the scales move as they would in a unified flow. A dynamic recipe
has no scaling state for inputs and needs no such pass, except at a cold start
that chooses dots by their health.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jetrl_jax import kernels
from jetrl_jax.core import sharding
from jetrl_jax.core.typing import PyTree
from jetrl_jax.fp8 import Recipe, scaling_state
from jetrl_jax.fp8.recipes import LM_HEAD
from jetrl_jax.kernels.requantize import changed_share
from jetrl_jax.models.policy import Policy, PolicyParams
from jetrl_jax.optim.types import TrainState, merge
from jetrl_jax.rl.run import train_state
from jetrl_jax.rl.types import TrainBatch


def rollout_params(state: TrainState) -> PolicyParams:
  """Returns the rollout's params; in a unified flow they are training's."""
  if state.rollout_weights:
    return PolicyParams(state.rollout_weights, state.rollout_fp8_state)
  return PolicyParams(state.weights, state.fp8_state)


def as_rollout(state: TrainState) -> TrainState:
  """Returns a state with the rollout's weights and scales; it cannot train."""
  return dataclasses.replace(
      state,
      fp8_state=state.rollout_fp8_state,
      weights=state.rollout_weights,
      opt_state=(),
      rollout_fp8_state={},
      rollout_weights={},
  )


def create(policy: Policy, state: TrainState, mesh: Mesh) -> TrainState:
  """Adds the rollout's weights and scales to a cold start's state.

  Only the kernels have scales so far.

  Args:
    policy: the rollout's policy.
    state: the result of `train_state.create`.
    mesh: devices of the new arrays.
  """
  empty = scaling_state.init_state(state.masters, policy.recipe)
  empty = jax.device_put(empty, NamedSharding(mesh, P()))
  state = dataclasses.replace(state, rollout_fp8_state=empty)
  return with_weights(policy, state, mesh, record=True)


def with_weights(
    policy: Policy, state: TrainState, mesh: Mesh, *, record: bool
) -> TrainState:
  """Quantises the masters for the rollout; see `train_state.with_weights`."""
  side = train_state.with_weights(
      policy, as_rollout(state), mesh, record=record
  )
  return dataclasses.replace(
      state, rollout_fp8_state=side.fp8_state, rollout_weights=side.weights
  )


def measured_operands(recipe: Recipe) -> tuple[str, ...]:
  """Returns the operands whose health the rollout's scaling state holds."""
  return ('input', 'kernel') if recipe.is_delayed else ('kernel',)


class Requantizer:
  """Quantises the masters for the rollout again after each training step.

  Args:
    policy: the rollout's policy.
    mesh: devices.
    state: an example, with the rollout's weights and scales.
  """

  def __init__(self, policy: Policy, mesh: Mesh, state: TrainState):
    # Without a backward pass there is nothing to rematerialise.
    policy = dataclasses.replace(policy, remat='none')
    calibrating = dataclasses.replace(
        policy, recipe=dataclasses.replace(policy.recipe, calibrating=True)
    )
    side = as_rollout(state)
    self._recipe = policy.recipe
    specs = sharding.tree_specs(side, mesh)

    def observing(policy):
      return policy.jit_per_device(
          functools.partial(_observed_inputs, policy),
          mesh,
          (specs, sharding.ROWS),
          P(),
      )

    self._observed_inputs = observing(policy)
    self._observed_inputs_calibrating = observing(calibrating)
    self._record = policy.jit_per_device(
        functools.partial(_record, policy),
        mesh,
        (specs.fp8_state, P()),
        specs.fp8_state,
    )
    self._requantize = policy.jit_per_device(
        functools.partial(_requantize, policy),
        mesh,
        (specs.trainable, specs.frozen, specs.fp8_state, specs.weights),
        (specs.fp8_state, specs.weights, P()),
        donate_argnums=(2, 3),
    )

  def calibrate(
      self, state: TrainState, batches: list[TrainBatch]
  ) -> TrainState:
    """Fills the input scales of a cold start, as `Calibration` does.

    Args:
      state: its rollout has kernel scales already.
      batches: micro-batches of real tokens.
    """
    if not self._recipe.needs_calibration:
      return state
    return self._observe(self._observed_inputs_calibrating, state, batches)

  def measure(self, state: TrainState, batches: list[TrainBatch]) -> TrainState:
    """Returns the state with the health that its input scales give.

    Args:
      state: its rollout's scales are filled.
      batches: the sequences that filled them.
    """
    if not self._recipe.needs_calibration:
      return state
    observed = self._seen(self._observed_inputs_calibrating, state, batches)
    measured = scaling_state.observe_health(state.rollout_fp8_state, observed)
    return dataclasses.replace(state, rollout_fp8_state=measured)

  def __call__(
      self, state: TrainState, batches: list[TrainBatch]
  ) -> tuple[TrainState, PyTree]:
    """Updates the rollout's scales and weights from the masters.

    Args:
      state: the state after the updates. Its rollout weights and scales are
        still those that sampled; they are donated.
      batches: the sequences that they sampled, in micro-batches.

    Returns:
      (state, share of 8-bit weight bytes that changed, nested like the scaling
       state).
    """
    if self._recipe.is_delayed:
      state = self._observe(self._observed_inputs, state, batches)
    fp8_state, weights, changed = self._requantize(
        state.trainable,
        state.frozen,
        state.rollout_fp8_state,
        state.rollout_weights,
    )
    state = dataclasses.replace(
        state, rollout_fp8_state=fp8_state, rollout_weights=weights
    )
    return state, sharding.fetch(changed)

  def _observe(self, observed_inputs, state, batches) -> TrainState:
    observed = self._seen(observed_inputs, state, batches)
    recorded = self._record(state.rollout_fp8_state, observed)
    return dataclasses.replace(state, rollout_fp8_state=recorded)

  def _seen(self, observed_inputs, state, batches) -> PyTree:
    observed = None
    for batch in batches:
      new = observed_inputs(as_rollout(state), batch)
      observed = (
          new if observed is None else scaling_state.combine(observed, new)
      )
    return observed


def _observed_inputs(
    policy: Policy, side: TrainState, batch: TrainBatch
) -> PyTree:
  """Returns the observations of all dots' inputs, see `stack_observations`."""
  masters = side.masters

  def forward(fp8_state):
    params = PolicyParams(side.weights, fp8_state)
    if LM_HEAD in fp8_state:
      return jnp.sum(policy.logprobs(params, batch, jnp.float32(1), masters)[0])
    return jnp.sum(policy.hidden(params, batch, masters).astype(jnp.float32))

  # The output gradients of this sum mean nothing. Because they are replaced
  # here, the whole backward pass is dead code and is not compiled.
  of_inputs = scaling_state.map_dot_states(
      lambda dot_state: dot_state
      | {'output_grad': jax.tree.map(jnp.zeros_like, dot_state['output_grad'])},
      jax.grad(forward)(side.fp8_state),
  )
  return scaling_state.reduce_over_devices(
      scaling_state.stack_observations(of_inputs), policy.axes
  )


def _record(policy: Policy, fp8_state: PyTree, observed: PyTree) -> PyTree:
  fp8_state = scaling_state.observe(fp8_state, observed)
  return scaling_state.roll(fp8_state, policy.recipe, operands=('input',))


def _requantize(policy: Policy, trainable, frozen, fp8_state, old_weights):
  """Returns (scaling state, weights, share of bytes that changed)."""
  recipe, axes = policy.recipe, policy.axes
  params = merge(trainable, frozen)
  fp8_state = scaling_state.observe_kernels(fp8_state, params, recipe, axes)
  weights = kernels.prepare_weights(params, fp8_state, recipe)
  fp8_state = scaling_state.measure_kernels(fp8_state, params, weights, axes)
  return fp8_state, weights, changed_share(old_weights, weights, axes)
