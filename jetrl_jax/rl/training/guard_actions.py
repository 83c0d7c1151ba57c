"""Carries out what the guard decides: scales, precision, or an older state.

Each action gives the state that the next step begins with. None touches the
step counter or the sampler's position: a run goes on with other prompts and
other noise, also behind a rollback.
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
from jetrl_jax.rl.training.guard import Decision
from jetrl_jax.rl.training.guard_state import Action, GuardState


def decide(
    spec: RunSpec, state: GuardState, step: int, metrics: Mapping[str, Any]
) -> Decision:
  """Returns what follows from a step of this run.

  Args:
    spec: what the run is made of.
    state: the guard's, behind the step before.
    step: its number.
    metrics: of the step.
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
    action: what is due.
    base: what the run is made of, in the precision that its start settled.
    spec: the same, in the precision at hand.
    engine: samples; its policy is that of `spec`.
    state: behind the last step.
    checkpoints: of the run.
    should_stop: called at a rollout's host visits; raises to give up.

  Raises:
    ValueError: the checkpoint to go back to is gone or damaged.
  """
  match action.name:
    case 'recalibrate':
      return spec, recalibrated(spec, engine, state, should_stop)
    case 'high_precision':
      spec = spec.keeping(action.dots)
      return spec, initialize.restricted(spec, state)
    case _:
      return spec, rolled_back(spec, base, state, checkpoints, action.step)


def recalibrated(
    spec: RunSpec, engine: Engine, state: TrainState, should_stop: StopCheck
) -> TrainState:
  """Measures all scales anew, as at a cold start; histories are forgotten.

  Args:
    spec: what the run is made of.
    engine: samples the short rollout.
    state: its masters and moments stay.
    should_stop: called at the rollout's host visits; raises to give up.
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
    spec: what the run is made of.
    base: the same in the precision that the cold start settled.
    state: given up; its arrays are freed before the others are read, since two
      states may not fit.
    checkpoints: of the run.
    step: of the checkpoint.

  Raises:
    ValueError: the checkpoint is gone or damaged.
  """
  jax.tree.map(lambda leaf: leaf.delete(), state)
  resumed = initialize.resume(base, checkpoints, step)
  assert resumed is not None
  if resumed.spec.policy == spec.policy:
    return resumed.state
  return initialize.restricted(spec, resumed.state)
