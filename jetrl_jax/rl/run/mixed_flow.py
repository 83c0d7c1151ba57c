"""The rollout's side of a mixed flow: weights and scales of its own.

In a unified flow the rollout reads the arrays that the training forward reads.
In a mixed flow (FlashRL, QuRL) it runs another recipe on the same masters:
really quantised dots, requantised behind each training step. Three policies are
then apart: mu, which sampled; pi_old, the training forward at the same masters;
and pi, which is being updated.

The rollout has no backward pass, so its delayed scales cannot leave one as
observations. What its inputs were is seen by running its recipe once more over
the step's own sequences: row by row the same numbers as those it sampled with,
so the scales move as they would in a unified flow. A dynamic recipe has nothing
to remember, and is spared the pass but at a cold start that chooses dots.
"""

import dataclasses
import functools
from typing import Any

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
from jetrl_jax.optim.apply import merge
from jetrl_jax.optim.types import TrainState
from jetrl_jax.rl.run import state as states
from jetrl_jax.rl.types import TrainBatch


def rollout_params(state: TrainState) -> PolicyParams:
  """Returns what the rollout reads: in a unified flow what training reads."""
  if state.rollout_weights:
    return PolicyParams(state.rollout_weights, state.rollout_fp8_state)
  return PolicyParams(state.weights, state.fp8_state)


def as_rollout(state: TrainState) -> TrainState:
  """Returns the state as the rollout's recipe sees it; it cannot train."""
  return dataclasses.replace(
      state,
      fp8_state=state.rollout_fp8_state,
      weights=state.rollout_weights,
      opt_state=(),
      rollout_fp8_state={},
      rollout_weights={},
  )


def create(policy: Policy, state: TrainState, mesh: Mesh) -> TrainState:
  """Adds the rollout's side to a cold start; only kernel slots are filled.

  Args:
    policy: the rollout's.
    state: of `states.create`.
    mesh: where new leaves go.
  """
  empty = scaling_state.init_state(
      merge(state.trainable, state.frozen), policy.recipe
  )
  empty = jax.device_put(empty, NamedSharding(mesh, P()))
  state = dataclasses.replace(state, rollout_fp8_state=empty)
  return with_weights(policy, state, mesh, record=True)


def with_weights(
    policy: Policy, state: TrainState, mesh: Mesh, *, record: bool
) -> TrainState:
  """Makes the rollout's weights from the masters; see `states.with_weights`."""
  side = states.with_weights(policy, as_rollout(state), mesh, record=record)
  return dataclasses.replace(
      state, rollout_fp8_state=side.fp8_state, rollout_weights=side.weights
  )


def measured_operands(recipe: Recipe) -> tuple[str, ...]:
  """Returns the operands whose health the rollout's slots hold."""
  return ('input', 'kernel') if recipe.is_delayed else ('kernel',)


class Requantizer:
  """Keeps the rollout's weights and scales where the masters are.

  Args:
    policy: the rollout's.
    mesh: devices.
    state: an example, with a rollout's side.
  """

  def __init__(self, policy: Policy, mesh: Mesh, state: TrainState):
    # Without a backward pass there is nothing to recompute for.
    policy = dataclasses.replace(policy, remat='none')
    calibrating = dataclasses.replace(
        policy, recipe=dataclasses.replace(policy.recipe, calibrating=True)
    )
    side = as_rollout(state)
    self._recipe = policy.recipe
    specs = sharding.tree_specs(side, mesh)

    def observing(policy):
      return policy.jit_per_device(
          functools.partial(_inputs_seen, policy),
          mesh,
          (specs, sharding.ROWS),
          specs.fp8_state,
      )

    self._seen = observing(policy)
    self._seen_calibrating = observing(calibrating)
    self._record = policy.jit_per_device(
        functools.partial(_record, policy),
        mesh,
        (specs.fp8_state, specs.fp8_state),
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
    """Fills the input slots of a cold start, as `Calibration` does.

    Args:
      state: its rollout's kernel slots are filled already.
      batches: micro-batches of real tokens.
    """
    if not self._recipe.needs_calibration:
      return state
    return self._observe(self._seen_calibrating, state, batches)

  def __call__(
      self, state: TrainState, batches: list[TrainBatch]
  ) -> tuple[TrainState, PyTree]:
    """Lets the rollout follow the masters.

    Args:
      state: behind the updates; its rollout's side still is what sampled,
        and is donated.
      batches: the sequences that it sampled, in micro-batches.

    Returns:
      (state, share of 8-bit weight bytes that changed, nested like the slots).
    """
    if self._recipe.is_delayed:
      state = self._observe(self._seen, state, batches)
    fp8_state, weights, changed = self._requantize(
        state.trainable,
        state.frozen,
        state.rollout_fp8_state,
        state.rollout_weights,
    )
    state = dataclasses.replace(
        state, rollout_fp8_state=fp8_state, rollout_weights=weights
    )
    return state, jax.device_get(changed)

  def _observe(self, seen_in, state, batches) -> TrainState:
    seen = None
    for batch in batches:
      new = seen_in(as_rollout(state), batch)
      seen = new if seen is None else scaling_state.combine(seen, new)
    recorded = self._record(state.rollout_fp8_state, seen)
    return dataclasses.replace(state, rollout_fp8_state=recorded)


def _inputs_seen(policy: Policy, side: TrainState, batch: TrainBatch) -> PyTree:
  """Returns slot cotangents that hold what the inputs of all dots were."""
  masters: Any = merge(side.trainable, side.frozen)

  def forward(fp8_state):
    params = PolicyParams(side.weights, fp8_state)
    if LM_HEAD in fp8_state:
      return jnp.sum(policy.score(params, batch, jnp.float32(1), masters)[0])
    return jnp.sum(policy.hidden(params, batch, masters).astype(jnp.float32))

  seen = scaling_state.reduce_over_devices(
      jax.grad(forward)(side.fp8_state), policy.axes
  )
  # Of a sum that nobody asked for. Unread, the whole backward pass is dead code
  # and is not compiled.
  return scaling_state.map_slots(
      lambda slot: slot
      | {'output_grad': jax.tree.map(jnp.zeros_like, slot['output_grad'])},
      seen,
  )


def _record(policy: Policy, fp8_state: PyTree, seen: PyTree) -> PyTree:
  observed = scaling_state.observe(fp8_state, seen)
  return scaling_state.roll(observed, policy.recipe, operands=('input',))


def _requantize(policy: Policy, trainable, frozen, fp8_state, old_weights):
  """Returns (slots, weights, share of bytes that changed)."""
  recipe, axes = policy.recipe, policy.axes
  params = merge(trainable, frozen)
  fp8_state = scaling_state.observe_kernels(fp8_state, params, recipe, axes)
  weights = kernels.prepare_weights(params, fp8_state, recipe)
  fp8_state = scaling_state.measure_kernels(fp8_state, params, weights, axes)
  return fp8_state, weights, changed_share(old_weights, weights, axes)
