"""Where the activation scales of a cold start come from."""

import numpy as np
from absl import logging

from jetrl_jax import rng
from jetrl_jax.data import Prompt
from jetrl_jax.rl import packing
from jetrl_jax.rl import state as states
from jetrl_jax.rl.engine import Engine
from jetrl_jax.rl.policy import PolicyParams
from jetrl_jax.rl.rollout import StopCheck, never_stop, rollout
from jetrl_jax.rl.types import TrainState
from jetrl_jax.typing import PRNGKey

# Of a checkpoint, where there is no run to say.
CHECKPOINT_PROMPTS = 16
CHECKPOINT_TOKENS = 64
_CHECKPOINT_SAMPLES = 4
_CHECKPOINT_ROWS = 4


def calibrate_checkpoint(
    engine: Engine,
    state: TrainState,
    prompts: list[Prompt],
    *,
    origin: str,
    seed: int = 0,
) -> TrainState:
  """Fills the slots of a policy without a run, as a cold start would.

  Args:
    engine: see `calibrate`.
    state: see `calibrate`.
    prompts: the first `CHECKPOINT_PROMPTS` are used.
    origin: of the policy, in words.
    seed: of the short answers that are sampled.
  """
  first = prompts[:CHECKPOINT_PROMPTS]
  logging.info(
      'No activation scales are kept with %s: calibrating on %d prompts',
      origin,
      len(first),
  )
  return calibrate(
      engine,
      state,
      first,
      rows=_CHECKPOINT_ROWS,
      num_generations=_CHECKPOINT_SAMPLES,
      temperature=1.0,
      max_tokens=min(CHECKPOINT_TOKENS, engine.config.max_response_length),
      base_key=rng.key(seed, rng.CALIBRATION),
  )


def calibrate(
    engine: Engine,
    state: TrainState,
    prompts: list[Prompt],
    *,
    rows: int,
    num_generations: int,
    temperature: float,
    max_tokens: int,
    base_key: PRNGKey,
    should_stop: StopCheck = never_stop,
) -> TrainState:
  """Fills the FP8 slots from prompts, then from a short rollout on them.

  Args:
    engine: samples the rollout; its policy and mesh are the state's.
    state: its kernel slots are filled already, see `states.create`.
    prompts: what the policy will meet.
    rows: packed rows per backward pass.
    num_generations: samples per prompt of the rollout.
    temperature: of the rollout and of pi.
    max_tokens: most response tokens of each sample.
    base_key: key with address (seed, stream).
    should_stop: called at the rollout's host visits; raises to give up.

  Returns:
    The state with input and output-gradient scales in use.
  """
  policy, config = engine.policy, engine.config
  calibration = states.Calibration(policy, engine.mesh, state)
  longest = config.max_prompt_length + config.max_response_length

  def fill(state, tokens, first_target):
    packed = packing.pack(
        states.likelihood_sequences(tokens, first_target),
        row_length=-(-longest // policy.tile) * policy.tile,
        rows_per_micro_batch=-(-rows // policy.axes.size) * policy.axes.size,
        tile=policy.tile,
    )
    return calibration.fill(state, packed.batches, temperature)

  state = fill(state, [p.tokens for p in prompts], [1] * len(prompts))
  completions = rollout(
      engine,
      PolicyParams(state.weights, state.fp8_state),
      prompts,
      num_generations=num_generations,
      temperature=temperature,
      base_key=base_key,
      weight_version=0,
      limits=np.full((len(prompts), num_generations), max_tokens),
      should_stop=should_stop,
  )
  return fill(
      state,
      [np.concatenate([c.prompt_tokens, c.tokens]) for c in completions],
      [len(c.prompt_tokens) for c in completions],
  )
