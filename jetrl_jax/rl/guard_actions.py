"""Carries out what the guard decides: scales, precision, or an older state.

Each action gives the state that the next step begins with. None touches the
step counter or the sampler's position: a run goes on with other prompts and
other noise, also behind a rollback.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from jetrl_jax.checkpoint_manager import CheckpointManager
from jetrl_jax.fp8 import slots
from jetrl_jax.rl import calibration, guard, startup
from jetrl_jax.rl.engine import Engine
from jetrl_jax.rl.guard import Decision
from jetrl_jax.rl.guard_state import Action, GuardState
from jetrl_jax.rl.parts import Parts
from jetrl_jax.rl.rollout import StopCheck
from jetrl_jax.rl.types import TrainState


def decide(
    parts: Parts, state: GuardState, step: int, metrics: Mapping[str, Any]
) -> Decision:
  """Returns what follows from a step of this run.

  Args:
    parts: what the run is made of.
    state: the guard's, behind the step before.
    step: its number.
    metrics: of the step.
  """
  save_freq = parts.run.save_freq
  recipes = (parts.policy.recipe, parts.rollout_policy.recipe)
  return guard.decide(
      parts.guard,
      state,
      metrics,
      step=step,
      saved=bool(save_freq) and step % save_freq == 0,
      has_histories=any(recipe.is_delayed for recipe in recipes),
      is_mixed=parts.is_mixed,
  )


def act(
    action: Action,
    base: Parts,
    parts: Parts,
    engine: Engine,
    state: TrainState,
    checkpoints: CheckpointManager,
    should_stop: StopCheck,
) -> tuple[Parts, TrainState]:
  """Returns (parts, state) for the next step.

  Args:
    action: what is due.
    base: what the run is made of, in the precision that its start settled.
    parts: the same, in the precision at hand.
    engine: samples; its policy is that of `parts`.
    state: behind the last step.
    checkpoints: of the run.
    should_stop: called at a rollout's host visits; raises to give up.

  Raises:
    ValueError: the checkpoint to go back to is gone or damaged.
  """
  match action.name:
    case 'recalibrate':
      return parts, recalibrated(parts, engine, state, should_stop)
    case 'high_precision':
      parts = parts.keeping(action.dots)
      return parts, startup.restricted(parts, state)
    case _:
      return parts, rolled_back(parts, base, state, checkpoints, action.step)


def recalibrated(
    parts: Parts, engine: Engine, state: TrainState, should_stop: StopCheck
) -> TrainState:
  """Measures all scales anew, as at a cold start; histories are forgotten.

  Args:
    parts: what the run is made of.
    engine: samples the short rollout.
    state: its masters and moments stay.
    should_stop: called at the rollout's host visits; raises to give up.
  """
  fp8_state, rollout_fp8_state = state.fp8_state, state.rollout_fp8_state
  for operand in slots.OPERANDS:
    fp8_state = slots.forget(fp8_state, operand=operand)
    rollout_fp8_state = slots.forget(rollout_fp8_state, operand=operand)
  state = dataclasses.replace(
      state, fp8_state=fp8_state, rollout_fp8_state=rollout_fp8_state
  )
  state = startup.with_weights(parts, state, record=True)
  return calibration.calibrate_run(parts, engine, state, should_stop)


def rolled_back(
    parts: Parts,
    base: Parts,
    state: TrainState,
    checkpoints: CheckpointManager,
    step: int,
) -> TrainState:
  """Returns the state of a checkpoint, in the precision of `parts`.

  Args:
    parts: what the run is made of.
    base: the same in the precision that the cold start settled.
    state: given up; its arrays are freed before the others are read, since two
      states may not fit.
    checkpoints: of the run.
    step: of the checkpoint.

  Raises:
    ValueError: the checkpoint is gone or damaged.
  """
  jax.tree.map(lambda leaf: leaf.delete(), state)
  resumed = startup.resume(base, checkpoints, step)
  assert resumed is not None
  if resumed.parts.policy == parts.policy:
    return resumed.state
  return startup.restricted(parts, resumed.state)
