"""One thread that serves all requests: continuous batching, and log-probs.

    until it is stopped:
        drop     free the slots of clients that have gone
        insert   prefill waiting prompts into idle slots
        forward  log-probs of one waiting sequence, between two decode blocks
        decode   a block of steps in all slots; hand out the new tokens

Only this thread touches the engine. Others call `submit`, and `cancel` of what
they submitted; they get events through a callback, which must not block.
"""

import collections
import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import numpy as np
from absl import logging

from jetrl_jax.config.saved_policy import SavedPolicy
from jetrl_jax.core import rng
from jetrl_jax.core.typing import NpArray
from jetrl_jax.rl.rollout.buckets import TAILS
from jetrl_jax.rl.rollout.engine import DecodeState, Engine, EngineConfig
from jetrl_jax.serve.logprobs import SequenceLogprobs, TokenLogprobs
from jetrl_jax.serve.requests import Limits, Sampling

# Decode steps between two checks of the queue; a multiple of 8 is faster on a
# GPU. Text is sent in pieces of so many tokens.
_STEPS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokens:
  """Tokens of a response, in order.

  Attributes:
    ids: token ids; the last one may be a stop token.
    logprobs: their log-probs, in nats, as the rollout records them.
    end: 'stop' or 'length' with the last tokens; '' before.
  """

  ids: list[int]
  logprobs: list[float]
  end: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failed:
  """There will be no more tokens.

  Attributes:
    why: a sentence.
    stopped: whether the server was stopped; otherwise the engine failed.
  """

  why: str
  stopped: bool


Event: TypeAlias = Tokens | TokenLogprobs | Failed


class Job:
  """One sequence to decode, or whose log-probs to compute.

  Args:
    deliver: called with each event, in the decoder's thread.
    tokens: int32; the prompt, or the whole sequence whose log-probs are wanted.
    sampling: how its response is sampled; None for its log-probs.
    temperature: the temperature of its log-probs.
    sample: its number among the samples of one prompt and seed.
  """

  def __init__(
      self,
      deliver: Callable[[Event], None],
      tokens: Sequence[int],
      sampling: Sampling | None,
      *,
      temperature: float = 1.0,
      sample: int = 0,
  ):
    self.tokens: NpArray = np.asarray(tokens, np.int32)
    self.sampling, self.sample = sampling, sample
    self.temperature = temperature
    self.cancelled = False
    self._deliver = deliver
    # Response tokens that were delivered.
    self.sent = 0

  def cancel(self) -> None:
    """Ends the job before the next block; there may be a last event."""
    self.cancelled = True

  def deliver(self, event: Event) -> None:
    """Hands an event to the request, if it is still there."""
    if not self.cancelled:
      self._deliver(event)


class Full(Exception):
  """All slots are taken, and as many requests wait as may wait."""


class Stopped(Exception):
  """The decoder takes no more jobs."""


def make_engine(saved: SavedPolicy, limits: Limits, num_slots: int) -> Engine:
  """Returns the engine of a server, with the policy's parameters.

  Args:
    saved: the policy.
    limits: bound prompts and responses.
    num_slots: requests decoded at once; rounded up to 16 per device.

  Raises:
    ValueError: prompts and responses of these lengths do not fit the model.
  """
  longest = limits.max_prompt_length + limits.max_tokens
  if longest > saved.policy.model.max_position:
    raise ValueError(
        f'max_prompt_length + max_tokens is {longest}; the model has'
        f' {saved.policy.model.max_position} positions'
    )
  engine = Engine(
      saved.policy,
      EngineConfig(
          num_slots=num_slots,
          max_prompt_length=limits.max_prompt_length,
          max_response_length=limits.max_tokens,
          stop_ids=saved.tokenizer.eos_ids,
      ),
      saved.mesh,
  )
  engine.set_params(saved.params)
  return engine


class Decoder:
  """Runs jobs on one engine.

  Args:
    engine: with its parameters set; nobody else may use it.
    queue_size: jobs that may wait while all slots are taken.
    on_failure: called in the decoder's thread after the engine has failed.
  """

  def __init__(
      self,
      engine: Engine,
      queue_size: int,
      on_failure: Callable[[], None] = lambda: None,
  ):
    self._engine, self._params = engine, engine.load_params()
    config = engine.config
    policy, params_spec = engine.reader
    self._logprobs_of = SequenceLogprobs(
        policy,
        engine.mesh,
        config.max_prompt_length + config.max_response_length,
        params_spec,
    )
    self.capacity = engine.num_slots + queue_size
    self._on_failure = on_failure
    self._key = rng.key(0, rng.ROLLOUT, 0)
    self._changed = threading.Condition()
    # Guarded by `_changed`.
    self._waiting: collections.deque[Job] = collections.deque()
    self._for_logprobs: collections.deque[Job] = collections.deque()
    self._closed: Failed | None = None
    # Only the decoder's thread reads and changes these.
    self._running: dict[int, Job] = {}
    self._thread = threading.Thread(
        target=self._run, name='decoder', daemon=True
    )

  # --- any thread ---------------------------------------------------------

  @property
  def num_running(self) -> int:
    """Jobs that have a slot."""
    return len(self._running)

  @property
  def num_waiting(self) -> int:
    """Jobs that wait for a slot or for log-probs."""
    return len(self._waiting) + len(self._for_logprobs)

  @property
  def is_live(self) -> bool:
    """Whether it takes jobs."""
    return self._closed is None and self._thread.is_alive()

  def submit(self, jobs: Sequence[Job], *, admitted: bool = False) -> None:
    """Takes all of these jobs, or none.

    Args:
      jobs: the jobs of one request.
      admitted: they go on with what was taken before, and are not counted.

    Raises:
      Full: too many wait.
      Stopped: it was stopped, or has failed.
    """
    with self._changed:
      if self._closed is not None:
        raise Stopped(self._closed.why)
      taken = self.num_waiting + self.num_running
      if not admitted and taken + len(jobs) > self.capacity:
        raise Full()
      for job in jobs:
        queue = self._for_logprobs if job.sampling is None else self._waiting
        queue.append(job)
      self._changed.notify()

  def start(self) -> None:
    """Compiles all that it runs, then takes jobs."""
    self._warm_up()
    self._thread.start()

  def stop(self, why: str) -> None:
    """Ends what runs and waits, and the thread.

    Args:
      why: a sentence for those who still wait.
    """
    with self._changed:
      if self._closed is None:
        self._closed = Failed(why=why, stopped=True)
      self._changed.notify()
    if self._thread.is_alive():
      self._thread.join()

  # --- the decoder's thread -----------------------------------------------

  def _run(self) -> None:
    try:
      self._state = self._engine.init_decode_state()
      while self._wait():
        self._drop()
        self._insert()
        self._compute_logprobs()
        if self._running:
          self._decode()
      self._tell_all()
    # For example out of memory. The server cannot continue.
    except Exception as error:
      logging.exception('The engine failed')
      first = (str(error).splitlines() or [''])[0]
      why = f'the engine failed: {type(error).__name__}: {first}'
      with self._changed:
        self._closed = Failed(why=why, stopped=False)
      self._tell_all()
      self._on_failure()

  def _wait(self) -> bool:
    """Waits for something to do; returns whether to go on."""
    with self._changed:
      self._changed.wait_for(
          lambda: self._closed or self.num_waiting or self.num_running
      )
      return self._closed is None

  def _tell_all(self) -> None:
    assert self._closed is not None
    with self._changed:
      left = [*self._running.values(), *self._waiting, *self._for_logprobs]
      self._waiting.clear()
      self._for_logprobs.clear()
    self._running = {}
    for job in left:
      job.deliver(self._closed)

  def _drop(self) -> None:
    for slot, job in list(self._running.items()):
      if job.cancelled:
        self._state = self._engine.free_resource(slot, self._state)
        del self._running[slot]
    with self._changed:
      for queue in (self._waiting, self._for_logprobs):
        left = [job for job in queue if not job.cancelled]
        queue.clear()
        queue.extend(left)

  def _insert(self) -> None:
    """Prefills waiting prompts one by one, so that no row is padding."""
    idle = [s for s in range(self._engine.num_slots) if s not in self._running]
    for slot in idle:
      with self._changed:
        if not self._waiting:
          return
        job = self._waiting.popleft()
        # Counted from here on as running: `submit` looks at the sum.
        self._running[slot] = job
      self._start_job(job, slot)

  def _start_job(self, job: Job, slot: int) -> None:
    sampling = job.sampling
    assert sampling is not None
    prefix = self._engine.prefill_batch(self._params, [job.tokens])
    self._state = self._engine.bulk_insert(
        prefix,
        self._state,
        [slot],
        # The address of its randomness.
        address=np.asarray([[sampling.seed, job.sample]], np.uint32),
        limits=[sampling.max_tokens],
        temperature=sampling.temperature,
    )
    _wait_for(self._state)

  def _compute_logprobs(self) -> None:
    with self._changed:
      if not self._for_logprobs:
        return
      job = self._for_logprobs.popleft()
    job.deliver(self._logprobs_of(self._params, job.tokens, job.temperature))

  def _decode(self) -> None:
    """Decodes a block and delivers what is new."""
    self._state = self._engine.generate_block(
        self._params, self._state, self._key, _STEPS, self._top_p()
    )
    state = self._state
    emitted, active, stopped, tokens, logprobs = jax.device_get(
        (
            state.emitted,
            state.active,
            state.stopped,
            state.tokens,
            state.logprobs,
        )
    )
    for slot, job in list(self._running.items()):
      new = slice(job.sent, int(emitted[slot]))
      job.sent = new.stop
      end = ''
      if not active[slot]:
        end = 'stop' if stopped[slot] else 'length'
        self._engine.release([slot])
        del self._running[slot]
      if end or new.start < new.stop:
        job.deliver(
            Tokens(
                ids=tokens[slot, new].tolist(),
                logprobs=logprobs[slot, new].tolist(),
                end=end,
            )
        )

  def _top_p(self) -> NpArray | None:
    """Returns each slot's top_p; None if none truncates."""
    top_p_B = np.ones(self._engine.num_slots, np.float32)
    for slot, job in self._running.items():
      assert job.sampling is not None
      top_p_B[slot] = job.sampling.top_p
    return top_p_B if (top_p_B < 1).any() else None

  # --- the start ----------------------------------------------------------

  def _warm_up(self) -> None:
    """Runs every program once; compiling later would make requests wait."""
    engine, params = self._engine, self._params
    state = engine.init_decode_state()
    slots = engine.num_slots
    # A long tail of few slots has a program of its own.
    counts = {1, slots} | {-(-slots // share) for share, _ in TAILS}
    longest = engine.config.max_prompt_length
    lengths = {min(bucket, longest) for bucket in engine.buckets}
    for length in sorted(lengths):
      prompt = np.zeros(length, np.int32)
      prefix = engine.prefill_batch(params, [prompt])
      state = engine.bulk_insert(prefix, state, [0], limits=[1])
      state = engine.free_resource(0, state)
      _wait_for(state)
    prefix = engine.prefill_batch(params, [np.zeros(1, np.int32)])
    for top_p_B in (None, np.full(slots, 0.5, np.float32)):
      for count in counts if top_p_B is None else {1}:
        for slot in range(count):
          state = engine.bulk_insert(prefix, state, [slot], limits=[1])
          _wait_for(state)
        state = engine.generate_block(params, state, self._key, _STEPS, top_p_B)
        engine.release(range(count))
    for length in self._logprobs_of.lengths:
      most = engine.config.max_prompt_length + engine.config.max_response_length
      tokens = np.zeros(min(length, most), np.int32)
      self._logprobs_of(params, tokens, 1.0)


def _wait_for(state: DecodeState) -> None:
  """Waits for the devices.

  Several CPU devices of one process that have many programs in flight, each of
  which waits for all of them, may wait for ever.
  """
  jax.block_until_ready(state.active)
