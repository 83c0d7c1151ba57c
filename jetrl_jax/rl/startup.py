"""Start-up: the first state of a run, and what is tried on it.

A state is restored from the workdir, or made from the initial masters and
calibrated on prompts and a short rollout. On a GPU the same short rollout tells
whether rollout and training agree to the bit there.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from absl import logging

from jetrl_jax import checkpoint, rng
from jetrl_jax.compilation import NOT_CLAIMED
from jetrl_jax.data import Prompt
from jetrl_jax.models import norm
from jetrl_jax.rl import (
    flow_check,
    mismatch,
    mixed_flow,
    packing,
    run_precision,
)
from jetrl_jax.rl import state as states
from jetrl_jax.rl.calibration import calibrate
from jetrl_jax.rl.engine import Engine
from jetrl_jax.rl.parts import Parts
from jetrl_jax.rl.policy import PolicyParams
from jetrl_jax.rl.rollout import StopCheck, rollout
from jetrl_jax.rl.types import Completion, TrainState

# Sequences to the training forward's log-probs, see `Learner.score`.
Scorer: TypeAlias = Callable[
    [list[packing.Sequence], PolicyParams], list[np.ndarray]
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resumed:
  """Where a workdir stands.

  Attributes:
    state: as it was behind `step`.
    step: training steps done.
    host_state: what the trainer saved beside the arrays.
  """

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
    parts: Parts, checkpoints: checkpoint.CheckpointManager
) -> Resumed | None:
  """Returns the newest whole checkpoint, None if there is none.

  Raises:
    ValueError: see `checkpoint.restore`.
  """
  like = abstract(parts)
  return _resumed(
      parts, like, checkpoints.restore(states.without_weights(like))
  )


def read(
    parts: Parts, workdir: pathlib.Path, step: int | None = None
) -> Resumed | None:
  """Does what `resume` does, beside a run that may be going on there.

  Args:
    parts: of the run, with the precision that it settled on.
    workdir: only read.
    step: of its checkpoints, by default the newest good one.

  Raises:
    ValueError: see `checkpoint.restore`.
  """
  like = abstract(parts)
  restored = checkpoint.restore(
      workdir / 'checkpoints', states.without_weights(like), step
  )
  return _resumed(parts, like, restored)


def _resumed(
    parts: Parts, like: TrainState, restored: checkpoint.Restored | None
) -> Resumed | None:
  if restored is None:
    return None
  state = states.with_weights(
      parts.policy,
      dataclasses.replace(like, **restored.state),
      parts.mesh,
      record=False,
  )
  if parts.is_mixed:
    state = mixed_flow.with_weights(
        parts.rollout_policy, state, parts.mesh, record=False
    )
  return Resumed(
      state=state, step=restored.step, host_state=restored.host_state
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
  if not _calibrated(parts):
    return state
  if parts.is_mixed:
    return _calibrate_both(parts, engine, state, should_stop)
  return calibrate(
      engine,
      state,
      _calibration_prompts(parts),
      rows=parts.run.micro_batch_size,
      num_generations=parts.run.num_generations,
      temperature=parts.run.temperature,
      max_tokens=parts.run.calibration_tokens,
      base_key=rng.key(parts.run.seed, rng.CALIBRATION),
      should_stop=should_stop,
  )


def settle_precision(
    parts: Parts, state: TrainState, workdir: pathlib.Path
) -> tuple[Parts, TrainState]:
  """Puts the dots that lose too much into high precision, on both sides.

  Args:
    parts: of the cold start.
    state: calibrated.
    workdir: keeps what was settled.
  """
  settled = run_precision.settle(parts.policy, state, parts.invariant_scale)
  run_precision.write(workdir, settled)
  policy = run_precision.keeping(parts.policy, settled)
  if policy is parts.policy:
    return parts, state
  return parts.with_policy(policy), states.restricted(policy, state, parts.mesh)


def _calibrated(parts: Parts) -> bool:
  """Whether a recipe must look at real tokens before it can be used."""
  recipes = (parts.policy.recipe, parts.rollout_policy.recipe)
  return any(recipe.needs_calibration for recipe in recipes)


def _calibrate_both(
    parts: Parts, engine: Engine, state: TrainState, should_stop: StopCheck
) -> TrainState:
  """Fills the slots of both sides of a mixed flow from the same tokens."""
  fills = []
  if parts.policy.recipe.needs_calibration:
    calibration = states.Calibration(parts.policy, parts.mesh, state)
    fills.append(
        functools.partial(calibration.fill, temperature=parts.run.temperature)
    )
  fills.append(
      mixed_flow.Requantizer(parts.rollout_policy, parts.mesh, state).calibrate
  )

  def fill(state, tokens, first_target):
    sequences = states.likelihood_sequences(tokens, first_target)
    batches = parts.pack(sequences).batches
    for one in fills:
      state = one(state, batches)
    return state

  prompts = _calibration_prompts(parts)
  state = fill(state, [p.tokens for p in prompts], [1] * len(prompts))
  completions = short_rollout(parts, engine, state, should_stop)
  return fill(
      state,
      [np.concatenate([c.prompt_tokens, c.tokens]) for c in completions],
      [len(c.prompt_tokens) for c in completions],
  )


def _calibration_prompts(parts: Parts) -> list[Prompt]:
  count = min(parts.run.calibration_prompts, len(parts.train_set))
  return [parts.train_set[i] for i in range(count)]


def short_rollout(
    parts: Parts, engine: Engine, state: TrainState, should_stop: StopCheck
) -> list[Completion]:
  """Samples the calibration's prompts, calibration_tokens at most."""
  run, prompts = parts.run, _calibration_prompts(parts)
  shape = (len(prompts), run.num_generations)
  return rollout(
      engine,
      mixed_flow.rollout_params(state),
      prompts,
      num_generations=run.num_generations,
      temperature=run.temperature,
      base_key=rng.key(run.seed, rng.CALIBRATION),
      weight_version=0,
      limits=np.full(shape, run.calibration_tokens),
      should_stop=should_stop,
      environment=parts.environment,
  )


def check(
    parts: Parts,
    loss: Any,
    engine: Engine,
    score: Scorer,
    state: TrainState,
    should_stop: StopCheck,
) -> None:
  """Compares rollout and training before a token is spent.

  Args:
    parts: what the run is made of.
    loss: the objective, see `train_step.TrainStep`.
    engine: samples.
    score: the training forward.
    state: the weights both read.
    should_stop: called at a rollout's host visits; raises to give up.

  Raises:
    ValueError: see `flow_check.check_flow`.
  """
  if not parts.policy.exact:
    logging.warning('This run compiles as XLA likes it: %s', NOT_CLAIMED)
  if parts.is_mixed:
    flow_check.report_mixed_flow(
        parts.policy, parts.rollout_policy, loss, parts.engine, state
    )
    return
  flow_check.check_flow(parts.policy, loss, parts.engine, state)
  if norm.on_gpu():
    say_whether_exact(bit_test(parts, engine, score, state, should_stop))


def bit_test(
    parts: Parts,
    engine: Engine,
    score: Scorer,
    state: TrainState,
    should_stop: StopCheck,
) -> float:
  """Returns the share of a short rollout's tokens that training differs on.

  The run's own executables at the run's own shapes: what they give on this
  device and with these library versions is an observation, and this is it.

  Args:
    parts: what the run is made of.
    engine: samples.
    score: the training forward.
    state: the weights both read.
    should_stop: called at the rollout's host visits; raises to give up.
  """
  completions = short_rollout(parts, engine, state, should_stop)
  batch = [
      packing.sequence_from_completion(
          completion,
          advantage=0.0,
          loss_weight=0.0,
          mask_truncated=False,
          origin=i,
      )
      for i, completion in enumerate(completions)
  ]
  scored = score(batch, PolicyParams(state.weights, state.fp8_state))
  return mismatch.mismatch_token_frac(
      np.concatenate([c.logprobs for c in completions]),
      np.concatenate(
          [
              values[len(c.prompt_tokens) :]
              for c, values in zip(completions, scored, strict=True)
          ]
      ),
  )


def say_whether_exact(share: float) -> None:
  """Logs what the bit test found."""
  if share == 0:
    logging.info('Start-up bit test: rollout and training agree on all tokens')
    return
  logging.warning(
      'Start-up bit test: %.3f%% of tokens differ between rollout and'
      ' training on this device; exactness may not be claimed for this run.'
      ' training/mismatch_token_frac shows it at every step.',
      100 * share,
  )
