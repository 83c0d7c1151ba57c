"""The rollout engine: slots, caches and sampling over the policy's functions.

A sequence's randomness has the address (seed, step, prompt, sample, token), so
what it samples does not depend on its slot, on its neighbours or on the number
of slots. All device work is in a handful of compiled functions; the state is
donated from call to call.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jetrl_jax import rng, sharding
from jetrl_jax.compilation import exact_jit
from jetrl_jax.rl import engine_api, logprobs, sampling
from jetrl_jax.rl.policy import Policy, PolicyParams
from jetrl_jax.typing import Array, NpArray, PRNGKey


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
  """Sizes and the sampler.

  Attributes:
    num_slots: sequences decoded at once; rounded up to a multiple of 16 per
      device.
    max_prompt_length: tokens.
    max_response_length: tokens, the stop token included.
    stop_ids: token ids that end a response.
    top_k: 0 is off.
    top_p: 1 is off.
    min_p: 0 is off.
    decode_block: most decode steps per host visit.
  """

  num_slots: int
  max_prompt_length: int
  max_response_length: int
  stop_ids: tuple[int, ...]
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  decode_block: int = 64

  def __post_init__(self):
    sampling.check_settings(
        top_k=self.top_k, top_p=self.top_p, min_p=self.min_p
    )
    for name in (
        'num_slots',
        'max_prompt_length',
        'max_response_length',
        'decode_block',
    ):
      if getattr(self, name) < 1:
        raise ValueError(f'{name} is {getattr(self, name)}; it must be >= 1')


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeState:
  """All slots, on the device. B slots, R = max_response_length.

  Attributes:
    caches: per layer (keys, values) [B, K, S, H].
    token: int32 [B], the token to feed next.
    position: int32 [B], where it goes.
    address: uint32 [B, 2], (prompt id, sample) of the slot's random keys.
    emitted: int32 [B], response tokens so far.
    given: int32 [B], response tokens before this index are not sampled: they
      are read from `tokens`, where `resume` wrote them.
    limit: int32 [B], response tokens after which the slot stops.
    temperature: float32 [B]; 0 is greedy.
    active: bool [B].
    stopped: bool [B], ended by a stop token (and not by its limit).
    tokens: int32 [B, R], the responses.
    log_mu: float32 [B, R], nats under the distribution really sampled.
    logprobs: float32 [B, R], nats under the whole tempered vocabulary.
  """

  caches: list[tuple[Array, Array]]
  token: Array
  position: Array
  address: Array
  emitted: Array
  given: Array
  limit: Array
  temperature: Array
  active: Array
  stopped: Array
  tokens: Array
  log_mu: Array
  logprobs: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Prefix:
  """The caches of P prefilled prompts, less their last token.

  Attributes:
    caches: per layer (keys, values) [P, K, T, H].
    last_token: int32 [P], fed by the first decode step.
    length: int32 [P], prompt tokens.
  """

  caches: list[tuple[Array, Array]]
  last_token: Array
  length: Array


def _round_up(value: int, multiple: int) -> int:
  return -(-value // multiple) * multiple


class Engine(engine_api.Engine):
  """Serves rollouts, evaluation and JetStream's orchestrator.

  Args:
    policy: the functions.
    config: sizes and the sampler.
    mesh: devices; slots are split over them.
  """

  def __init__(self, policy: Policy, config: EngineConfig, mesh: Mesh):
    self.policy, self.config, self.mesh = policy, config, mesh
    self._params: PolicyParams | None = None
    self._base_key = rng.key(0, rng.ROLLOUT, 0)
    devices = policy.axes.size
    self.num_slots = _round_up(config.num_slots, 16 * devices)
    tile = policy.tile
    self.prompt_buckets = _buckets(config.max_prompt_length, tile)
    self.cache_length = _round_up(
        config.max_prompt_length + config.max_response_length, tile
    )
    rows = sharding.ROWS
    self._rows = NamedSharding(mesh, rows)
    self._compiled: dict[str, Callable] = {}
    self._insert = exact_jit(
        _insert, donate_argnums=(0,), out_shardings=self._rows
    )
    self._free = exact_jit(_free, donate_argnums=(0,), out_shardings=self._rows)
    self._pause = exact_jit(
        _pause, donate_argnums=(0,), out_shardings=self._rows
    )
    self._resume = exact_jit(
        _resume, donate_argnums=(0,), out_shardings=self._rows
    )

  # --- JetStream's Engine API -------------------------------------------

  def set_params(self, params: PolicyParams) -> None:
    """Makes `params` what `load_params` returns; an update is an assignment."""
    self._params = params

  def load_params(self) -> PolicyParams:
    """Returns the parameters last assigned.

    Raises:
      ValueError: none were.
    """
    if self._params is None:
      raise ValueError('the engine has no parameters; call set_params first')
    return self._params

  @property
  def max_concurrent_decodes(self) -> int:
    """Number of slots."""
    return self.num_slots

  @property
  def max_prefill_length(self) -> int:
    """Longest prompt, in tokens."""
    return self.config.max_prompt_length

  def init_decode_state(self) -> DecodeState:
    """Returns a state with every slot idle."""
    slots, length = self.num_slots, self.config.max_response_length
    cache = self.policy.cache_shape(slots, self.cache_length)
    layers = self.policy.model.num_layers

    def make():
      def zeros(dtype, *tail):
        return jnp.full((slots, *tail), 0, dtype)

      def layer():
        empty = jnp.zeros(cache.shape, cache.dtype)
        return empty, empty

      return DecodeState(
          caches=[layer() for _ in range(layers)],
          token=zeros(jnp.int32),
          position=zeros(jnp.int32),
          address=zeros(jnp.uint32, 2),
          emitted=zeros(jnp.int32),
          given=zeros(jnp.int32),
          limit=zeros(jnp.int32),
          temperature=zeros(jnp.float32),
          active=zeros(jnp.bool_),
          stopped=zeros(jnp.bool_),
          tokens=zeros(jnp.int32, length),
          log_mu=zeros(jnp.float32, length),
          logprobs=zeros(jnp.float32, length),
      )

    return jax.jit(make, out_shardings=self._rows)()

  def prefill(
      self, *, params: PolicyParams, padded_tokens: NpArray, true_length: int
  ) -> Prefix:
    """See `engine_api.Engine.prefill`."""
    return self.prefill_batch(params, [np.asarray(padded_tokens)[:true_length]])

  def prefill_batch(
      self,
      params: PolicyParams,
      prompts: list[NpArray],
      rows: int | None = None,
  ) -> Prefix:
    """Prefills several prompts at once.

    Args:
      params: weights and scales.
      prompts: int32 token ids, 1 to max_prompt_length each.
      rows: compiled number of prompts; empty rows fill up.

    Returns:
      A prefix whose row i is `prompts[i]`.

    Raises:
      ValueError: a prompt is empty or too long.
    """
    allowed = self.config.max_prompt_length
    for i, tokens in enumerate(prompts):
      if not 1 <= len(tokens) <= allowed:
        raise ValueError(
            f'prompt {i} of the batch has {len(tokens)} tokens; allowed: 1 to'
            f' {allowed} (max_prompt_length)'
        )
    rows = _round_up(max(rows or 1, len(prompts)), self.policy.axes.size)
    longest = max(map(len, prompts))
    bucket = next(b for b in self.prompt_buckets if b >= longest)
    tokens_PT = np.zeros((rows, bucket), np.int32)
    lengths_P = np.zeros((rows,), np.int32)
    last_P = np.zeros((rows,), np.int32)
    for i, tokens in enumerate(prompts):
      # The last token is not prefilled: the first decode step feeds it.
      tokens_PT[i, : len(tokens) - 1] = tokens[:-1]
      lengths_P[i], last_P[i] = len(tokens), tokens[-1]
    put = functools.partial(jax.device_put, device=self._rows)
    caches = self._per_row(params, _prefill, (self.policy,), 2)(
        params, put(tokens_PT), put(np.maximum(lengths_P - 1, 0))
    )
    return Prefix(caches=caches, last_token=put(last_P), length=put(lengths_P))

  def insert(
      self, prefix: Prefix, decode_state: DecodeState, slot: int
  ) -> DecodeState:
    """See `engine_api.Engine.insert`."""
    return self.bulk_insert(prefix, decode_state, [slot])

  def bulk_insert(
      self,
      prefix: Prefix,
      decode_state: DecodeState,
      slots: list[int],
      *,
      rows: list[int] | None = None,
      address: NpArray | None = None,
      limits: list[int] | None = None,
      temperature: float = 1.0,
  ) -> DecodeState:
    """Starts sequences in slots.

    Args:
      prefix: prefilled prompts.
      decode_state: donated.
      slots: slots to start, each once.
      rows: row of the prefix per slot; by default row 0 for all.
      address: uint32 [n, 2], (prompt id, sample) per slot; by default
        (0, slot).
      limits: most response tokens per slot; by default max_response_length.
      temperature: of the sampler; 0 is greedy.
    """
    count = len(slots)
    # Padded to powers of two, so that few shapes are compiled; padding points
    # at a slot that does not exist and is dropped.
    size = min(1 << max(count - 1, 0).bit_length(), self.num_slots)
    maximum = self.config.max_response_length

    def padded(values, fill):
      padding = np.full(size - count, fill, np.int32)
      return np.concatenate([np.asarray(values, np.int32), padding])

    if address is None:
      address = np.stack([np.zeros(count, np.uint32), slots], 1)
    address_N2 = np.zeros((size, 2), np.uint32)
    address_N2[:count] = address
    return self._insert(
        decode_state,
        prefix,
        padded(slots, self.num_slots),
        padded(rows if rows is not None else [0] * count, 0),
        address_N2,
        padded(limits if limits is not None else [maximum] * count, 1),
        np.float32(temperature),
    )

  def generate(
      self, params: PolicyParams, decode_state: DecodeState
  ) -> tuple[DecodeState, engine_api.ResultTokens]:
    """Takes one step; see `engine_api.Engine.generate`."""
    was_active = jnp.copy(decode_state.active)
    state = self.generate_block(params, decode_state, self._base_key, 1)
    last = jnp.maximum(state.emitted - 1, 0)[:, None]

    def pick(x):
      return jnp.take_along_axis(x, last, axis=1)[:, 0]

    data = jnp.stack(
        [pick(state.tokens), was_active.astype(jnp.int32), state.emitted], 1
    )
    return state, engine_api.ResultTokens(
        data=data, log_prob=pick(state.logprobs), log_mu=pick(state.log_mu)
    )

  def generate_block(
      self,
      params: PolicyParams,
      decode_state: DecodeState,
      base_key: PRNGKey,
      steps: int | None = None,
  ) -> DecodeState:
    """Takes up to `steps` steps on the device; stops early when all are done.

    Args:
      params: weights and scales.
      decode_state: donated.
      base_key: key with address (seed, step); the rest is folded in per slot.
      steps: by default decode_block.
    """
    count = np.int32(self.config.decode_block if steps is None else steps)
    bound = (self.policy, self.config)
    run = self._per_row(params, _generate, bound, 1, (0, 3))
    return run(params, decode_state, base_key, count)

  def free_resource(self, slot: int, decode_state: DecodeState) -> DecodeState:
    """Makes a slot idle."""
    return self._free(decode_state, np.int32(slot))

  # --- turns --------------------------------------------------------------

  def pause(
      self, decode_state: DecodeState, slots: Sequence[int]
  ) -> DecodeState:
    """Stops slots and keeps what they hold, for `resume`."""
    chosen_B = np.zeros(self.num_slots, bool)
    chosen_B[list(slots)] = True
    return self._pause(decode_state, self._put(chosen_B))

  def resume(
      self,
      decode_state: DecodeState,
      kept: Mapping[int, int],
      given: Mapping[int, NpArray],
  ) -> DecodeState:
    """Goes on with slots, from an earlier token if need be.

    The given tokens are fed by the decode step like sampled ones, so that
    their KV and their log-probs are computed by the same function. Random
    keys have the token's index as before.

    Args:
      decode_state: donated.
      kept: response tokens kept by slot; later ones are forgotten. 0 only in
        a slot that has taken no step: the prompt's end is not fed again.
      given: int32 tokens that follow the kept ones by slot, for example an
        environment's observation; of the same slots. Kept and given tokens
        must leave room for one more below the slot's limit.
    """
    longest = max(map(len, given.values()), default=0)
    # Powers of two, so that few shapes are compiled.
    width = min(
        max(64, 1 << max(longest - 1, 0).bit_length()),
        self.config.max_response_length,
    )
    chosen_B = np.zeros(self.num_slots, bool)
    kept_B, count_B = np.zeros((2, self.num_slots), np.int32)
    given_BW = np.zeros((self.num_slots, width), np.int32)
    for slot, tokens in given.items():
      chosen_B[slot], kept_B[slot] = True, kept[slot]
      count_B[slot] = len(tokens)
      given_BW[slot, : len(tokens)] = tokens
    put = self._put
    return self._resume(
        decode_state, put(chosen_B), put(kept_B), put(given_BW), put(count_B)
    )

  def _put(self, values: NpArray) -> Array:
    return jax.device_put(values, self._rows)

  # -----------------------------------------------------------------------

  def _per_row(self, params, function, bound, num_rows, tail=None):
    """Compiles `function(*bound, params, row arrays..., whole arrays...)`."""
    name = function.__name__
    if name not in self._compiled:
      specs = PolicyParams(*(sharding.tree_specs(t, self.mesh) for t in params))
      whole = () if tail is None else (P(), P())
      self._compiled[name] = exact_jit(
          sharding.per_device(
              functools.partial(function, *bound),
              self.mesh,
              (specs, *(sharding.ROWS,) * num_rows, *whole),
              sharding.ROWS,
          ),
          donate_argnums=(1,) if tail is not None else (),
          out_shardings=self._rows,
      )
    return self._compiled[name]


def _buckets(longest: int, tile: int) -> list[int]:
  """Prompt lengths that are compiled: powers of two times the tile."""
  buckets, size = [], tile
  while size < longest:
    buckets.append(size)
    size *= 2
  return [*buckets, _round_up(longest, tile)]


def _prefill(policy, params, tokens_PT, lengths_P):
  return policy.prefill(params, tokens_PT, lengths_P)


def _insert(state, prefix, slots_N, rows_N, address_N2, limits_N, temperature):
  length = prefix.caches[0][0].shape[2]

  def put(old, new):
    return old.at[slots_N].set(new, mode='drop')

  def copy(old, new):
    return old.at[slots_N, :, :length].set(new[rows_N], mode='drop')

  none = jnp.zeros(slots_N.shape, jnp.int32)
  return dataclasses.replace(
      state,
      caches=[
          (copy(keys, new_keys), copy(values, new_values))
          for (keys, values), (new_keys, new_values) in zip(
              state.caches, prefix.caches, strict=True
          )
      ],
      token=put(state.token, prefix.last_token[rows_N]),
      position=put(state.position, prefix.length[rows_N] - 1),
      address=put(state.address, address_N2),
      emitted=put(state.emitted, none),
      given=put(state.given, none),
      limit=put(state.limit, limits_N),
      temperature=put(
          state.temperature, jnp.broadcast_to(temperature, slots_N.shape)
      ),
      active=put(state.active, none == 0),
      stopped=put(state.stopped, none != 0),
  )


def _free(state, slot):
  return dataclasses.replace(state, active=state.active.at[slot].set(False))


def _pause(state, chosen_B):
  return dataclasses.replace(state, active=state.active & ~chosen_B)


def _resume(state, chosen_B, kept_B, given_BW, count_B):
  # From the first given token on: [0, W) in `given_BW`.
  index_BR = (
      jnp.arange(state.tokens.shape[1], dtype=jnp.int32)[None, :]
      - kept_B[:, None]
  )
  written_BR = (
      chosen_B[:, None] & (index_BR >= 0) & (index_BR < count_B[:, None])
  )
  given_BR = jnp.take_along_axis(
      given_BW, jnp.clip(index_BR, 0, given_BW.shape[1] - 1), axis=1
  )
  # With nothing kept the prompt's last token is the one to feed, still.
  last_B = _token_at(state.tokens, kept_B - 1)
  return dataclasses.replace(
      state,
      token=jnp.where(chosen_B & (kept_B > 0), last_B, state.token),
      position=state.position + jnp.where(chosen_B, kept_B - state.emitted, 0),
      emitted=jnp.where(chosen_B, kept_B, state.emitted),
      given=jnp.where(chosen_B, kept_B + count_B, state.given),
      active=state.active | chosen_B,
      stopped=state.stopped & ~chosen_B,
      tokens=jnp.where(written_BR, given_BR, state.tokens),
  )


def _token_at(tokens_BR, index_B):
  index_B1 = jnp.clip(index_B, 0, tokens_BR.shape[1] - 1)[:, None]
  return jnp.take_along_axis(tokens_BR, index_B1, axis=1)[:, 0]


def _sample(config: EngineConfig, state: DecodeState, z_BV, base_key):
  """Returns (token, log mu, log pi, whether it is given) of every slot.

  A given token was not sampled; log pi stands for its log mu.
  """
  with jax.named_scope('head'):
    lse_B, _ = logprobs.row_stats(z_BV)

  def one(z_V, address, emitted, temperature):
    key = rng.fold(base_key, address[0], address[1], emitted)
    mask_V = sampling.truncation_mask(
        z_V, top_k=config.top_k, top_p=config.top_p, min_p=config.min_p
    )
    greedy = temperature <= 0
    token = sampling.gumbel_argmax(z_V, mask_V, key, greedy=greedy)
    if mask_V is None:
      return token, z_V[token], greedy
    return token, sampling.log_mu(z_V, mask_V, token, greedy=greedy), greedy

  with jax.named_scope('sampling'):
    token_B, value_B, greedy_B = jax.vmap(one)(
        z_BV, state.address, state.emitted, state.temperature
    )
  is_given_B = state.emitted < state.given
  token_B = jnp.where(
      is_given_B, _token_at(state.tokens, state.emitted), token_B
  )
  with jax.named_scope('head'):
    logprob_B = logprobs.pick(z_BV, token_B) - lse_B
  truncates = config.top_k > 0 or config.top_p < 1 or config.min_p > 0
  log_mu_B = value_B if truncates else jnp.where(greedy_B, 0.0, logprob_B)
  log_mu_B = jnp.where(is_given_B, logprob_B, log_mu_B)
  return token_B, log_mu_B, logprob_B, is_given_B


def _step(policy, config, params, base_key, state: DecodeState) -> DecodeState:
  """Feeds, samples and books one token in every active slot."""
  length = state.caches[0][0].shape[2]
  z_BV, caches = policy.decode(
      params,
      state.token,
      jnp.where(state.active, state.position, length),
      state.caches,
      state.temperature,
  )
  token, log_mu, logprob, is_given = _sample(config, state, z_BV, base_key)
  index_R = jnp.arange(state.tokens.shape[1], dtype=jnp.int32)[None, :]
  here_BR = (index_R == state.emitted[:, None]) & state.active[:, None]

  def write(buffer, new):
    return jnp.where(here_BR, new[:, None], buffer)

  stop_ids = jnp.asarray(config.stop_ids or (-1,), jnp.int32)
  is_stop = jnp.any(token[:, None] == stop_ids[None, :], axis=1) & ~is_given
  emitted = state.emitted + state.active
  return dataclasses.replace(
      state,
      caches=caches,
      token=jnp.where(state.active, token, state.token),
      position=state.position + state.active,
      emitted=emitted,
      active=state.active & ~is_stop & (emitted < state.limit),
      stopped=state.stopped | (state.active & is_stop),
      tokens=write(state.tokens, token),
      log_mu=write(state.log_mu, log_mu),
      logprobs=write(state.logprobs, logprob),
  )


def _generate(policy, config, params, state, base_key, steps):
  # Devices take the same number of steps: weights are gathered inside.
  def any_active(state):
    return policy.axes.pmax(jnp.any(state.active).astype(jnp.int32))

  def body(carry):
    i, state, _ = carry
    state = _step(policy, config, params, base_key, state)
    return i + 1, state, any_active(state)

  _, state, _ = lax.while_loop(
      lambda carry: (carry[0] < steps) & (carry[2] > 0),
      body,
      (jnp.int32(0), state, any_active(state)),
  )
  return state
