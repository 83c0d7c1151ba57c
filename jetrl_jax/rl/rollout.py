"""Prompts to completions: continuous batching around the engine.

A prompt is prefilled once and inserted into slots for each of its samples; a
finished slot is refilled at the next host visit. The loop decides only when
things are computed, never what: a completion is a function of the weights,
the seed and its own address.
"""

import collections
import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from jetrl_jax.data import Prompt
from jetrl_jax.rl.engine import DecodeState, Engine, Prefix
from jetrl_jax.rl.policy import PolicyParams
from jetrl_jax.rl.types import Completion
from jetrl_jax.typing import PRNGKey

_PREFILL_ROWS = 16

StopCheck = Callable[[], None]


def never_stop() -> None:
  """The stop check of a rollout that is not interrupted."""


@dataclasses.dataclass(frozen=True)
class _Job:
  """One sequence to sample: its place in the result, its prompt, its row."""

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
) -> list[Completion]:
  """Samples `num_generations` responses to every prompt.

  Args:
    engine: its sizes bound prompts and responses.
    params: weights and activation scales, constant throughout.
    prompts: ids must differ: they are part of the random keys.
    num_generations: samples per prompt, G.
    temperature: 0 is greedy.
    base_key: key with address (seed, step).
    weight_version: recorded with every token.
    limits: int [P, G], most response tokens of each sample; by default
      max_response_length.
    should_stop: called at every host visit; raises to abandon the rollout.

  Returns:
    P * G completions, prompt by prompt.

  Raises:
    ValueError: two prompts share an id, or a prompt does not fit.
  """
  ids = [prompt.id for prompt in prompts]
  if len(set(ids)) != len(ids):
    twice = [i for i, n in collections.Counter(ids).items() if n > 1]
    raise ValueError(
        f'prompt ids {twice[:5]} occur twice in one rollout; their samples'
        ' would share random keys'
    )
  loop = _Loop(engine, params, temperature, base_key, weight_version)
  maximum = engine.config.max_response_length
  for p, prompt in enumerate(prompts):
    for g in range(num_generations):
      limit = maximum if limits is None else int(limits[p, g])
      loop.waiting.append(
          _Job(p * num_generations + g, prompt, g, max(1, min(limit, maximum)))
      )
  return loop.run(should_stop)


class _Loop:
  """The host's books of one rollout."""

  def __init__(self, engine, params, temperature, base_key, weight_version):
    self.engine, self.params, self.temperature = engine, params, temperature
    self.base_key, self.weight_version = base_key, weight_version
    self.waiting: collections.deque[_Job] = collections.deque()
    # Prefilled and not yet in a slot: (prefix, row, job).
    self.ready: collections.deque[tuple[Prefix, int, _Job]] = (
        collections.deque()
    )
    self.running: dict[int, _Job] = {}
    self.done: dict[int, Completion] = {}

  def run(self, should_stop: StopCheck) -> list[Completion]:
    """Decodes until every job is done; returns them in order."""
    state = self.engine.init_decode_state()
    while self.waiting or self.ready or self.running:
      should_stop()
      state = self._refill(state)
      state = self.engine.generate_block(self.params, state, self.base_key)
      self._collect(state)
    return [self.done[i] for i in range(len(self.done))]

  def _refill(self, state: DecodeState) -> DecodeState:
    free = [s for s in range(self.engine.num_slots) if s not in self.running]
    while len(self.ready) < len(free) and self.waiting:
      self._prefill()
    taken = [self.ready.popleft() for _ in free[: len(self.ready)]]
    pairs = list(zip(free, taken, strict=False))
    for prefix in {id(p): p for p, _, _ in taken}.values():
      mine = [(s, row, job) for s, (p, row, job) in pairs if p is prefix]
      state = self.engine.bulk_insert(
          prefix,
          state,
          [slot for slot, _, _ in mine],
          rows=[row for _, row, _ in mine],
          address=np.asarray(
              [(job.prompt.id, job.sample) for _, _, job in mine], np.uint32
          ),
          limits=[job.limit for _, _, job in mine],
          temperature=self.temperature,
      )
      self.running.update({slot: job for slot, _, job in mine})
    return state

  def _prefill(self) -> None:
    """Prefills the next prompts, with all their waiting samples."""
    jobs: dict[int, list[_Job]] = {}
    while self.waiting:
      job = self.waiting[0]
      if job.prompt.id not in jobs and len(jobs) == _PREFILL_ROWS:
        break
      jobs.setdefault(job.prompt.id, []).append(self.waiting.popleft())
    groups = list(jobs.values())
    prefix = self.engine.prefill_batch(
        self.params,
        [group[0].prompt.tokens for group in groups],
        rows=_PREFILL_ROWS,
    )
    for row, group in enumerate(groups):
      self.ready.extend((prefix, row, job) for job in group)

  def _collect(self, state: DecodeState) -> None:
    active, emitted, stopped = jax.device_get(
        (state.active, state.emitted, state.stopped)
    )
    finished = [slot for slot in self.running if not active[slot]]
    if not finished:
      return
    tokens, log_mu, logprobs = jax.device_get(
        (state.tokens, state.log_mu, state.logprobs)
    )
    self.engine.release(finished)
    for slot in finished:
      job, length = self.running.pop(slot), int(emitted[slot])
      self.done[job.index] = Completion(
          prompt_id=job.prompt.id,
          sample=job.sample,
          prompt_tokens=np.asarray(job.prompt.tokens, np.int32),
          tokens=tokens[slot, :length].copy(),
          log_mu=log_mu[slot, :length].copy(),
          logprobs=logprobs[slot, :length].copy(),
          weight_version=np.full(length, self.weight_version, np.int32),
          finish_reason='stop' if stopped[slot] else 'length',
      )
