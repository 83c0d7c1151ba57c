"""The first state of a run: restored from its workdir, or built.

A cold start builds the state from the initial masters, calibrates it on prompts
and a short rollout (`calibration.calibrate_run`), and settles which dots run in
8 bits.
"""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

from jetrl_jax.checkpoint import restore
from jetrl_jax.checkpoint.manager import CheckpointManager
from jetrl_jax.core.typing import PyTree
from jetrl_jax.fp8 import scaling_state
from jetrl_jax.optim.types import TrainState
from jetrl_jax.rl.run import mixed_flow, train_state
from jetrl_jax.rl.run import precision as run_precision
from jetrl_jax.rl.run.spec import RunSpec
from jetrl_jax.rl.training.guard import GuardState


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resumed:
  """A checkpoint of a run, from which the run can continue.

  Attributes:
    spec: the run's specification in the precision of that checkpoint.
    state: the state after `step`.
    step: training steps done.
    host_state: what the trainer saved besides the arrays.
  """

  spec: RunSpec
  state: TrainState
  step: int
  host_state: dict[str, Any]


def abstract(spec: RunSpec) -> TrainState:
  """Returns the shapes of the run's state, without compute weights."""
  return train_state.abstract(
      spec.policy,
      spec.param_shapes,
      spec.optimizer.build(),
      spec.mesh,
      spec.freeze,
      spec.rollout_policy.recipe if spec.is_mixed else None,
  )


def resume(
    spec: RunSpec,
    checkpoints: CheckpointManager,
    step: int | None = None,
) -> Resumed | None:
  """Returns a complete checkpoint; None if there is no checkpoint.

  Args:
    spec: in the precision that the cold start settled.
    checkpoints: the run's checkpoints.
    step: the checkpoint's step; by default the newest.

  Raises:
    ValueError: see `checkpoint.restore`.
  """
  return _resumed(spec, checkpoints.restore(_like(spec), step))


def read(
    spec: RunSpec, workdir: pathlib.Path, step: int | None = None
) -> Resumed | None:
  """Does what `resume` does, even while a run still writes to the workdir.

  Args:
    spec: in the precision that the cold start settled.
    workdir: it is only read.
    step: the checkpoint's step; by default the newest good one.

  Raises:
    ValueError: see `checkpoint.restore`.
  """
  restored = restore.restore(workdir / 'checkpoints', _like(spec), step)
  return _resumed(spec, restored)


def check_resume(spec: RunSpec, workdir: pathlib.Path) -> None:
  """Raises what a resume would raise, but reads no array.

  Args:
    spec: in the precision that the cold start settled.
    workdir: it has a checkpoint and is only read.

  Raises:
    ValueError: the newest checkpoint's arrays or its position in the data do
      not match the specification, or a KL term has no reference policy.
  """
  saved = restore.compare(workdir / 'checkpoints', _like(spec))
  spec.prompt_sampler().restore(saved['sampler'])
  if spec.needs_reference:
    train_state.check_reference(workdir / 'reference')


def _at(spec: RunSpec, host_state: dict[str, Any]) -> RunSpec:
  """Returns the spec in the precision of a checkpoint."""
  return spec.with_high_precision(
      GuardState.of_checkpoint(host_state).high_precision
  )


def _like(spec: RunSpec) -> Callable[[dict[str, Any]], PyTree]:
  return lambda host_state: train_state.without_weights(
      abstract(_at(spec, host_state))
  )


def _resumed(
    spec: RunSpec, restored: restore.Restored | None
) -> Resumed | None:
  if restored is None:
    return None
  spec = _at(spec, restored.host_state)
  state = dataclasses.replace(abstract(spec), **restored.state)
  return Resumed(
      spec=spec,
      state=with_weights(spec, state, record=False),
      step=restored.step,
      host_state=restored.host_state,
  )


def with_weights(
    spec: RunSpec, state: TrainState, *, record: bool
) -> TrainState:
  """Returns the state with compute weights made from its masters.

  Args:
    spec: the run's specification.
    state: its compute weights, and a mixed flow's rollout weights, are
      replaced.
    record: see `train_state.with_weights`.
  """
  state = train_state.with_weights(spec.policy, state, spec.mesh, record=record)
  if not spec.is_mixed:
    return state
  return mixed_flow.with_weights(
      spec.rollout_policy, state, spec.mesh, record=record
  )


def create(spec: RunSpec) -> TrainState:
  """Returns the state of a cold start, before it is calibrated."""
  state = train_state.create(
      spec.policy,
      spec.initial_params(),
      spec.optimizer.build(),
      spec.mesh,
      spec.freeze,
  )
  if spec.is_mixed:
    state = mixed_flow.create(spec.rollout_policy, state, spec.mesh)
  return state


def settle_precision(
    spec: RunSpec, state: TrainState, workdir: pathlib.Path
) -> tuple[RunSpec, TrainState]:
  """Puts the dots that lose too much into high precision, on both sides.

  Args:
    spec: the cold start's specification.
    state: the calibrated state.
    workdir: the choice is written here.

  Returns:
    (spec, state) in the settled precision.
  """
  sides = [(spec.policy, state)]
  if spec.is_mixed:
    sides.append((spec.rollout_policy, mixed_flow.as_rollout(state)))
  settled = run_precision.settle(sides, spec.invariant_scale)
  run_precision.write(workdir, settled)
  policy = run_precision.with_high_precision(spec.policy, settled)
  if policy is spec.policy:
    return spec, state
  spec = spec.with_policy(policy)
  return spec, restricted(spec, state)


def restricted(spec: RunSpec, state: TrainState) -> TrainState:
  """Returns the state for a specification that quantises fewer dots.

  Args:
    spec: quantises a subset of the dots that the state quantises.
    state: the other dots lose their scaling state and quantised weights.
  """
  state = dataclasses.replace(
      state,
      fp8_state=scaling_state.restrict(state.fp8_state, spec.policy.recipe),
      rollout_fp8_state=scaling_state.restrict(
          state.rollout_fp8_state, spec.rollout_policy.recipe
      ),
  )
  return with_weights(spec, state, record=False)
