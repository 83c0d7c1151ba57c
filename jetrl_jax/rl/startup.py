"""The first state of a run: restored from its workdir, or made anew.

A cold start builds it from the initial masters, calibrates it on prompts and a
short rollout and settles which dots are worth their 8 bits.
"""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

from jetrl_jax import checkpoint
from jetrl_jax.checkpoint_manager import CheckpointManager
from jetrl_jax.fp8 import slots
from jetrl_jax.rl import calibration, guard_state, mixed_flow, run_precision
from jetrl_jax.rl import state as states
from jetrl_jax.rl.engine import Engine
from jetrl_jax.rl.parts import Parts
from jetrl_jax.rl.rollout import StopCheck
from jetrl_jax.rl.types import TrainState
from jetrl_jax.typing import PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resumed:
  """A checkpoint of a run, ready to go on from.

  Attributes:
    parts: what the run is made of, in the precision of that checkpoint.
    state: as it was behind `step`.
    step: training steps done.
    host_state: what the trainer saved beside the arrays.
  """

  parts: Parts
  state: TrainState
  step: int
  host_state: dict[str, Any]


def abstract(parts: Parts) -> TrainState:
  """Returns the run's state as shapes, without weights."""
  return states.abstract(
      parts.policy,
      parts.param_shapes,
      parts.optimizer.build(),
      parts.mesh,
      parts.freeze,
      parts.rollout_policy.recipe if parts.is_mixed else None,
  )


def resume(
    parts: Parts,
    checkpoints: CheckpointManager,
    step: int | None = None,
) -> Resumed | None:
  """Returns a whole checkpoint, None if there is none at all.

  Args:
    parts: in the precision that the cold start settled.
    checkpoints: of the run.
    step: which one; by default the newest.

  Raises:
    ValueError: see `checkpoint.restore`.
  """
  return _resumed(parts, checkpoints.restore(_like(parts), step))


def read(
    parts: Parts, workdir: pathlib.Path, step: int | None = None
) -> Resumed | None:
  """Does what `resume` does, beside a run that may be going on there.

  Args:
    parts: in the precision that the cold start settled.
    workdir: only read.
    step: of its checkpoints, by default the newest good one.

  Raises:
    ValueError: see `checkpoint.restore`.
  """
  restored = checkpoint.restore(workdir / 'checkpoints', _like(parts), step)
  return _resumed(parts, restored)


def check_resume(parts: Parts, workdir: pathlib.Path) -> None:
  """Refuses what a resume would refuse; reads no array.

  Args:
    parts: in the precision that the cold start settled.
    workdir: with a step, only read.

  Raises:
    ValueError: the newest step's arrays or its position in the data are others
      than these parts have; a KL term has no reference.
  """
  saved = checkpoint.compare(workdir / 'checkpoints', _like(parts))
  parts.prompt_sampler().restore(saved['sampler'])
  if parts.needs_reference:
    states.check_reference(workdir / 'reference')


def _at(parts: Parts, host_state: dict[str, Any]) -> Parts:
  """Returns the parts in the precision of a checkpoint."""
  return parts.keeping(guard_state.of_checkpoint(host_state).high_precision)


def _like(parts: Parts) -> Callable[[dict[str, Any]], PyTree]:
  return lambda host_state: states.without_weights(
      abstract(_at(parts, host_state))
  )


def _resumed(
    parts: Parts, restored: checkpoint.Restored | None
) -> Resumed | None:
  if restored is None:
    return None
  parts = _at(parts, restored.host_state)
  state = dataclasses.replace(abstract(parts), **restored.state)
  return Resumed(
      parts=parts,
      state=with_weights(parts, state, record=False),
      step=restored.step,
      host_state=restored.host_state,
  )


def with_weights(
    parts: Parts, state: TrainState, *, record: bool
) -> TrainState:
  """Returns the state with the weights of both sides made from its masters.

  Args:
    parts: what the run is made of.
    state: whose weights are replaced.
    record: see `states.with_weights`.
  """
  state = states.with_weights(parts.policy, state, parts.mesh, record=record)
  if not parts.is_mixed:
    return state
  return mixed_flow.with_weights(
      parts.rollout_policy, state, parts.mesh, record=record
  )


def cold_start(
    parts: Parts, engine: Engine, should_stop: StopCheck
) -> TrainState:
  """Builds a state and fills its FP8 slots from prompts and a rollout.

  Args:
    parts: what the run is made of.
    engine: samples the short rollout.
    should_stop: called at its host visits; raises to give up.
  """
  state = states.create(
      parts.policy,
      parts.initial_params(),
      parts.optimizer.build(),
      parts.mesh,
      parts.freeze,
  )
  if parts.is_mixed:
    state = mixed_flow.create(parts.rollout_policy, state, parts.mesh)
  return calibration.calibrate_run(parts, engine, state, should_stop)


def settle_precision(
    parts: Parts, state: TrainState, workdir: pathlib.Path
) -> tuple[Parts, TrainState]:
  """Puts the dots that lose too much into high precision, on both sides.

  Args:
    parts: of the cold start.
    state: calibrated.
    workdir: keeps what was settled.
  """
  sides = [(parts.policy, state)]
  if parts.is_mixed:
    sides.append((parts.rollout_policy, mixed_flow.as_rollout(state)))
  settled = run_precision.settle(sides, parts.invariant_scale)
  run_precision.write(workdir, settled)
  policy = run_precision.keeping(parts.policy, settled)
  if policy is parts.policy:
    return parts, state
  parts = parts.with_policy(policy)
  return parts, restricted(parts, state)


def restricted(parts: Parts, state: TrainState) -> TrainState:
  """Returns the state for parts that quantise fewer dots, on both sides.

  Args:
    parts: quantise some of the dots that the state's do.
    state: all but the slots and weights of the others stay.
  """
  state = dataclasses.replace(
      state,
      fp8_state=slots.restrict(state.fp8_state, parts.policy.recipe),
      rollout_fp8_state=slots.restrict(
          state.rollout_fp8_state, parts.rollout_policy.recipe
      ),
  )
  return with_weights(parts, state, record=False)
