"""Where the activation scales of a cold start come from."""

import functools

import numpy as np
from absl import logging

from jetrl_jax import rng
from jetrl_jax.data import Prompt
from jetrl_jax.rl import mixed_flow, packing
from jetrl_jax.rl import state as states
from jetrl_jax.rl.engine import Engine
from jetrl_jax.rl.environment import EnvironmentConfig
from jetrl_jax.rl.parts import Parts
from jetrl_jax.rl.policy import PolicyParams
from jetrl_jax.rl.rollout import StopCheck, never_stop, rollout
from jetrl_jax.rl.types import Completion, TrainState
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
  policy, config = engine.policy, engine.config
  return calibrate(
      engine,
      state,
      first,
      shape=packing.batch_shape(
          config.max_prompt_length + config.max_response_length,
          micro_batch_size=_CHECKPOINT_ROWS,
          packed_rows=0,
          tile=policy.tile,
          devices=policy.axes.size,
      ),
      num_generations=_CHECKPOINT_SAMPLES,
      temperature=1.0,
      max_tokens=min(CHECKPOINT_TOKENS, config.max_response_length),
      base_key=rng.key(seed, rng.CALIBRATION),
  )


def calibrate(
    engine: Engine,
    state: TrainState,
    prompts: list[Prompt],
    *,
    shape: tuple[int, int],
    num_generations: int,
    temperature: float,
    max_tokens: int,
    base_key: PRNGKey,
    should_stop: StopCheck = never_stop,
    environment: EnvironmentConfig | None = None,
) -> TrainState:
  """Fills the FP8 slots from prompts, then from a short rollout on them.

  Args:
    engine: samples the rollout; its policy and mesh are the state's.
    state: its kernel slots are filled already, see `states.create`.
    prompts: what the policy will meet.
    shape: (rows, tokens per row) of a micro-batch.
    num_generations: samples per prompt of the rollout.
    temperature: of the rollout and of pi.
    max_tokens: most response tokens of each sample.
    base_key: key with address (seed, stream).
    should_stop: called at the rollout's host visits; raises to give up.
    environment: whose turns the rollout takes, if any.

  Returns:
    The state with input and output-gradient scales in use.
  """
  policy, (rows, row_length) = engine.policy, shape
  calibration = states.Calibration(policy, engine.mesh, state)

  def fill(state, tokens, first_target):
    packed = packing.pack(
        states.likelihood_sequences(tokens, first_target),
        row_length=row_length,
        rows_per_micro_batch=rows,
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
      environment=environment,
  )
  return fill(
      state,
      [np.concatenate([c.prompt_tokens, c.tokens]) for c in completions],
      [len(c.prompt_tokens) for c in completions],
  )


def calibrate_run(
    parts: Parts, engine: Engine, state: TrainState, should_stop: StopCheck
) -> TrainState:
  """Fills the FP8 slots of a run, on all its sides, where a recipe has any.

  Args:
    parts: what the run is made of.
    engine: samples the short rollout; its policy is that of `parts`.
    state: its kernel slots are filled already.
    should_stop: called at the rollout's host visits; raises to give up.
  """
  recipes = (parts.policy.recipe, parts.rollout_policy.recipe)
  if not any(recipe.needs_calibration for recipe in recipes):
    return state
  if parts.is_mixed:
    return _calibrate_both(parts, engine, state, should_stop)
  return calibrate(
      engine,
      state,
      _calibration_prompts(parts),
      shape=parts.batch_shape,
      num_generations=parts.run.num_generations,
      temperature=parts.run.temperature,
      max_tokens=parts.run.calibration_tokens,
      base_key=rng.key(parts.run.seed, rng.CALIBRATION),
      should_stop=should_stop,
      environment=parts.environment,
  )


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


def _calibration_prompts(parts: Parts) -> list[Prompt]:
  count = min(parts.run.calibration_prompts, len(parts.train_set))
  return [parts.train_set[i] for i in range(count)]


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
