"""The engine's device side: what a prefill and a decode step compute.

Pure functions over `DecodeState`; `engine.py` compiles them. A sequence's
randomness has the address (seed, step, prompt, sample, token), so what it
samples does not depend on its slot, on its neighbours or on the number of
slots.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from jetrl_jax.core import rng
from jetrl_jax.models import logprobs
from jetrl_jax.models.policy import Policy
from jetrl_jax.rl.rollout import sampling
from jetrl_jax.rl.rollout.decode_state import (
    DecodeState,
    EngineConfig,
    token_at,
)


def prefill(policy, params, tokens_PT, lengths_P):
  """Returns the keys and values of prompts, see `Policy.prefill`."""
  return policy.prefill(params, tokens_PT, lengths_P)


def sample(
    policy: Policy,
    config: EngineConfig,
    state: DecodeState,
    logits_BV,
    base_key,
):
  """Returns (token, log mu, log pi, whether it is given) of every slot.

  A given token was not sampled; log pi stands for its log mu.
  """
  greedy_B = state.temperature <= 0
  inverse_B = logprobs.inverse_temperature(state.temperature)
  limits = {
      'top_k': config.top_k,
      'top_p': config.top_p,
      'min_p': config.min_p,
  }

  def key_of(address, emitted):
    return rng.fold(base_key, address[0], address[1], emitted)

  with jax.named_scope('sampling'):
    # Where nothing reads it no program makes it.
    z_BV = logprobs.temper(logits_BV, inverse_B[:, None])
    mask_BV = jax.vmap(functools.partial(sampling.truncation_mask, **limits))(
        z_BV
    )
    keys_B = jax.vmap(key_of)(state.address, state.emitted)
    token_B, lse_B = sampling.draw(
        logits_BV, inverse_B, mask_BV, keys_B, greedy_B=greedy_B
    )
  if lse_B is None:
    lse_B = policy.log_sum_exp(logits_BV, inverse_B)
  is_given_B = state.emitted < state.given
  token_B = jnp.where(
      is_given_B, token_at(state.tokens, state.emitted), token_B
  )
  with jax.named_scope('head'):
    picked_B = logprobs.pick(logits_BV, token_B)
    logprob_B = logprobs.temper(picked_B, inverse_B) - lse_B
  if mask_BV is None:
    log_mu_B = jnp.where(greedy_B, 0.0, logprob_B)
  else:
    with jax.named_scope('sampling'):
      log_mu_B = jax.vmap(sampling.log_mu)(
          z_BV, mask_BV, token_B, greedy=greedy_B
      )
  log_mu_B = jnp.where(is_given_B, logprob_B, log_mu_B)
  return token_B, log_mu_B, logprob_B, is_given_B


def step(policy, config, params, base_key, state: DecodeState) -> DecodeState:
  """Feeds, samples and books one token in every active slot."""
  running = state.active & ~state.preempted
  logits_BV, caches = policy.decode(
      params,
      state.token,
      jnp.where(running, state.position, -1),
      state.table,
      state.caches,
  )
  token, log_mu, logprob, is_given = sample(
      policy, config, state, logits_BV, base_key
  )
  index_R = jnp.arange(state.tokens.shape[1], dtype=jnp.int32)[None, :]
  here_BR = (index_R == state.emitted[:, None]) & running[:, None]

  def write(buffer, new):
    return jnp.where(here_BR, new[:, None], buffer)

  stop_ids = jnp.asarray(config.stop_ids or (-1,), jnp.int32)
  is_stop = jnp.any(token[:, None] == stop_ids[None, :], axis=1) & ~is_given
  emitted = state.emitted + running
  return dataclasses.replace(
      state,
      caches=caches,
      token=jnp.where(running, token, state.token),
      position=state.position + running,
      emitted=emitted,
      active=state.active & ~(running & (is_stop | (emitted >= state.limit))),
      stopped=state.stopped | (running & is_stop),
      tokens=write(state.tokens, token),
      log_mu=write(state.log_mu, log_mu),
      logprobs=write(state.logprobs, logprob),
  )


def generate_compacted(
    policy, config, in_a_row, params, state, slots_N, base_key, steps
):
  """`generate` for some slots, as rows of a smaller state; others do nothing.

  Their pages stay where they are: a slot's table says so.

  Args:
    policy: the functions.
    config: the engine's.
    in_a_row: see `generate`.
    params: weights and scales.
    state: all slots.
    slots_N: int32, each slot once; N a multiple of 16.
    base_key: see `sample`.
    steps: at most.
  """

  def of_slots(state):
    fields = {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}
    del fields['caches']
    return fields

  all_B = of_slots(state)
  some_N = jax.tree.map(lambda x: x[slots_N], all_B)
  few = dataclasses.replace(state, **some_N)
  few = generate(policy, config, in_a_row, params, few, base_key, steps)
  back_B = jax.tree.map(
      lambda x, y: x.at[slots_N].set(y, unique_indices=True),
      all_B,
      of_slots(few),
  )
  return dataclasses.replace(few, **back_B)


def generate(policy, config, in_a_row, params, state, base_key, steps):
  """Takes up to `steps` steps; stops early when nothing runs.

  Args:
    policy: the functions.
    config: the engine's.
    in_a_row: steps after which it is asked whether a slot still runs. On a GPU
      the host reads the answer while the device waits, and sends the next step.
    params: weights and scales.
    state: all slots.
    base_key: see `sample`.
    steps: at most, a multiple of `in_a_row`.
  """

  # Each device by itself: weights are whole, so nothing here asks another.
  def any_active(state):
    return jnp.any(state.active & ~state.preempted)

  def one(_, state):
    return step(policy, config, params, base_key, state)

  def body(carry):
    i, state, _ = carry
    state = lax.fori_loop(0, in_a_row, one, state)
    return i + in_a_row, state, any_active(state)

  _, state, _ = lax.while_loop(
      lambda carry: (carry[0] < steps) & carry[2],
      body,
      (jnp.int32(0), state, any_active(state)),
  )
  return state
