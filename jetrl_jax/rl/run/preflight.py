"""What is tried before a token is spent: do rollout and training agree?

Their graphs are compared on every device, and on a GPU a short rollout tells
whether they agree to the bit there.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from absl import logging

from jetrl_jax.core.compilation import NOT_CLAIMED, on_gpu
from jetrl_jax.models.policy import PolicyParams
from jetrl_jax.optim.types import TrainState
from jetrl_jax.rl import mismatch, packing
from jetrl_jax.rl.rollout.engine import Engine
from jetrl_jax.rl.rollout.scheduler import StopCheck
from jetrl_jax.rl.run import flow_check
from jetrl_jax.rl.run.calibration import short_rollout
from jetrl_jax.rl.run.spec import RunSpec

# Sequences to the training forward's log-probs, see `Learner.score`.
Score: TypeAlias = Callable[
    [list[packing.Sequence], PolicyParams], list[np.ndarray]
]


def check(
    spec: RunSpec,
    loss: Any,
    engine: Engine,
    score: Score,
    state: TrainState,
    should_stop: StopCheck,
    moved: tuple[str, ...],
) -> None:
  """Compares rollout and training before a token is spent.

  Args:
    spec: what the run is made of.
    loss: the objective, see `train_step.UpdatePrograms`.
    engine: samples.
    score: the training forward.
    state: the weights both read.
    should_stop: called at a rollout's host visits; raises to give up.
    moved: dots that the guard has put into high precision.

  Raises:
    ValueError: see `flow_check.check_flow` and `report_mixed_flow`.
  """
  if not spec.policy.exact:
    logging.warning('This run compiles as XLA likes it: %s', NOT_CLAIMED)
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
    say_whether_exact(bit_test(spec, engine, score, state, should_stop))


def bit_test(
    spec: RunSpec,
    engine: Engine,
    score: Score,
    state: TrainState,
    should_stop: StopCheck,
) -> float:
  """Returns the share of a short rollout's tokens that training differs on.

  The run's own executables at the run's own shapes: what they give on this
  device and with these library versions is an observation, and this is it.

  Args:
    spec: what the run is made of.
    engine: samples.
    score: the training forward.
    state: the weights both read.
    should_stop: called at the rollout's host visits; raises to give up.
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
