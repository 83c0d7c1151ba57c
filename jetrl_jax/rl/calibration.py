"""Where the activation scales of a cold start come from."""

import functools
from collections.abc import Callable

import numpy as np
from absl import logging

from jetrl_jax import rng
from jetrl_jax.data import Prompt
from jetrl_jax.rl import mixed_flow, packing
from jetrl_jax.rl import state as states
from jetrl_jax.rl.engine import Engine
from jetrl_jax.rl.parts import Parts
from jetrl_jax.rl.policy import PolicyParams
from jetrl_jax.rl.rollout import StopCheck, rollout
from jetrl_jax.rl.types import Completion, TrainState

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
    engine: samples; its policy and mesh are the state's.
    state: its kernel slots are filled already, see `states.create`.
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
  rows, row_length = packing.batch_shape(
      config.max_prompt_length + config.max_response_length,
      micro_batch_size=_CHECKPOINT_ROWS,
      packed_rows=0,
      tile=policy.tile,
      devices=policy.axes.size,
  )
  calibration = states.Calibration(policy, engine.mesh, state)

  def fill(state, sequences):
    packed = packing.pack(
        sequences,
        row_length=row_length,
        rows_per_micro_batch=rows,
        tile=policy.tile,
    )
    return calibration.fill(state, packed.batches, temperature=1.0)

  def sample(state):
    most = min(CHECKPOINT_TOKENS, config.max_response_length)
    return rollout(
        engine,
        PolicyParams(state.weights, state.fp8_state),
        first,
        num_generations=_CHECKPOINT_SAMPLES,
        temperature=1.0,
        base_key=rng.key(seed, rng.CALIBRATION),
        weight_version=0,
        limits=np.full((len(first), _CHECKPOINT_SAMPLES), most),
    )

  return _filled(state, first, fill, sample)


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
  fills = []
  if parts.policy.recipe.needs_calibration:
    calibration = states.Calibration(parts.policy, parts.mesh, state)
    fills.append(
        functools.partial(calibration.fill, temperature=parts.run.temperature)
    )
  if parts.is_mixed:
    fills.append(
        mixed_flow.Requantizer(
            parts.rollout_policy, parts.mesh, state
        ).calibrate
    )

  def fill(state, sequences):
    batches = parts.pack(sequences).batches
    for one in fills:
      state = one(state, batches)
    return state

  def sample(state):
    return short_rollout(parts, engine, state, should_stop)

  return _filled(state, _calibration_prompts(parts), fill, sample)


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


def _filled(
    state: TrainState,
    prompts: list[Prompt],
    fill: Callable[[TrainState, list[packing.Sequence]], TrainState],
    sample: Callable[[TrainState], list[Completion]],
) -> TrainState:
  """Fills slots from prompts, then from answers to them.

  Args:
    state: its kernel slots are filled already.
    prompts: what the policy will meet.
    fill: measures sequences.
    sample: answers the prompts, with the scales that those gave.
  """
  sequences = states.likelihood_sequences(
      [p.tokens for p in prompts], [1] * len(prompts)
  )
  state = fill(state, sequences)
  completions = sample(state)
  sequences = states.likelihood_sequences(
      [np.concatenate([c.prompt_tokens, c.tokens]) for c in completions],
      [len(c.prompt_tokens) for c in completions],
  )
  return fill(state, sequences)
