"""Two policies to serve, and what our own loop samples from them.

`trained` is the quickstart's checkpoint in bfloat16. `quantized` has the same
weights in the FP8 flow, with the activation scales that a run starts with.
`ENDLESS` is a prompt that it never ends the response to.
"""

import dataclasses
import functools
import pathlib

import numpy as np
import optax

from jetrl_jax import fp8, models
from jetrl_jax.config import saved_policy
from jetrl_jax.core import rng
from jetrl_jax.data import Prompt
from jetrl_jax.models.policy import PolicyParams
from jetrl_jax.rl.rollout.engine import Engine, EngineConfig
from jetrl_jax.rl.rollout.scheduler import rollout
from jetrl_jax.rl.run import train_state
from jetrl_jax.rl.types import Completion
from jetrl_jax.serve.requests import Limits

ROOT = pathlib.Path(__file__).parents[2]
CHECKPOINT = ROOT / 'examples' / 'quickstart' / 'checkpoint'
LIMITS = Limits(max_prompt_length=16, max_tokens=24, queue_size=8)
ENDLESS = '1'
LONG = Limits(max_prompt_length=16, max_tokens=300, queue_size=0)


@functools.cache
def trained() -> saved_policy.SavedPolicy:
  return saved_policy.load(str(CHECKPOINT))


@functools.cache
def quantized() -> saved_policy.SavedPolicy:
  saved = trained()
  policy = dataclasses.replace(
      saved.policy,
      # Rotary positions go on for as long as one likes.
      model=dataclasses.replace(saved.policy.model, max_position=2048),
      recipe=fp8.Recipe(),
      tile=16,
  )
  masters = models.load_checkpoint(CHECKPOINT, policy.model, dtype='float32')
  state = train_state.create(policy, masters, optax.identity(), saved.mesh)
  params = PolicyParams(state.weights, state.fp8_state)
  return dataclasses.replace(saved, policy=policy, params=params)


def expected(
    saved: saved_policy.SavedPolicy,
    limits: Limits,
    prompts: list[list[int]],
    *,
    seed: int = 0,
    temperature: float = 0.0,
    max_tokens: int | None = None,
) -> list[Completion]:
  """What the rollout loop samples, one loop per prompt: ids are the seed."""
  engine = _engine(id(saved), limits)
  return [
      rollout(
          engine,
          saved.params,
          [_prompt(seed, tokens)],
          num_generations=1,
          temperature=temperature,
          base_key=rng.key(0, rng.ROLLOUT, 0),
          weight_version=0,
          limits=None if max_tokens is None else np.full((1, 1), max_tokens),
      )[0]
      for tokens in prompts
  ]


@functools.cache
def _engine(which: int, limits: Limits) -> Engine:
  saved = next(s for s in (trained(), quantized()) if id(s) == which)
  return Engine(
      saved.policy,
      EngineConfig(
          num_slots=16,
          max_prompt_length=limits.max_prompt_length,
          max_response_length=limits.max_tokens,
          stop_ids=saved.tokenizer.eos_ids,
      ),
      saved.mesh,
  )


def _prompt(i: int, tokens: list[int]) -> Prompt:
  return Prompt(
      id=i,
      tokens=np.asarray(tokens, np.int32),
      text='',
      answer='',
      source='',
      extra={},
  )
