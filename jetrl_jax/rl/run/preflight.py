"""Checks before the first step whether rollout and training agree.

The check compares their graphs on every device. On a GPU it also compares the
log-probs of a short rollout bit by bit.
"""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from absl import logging

from jetrl_jax.core.compilation import NOT_CLAIMED, on_gpu
from jetrl_jax.optim.types import TrainState
from jetrl_jax.rl import mismatch, packing
from jetrl_jax.rl.objective import LossFunction
from jetrl_jax.rl.rollout.engine import Engine
from jetrl_jax.rl.rollout.scheduler import StopCheck
from jetrl_jax.rl.run import flow_check
from jetrl_jax.rl.run.calibration import short_rollout
from jetrl_jax.rl.run.spec import RunSpec

# Sequences to the log-probs that an update computes of them, see
# `Learner.logprobs_in_update`.
LogprobsInUpdate: TypeAlias = Callable[
    [list[packing.Sequence], TrainState], list[np.ndarray]
]


def check(
    spec: RunSpec,
    loss: LossFunction,
    engine: Engine,
    logprobs_in_update: LogprobsInUpdate,
    state: TrainState,
    should_stop: StopCheck,
    moved: tuple[str, ...],
) -> None:
  """Compares rollout and training before the first step.

  Args:
    spec: the run's specification.
    loss: the objective.
    engine: samples.
    logprobs_in_update: the training forward, in the update's own program.
    state: its weights are read by both sides.
    should_stop: called at each host visit of a rollout; raises to stop.
    moved: dots that the guard has put into high precision.

  Raises:
    ValueError: see `flow_check.check_flow` and `report_mixed_flow`.
  """
  if not spec.policy.exact:
    logging.warning(
        "This run compiles with XLA's default options: %s", NOT_CLAIMED
    )
  if spec.is_mixed:
    flow_check.report_mixed_flow(
        spec.policy,
        spec.rollout_policy,
        loss,
        spec.engine,
        state,
        moved=moved,
    )
    return
  flow_check.check_flow(spec.policy, loss, spec.engine, state)
  if on_gpu():
    log_bit_test(bit_test(spec, engine, logprobs_in_update, state, should_stop))


def bit_test(
    spec: RunSpec,
    engine: Engine,
    logprobs_in_update: LogprobsInUpdate,
    state: TrainState,
    should_stop: StopCheck,
) -> float:
  """Returns the share of a short rollout's tokens whose log-probs differ.

  The test runs the run's own executables at the run's own shapes, because only
  a measurement shows what this device and these library versions compute.

  Args:
    spec: the run's specification.
    engine: samples.
    logprobs_in_update: the training forward, in the update's own program.
    state: its weights are read by both sides.
    should_stop: called at each host visit of the rollout; raises to stop.
  """
  completions = short_rollout(spec, engine, state, should_stop)
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
  found = logprobs_in_update(batch, state)
  return mismatch.mismatch_token_frac(
      np.concatenate([c.logprobs for c in completions]),
      np.concatenate(
          [
              values[len(c.prompt_tokens) :]
              for c, values in zip(completions, found, strict=True)
          ]
      ),
  )


def log_bit_test(share: float) -> None:
  """Logs the result of the bit test."""
  if share == 0:
    logging.info('Start-up bit test: rollout and training agree on all tokens')
    return
  logging.warning(
      'Start-up bit test: %.3f%% of tokens differ between rollout and'
      ' training on this device, so this run is not exact.'
      ' training/mismatch_token_frac shows the share at every step.',
      100 * share,
  )
