"""The engine's slots on the device, and the functions that change them.

These are pure functions over `DecodeState`, which `engine.py` compiles: start,
free, pause and resume a slot. Between them `decode_step.py` decodes.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jetrl_jax.core.sharding import ROWS
from jetrl_jax.core.typing import Array
from jetrl_jax.kernels.dispatch import MOST_VALUES
from jetrl_jax.kernels.gather_columns import Workspace
from jetrl_jax.rl.rollout import sampling
from jetrl_jax.rl.rollout.kv_pages import PagesConfig

# An index beyond all slots and pages, for those of another device.
_ELSEWHERE = 1 << 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
  """From prompts to responses: the sampler, and the sizes of its engine.

  Attributes:
    max_prompt_length: tokens.
    stop_ids: token ids that end a response.
    max_response_length: longest response, in tokens, the stop token included.
    top_k: sample from this many most probable tokens; 0 is off.
    top_p: sample from the fewest most probable tokens whose probabilities add
      up to this; 1 is off.
    min_p: sample from tokens with at least this share of the largest
      probability; 0 is off.
    num_slots: sequences decoded at once; rounded up to a multiple of 16 per
      device.
    kv_cache_tokens: tokens that the KV cache holds, all devices together; 0 for
      every slot at full length. With fewer, sequences that started last wait
      for room and are computed again, to the same bits.
    decode_block: most decode steps per host visit; a multiple of 8 is faster on
      a GPU.
  """

  max_prompt_length: int
  stop_ids: tuple[int, ...]
  max_response_length: int = 1024
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  num_slots: int = 128
  kv_cache_tokens: int = 0
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
    if self.kv_cache_tokens < 0:
      raise ValueError(
          f'kv_cache_tokens is {self.kv_cache_tokens}; allowed: 0 (every slot'
          ' at full length) and above'
      )

  def check_positions(self, positions: int) -> None:
    """Refuses sequences that are longer than the model has positions.

    Rotary embeddings go on beyond those, but the model has not learnt them.

    Args:
      positions: `ModelConfig.max_position`, tokens.

    Raises:
      ValueError: the longest prompt and the longest response together have more
        tokens.
    """
    longest = self.max_prompt_length + self.max_response_length
    if longest > positions:
      raise ValueError(
          f'max_prompt_length {self.max_prompt_length} + max_response_length'
          f' {self.max_response_length} is {longest}; the model has'
          f' {positions} positions: shorten one of the two'
      )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeState:
  """All slots, on the device.

  B is the number of slots, R is max_response_length, T is max_prompt_length.

  Attributes:
    caches: per layer pages of (keys, values), see `Policy.page_shapes`.
    workspace: of gathers between devices; decode steps take it and nothing
      else does. None if XLA gathers, see `Policy.idle_workspace`.
    table: int32 [B, pages per slot], the slot's pages, see `DecodeAttention`.
    preempted: bool [B], waits for pages: the slot is active and takes no step.
    prompt: int32 [B, T], to prefill a preempted sequence again.
    token: int32 [B], the token to feed next.
    position: int32 [B], the position of that token.
    address: uint32 [B, 2], (prompt id, sample) of the slot's random keys.
    emitted: int32 [B], response tokens so far.
    given: int32 [B], response tokens before this index are given and not
      sampled; the decode step reads them from `tokens`, where `resume` wrote
      them.
    limit: int32 [B], response tokens after which the slot stops.
    temperature: float32 [B]; 0 is greedy.
    active: bool [B].
    stopped: bool [B], whether a stop token ended the response (not its limit).
    tokens: int32 [B, R], the responses.
    log_mu: float32 [B, R], nats, under the distribution that was sampled.
    logprobs: float32 [B, R], nats, under the softmax of all tempered logits.
  """

  caches: list[tuple[Array, Array]]
  workspace: Workspace | None
  table: Array
  preempted: Array
  prompt: Array
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
  """The caches of P prefilled prompts, without each prompt's last token.

  Attributes:
    caches: per layer (keys, values), with one row of T tokens per prompt.
    tokens: int32 [P, max_prompt_length].
    last_token: int32 [P]; the first decode step feeds it.
    length: int32 [P], prompt tokens.
  """

  caches: list[tuple[Array, Array]]
  tokens: Array
  last_token: Array
  length: Array


def specs(kv_spec: P) -> tuple[Any, Any]:
  """Returns the specs of a `DecodeState` and of a `Prefix`, see `Axes`."""
  if kv_spec == ROWS:
    return ROWS, ROWS

  def of(record: Any) -> Any:
    apart = 'caches', 'workspace'
    names = [field.name for field in dataclasses.fields(record)]
    return record(**{x: kv_spec if x in apart else ROWS for x in names})

  return of(DecodeState), of(Prefix)


def idle(policy, config: EngineConfig, pages: PagesConfig) -> DecodeState:
  """Returns a state in which every slot is idle."""
  length = config.max_response_length
  keys, values = policy.page_shapes(
      pages.pages_per_device * pages.num_devices, pages.page_size
  )
  tokens = pages.pages_per_device * pages.page_size
  kv_heads = keys.shape[1] // policy.axes.tensor
  most = MOST_VALUES // (kv_heads * keys.shape[3])
  if keys.dtype.itemsize == 1 and tokens > most:
    raise ValueError(
        f'FP8 caches hold {tokens} tokens on each device; with this model the'
        f' kernels can address {most}. Set kv_cache_tokens to'
        f' {most * pages.num_devices} or less'
    )

  def zeros(dtype, *tail):
    return jnp.zeros((pages.num_slots, *tail), dtype)

  return DecodeState(
      caches=[
          (
              jnp.zeros(keys.shape, keys.dtype),
              jnp.zeros(values.shape, values.dtype),
          )
          for _ in range(policy.model.num_layers)
      ],
      workspace=policy.idle_workspace(pages.num_slots // policy.axes.size),
      table=zeros(jnp.int32, pages.pages_per_slot),
      preempted=zeros(jnp.bool_),
      prompt=zeros(jnp.int32, config.max_prompt_length),
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


def _here(axes, numbers, count):
  """Returns global numbers of slots or pages as numbers on this device.

  Numbers of other devices become distinct numbers beyond `count`, so that a
  scatter drops them.
  """
  if axes.size == 1:
    return numbers
  numbers = numbers - axes.index() * count
  return jnp.where(numbers < 0, numbers + _ELSEWHERE, numbers)


def fill_pages(axes, caches, prefix_caches, rows_N, pages_NJ):
  """Copies prefixes into pages.

  Each device fills its own pages. A sequence's prefix may be on any device.

  Args:
    axes: devices over which all rows, slots and pages are split.
    caches: per layer pages of (keys, values), see `Policy.page_shapes`.
    prefix_caches: per layer (keys, values) of Q rows, at most as long as J
      pages.
    rows_N: int32, the prefix row of each sequence, counted over all devices.
    pages_NJ: int32, the pages of each sequence, counted over all devices; a
      number beyond the last page is no page.
  """
  pages_NJ = _here(axes, pages_NJ, caches[0][0].shape[0])

  def copy(pool, new):
    new = axes.gather_rows(new)
    # The third axis holds tokens or pairs of tokens.
    size, pages = pool.shape[2], pages_NJ.shape[1]
    rows, kv_heads, length, *rest = new.shape
    padding = [
        (0, 0),
        (0, 0),
        (0, pages * size - length),
        *[(0, 0)] * len(rest),
    ]
    new = jnp.pad(new, padding).reshape(rows, kv_heads, pages, size, *rest)
    new = jnp.swapaxes(new, 1, 2)[rows_N]
    return pool.at[pages_NJ].set(new, mode='drop', unique_indices=True)

  return [
      (copy(keys, new_keys), copy(values, new_values))
      for (keys, values), (new_keys, new_values) in zip(
          caches, prefix_caches, strict=True
      )
  ]


def insert(
    axes,
    state,
    prefix,
    slots_N,
    rows_N,
    pages_NJ,
    address_N2,
    limits_N,
    temperature,
):
  """Starts sequences; see `Engine.bulk_insert` and `fill_pages`."""
  slots_N = _here(axes, slots_N, state.active.shape[0])
  tokens, last_token, length = axes.gather_rows(
      (prefix.tokens, prefix.last_token, prefix.length)
  )

  def put(old, new):
    return old.at[slots_N].set(new, mode='drop')

  none = jnp.zeros(slots_N.shape, jnp.int32)
  return dataclasses.replace(
      state,
      caches=fill_pages(axes, state.caches, prefix.caches, rows_N, pages_NJ),
      prompt=put(state.prompt, tokens[rows_N]),
      token=put(state.token, last_token[rows_N]),
      position=put(state.position, length[rows_N] - 1),
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


def free(state, slot):
  """Makes a slot idle."""
  return dataclasses.replace(state, active=state.active.at[slot].set(False))


def pause(state, chosen_B):
  """Stops slots; see `Engine.pause`."""
  return dataclasses.replace(state, active=state.active & ~chosen_B)


def resume(state, chosen_B, kept_B, given_BW, count_B):
  """Continues slots; see `Engine.resume`."""
  # Index into `given_BW`: [0, W) from the first given token on.
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
  # If nothing is kept, the prompt's last token is still the one to feed.
  last_B = token_at(state.tokens, kept_B - 1)
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


def token_at(tokens_BR, index_B):
  """Returns the token [B] at each slot's index, which is clipped to [0, R)."""
  index_B1 = jnp.clip(index_B, 0, tokens_BR.shape[1] - 1)[:, None]
  return jnp.take_along_axis(tokens_BR, index_B1, axis=1)[:, 0]
