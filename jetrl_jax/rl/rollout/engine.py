"""The rollout engine: continuous batching over slots and KV pages.

    prefill    compute the keys and values of a prompt, once for all its samples
    insert     copy them into pages of a slot; one slot decodes one sample
    generate   decode all active slots, many steps per host visit
    free       make a slot idle; the next sequence can have it and its pages

`scheduler.py` calls these until every prompt is answered. The engine gives
each slot pages as its sequence grows (`kv_pages.py`), so memory follows the
real lengths. If the pages run out, it preempts the sequence that started last
and later prefills it again, to the same bits. All device work is in a few
compiled functions (`decode_step.py`, `decode_state.py`), and each call donates
the decode state.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jetrl_jax.core import collectives, processes, rng, sharding
from jetrl_jax.core.compile_ahead import CompileAhead, Program
from jetrl_jax.core.typing import Array, NpArray, PRNGKey
from jetrl_jax.kernels import gather_columns
from jetrl_jax.models.policy import PlacedParams, Policy, PolicyParams
from jetrl_jax.rl.rollout import decode_state as decode_states
from jetrl_jax.rl.rollout import decode_step
from jetrl_jax.rl.rollout.buckets import (
    PREFILL_ROWS,
    buckets,
    few_slots,
    likely,
    pages_config,
    round_up,
    steps_per_sync,
    tail_sizes,
)
from jetrl_jax.rl.rollout.decode_state import DecodeState, EngineConfig, Prefix
from jetrl_jax.rl.rollout.kv_pages import PageAllocator
from jetrl_jax.rl.rollout.responses import Responses

# Most tokens of preempted sequences that are prefilled at once, with padding.
_PREFILL_TOKENS = 16384


def local_share(
    policy: Policy, config: EngineConfig, mesh: Mesh
) -> tuple[Policy, EngineConfig, Mesh]:
  """Returns this process's share of an engine over all devices.

  Its mesh is `sharding.local_mesh`. Each device has as many slots and pages as
  in one process.

  Args:
    policy: the functions, over all devices.
    config: the sizes of all devices together.
    mesh: all devices.
  """
  local = sharding.local_mesh(mesh)
  axes, size = collectives.axes_of(local), policy.axes.size
  whole = pages_config(config, size, policy.tile)
  config = dataclasses.replace(
      config,
      num_slots=whole.num_slots // size * axes.size,
      kv_cache_tokens=whole.pages_per_device * whole.page_size * axes.size,
  )
  policy = dataclasses.replace(policy, axes=axes)
  return policy, config, local


class Engine:
  """Samples for rollouts, evaluations and servers.

  With several processes, each has an engine over its own devices, with its
  share of the slots, and needs no other process until its work is done. Where
  `mesh.tensor` is more than a process has, those that share sequences have one
  engine together: all of them must call it alike.

  Args:
    policy: the functions.
    config: sizes and the sampler.
    mesh: devices of the run; the slots are split over them.
    abstract: make an engine over the devices of all processes, to look at its
      shapes; it cannot sample if there are several.

  Raises:
    ValueError: prompt and response together are longer than the model has
      positions.

  Attributes:
    run_policy: the functions, over all devices of the run.
    run_mesh: all devices of the run.
    policy: the functions, over the engine's devices.
    config: sizes for the engine's devices.
    mesh: the engine's devices.
    group: the processes whose engine this is.
    num_slots: sequences that are decoded at once.
    page_size: tokens of a KV page.
    cache_length: tokens of the longest sequence, in whole pages.
    buckets: lengths, in tokens, for which prefill is compiled.
    pages: which pages each slot has.
    responses: copies responses to the host.
  """

  def __init__(
      self,
      policy: Policy,
      config: EngineConfig,
      mesh: Mesh,
      *,
      abstract: bool = False,
  ):
    config.check_positions(policy.model.max_position)
    self.run_policy, self.run_mesh = policy, mesh
    gather_columns.check(policy.kernels, policy.axes, mesh)
    shared = 1 if abstract else sharding.processes_of_sequence(mesh)
    self.group = processes.TensorGroup(shared)
    if sharding.spans_processes(mesh) and not abstract:
      policy, config, mesh = local_share(policy, config, mesh)
    self.policy, self.config, self.mesh = policy, config, mesh
    sizes = pages_config(config, policy.axes.size, policy.tile)
    self.num_slots, self.page_size = sizes.num_slots, sizes.page_size
    self.cache_length = sizes.pages_per_slot * sizes.page_size
    self.buckets = _prefill_buckets(config, policy.tile, self.cache_length)
    self.pages = PageAllocator(sizes)
    self.responses = Responses(mesh, self.num_slots // policy.axes.size)
    self._params: PolicyParams | None = None
    self._base_key = rng.key(0, rng.ROLLOUT, 0)
    # The policy and the specs of what `replicate` returns.
    self._placed_policy = policy.placed()
    self._params_spec: Any = P()
    self._rows = NamedSharding(mesh, sharding.ROWS)
    self._kv_spec = policy.axes.kv_spec
    self._state_spec, prefix_spec = decode_states.specs(self._kv_spec)
    # Prefills and decode steps, compiled when they are first asked for.
    self._programs: dict[tuple[str, int], Program] = {}
    self._compile(prefix_spec)

  def _compile(self, prefix_spec: Any) -> None:
    """Makes the jitted functions that move parameters and change slots."""
    policy, mesh, kv_spec = self.policy, self.mesh, self._kv_spec
    state_sharding = sharding.named(self._state_spec, mesh)

    def changing_state(function):
      return policy.jit(
          function, donate_argnums=(0,), out_shardings=state_sharding
      )

    def filling(function, into, *specs):
      # Each device runs the function on its own rows; XLA does not split it.
      function = functools.partial(function, policy.axes)
      return policy.jit_per_device(
          function, mesh, (into, *specs), into, donate_argnums=(0,)
      )

    # `idle` holds no reference to the engine, which holds parameters. It only
    # makes zeros, so it needs no pinned compile options; with those the dry run
    # could not ask for its shapes.
    idle = functools.partial(
        decode_states.idle, policy, self.config, self.pages.config
    )
    self._idle = jax.jit(idle, out_shardings=state_sharding)
    # The devices copy directly; `jax.device_put` would go through the host.
    self._copy = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))
    self._join: Callable | None = None
    self._place: Callable | None = None
    self._insert = filling(
        decode_states.insert, self._state_spec, prefix_spec, *[P()] * 6
    )
    self._fill_pages = filling(
        decode_states.fill_pages, kv_spec, kv_spec, P(), P()
    )
    self._free = changing_state(decode_states.free)
    self._pause = changing_state(decode_states.pause)
    self._resume = changing_state(decode_states.resume)

  def replicate(self, params: PolicyParams) -> PolicyParams:
    """Returns the parameters with all that a device reads on that device.

    That is a whole copy, or with tensor parallelism the device's share. The
    other functions also accept parameters as training holds them, but then they
    gather them in every call.
    """
    axes = self.policy.axes
    if isinstance(params, PlacedParams):
      return params
    if self.run_mesh is not self.mesh:
      if axes.fsdp < self.run_policy.axes.fsdp:
        # No process has all parts, so they travel between processes.
        params = self._join_parts(params)
      params = sharding.on_local_mesh(params, self.mesh)
    if axes.stored == 1:
      return params
    if axes.tensor == 1:
      return self._copy(params)
    if self._place is None:
      self._params_spec = self.policy.placed_specs(params)
      self._place = self.policy.jit_per_device(
          self.policy.place,
          self.mesh,
          (sharding.tree_specs(params, self.mesh),),
          self._params_spec,
      )
    return self._place(params)

  def _join_parts(self, params: PolicyParams) -> PolicyParams:
    """Returns parameters that each process has whole, on the run's devices.

    With tensor parallelism a device has the rows that it stores in `mesh`.
    """
    if self._join is None:

      def joined(spec: P) -> NamedSharding:
        parts = P() if spec == P() else P(sharding.TENSOR)
        return NamedSharding(self.run_mesh, parts)

      where = jax.tree.map(
          joined,
          sharding.tree_specs(params, self.mesh),
          is_leaf=lambda node: isinstance(node, P),
      )
      self._join = jax.jit(lambda params: params, out_shardings=where)
    return self._join(params)

  def _as_compiled(self, params: PolicyParams) -> PolicyParams:
    """Returns the parameters in the layout that the programs take."""
    if self.policy.axes.tensor == 1:
      return params
    params = self.replicate(params)
    if self._place is None:  # Another engine has placed them.
      self._params_spec = self.policy.placed_specs(params)
    return params

  # --- parameters of a server ---------------------------------------------

  def set_params(self, params: PolicyParams) -> None:
    """Replicates `params` and keeps them for `load_params`."""
    self._params = self.replicate(params)

  def load_params(self) -> PolicyParams:
    """Returns the parameters that `set_params` was last given.

    Raises:
      ValueError: `set_params` was not called.
    """
    if self._params is None:
      raise ValueError('the engine has no parameters; call set_params first')
    return self._params

  @property
  def reader(self) -> tuple[Policy, Any]:
    """The functions that read what `load_params` returns, and its specs."""
    return self._placed_policy, self._params_spec

  def compile_ahead(
      self,
      ahead: CompileAhead,
      params: PolicyParams,
      lengths: Iterable[int],
      *,
      is_needed_soon: bool = True,
  ) -> None:
    """Compiles what every rollout calls, on other threads.

    What decodes the last answers of a rollout is lowered there, too, and the
    prefill of all but the likeliest length.

    Args:
      ahead: the threads.
      params: weights and scales, as `replicate` takes them.
      lengths: tokens of each prompt that may come.
      is_needed_soon: if not, all of it is lowered there.
    """
    add = ahead if is_needed_soon else ahead.later
    devices = self.policy.axes.size
    rows = round_up(PREFILL_ROWS, devices)
    if self.policy.axes.tensor > 1:
      self._params_spec = self.policy.placed_specs(params)
    params = self.policy.replicated_shapes(params, self.mesh)

    def by_row(*shape: int) -> jax.ShapeDtypeStruct:
      return jax.ShapeDtypeStruct(shape, np.int32, sharding=self._rows)

    first, *others = likely(lengths, self.buckets)
    prefill = self._prefill_program()
    add(prefill, params, by_row(rows, first), by_row(rows))
    steps = self.config.decode_block
    state = self._idle.eval_shape()  # With shardings.
    program = self._decode_program(
        decode_step.generate, steps_per_sync(steps), 0
    )
    add(program, params, state, self._base_key, np.int32(steps))
    maximum = self.config.max_response_length
    for size in tail_sizes(self.num_slots // devices, maximum):
      program = self._decode_program(
          decode_step.generate_compacted, steps_per_sync(steps), 1
      )
      few = by_row(devices * size)
      ahead.later(program, params, state, few, self._base_key, np.int32(steps))
    for bucket in others:
      ahead.later(prefill, params, by_row(rows, bucket), by_row(rows))

  # --- slots --------------------------------------------------------------

  def init_decode_state(self) -> DecodeState:
    """Returns a state with every slot idle; earlier states become invalid."""
    self.pages = PageAllocator(self.pages.config)
    state = self._idle()
    # All devices must have made theirs before one pushes into another's.
    jax.block_until_ready(state.workspace)
    return state

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
      rows: compiled number of prompts; unused rows stay empty.

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
        caches=self._prefilled_caches(params, prompts, rows),
        tokens=self._put(tokens_PT),
        last_token=self._put(last_P),
        length=self._put(lengths_P),
    )

  def _prefilled_caches(
      self, params: PolicyParams, sequences: list[NpArray], rows: int
  ):
    """Returns per layer (keys, values) of all tokens except the last.

    The next decode step feeds the last token, so it is not prefilled.
    """
    bucket = self._bucket(max(map(len, sequences)))
    tokens_PT = np.zeros((rows, bucket), np.int32)
    lengths_P = np.zeros((rows,), np.int32)
    for i, tokens in enumerate(sequences):
      tokens_PT[i, : len(tokens) - 1] = tokens[:-1]
      lengths_P[i] = len(tokens) - 1
    params = self._as_compiled(params)
    run = self._prefill_program()
    return run(params, self._put(tokens_PT), self._put(lengths_P))

  def reprefill_rows(self, bucket: int) -> int:
    """Returns how many preempted sequences are prefilled at once."""
    return min(max(_PREFILL_TOKENS // bucket, 1), PREFILL_ROWS)

  def _bucket(self, longest: int) -> int:
    """Returns the least bucket that holds sequences of this length."""
    return next(b for b in self.buckets if b >= longest)

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
      temperature: the sampler's temperature; 0 is greedy.
    """
    count = len(slots)
    # Padded to few sizes, so that few programs are compiled. Padding names a
    # slot that does not exist, so it is dropped.
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
    return self._changed(
        self._insert,
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
  ) -> tuple[DecodeState, Array]:
    """Takes one decode step in all active slots.

    Returns:
      (state, int32 [slots, 3]: the token, 1 if the slot took a step, and its
      response tokens so far; one array, so that one copy to the host does).
    """
    decode_state, _ = self._with_pages(params, decode_state, 1)
    was_active = decode_state.active & ~decode_state.preempted
    state = self._decode(
        decode_step.generate,
        params,
        decode_state,
        base_key=self._base_key,
        steps=1,
    )
    last_B1 = jnp.maximum(state.emitted - 1, 0)[:, None]
    token_B = jnp.take_along_axis(state.tokens, last_B1, axis=1)[:, 0]
    return state, jnp.stack(
        [token_B, was_active.astype(jnp.int32), state.emitted], 1
    )

  def generate_block(
      self,
      params: PolicyParams,
      decode_state: DecodeState,
      base_key: PRNGKey,
      steps: int | None = None,
      top_p_B: NpArray | None = None,
  ) -> DecodeState:
    """Takes up to `steps` decode steps; stops early once all slots are done.

    Args:
      params: weights and scales.
      decode_state: donated.
      base_key: key with address (seed, step); each slot folds in the rest.
      steps: by default decode_block.
      top_p_B: float32, a top_p of each slot's own, in an engine that truncates
        nothing itself; see `decode_step.sample`.
    """
    steps = self.config.decode_block if steps is None else steps
    decode_state, running_B = self._with_pages(params, decode_state, steps)
    if top_p_B is not None:
      top_p_B = np.asarray(top_p_B, np.float32)
      return self._decode(
          decode_step.generate_top_p,
          params,
          decode_state,
          top_p_B,
          base_key=base_key,
          steps=steps,
      )
    few = few_slots(
        running_B, self.policy.axes.size, self.config.max_response_length
    )
    if few is not None:
      return self._decode(
          decode_step.generate_compacted,
          params,
          decode_state,
          few,
          base_key=base_key,
          steps=steps,
      )
    return self._decode(
        decode_step.generate,
        params,
        decode_state,
        base_key=base_key,
        steps=steps,
    )

  def _decode(
      self,
      function: Callable[..., DecodeState],
      params: PolicyParams,
      state: DecodeState,
      *per_slot: NpArray,
      base_key: PRNGKey,
      steps: int,
  ) -> DecodeState:
    """Runs one of the `generate` functions of `decode_step`.

    Args:
      function: the function.
      params: weights and scales.
      state: donated.
      *per_slot: more arrays with a row per slot, which the function takes after
        the state.
      base_key: key with address (seed, step).
      steps: most decode steps.
    """
    run = self._decode_program(function, steps_per_sync(steps), len(per_slot))
    arrays = [self._put(values) for values in per_slot]
    params = self._as_compiled(params)
    return run(params, state, *arrays, base_key, np.int32(steps))

  def _changed(
      self, program: Program, state: DecodeState, *args: Any
  ) -> DecodeState:
    """Runs a program that changes slots; the workspace goes around it.

    No program takes the workspace that does not gather: it might copy it.
    """
    others = dataclasses.replace(state, workspace=None)
    changed = program(others, *args)
    return dataclasses.replace(changed, workspace=state.workspace)

  def free_resource(self, slot: int, decode_state: DecodeState) -> DecodeState:
    """Makes a slot idle."""
    self.release([slot])
    return self._changed(self._free, decode_state, np.int32(slot))

  # --- pages --------------------------------------------------------------

  def release(self, slots: Sequence[int]) -> None:
    """Frees the pages of slots whose sequences have ended."""
    for slot in slots:
      self.pages.release(slot)

  def _with_pages(
      self, params, state: DecodeState, steps: int
  ) -> tuple[DecodeState, NpArray]:
    """Gives slots pages for the next steps; preempts and resumes sequences.

    Returns:
      (state, bool [B] which slots will take a step).
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
    """Prefills preempted sequences (prompt and response) into new pages."""
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
      # Rows follow the bucket and not the longest sequence, because every new
      # shape is a new program.
      bucket = self._bucket(max(len(sequences[slot]) for slot in slots))
      rows = self.reprefill_rows(bucket)
      now, slots = slots[:rows], slots[rows:]
      rows = round_up(rows, self.policy.axes.size)
      caches = self._prefilled_caches(params, [sequences[s] for s in now], rows)
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
    """Stops slots and keeps their sequences for `resume`."""
    chosen_B = np.zeros(self.num_slots, bool)
    chosen_B[list(slots)] = True
    return self._changed(self._pause, decode_state, self._put(chosen_B))

  def resume(
      self,
      decode_state: DecodeState,
      kept: Mapping[int, int],
      given: Mapping[int, NpArray],
  ) -> DecodeState:
    """Continues slots, with given tokens after those that they keep.

    The decode step feeds given tokens like sampled ones, so the same function
    computes their KV and their log-probs. Random keys still depend on the
    token's index.

    Args:
      decode_state: donated.
      kept: slot -> response tokens to keep; later ones are dropped. It may be 0
        only in a slot that has taken no step, because the prompt's last token
        is not fed again.
      given: slot -> int32 tokens that follow the kept ones, for example an
        environment's observation; the same slots as in `kept`. Kept and given
        tokens together must be fewer than the slot's limit.
    """
    longest = max(map(len, given.values()), default=0)
    # Padded to powers of two, so that few shapes are compiled.
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
    arrays = [self._put(x) for x in (chosen_B, kept_B, given_BW, count_B)]
    return self._changed(self._resume, decode_state, *arrays)

  def _put(self, values: NpArray) -> Array:
    return sharding.put(values, self._rows)

  # --- programs -----------------------------------------------------------

  def _prefill_program(self) -> Program:
    """Returns the compiled (params, tokens, lengths) -> caches."""
    name = 'prefill', 0
    if name not in self._programs:
      self._programs[name] = self._jit(
          functools.partial(decode_step.prefill, self._placed_policy),
          (self._params_spec, sharding.ROWS, sharding.ROWS),
          self._kv_spec,
      )
    return self._programs[name]

  def _decode_program(
      self,
      function: Callable[..., DecodeState],
      steps_per_sync: int,
      num_per_slot: int,
  ) -> Program:
    """Returns a compiled function of `decode_step`; see `_decode`.

    Args:
      function: takes (policy, config, steps_per_sync, params, state, arrays
        with a row per slot, base_key, steps).
      steps_per_sync: steps between two checks whether a slot still runs.
      num_per_slot: how many arrays have a row per slot.
    """
    name = function.__name__, steps_per_sync
    if name not in self._programs:
      bound = self._placed_policy, self.config, steps_per_sync
      per_slot = [sharding.ROWS] * num_per_slot
      self._programs[name] = self._jit(
          functools.partial(function, *bound),
          (self._params_spec, self._state_spec, *per_slot, P(), P()),
          self._state_spec,
          donate_argnums=(1,),
      )
    return self._programs[name]

  def _jit(
      self,
      function: functools.partial,
      in_specs: tuple,
      out_specs: Any,
      **options: Any,
  ) -> Program:
    return self.policy.jit_per_device(
        function, self.mesh, in_specs, out_specs, **options
    )


def _prefill_buckets(
    config: EngineConfig, tile: int, cache_length: int
) -> list[int]:
  """Returns the lengths, in tokens, for which prefill is compiled."""
  # Prompts have few buckets, because nothing should compile in the middle of a
  # run and some padding is cheap. Preempted sequences are prefilled with their
  # responses, so they are longer.
  prompts = buckets(config.max_prompt_length, tile, 4)
  longer = buckets(cache_length, tile, 2)
  return [*prompts, *(size for size in longer if size > prompts[-1])]
