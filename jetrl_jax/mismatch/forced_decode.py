"""Decodes existing responses again and returns their log-probs.

Every token is given and none is sampled, but each goes through the same decode
step as a sampled token. So the same tokens can be decoded in other slots, with
other weights or in another recipe, and their log-probs can be compared.
"""

import jax
import numpy as np

from jetrl_jax.core import rng
from jetrl_jax.models.policy import PolicyParams
from jetrl_jax.rl.rollout.buckets import PREFILL_ROWS
from jetrl_jax.rl.rollout.engine import DecodeState, Engine
from jetrl_jax.rl.types import Completion


def forced_logprobs(
    engine: Engine,
    params: PolicyParams,
    completions: list[Completion],
    *,
    temperature: float,
) -> list[np.ndarray]:
  """Returns the decode step's log-probs of responses, with observations.

  Args:
    engine: its sizes limit prompts and responses; it decodes as many responses
      at once as it has slots.
    params: weights and scales, of the engine's recipe.
    completions: their tokens are fed.
    temperature: temperature of pi, above 0.

  Returns:
    Per completion float32 [response_length], nats, under the tempered softmax
    over the whole vocabulary.
  """
  params = engine.replicate(params)
  found, key = [], rng.key(0, rng.ROLLOUT, 0)  # Nothing is sampled with it.
  for start in range(0, len(completions), engine.num_slots):
    chunk = completions[start : start + engine.num_slots]
    state = begin(engine, params, chunk, temperature=temperature)
    while running(engine, state):
      state = engine.generate_block(params, state, key)
    logprobs = jax.device_get(state.logprobs)
    found += [
        logprobs[slot, : len(completion.tokens)].copy()
        for slot, completion in enumerate(chunk)
    ]
  return found


def running(engine: Engine, state: DecodeState) -> bool:
  """Returns whether a slot still decodes; frees the pages of the others.

  Without these pages a preempted sequence would wait forever.
  """
  active_B = jax.device_get(state.active)
  engine.release(np.flatnonzero(~active_B).tolist())
  return bool(active_B.any())


def begin(
    engine: Engine,
    params: PolicyParams,
    completions: list[Completion],
    *,
    temperature: float,
) -> DecodeState:
  """Returns a state in which slot i is about to decode completion i.

  Args:
    engine: it has at least as many slots.
    params: see `forced_logprobs`.
    completions: at most one per slot.
    temperature: temperature of pi.
  """
  state = engine.init_decode_state()
  groups: dict[int, list[int]] = {}
  for slot, completion in enumerate(completions):
    groups.setdefault(completion.prompt_id, []).append(slot)
  same_prompt = list(groups.values())
  for first in range(0, len(same_prompt), PREFILL_ROWS):
    some = same_prompt[first : first + PREFILL_ROWS]
    prefix = engine.prefill_batch(
        params,
        [completions[slots[0]].prompt_tokens for slots in some],
        rows=PREFILL_ROWS,
    )
    pairs = [(slot, row) for row, slots in enumerate(some) for slot in slots]
    state = engine.bulk_insert(
        prefix,
        state,
        [slot for slot, _ in pairs],
        rows=[row for _, row in pairs],
        # Even an empty response takes a step, which needs its page.
        limits=[max(1, len(completions[slot].tokens)) for slot, _ in pairs],
        temperature=temperature,
    )
  tokens = {slot: c.tokens for slot, c in enumerate(completions)}
  return engine.resume(state, dict.fromkeys(tokens, 0), tokens)
