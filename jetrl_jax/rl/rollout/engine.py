"""The rollout engine: slots, pages and sampling over the policy's functions.

All device work is in a handful of compiled functions (`decode_step.py`,
`decode_state.py`); the state is donated from call to call. Keys and values lie
in pages (`kv_pages.py`), so that memory follows the lengths that sequences
really have.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jetrl_jax.core import rng, sharding
from jetrl_jax.core.typing import Array, NpArray, PRNGKey
from jetrl_jax.models.policy import Policy, PolicyParams
from jetrl_jax.rl.rollout import buckets as engine_sizes
from jetrl_jax.rl.rollout import decode_state as decode_states
from jetrl_jax.rl.rollout import decode_step, engine_api
from jetrl_jax.rl.rollout.buckets import (
    PREFILL_ROWS,
    buckets,
    few_slots,
    round_up,
    steps_per_sync,
)
from jetrl_jax.rl.rollout.decode_state import DecodeState, EngineConfig, Prefix
from jetrl_jax.rl.rollout.kv_pages import PageAllocator
from jetrl_jax.rl.rollout.responses import Responses

# Tokens, padding included, that are prefilled at once.
_PREFILL_TOKENS = 16384


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
    sizes = engine_sizes.pages(config, policy.axes.size, policy.tile)
    self.num_slots, self.page_size = sizes.num_slots, sizes.page_size
    self.cache_length = sizes.pages_per_slot * sizes.page_size
    # A program for each: of prompts few, as none should be compiled in the
    # middle of a run, and computing some padding is cheap.
    self.buckets = buckets(config.max_prompt_length, policy.tile, 4)
    # Parked sequences are prefilled with all they have.
    self.buckets += [
        size
        for size in buckets(self.cache_length, policy.tile, 2)
        if size > self.buckets[-1]
    ]
    self.pages = PageAllocator(sizes)
    rows = sharding.ROWS
    self._rows = NamedSharding(mesh, rows)
    self._compiled: dict[tuple, Callable] = {}

    def compiled(function):
      return policy.jit(function, donate_argnums=(0,), out_shardings=self._rows)

    def filling(function, *specs):
      # Its own part on each device, not as XLA would split it.
      function = functools.partial(function, policy.axes)
      return policy.jit_per_device(
          function, mesh, specs, rows, donate_argnums=(0,)
      )

    # Without a reference to the engine, which holds parameters. Zeros need no
    # pinned options, with which the dry run could not ask for its shapes.
    idle = functools.partial(
        decode_states.idle, policy, config, self.pages.config
    )
    self._idle = jax.jit(idle, out_shardings=self._rows)
    # By the devices: `jax.device_put` would go through the host.
    self._everywhere = jax.jit(
        lambda params: params, out_shardings=NamedSharding(mesh, P())
    )
    self.responses = Responses(mesh, self.num_slots // policy.axes.size)
    self._insert = filling(decode_states.insert, rows, rows, *[P()] * 6)
    self._free = compiled(decode_states.free)
    self._pause = compiled(decode_states.pause)
    self._resume = compiled(decode_states.resume)
    self._fill_pages = filling(decode_states.fill_pages, rows, rows, P(), P())

  def whole(self, params: PolicyParams) -> PolicyParams:
    """Returns the parameters with all of each on every device.

    Other functions take parameters that are split over fsdp, as training holds
    them, too, and gather them in every call.
    """
    if self.policy.axes.fsdp == 1:
      return params
    return self._everywhere(params)

  # --- JetStream's Engine API -------------------------------------------

  def set_params(self, params: PolicyParams) -> None:
    """Makes `params`, `whole`, what `load_params` returns."""
    self._params = self.whole(params)

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
    """Returns a state with every slot idle; the one before it is void."""
    self.pages = PageAllocator(self.pages.config)
    return self._idle()

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
    limit = self.config.max_prompt_length
    for i, tokens in enumerate(prompts):
      if not 1 <= len(tokens) <= limit:
        raise ValueError(
            f'prompt {i} of the batch has {len(tokens)} tokens; allowed: 1 to'
            f' {limit} (max_prompt_length)'
        )
    rows = round_up(max(rows or 1, len(prompts)), self.policy.axes.size)
    tokens_PT = np.zeros((rows, limit), np.int32)
    lengths_P, last_P = np.zeros((2, rows), np.int32)
    for i, tokens in enumerate(prompts):
      tokens_PT[i, : len(tokens)] = tokens
      lengths_P[i], last_P[i] = len(tokens), tokens[-1]
    return Prefix(
        caches=self._keys_of(params, prompts, rows),
        tokens=self._put(tokens_PT),
        last_token=self._put(last_P),
        length=self._put(lengths_P),
    )

  def _keys_of(self, params: PolicyParams, sequences: list[NpArray], rows: int):
    """Returns per layer (keys, values) of all tokens but the last.

    The last is not prefilled: the next decode step feeds it.
    """
    bucket = self._bucket(max(map(len, sequences)))
    tokens_PT = np.zeros((rows, bucket), np.int32)
    lengths_P = np.zeros((rows,), np.int32)
    for i, tokens in enumerate(sequences):
      tokens_PT[i, : len(tokens) - 1] = tokens[:-1]
      lengths_P[i] = len(tokens) - 1
    run = self._per_row(decode_step.prefill, (self.policy,), 2)
    return run(params, self._put(tokens_PT), self._put(lengths_P))

  def rows_again(self, bucket: int) -> int:
    """Returns how many preempted sequences of a length prefill at a time."""
    return min(max(_PREFILL_TOKENS // bucket, 1), PREFILL_ROWS)

  def _bucket(self, longest: int) -> int:
    """Returns the length to which a batch of such sequences is padded."""
    return next(b for b in self.buckets if b >= longest)

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
    # Padded to few sizes, so that few programs are compiled; padding points
    # at a slot that does not exist and is dropped.
    size = next(s for s in buckets(self.num_slots, 1, 4) if s >= count)
    maximum = self.config.max_response_length

    def padded(values, fill):
      padding = np.full(size - count, fill, np.int32)
      return np.concatenate([np.asarray(values, np.int32), padding])

    if address is None:
      address = np.stack([np.zeros(count, np.uint32), slots], 1)
    address_N2 = np.zeros((size, 2), np.uint32)
    address_N2[:count] = address
    rows = rows if rows is not None else [0] * count
    lengths_P = np.asarray(prefix.length)
    for slot, row in zip(slots, rows, strict=True):
      self.pages.start(slot, int(lengths_P[row]))
    length = prefix.caches[0][0].shape[2]
    pages_NJ = self.pages.global_pages(
        [*slots, *[-1] * (size - count)], self.pages.pages_for(length)
    )
    return self._insert(
        decode_state,
        prefix,
        padded(slots, self.num_slots),
        padded(rows, 0),
        pages_NJ,
        address_N2,
        padded(limits if limits is not None else [maximum] * count, 1),
        np.float32(temperature),
    )

  def generate(
      self, params: PolicyParams, decode_state: DecodeState
  ) -> tuple[DecodeState, engine_api.ResultTokens]:
    """Takes one step; see `engine_api.Engine.generate`."""
    decode_state, _ = self._with_pages(params, decode_state, 1)
    was_active = decode_state.active & ~decode_state.preempted
    state = self._run_block(params, decode_state, self._base_key, 1)
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
    steps = self.config.decode_block if steps is None else steps
    decode_state, running_B = self._with_pages(params, decode_state, steps)
    few = few_slots(
        running_B, self.policy.axes.size, self.config.max_response_length
    )
    return self._run_block(params, decode_state, base_key, steps, few)

  def _run_block(self, params, state, base_key, steps, few=None):
    """Decodes; of `few` slots only, see `few_slots`."""
    bound = self.policy, self.config, steps_per_sync(steps)
    steps = np.int32(steps)
    if few is None:
      run = self._per_row(decode_step.generate, bound, 1, whole=2)
      return run(params, state, base_key, steps)
    run = self._per_row(decode_step.generate_compacted, bound, 2, whole=2)
    return run(params, state, self._put(few), base_key, steps)

  def free_resource(self, slot: int, decode_state: DecodeState) -> DecodeState:
    """Makes a slot idle."""
    self.release([slot])
    return self._free(decode_state, np.int32(slot))

  # --- pages --------------------------------------------------------------

  def release(self, slots: Sequence[int]) -> None:
    """Takes back the pages of slots whose sequences are over."""
    for slot in slots:
      self.pages.release(slot)

  def _with_pages(
      self, params, state: DecodeState, steps: int
  ) -> tuple[DecodeState, NpArray]:
    """Makes room for the next steps; parks sequences and brings them back.

    Returns:
      (state, bool [B], the slots that will take a step)
    """
    active, position, emitted, limit = jax.device_get(
        (state.active, state.position, state.emitted, state.limit)
    )
    wanted = {
        int(slot): int(position[slot])
        + min(steps, int(limit[slot] - emitted[slot]))
        for slot in np.flatnonzero(active)
    }
    back = sorted(self.pages.grow(wanted))
    if back:
      state = self._reprefill(params, state, back)
    preempted_B = np.zeros(self.num_slots, bool)
    preempted_B[list(self.pages.preempted)] = True
    if self.pages.changed:
      self.pages.changed = False
      state = dataclasses.replace(
          state,
          table=self._put(self.pages.table),
          preempted=self._put(preempted_B),
      )
    return state, active & ~preempted_B

  def _reprefill(self, params, state, slots: list[int]) -> DecodeState:
    """Fills the pages of sequences that were preempted."""
    prompt, position, tokens, emitted = jax.device_get(
        (state.prompt, state.position, state.tokens, state.emitted)
    )
    sequences = {
        slot: np.concatenate(
            [
                prompt[slot, : position[slot] - emitted[slot] + 1],
                tokens[slot, : emitted[slot]],
            ]
        )
        for slot in slots
    }
    while slots:
      # By the bucket, not by the longest: a new shape is a new program.
      bucket = self._bucket(max(len(sequences[slot]) for slot in slots))
      rows = self.rows_again(bucket)
      now, slots = slots[:rows], slots[rows:]
      rows = round_up(rows, self.policy.axes.size)
      caches = self._keys_of(params, [sequences[s] for s in now], rows)
      count = self.pages.pages_for(caches[0][0].shape[2])
      pages_NJ = self.pages.global_pages(
          [*now, *[-1] * (rows - len(now))], count
      )
      filled = self._fill_pages(
          state.caches, caches, np.arange(rows, dtype=np.int32), pages_NJ
      )
      state = dataclasses.replace(state, caches=filled)
    return state

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

  def _per_row(self, function, bound, num_rows, whole=0):
    """Compiles `function(*bound, params, row arrays..., whole arrays...)`.

    With whole arrays, which steps have, the first row array is donated.
    """
    name = function.__name__, bound
    if name not in self._compiled:
      self._compiled[name] = self.policy.jit_per_device(
          functools.partial(function, *bound),
          self.mesh,
          (P(), *(sharding.ROWS,) * num_rows, *(P(),) * whole),
          sharding.ROWS,
          donate_argnums=(1,) if whole else (),
      )
    return self._compiled[name]
