"""The prefill and the decode step, on the device.

    decode   feed each active slot's token, get the next token's logits
    sample   draw a token and record its log-probs (mu and pi)
    write    append it to the response; stop at a stop token or the limit

These are pure functions over `DecodeState`, which `engine.py` compiles. A
random key has the address (seed, step, prompt, sample, token), so the sampled
tokens do not depend on the slot, on its neighbours or on the number of slots.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jetrl_jax.core import rng
from jetrl_jax.core.typing import Array, PRNGKey
from jetrl_jax.kernels.log_sum_exp import temper
from jetrl_jax.kernels.sample_token import draw
from jetrl_jax.models import logprobs
from jetrl_jax.models.policy import Policy, PolicyParams
from jetrl_jax.rl.rollout import sampling
from jetrl_jax.rl.rollout.decode_state import (
    DecodeState,
    EngineConfig,
    token_at,
)


def prefill(
    policy: Policy, params: PolicyParams, tokens_PT: Array, lengths_P: Array
) -> list[tuple[Array, Array]]:
  """Returns the keys and values of prompts, see `Policy.prefill`."""
  return policy.prefill(params, tokens_PT, lengths_P)


class _Slots(NamedTuple):
  """What sampling reads of slots, see `DecodeState`."""

  temperature: Array
  address: Array
  emitted: Array
  given: Array
  tokens: Array


def sample(
    policy: Policy,
    config: EngineConfig,
    state: DecodeState,
    logits_BV: Array,
    base_key: PRNGKey,
    top_p_B: Array | None = None,
) -> tuple[Array, Array, Array, Array]:
  """Returns (token, log mu, log pi, whether it is given), each [B].

  A given token is not sampled, and its log mu is its log pi. Devices that share
  sequences exchange their columns of the logits for whole rows, sample a share
  of the slots each, and tell the others.

  Args:
    policy: the functions.
    config: the sampler.
    state: all slots.
    logits_BV: float32, this device's columns, see `Policy.decode`.
    base_key: key with address (seed, step).
    top_p_B: float32, one top_p per slot, for a config that truncates nothing. A
      slot whose top_p is 1 draws the same token as without this argument.
  """
  axes, slots = policy.axes, logits_BV.shape[0]
  mine = _Slots(*(axes.own_rows(getattr(state, x)) for x in _Slots._fields))
  if top_p_B is not None:
    top_p_B = axes.own_rows(top_p_B)
  with jax.named_scope('head'):
    logits_BV = axes.whole_rows(logits_BV)
  found = _sample(
      policy,
      config,
      mine,
      logits_BV,
      base_key,
      top_p_B,
      slots,
  )
  with jax.named_scope('sampling'):
    token_B, log_mu_B, logprob_B = axes.all_rows(found, slots)
  return token_B, log_mu_B, logprob_B, state.emitted < state.given


def _sample(
    policy: Policy,
    config: EngineConfig,
    state: _Slots,
    logits_BV: Array,
    base_key: PRNGKey,
    top_p_B: Array | None,
    slots: int,
) -> tuple[Array, Array, Array]:
  """Returns (token, log mu, log pi) of this device's share of the slots."""
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
    # XLA removes `z_BV` where nothing reads it.
    z_BV = temper(logits_BV, inverse_B[:, None])
    mask_BV = jax.vmap(functools.partial(sampling.truncation_mask, **limits))(
        z_BV
    )
    keys_B = jax.vmap(key_of)(state.address, state.emitted)
  token_B, lse_B = draw(
      logits_BV, inverse_B, mask_BV, keys_B, greedy_B=greedy_B
  )
  top_p_mask_BV = None
  if top_p_B is not None:
    with jax.named_scope('sampling'):
      top_p_mask_BV = jax.vmap(sampling.top_p_mask)(z_BV, top_p_B)
    truncated_B, _ = draw(
        logits_BV, inverse_B, top_p_mask_BV, keys_B, greedy_B=greedy_B
    )
    token_B = jnp.where(top_p_B < 1.0, truncated_B, token_B)
  lse_B = policy.log_sum_exp(logits_BV, inverse_B, lse_B, slots)
  is_given_B = state.emitted < state.given
  token_B = jnp.where(
      is_given_B, token_at(state.tokens, state.emitted), token_B
  )
  with jax.named_scope('head'):
    picked_B = logprobs.pick(logits_BV, token_B)
    logprob_B = temper(picked_B, inverse_B) - lse_B
  if mask_BV is None:
    log_mu_B = jnp.where(greedy_B, 0.0, logprob_B)
  else:
    with jax.named_scope('sampling'):
      log_mu_B = jax.vmap(sampling.log_mu)(
          z_BV, mask_BV, token_B, greedy=greedy_B
      )
  if top_p_B is not None and top_p_mask_BV is not None:
    log_mu_B = jnp.where(
        (top_p_B < 1.0) & ~greedy_B,
        jax.vmap(sampling.log_mu)(z_BV, top_p_mask_BV, token_B),
        log_mu_B,
    )
  log_mu_B = jnp.where(is_given_B, logprob_B, log_mu_B)
  return token_B, log_mu_B, logprob_B


def step(
    policy: Policy,
    config: EngineConfig,
    params: PolicyParams,
    base_key: PRNGKey,
    state: DecodeState,
    top_p_B: Array | None = None,
) -> DecodeState:
  """Takes one decode step in every active slot: decode, sample, write."""
  running = state.active & ~state.preempted
  logits_BV, caches, workspace = policy.decode(
      params,
      state.token,
      jnp.where(running, state.position, -1),
      state.table,
      state.caches,
      state.workspace,
  )
  token, log_mu, logprob, is_given = sample(
      policy, config, state, logits_BV, base_key, top_p_B
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
      workspace=workspace,
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
    policy: Policy,
    config: EngineConfig,
    steps_per_sync: int,
    params: PolicyParams,
    state: DecodeState,
    slots_N: Array,
    base_key: PRNGKey,
    steps: Array,
) -> DecodeState:
  """Runs `generate` on some slots, as rows of a smaller state.

  The other slots take no step. All pages stay in place, because each slot's
  page table moves with it.

  Args:
    policy: the functions.
    config: the engine's sizes and sampler.
    steps_per_sync: see `generate`.
    params: weights and scales.
    state: all slots.
    slots_N: int32, each slot once; N is a multiple of 16.
    base_key: key with address (seed, step).
    steps: int32 scalar, most steps.
  """

  def of_slots(state):
    fields = {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}
    del fields['caches'], fields['workspace']
    return fields

  all_B = of_slots(state)
  some_N = jax.tree.map(lambda x: x[slots_N], all_B)
  few = dataclasses.replace(state, **some_N)
  few = generate(policy, config, steps_per_sync, params, few, base_key, steps)
  back_B = jax.tree.map(
      lambda x, y: x.at[slots_N].set(y, unique_indices=True),
      all_B,
      of_slots(few),
  )
  return dataclasses.replace(few, **back_B)


def generate_top_p(
    policy: Policy,
    config: EngineConfig,
    steps_per_sync: int,
    params: PolicyParams,
    state: DecodeState,
    top_p_B: Array,
    base_key: PRNGKey,
    steps: Array,
) -> DecodeState:
  """Runs `generate` with one top_p per slot, see `sample`."""
  return generate(
      policy, config, steps_per_sync, params, state, base_key, steps, top_p_B
  )


def generate(
    policy: Policy,
    config: EngineConfig,
    steps_per_sync: int,
    params: PolicyParams,
    state: DecodeState,
    base_key: PRNGKey,
    steps: Array,
    top_p_B: Array | None = None,
) -> DecodeState:
  """Takes up to `steps` decode steps; stops early once no slot runs.

  Args:
    policy: the functions.
    config: the engine's sizes and sampler.
    steps_per_sync: steps between two checks whether a slot still runs. On a GPU
      the device waits at each check, because the host reads the result and then
      launches the next steps.
    params: weights and scales.
    state: all slots.
    base_key: key with address (seed, step).
    steps: int32 scalar, most steps, a multiple of `steps_per_sync`.
    top_p_B: see `sample`.
  """

  # Each device decides alone: weights are replicated, so a decode step needs no
  # other device.
  def any_active(state):
    return jnp.any(state.active & ~state.preempted)

  def one(_, state):
    return step(policy, config, params, base_key, state, top_p_B)

  def body(carry):
    i, state, _ = carry
    state = lax.fori_loop(0, steps_per_sync, one, state)
    return i + steps_per_sync, state, any_active(state)

  _, state, _ = lax.while_loop(
      lambda carry: (carry[0] < steps) & carry[2],
      body,
      (jnp.int32(0), state, any_active(state)),
  )
  return state
