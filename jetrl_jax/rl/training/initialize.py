"""The first state of a run: restored from its workdir, or made anew.

A cold start builds it from the initial masters, calibrates it on prompts and a
short rollout and settles which dots are worth their 8 bits.
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
from jetrl_jax.rl.rollout.engine import Engine
from jetrl_jax.rl.rollout.scheduler import StopCheck
from jetrl_jax.rl.run import calibration, mixed_flow
from jetrl_jax.rl.run import precision as run_precision
from jetrl_jax.rl.run import state as states
from jetrl_jax.rl.run.spec import RunSpec
from jetrl_jax.rl.training import guard_state


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resumed:
  """A checkpoint of a run, ready to go on from.

  Attributes:
    spec: what the run is made of, in the precision of that checkpoint.
    state: as it was behind `step`.
    step: training steps done.
    host_state: what the trainer saved beside the arrays.
  """

  spec: RunSpec
  state: TrainState
  step: int
  host_state: dict[str, Any]


def abstract(spec: RunSpec) -> TrainState:
  """Returns the run's state as shapes, without weights."""
  return states.abstract(
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
  """Returns a whole checkpoint, None if there is none at all.

  Args:
    spec: in the precision that the cold start settled.
    checkpoints: of the run.
    step: which one; by default the newest.

  Raises:
    ValueError: see `checkpoint.restore`.
  """
  return _resumed(spec, checkpoints.restore(_like(spec), step))


def read(
    spec: RunSpec, workdir: pathlib.Path, step: int | None = None
) -> Resumed | None:
  """Does what `resume` does, beside a run that may be going on there.

  Args:
    spec: in the precision that the cold start settled.
    workdir: only read.
    step: of its checkpoints, by default the newest good one.

  Raises:
    ValueError: see `checkpoint.restore`.
  """
  restored = restore.restore(workdir / 'checkpoints', _like(spec), step)
  return _resumed(spec, restored)


def check_resume(spec: RunSpec, workdir: pathlib.Path) -> None:
  """Refuses what a resume would refuse; reads no array.

  Args:
    spec: in the precision that the cold start settled.
    workdir: with a step, only read.

  Raises:
    ValueError: the newest step's arrays or its position in the data are others
      than these parts have; a KL term has no reference.
  """
  saved = restore.compare(workdir / 'checkpoints', _like(spec))
  spec.prompt_sampler().restore(saved['sampler'])
  if spec.needs_reference:
    states.check_reference(workdir / 'reference')


def _at(spec: RunSpec, host_state: dict[str, Any]) -> RunSpec:
  """Returns the spec in the precision of a checkpoint."""
  return spec.keeping(guard_state.of_checkpoint(host_state).high_precision)


def _like(spec: RunSpec) -> Callable[[dict[str, Any]], PyTree]:
  return lambda host_state: states.without_weights(
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
  """Returns the state with the weights of both sides made from its masters.

  Args:
    spec: what the run is made of.
    state: whose weights are replaced.
    record: see `states.with_weights`.
  """
  state = states.with_weights(spec.policy, state, spec.mesh, record=record)
  if not spec.is_mixed:
    return state
  return mixed_flow.with_weights(
      spec.rollout_policy, state, spec.mesh, record=record
  )


def cold_start(
    spec: RunSpec, engine: Engine, should_stop: StopCheck
) -> TrainState:
  """Builds a state and fills its FP8 slots from prompts and a rollout.

  Args:
    spec: what the run is made of.
    engine: samples the short rollout.
    should_stop: called at its host visits; raises to give up.
  """
  state = states.create(
      spec.policy,
      spec.initial_params(),
      spec.optimizer.build(),
      spec.mesh,
      spec.freeze,
  )
  if spec.is_mixed:
    state = mixed_flow.create(spec.rollout_policy, state, spec.mesh)
  return calibration.calibrate_run(spec, engine, state, should_stop)


def settle_precision(
    spec: RunSpec, state: TrainState, workdir: pathlib.Path
) -> tuple[RunSpec, TrainState]:
  """Puts the dots that lose too much into high precision, on both sides.

  Args:
    spec: of the cold start.
    state: calibrated.
    workdir: keeps what was settled.
  """
  sides = [(spec.policy, state)]
  if spec.is_mixed:
    sides.append((spec.rollout_policy, mixed_flow.as_rollout(state)))
  settled = run_precision.settle(sides, spec.invariant_scale)
  run_precision.write(workdir, settled)
  policy = run_precision.keeping(spec.policy, settled)
  if policy is spec.policy:
    return spec, state
  spec = spec.with_policy(policy)
  return spec, restricted(spec, state)


def restricted(spec: RunSpec, state: TrainState) -> TrainState:
  """Returns the state for parts that quantise fewer dots, on both sides.

  Args:
    spec: quantise some of the dots that the state's do.
    state: all but the slots and weights of the others stay.
  """
  state = dataclasses.replace(
      state,
      fp8_state=scaling_state.restrict(state.fp8_state, spec.policy.recipe),
      rollout_fp8_state=scaling_state.restrict(
          state.rollout_fp8_state, spec.rollout_policy.recipe
      ),
  )
  return with_weights(spec, state, record=False)
