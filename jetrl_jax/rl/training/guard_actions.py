"""Carries out the guard's actions: new scales, precision, or an older state.

Each action returns the state that the next step starts with. No action changes
the step counter or the sampler's position, so a run continues with new prompts
and new noise, even after a rollback.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from jetrl_jax.checkpoint.manager import CheckpointManager
from jetrl_jax.fp8 import scaling_state
from jetrl_jax.optim.types import TrainState
from jetrl_jax.rl.rollout.engine import Engine
from jetrl_jax.rl.rollout.scheduler import StopCheck
from jetrl_jax.rl.run import calibration
from jetrl_jax.rl.run.spec import RunSpec
from jetrl_jax.rl.training import guard, initialize
from jetrl_jax.rl.training.guard import Action, Decision, GuardState


def decide(
    spec: RunSpec, state: GuardState, step: int, metrics: Mapping[str, Any]
) -> Decision:
  """Returns the guard's decision after a step of this run.

  Args:
    spec: the run's specification.
    state: the guard's state after the previous step.
    step: the step's number.
    metrics: the step's metrics.
  """
  save_freq = spec.run.save_freq
  recipes = (spec.policy.recipe, spec.rollout_policy.recipe)
  return guard.decide(
      spec.guard,
      state,
      metrics,
      step=step,
      saved=bool(save_freq) and step % save_freq == 0,
      has_histories=any(recipe.is_delayed for recipe in recipes),
      is_mixed=spec.is_mixed,
  )


def act(
    action: Action,
    base: RunSpec,
    spec: RunSpec,
    engine: Engine,
    state: TrainState,
    checkpoints: CheckpointManager,
    should_stop: StopCheck,
) -> tuple[RunSpec, TrainState]:
  """Returns (spec, state) for the next step.

  Args:
    action: the action that is due.
    base: the run's specification in the precision that its start settled.
    spec: the run's specification in its current precision.
    engine: the rollout engine; its policy is that of `spec`.
    state: the state after the last step.
    checkpoints: the run's checkpoints.
    should_stop: called at each host visit of a rollout; raises to stop the run.

  Raises:
    ValueError: the checkpoint to go back to is missing or damaged.
  """
  match action.name:
    case 'recalibrate':
      return spec, recalibrated(spec, engine, state, should_stop)
    case 'high_precision':
      spec = spec.with_high_precision(action.dots)
      return spec, initialize.restricted(spec, state)
    case _:
      return spec, rolled_back(spec, base, state, checkpoints, action.step)


def recalibrated(
    spec: RunSpec, engine: Engine, state: TrainState, should_stop: StopCheck
) -> TrainState:
  """Measures all scales again, as at a cold start, and clears their histories.

  Args:
    spec: the run's specification.
    engine: samples the short rollout.
    state: its masters and moments stay as they are.
    should_stop: called at each host visit of the rollout; raises to stop.
  """
  fp8_state, rollout_fp8_state = state.fp8_state, state.rollout_fp8_state
  for operand in scaling_state.OPERANDS:
    fp8_state = scaling_state.forget(fp8_state, operand=operand)
    rollout_fp8_state = scaling_state.forget(rollout_fp8_state, operand=operand)
  state = dataclasses.replace(
      state, fp8_state=fp8_state, rollout_fp8_state=rollout_fp8_state
  )
  state = initialize.with_weights(spec, state, record=True)
  return calibration.calibrate_run(spec, engine, state, should_stop)


def rolled_back(
    spec: RunSpec,
    base: RunSpec,
    state: TrainState,
    checkpoints: CheckpointManager,
    step: int,
) -> TrainState:
  """Returns the state of a checkpoint, in the precision of `spec`.

  Args:
    spec: the run's specification in its current precision.
    base: the run's specification in the precision that its start settled.
    state: the current state. Its arrays are freed before the checkpoint is
      read, because two states may not fit into memory.
    checkpoints: the run's checkpoints.
    step: the checkpoint's step.

  Raises:
    ValueError: the checkpoint is missing or damaged.
  """
  jax.tree.map(lambda leaf: leaf.delete(), state)
  resumed = initialize.resume(base, checkpoints, step)
  assert resumed is not None
  if resumed.spec.policy == spec.policy:
    return resumed.state
  return initialize.restricted(spec, resumed.state)
