"""What is tried before a token is spent: do rollout and training agree?

Their graphs are compared on every device, and on a GPU a short rollout tells
whether they agree to the bit there.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from absl import logging

from jetrl_jax.compilation import NOT_CLAIMED, on_gpu
from jetrl_jax.rl import flow_check, mismatch, packing
from jetrl_jax.rl.calibration import short_rollout
from jetrl_jax.rl.engine import Engine
from jetrl_jax.rl.parts import Parts
from jetrl_jax.rl.policy import PolicyParams
from jetrl_jax.rl.rollout import StopCheck
from jetrl_jax.rl.types import TrainState

# Sequences to the training forward's log-probs, see `Learner.score`.
Score: TypeAlias = Callable[
    [list[packing.Sequence], PolicyParams], list[np.ndarray]
]


def check(
    parts: Parts,
    loss: Any,
    engine: Engine,
    score: Score,
    state: TrainState,
    should_stop: StopCheck,
    moved: tuple[str, ...],
) -> None:
  """Compares rollout and training before a token is spent.

  Args:
    parts: what the run is made of.
    loss: the objective, see `train_step.TrainStep`.
    engine: samples.
    score: the training forward.
    state: the weights both read.
    should_stop: called at a rollout's host visits; raises to give up.
    moved: dots that the guard has put into high precision.

  Raises:
    ValueError: see `flow_check.check_flow` and `report_mixed_flow`.
  """
  if not parts.policy.exact:
    logging.warning('This run compiles as XLA likes it: %s', NOT_CLAIMED)
  if parts.is_mixed:
    flow_check.report_mixed_flow(
        parts.policy,
        parts.rollout_policy,
        loss,
        parts.engine,
        state,
        moved=moved,
    )
    return
  flow_check.check_flow(parts.policy, loss, parts.engine, state)
  if on_gpu():
    say_whether_exact(bit_test(parts, engine, score, state, should_stop))


def bit_test(
    parts: Parts,
    engine: Engine,
    score: Score,
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
