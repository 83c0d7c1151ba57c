"""Continuous batching: keeps the engine's slots full until all is sampled.

    while sequences wait or run:
        refill    prefill waiting prompts, insert them into idle slots
        decode    many steps on the device (one host visit)
        collect   take finished responses to the host, free their slots

A prompt is prefilled once, and each of its samples gets its own slot. A slot
that finishes is refilled at the next host visit. The schedule decides when
something is computed, never its result: a completion is a function of the
weights, the seed and its own address.

With an environment, `collect` also finds the end of each turn, which depends
only on the turn's tokens; later tokens are dropped. The slot then waits for the
environment's answer while the other slots decode.

Where several processes share sequences (`mesh.tensor`), all of them run this
loop on the same prompts. They read the same tokens, so they decide the same.
What comes from elsewhere, a request to stop or an environment's answer, the
first of them tells the others.
"""

import collections
import dataclasses
import threading
import time
from collections.abc import Callable

import jax
import numpy as np
from flax import traverse_util

from jetrl_jax.core import processes, rng
from jetrl_jax.core.typing import NpArray, PRNGKey
from jetrl_jax.data import Prompt
from jetrl_jax.fp8 import QTensor
from jetrl_jax.models.policy import PlacedParams, PolicyParams
from jetrl_jax.rl.rollout.buckets import PREFILL_ROWS
from jetrl_jax.rl.rollout.engine import DecodeState, Engine, Prefix
from jetrl_jax.rl.rollout.environment import EnvironmentConfig
from jetrl_jax.rl.rollout.episodes import Episode, StopStrings
from jetrl_jax.rl.settings import check_temperature
from jetrl_jax.rl.types import Completion

# Seconds that a host visit waits for environments: for each one, counted from
# its call, while other slots can decode; and for the first answer otherwise.
_QUICK_S, _IDLE_S = 0.02, 0.1

StopCheck = Callable[[], None]


def never_stop() -> None:
  """A stop check that never interrupts the rollout."""


@dataclasses.dataclass(frozen=True)
class _Job:
  """One sequence to sample.

  Attributes:
    index: its place in the result.
    prompt: its prompt.
    sample: its number among the prompt's samples.
    limit: most response tokens.
  """

  index: int
  prompt: Prompt
  sample: int
  limit: int


def rollout(
    engine: Engine,
    params: PolicyParams,
    prompts: list[Prompt],
    *,
    num_generations: int,
    temperature: float,
    base_key: PRNGKey,
    weight_version: int,
    limits: np.ndarray | None = None,
    should_stop: StopCheck = never_stop,
    on_end: Callable[[Completion], None] | None = None,
    environment: EnvironmentConfig | None = None,
) -> list[Completion]:
  """Samples `num_generations` responses to every prompt.

  Args:
    engine: its sizes limit prompts and responses.
    params: weights and activation scales.
    prompts: their ids must differ, because they are part of the random keys.
    num_generations: samples per prompt, G.
    temperature: 0 is greedy.
    base_key: key with address (seed, step).
    weight_version: recorded with every token.
    limits: int [P, G], most response tokens of each sample; by default
      max_response_length.
    should_stop: called at every host visit; raises to stop the rollout.
    on_end: called with each completion of this process soon after it ends, in
      that order.
    environment: answers the turns; by default a response is one turn.

  With several processes each samples every n-th prompt, or shares it with its
  neighbours; all get all completions. A completion does not depend on where it
  was sampled.

  Returns:
    P * G completions, prompt by prompt; with an environment one per episode.

  Raises:
    ValueError: two prompts share an id, a prompt is too long or has a token
      outside of the vocabulary, the temperature is out of range, or the weights
      are not of the engine's recipe.
    StopRequested: `should_stop` raised it in any process.
  """
  check_temperature('temperature', temperature, greedy=True)
  ids = [prompt.id for prompt in prompts]
  if len(set(ids)) != len(ids):
    twice = [i for i, n in collections.Counter(ids).items() if n > 1]
    raise ValueError(
        f'prompt ids {twice[:5]} occur twice in one rollout; their samples'
        ' would share random keys'
    )
  for prompt in prompts:
    _check_numbers(prompt, engine.policy.model.vocab_size)
  _check_recipe(engine, params)
  # Split parameters are gathered once here and not in every decode step.
  params = engine.replicate(params)
  group = engine.group
  loop = Scheduler(
      engine,
      params,
      temperature,
      base_key,
      weight_version,
      environment,
      on_end if group.leads else None,
  )
  maximum, mine = engine.config.max_response_length, 0
  for p in group.share(len(prompts)):
    for g in range(num_generations):
      limit = maximum if limits is None else int(limits[p, g])
      loop.waiting.append(
          _Job(mine, prompts[p], g, max(1, min(limit, maximum)))
      )
      mine += 1

  def stop_alike() -> None:
    group.from_leader('a visit of the host', should_stop)

  def mine_alone() -> list[Completion]:
    found = loop.run(stop_alike)
    return found if group.leads else []

  parts = group.leaders(
      processes.together('a rollout', mine_alone, should_stop)
  )
  return _prompt_by_prompt(parts, len(prompts), num_generations)


def _check_recipe(engine: Engine, params: PolicyParams) -> None:
  """Refuses weights that were made for another recipe than the engine's."""
  if isinstance(params, PlacedParams):
    return
  recipe = engine.policy.recipe
  flat = traverse_util.flatten_dict(params.weights, sep='/')
  for path, weight in flat.items():
    dot = str(path).removesuffix('/kernel')
    if dot == path or isinstance(weight, QTensor) == recipe.quantizes(dot):
      continue
    found, wanted = 'in 8 bits', 'are not'
    if recipe.quantizes(dot):
      found, wanted = 'not in 8 bits', 'are'
    raise ValueError(
        f"the weights of {dot} are {found}, and those of the engine's recipe"
        f' {recipe.name!r} {wanted}: the state is of another policy. Make state'
        ' and engine of one policy'
    )


def _check_numbers(prompt: Prompt, vocab_size: int) -> None:
  """Refuses what an array would hold as another number, or not at all."""
  if not 0 <= prompt.id < 2**32:
    raise ValueError(
        f'a prompt has id {prompt.id}; allowed: 0 to {2**32 - 1}, because ids'
        ' are part of the random keys'
    )
  tokens = np.asarray(prompt.tokens)
  wrong = tokens[(tokens < 0) | (tokens >= vocab_size)]
  if len(wrong):
    raise ValueError(
        f'prompt {prompt.id} has the token {wrong[0]}; allowed: 0 to'
        f' {vocab_size - 1}, the vocabulary of the model. Is the tokenizer that'
        ' of the checkpoint?'
    )


def _prompt_by_prompt(
    parts: list[list[Completion]], num_prompts: int, num_generations: int
) -> list[Completion]:
  """Joins the completions of all engines, see `TensorGroup.share`."""
  found = []
  for p in range(num_prompts):
    part, first = parts[p % len(parts)], p // len(parts) * num_generations
    found += part[first : first + num_generations]
  return found


@dataclasses.dataclass(kw_only=True)
class _Slot:
  """The state of a slot, on the host.

  Attributes:
    job: the sequence in the slot.
    episode: its environment; None without one, and in a process that is told
      what the environment answers.
    turn: response tokens before the current turn.
    searched: response tokens already searched for stop strings.
    tail: see `StopStrings.find`.
    ended: response tokens at the end of the turn, while the slot waits for its
      environment; None while the slot decodes.
    observed: the observations' (start, stop) in the response.
  """

  job: _Job
  episode: Episode | None = None
  turn: int = 0
  searched: int = 0
  tail: str = ''
  ended: int | None = None
  observed: list[tuple[int, int]] = dataclasses.field(default_factory=list)


def _answer(episode: Episode | None) -> tuple[NpArray, str | None] | None:
  """Returns (observation, why the episode is over); None without an answer."""
  assert episode is not None
  answer = episode.poll()
  if answer is None:
    return None
  return answer.observation, episode.finish_reason() if answer.over else None


class Scheduler:
  """The host's side of one rollout: which sequences wait, run and are done."""

  def __init__(
      self,
      engine: Engine,
      params: PolicyParams,
      temperature: float,
      base_key: PRNGKey,
      weight_version: int,
      environment: EnvironmentConfig | None,
      on_end: Callable[[Completion], None] | None,
  ):
    self.on_end = on_end
    self.engine, self.params, self.temperature = engine, params, temperature
    self.base_key, self.weight_version = base_key, weight_version
    self.environment = environment
    self.strings: tuple[str, ...] = ()
    if environment is not None:
      self.strings = environment.stop_strings
      self.finder = StopStrings(self.strings, environment.tokenizer)
    self.call_ended = threading.Event()
    self.waiting: collections.deque[_Job] = collections.deque()
    # Prefilled sequences without a slot: (prefix, row, job).
    self.ready: collections.deque[tuple[Prefix, int, _Job]] = (
        collections.deque()
    )
    self.running: dict[int, _Slot] = {}
    self.done: dict[int, Completion] = {}
    # Completions that `on_end` has not received yet.
    self.unreported: list[Completion] = []

  def run(self, should_stop: StopCheck) -> list[Completion]:
    """Decodes until every job is done; returns the completions in order."""
    state = self.engine.init_decode_state()
    while self.waiting or self.ready or self.running:
      should_stop()
      processes.touch()
      state = self._continue_turns(
          state
      )  # Of turns that ended in the last visit.
      state = self._refill(state)
      state = self._continue_turns(state)  # Of episodes that have just started.
      if any(slot.ended is None for slot in self.running.values()):
        state = self.engine.generate_block(self.params, state, self.base_key)
        self._notify()  # The device decodes meanwhile.
        state = self._collect(state)
    self._notify()
    return [self.done[i] for i in range(len(self.done))]

  def _refill(self, state: DecodeState) -> DecodeState:
    """Starts waiting sequences in idle slots, and prefills as needed."""
    free = collections.deque(
        s for s in range(self.engine.num_slots) if s not in self.running
    )
    started: list[int] = []
    while free and (self.ready or self.waiting):
      # Inserting comes first, so that only one prefill's caches are alive.
      if not self.ready:
        self._prefill()
      state, slots = self._insert(state, free)
      started += slots
    if self.environment is not None and started:
      state = self.engine.pause(state, started)
    return state

  def _insert(
      self, state: DecodeState, free: collections.deque[int]
  ) -> tuple[DecodeState, list[int]]:
    """Inserts prefilled sequences; returns (state, their slots)."""
    prefix, mine = self.ready[0][0], []
    while free and self.ready:
      _, row, job = self.ready.popleft()
      mine.append((free.popleft(), row, job))
    slots = [slot for slot, _, _ in mine]
    state = self.engine.bulk_insert(
        prefix,
        state,
        slots,
        rows=[row for _, row, _ in mine],
        address=np.asarray(
            [(job.prompt.id, job.sample) for _, _, job in mine], np.uint32
        ),
        limits=[job.limit for _, _, job in mine],
        temperature=self.temperature,
    )
    self.running.update({slot: self._new_slot(job) for slot, _, job in mine})
    return state, slots

  def _new_slot(self, job: _Job) -> _Slot:
    """Returns the slot of a job; with an environment its episode starts."""
    if self.environment is None:
      return _Slot(job=job)
    if not self.engine.group.leads:
      return _Slot(job=job, ended=0)
    generator = rng.host_generator(self.base_key, job.prompt.id, job.sample)
    episode = Episode(
        self.environment,
        job.prompt,
        generator,
        self.call_ended,
        self.engine.policy.model.vocab_size,
    )
    return _Slot(job=job, episode=episode, ended=0)

  def _prefill(self) -> None:
    """Prefills the next prompts; all their waiting samples become ready."""
    jobs: dict[int, list[_Job]] = {}
    while self.waiting:
      job = self.waiting[0]
      if job.prompt.id not in jobs and len(jobs) == PREFILL_ROWS:
        break
      jobs.setdefault(job.prompt.id, []).append(self.waiting.popleft())
    groups = list(jobs.values())
    prefix = self.engine.prefill_batch(
        self.params,
        [group[0].prompt.tokens for group in groups],
        rows=PREFILL_ROWS,
    )
    for row, group in enumerate(groups):
      self.ready.extend((prefix, row, job) for job in group)

  def _collect(self, state: DecodeState) -> DecodeState:
    """Finds ended turns; sends them to environments or completes them."""
    active, emitted, stopped = jax.device_get(
        (state.active, state.emitted, state.stopped)
    )
    decoding = {i: s for i, s in self.running.items() if s.ended is None}
    if not self.strings:
      decoding = {i: s for i, s in decoding.items() if not active[i]}
    if not decoding:
      return state
    # Only environments and stop strings need the tokens here.
    tokens = np.zeros((len(active), 0), np.int32)
    if self.environment is not None:
      tokens = jax.device_get(state.tokens)
    over, asked = {}, []
    for i, slot in decoding.items():
      cut = self._stop_string(slot, tokens[i, : emitted[i]])
      if cut is None and active[i]:
        continue
      slot.ended = int(emitted[i]) if cut is None else cut
      reason = 'stop' if cut is not None or stopped[i] else 'length'
      if self.environment is None or reason == 'length':
        over[i] = reason
        continue
      text_end = slot.ended - (cut is None)  # The text has no stop token.
      if slot.episode is not None:
        slot.episode.step(
            self.environment.tokenizer.decode(tokens[i, slot.turn : text_end]),
            end=int(tokens[i, text_end]) if cut is None else None,
        )
      asked.append(i)
    if any(active[i] for i in asked):
      state = self.engine.pause(state, asked)
    self._complete(state, over)
    return state

  def _stop_string(self, slot: _Slot, tokens: np.ndarray) -> int | None:
    """Returns the number of tokens up to the turn's first stop string."""
    if not self.strings or len(tokens) <= slot.searched:
      return None
    found, slot.tail = self.finder.find(tokens[slot.searched :], slot.tail)
    if found is not None:
      return slot.searched + found
    slot.searched = len(tokens)
    return None

  def _continue_turns(self, state: DecodeState) -> DecodeState:
    """Continues the slots whose environments have answered."""
    asked = {i: s for i, s in self.running.items() if s.ended is not None}
    if not asked:
      return state

    def answers() -> dict[int, tuple[NpArray, str | None]]:
      self._wait_for_environments(list(asked.values()))
      found = {i: _answer(slot.episode) for i, slot in asked.items()}
      return {i: told for i, told in found.items() if told is not None}

    over, kept, given = {}, {}, {}
    told = self.engine.group.from_leader('the environments', answers)
    for i, (observation, reason) in told.items():
      slot = asked[i]
      assert slot.ended is not None
      end = slot.ended + len(observation)
      if reason is not None:
        over[i] = reason
      elif end >= slot.job.limit:
        over[i] = 'length'
      else:
        kept[i], given[i] = slot.ended, observation
        slot.observed.append((slot.ended, end))
        slot.turn, slot.searched, slot.tail, slot.ended = end, end, '', None
    self._complete(state, over)
    return self.engine.resume(state, kept, given) if kept else state

  def _wait_for_environments(self, asked: list[_Slot]) -> None:
    """Waits briefly, so that fast environments answer in this host visit."""
    start = time.monotonic()
    decoding = len(asked) < len(self.running)
    while True:
      self.call_ended.clear()
      pending = [s for s in asked if s.episode and not s.episode.answered()]
      if not pending:
        return
      # No slot can decode, so wait longer, for the first answer.
      stuck = not decoding and len(pending) == len(asked)
      # Calls of earlier visits have used up their time already.
      newest = max(s.episode.asked_at for s in pending if s.episode)
      end = start + _IDLE_S if stuck else newest + _QUICK_S
      left = end - time.monotonic()
      if left <= 0:
        return
      self.call_ended.wait(left)

  def _complete(self, state: DecodeState, over: dict[int, str]) -> None:
    """Takes finished sequences to the host and frees their slots.

    Args:
      state: all slots.
      over: slot -> finish reason.
    """
    if not over:
      return
    responses = self.engine.responses(state, list(over))
    self.engine.release(list(over))
    for i, reason in over.items():
      slot = self.running.pop(i)
      assert slot.ended is not None
      job, length = slot.job, slot.ended
      sampled = np.ones(length, bool)
      for start, stop in slot.observed:
        sampled[start:stop] = False
      tokens, log_mu, logprobs = responses[i]
      completion = Completion(
          prompt_id=job.prompt.id,
          sample=job.sample,
          prompt_tokens=np.asarray(job.prompt.tokens, np.int32),
          tokens=tokens[:length].copy(),
          sampled=sampled,
          log_mu=log_mu[:length].copy(),
          logprobs=logprobs[:length].copy(),
          weight_version=np.full(length, self.weight_version, np.int32),
          finish_reason=reason,
          episode=slot.episode and slot.episode.result(),
      )
      self.done[job.index] = completion
      self.unreported.append(completion)

  def _notify(self) -> None:
    """Passes new completions to `on_end`, which may take time."""
    ended, self.unreported = self.unreported, []
    if self.on_end is not None:
      for completion in ended:
        self.on_end(completion)
