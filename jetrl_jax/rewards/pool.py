"""Scores answers in processes that are killed when they take too long.

A time limit inside a process does not hold: a signal handler runs between byte
codes, and one power of big integers is one byte code. So the pool's own process
watches. A worker that has not answered in time gets SIGKILL, its answer counts
0, and a new worker takes the rest of the batch. Answers that came are judged by
the seconds that their worker reports, so a score does not depend on how often
this process finds the time to look.
"""

import collections
import contextlib
import dataclasses
import json
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from typing import Any

from absl import logging

from jetrl_jax.rewards import wire
from jetrl_jax.rewards.fork_server import ForkServer, Worker
from jetrl_jax.rewards.types import (
    READERS,
    Columns,
    RewardFunctionError,
    RewardRequest,
    RewardResult,
    RewardSpec,
)
from jetrl_jax.rewards.worker import failed

# Most answers per message: enough to save system calls, and few enough to
# spread over the workers.
_BATCH = 16
# Time to import a user's module, which may be large. It does not count as an
# answer's time.
_START_SECONDS = 120.0
# Failures in a row. The kernel may cause one, when memory runs out; this many
# come from the user's code.
_MAX_FAILED_STARTS = 3


def check_limits(
    num_workers: int, timeout_s: float, memory_limit_mb: int
) -> None:
  """Refuses limits that no pool can keep; see `RewardPool`.

  Raises:
    ValueError: a limit is out of range.
  """
  for name, value, low, high in (
      ('num_workers', num_workers, 1, 4096),
      ('timeout_s', timeout_s, 0.01, 86_400),
      ('memory_limit_mb', memory_limit_mb, 1, 2**31),
  ):
    if not low <= value <= high:
      raise ValueError(f'reward.{name} is {value}; allowed: {low} to {high}')


@dataclasses.dataclass
class Scoring:
  """Answers that are scored together, added one by one.

  Attributes:
    pool: whose workers score them.
    requests: the answers.
    waiting: indices that no worker has.
    replies: what came of an answer, by index.
    crashed: indices whose worker died once.
  """

  pool: 'RewardPool'
  requests: list[RewardRequest] = dataclasses.field(default_factory=list)
  waiting: collections.deque[int] = dataclasses.field(
      default_factory=collections.deque
  )
  replies: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict)
  crashed: set[int] = dataclasses.field(default_factory=set)

  def add(self, requests: Sequence[RewardRequest]) -> None:
    """Adds answers; `poll` or `results` gives them to workers."""
    first = len(self.requests)
    self.requests.extend(requests)
    self.waiting.extend(range(first, len(self.requests)))

  def poll(self) -> None:
    """Hands out waiting requests and takes replies; does not wait."""
    self.pool.serve(self, wait=False)

  def results(
      self, should_stop: Callable[[], None] = lambda: None
  ) -> list[RewardResult]:
    """Returns one result per answer, in order, when all are scored.

    Args:
      should_stop: called after each reply or time limit; raises to give up.

    Raises:
      RewardFunctionError: see `RewardPool.score`.
    """
    while len(self.replies) < len(self.requests):
      should_stop()
      self.pool.serve(self, wait=True)
    results = []
    for index, request in enumerate(self.requests):
      reply = self.replies[index]
      if 'unusable' in reply:
        raise RewardFunctionError(reply['unusable'])
      if 'fatal' in reply:
        raise RewardFunctionError(
            f'scoring answer {index} of the batch failed (prompt of'
            f' {request.source!r}):\n{reply["fatal"]}'
        )
      results.append(RewardResult(**reply))
    self.pool.warn_once(results)
    return results


class RewardPool:
  """Worker processes that score answers; a context manager.

  Results come in the order of the requests. Unless a function keeps a state,
  they do not depend on the number of workers. One batch at a time: a second
  thread waits.
  """

  def __init__(
      self,
      specs: Sequence[RewardSpec | str],
      *,
      num_workers: int,
      timeout_s: float,
      memory_limit_mb: int,
      columns: Columns = (),
  ):
    """Starts the workers and waits until they are warm (seconds).

    Args:
      specs: the terms of the score; a text is the function of a `RewardSpec`.
      num_workers: processes that score at the same time.
      timeout_s: longest time for one answer, in seconds; later it counts 0.
      memory_limit_mb: address space that an answer may add, in MiB.
      columns: those of the rows to come, as far as they are known.

    Raises:
      ValueError: a setting is out of range, two terms have the same name, a
        term is neither a spec nor a text.
      RewardFunctionError: a custom function cannot be loaded, or needs a
        column that rows lack.
    """
    if isinstance(specs, (str, RewardSpec)):
      raise ValueError(f'specs is {specs!r}; pass a list, [{specs!r}]')
    terms = [
        spec if isinstance(spec, RewardSpec) else RewardSpec(function=spec)
        for spec in specs
    ]
    labels = [spec.label for spec in terms]
    if not terms or len(set(labels)) != len(labels):
      raise ValueError(
          f'the rewards are {labels}; there must be at least one, and each'
          ' needs a name of its own, by which it is reported: rename a'
          ' function, or give it a second name in its file (mine ='
          ' compute_score)'
      )
    check_limits(num_workers, timeout_s, memory_limit_mb)
    self._specs = tuple(terms)
    self._num_workers = num_workers
    self._timeout_s = timeout_s
    self._memory_limit_mb = memory_limit_mb
    self._lock = threading.Lock()
    self._failed_starts = 0
    # Kinds of errors that were warned about.
    self._warned: set[str] = set()
    self._workers: list[Worker] = []
    self._fork_server: ForkServer | None = None
    try:
      self._fork_server = ForkServer(
          self._specs, columns, memory_limit_mb, timeout_s
      )
      nothing = Scoring(self)
      while not self._workers or not all(w.ready for w in self._workers):
        self.serve(nothing, wait=True)
    except BaseException:
      self.close()
      raise

  @property
  def reads_answers(self) -> bool:
    """Whether a term reads final answers; a prediction of '' is then none."""
    return any(spec.function in READERS for spec in self._specs)

  def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
    """Scores answers, each within the time limit.

    Args:
      requests: the answers, in any number.

    Returns:
      One result per request, in order.

    Raises:
      RewardFunctionError: a custom function raised, and the message holds its
        traceback; or it returned what is no finite number. A silent 0 would
        train against the user's mistake.
    """
    with self.scoring() as scoring:
      scoring.add(requests)
      return scoring.results()

  @contextlib.contextmanager
  def scoring(self) -> Iterator[Scoring]:
    """Scores answers while the caller makes more of them.

    Workers have no answer when it ends: those still under way are given up.

    Raises:
      ValueError: the pool is closed.
    """
    with self._lock:
      if self._fork_server is None:
        raise ValueError('the reward pool is closed.')
      try:
        yield Scoring(self)
      finally:
        # Their replies would be mistaken for answers of the next batch.
        for worker in [w for w in self._workers if w.assigned]:
          self._drop(worker)

  def serve(self, batch: Scoring, *, wait: bool) -> None:
    """Takes replies, waiting up to a time limit; hands out waiting requests.

    In this order a worker that is done has answers again. For `Scoring`.
    """
    self._take(batch, wait=wait)
    self._hand_out(batch)

  def close(self) -> None:
    """Ends all processes. The pool cannot be used afterwards."""
    for worker in self._workers:
      worker.end()
    self._workers = []
    if self._fork_server is not None:
      self._fork_server.end()
      self._fork_server = None

  def __enter__(self) -> 'RewardPool':
    """Returns the pool."""
    return self

  def __exit__(self, *_: object) -> None:
    """Ends all processes."""
    self.close()

  def warn_once(self, results: Sequence[RewardResult]) -> None:
    """Says once of each kind that answers count 0 or not at all, and why.

    Where all of them do, the run trains on zeros, and no score tells. For
    `Scoring`.
    """
    unscored = sum(result.score is None for result in results)
    if unscored and 'unscored' not in self._warned:
      self._warned.add('unscored')
      logging.warning(
          '%d of %d answers got no score, as every reward returned None; they'
          ' are left out of their groups. Said once: those of training steps'
          ' are counted as reward/unscored in metrics.jsonl.',
          unscored,
          len(results),
      )
    limits = {
        'timeout': f'the limit is reward.timeout_s={self._timeout_s} seconds',
        'memory': (
            f'the limit is reward.memory_limit_mb={self._memory_limit_mb} MiB'
        ),
        'crash': 'the limit is two dead workers for one answer',
        'failed': (
            'it is a defect of this library, please report it with the log of'
            ' the worker'
        ),
    }
    for error in dict.fromkeys(result.error for result in results):
      if error not in limits or error in self._warned:
        continue
      self._warned.add(error)
      count = sum(result.error == error for result in results)
      logging.warning(
          '%d of %d rewards ended with %r and count 0; %s. Said once: those of'
          ' training steps are counted as reward/%s in metrics.jsonl.',
          count,
          len(results),
          error,
          limits[error],
          error,
      )

  def _hand_out(self, batch: Scoring) -> None:
    """Gives every idle worker some of the waiting requests."""
    assert self._fork_server is not None
    while len(self._workers) < self._num_workers:
      self._workers.append(self._fork_server.fork())
    for worker in self._workers:
      if not batch.waiting or not worker.ready or worker.assigned:
        continue
      share = len(batch.waiting) // (2 * self._num_workers)
      size = max(1, min(_BATCH, share))
      indices = [batch.waiting.popleft() for _ in range(size)]
      worker.assigned.extend(indices)
      message = pickle.dumps([(i, batch.requests[i]) for i in indices])
      with contextlib.suppress(OSError):
        # `_take` finds a worker that does not read or has died.
        worker.sock.sendall(wire.pack(message))
      worker.since = time.monotonic()

  def _take(self, batch: Scoring, *, wait: bool) -> None:
    """Acts on replies and time limits; may `wait` for the next of them."""
    limits = [
        self._limit(w) for w in self._workers if w.assigned or not w.ready
    ]
    patience = 0.0
    if wait and limits:
      patience = max(0.0, min(limits) - time.monotonic())
    # Idle workers too: if an answer is given to a dead worker, it counts as
    # crashed.
    arrived = connection.wait([w.sock for w in self._workers], patience)
    for worker in list(self._workers):
      if worker.sock in arrived and not self._read(worker, batch):
        self._give_up(worker, 'crash', batch)
    # The clock is checked last. A reply that was ready in time counts, however
    # late this process reads it.
    now = time.monotonic()
    for worker in list(self._workers):
      if (worker.assigned or not worker.ready) and now >= self._limit(worker):
        self._give_up(worker, 'timeout', batch)

  def _limit(self, worker: Worker) -> float:
    allowed = self._timeout_s if worker.ready else _START_SECONDS
    return worker.since + allowed

  def _read(self, worker: Worker, batch: Scoring) -> bool:
    """Takes a worker's messages; False when the worker is gone."""
    alive = True
    # Read to the end: after the next fork, the process id of a dead worker no
    # longer leads to what it started.
    while alive and connection.wait([worker.sock], 0):
      try:
        data = worker.sock.recv(1 << 20)
      except OSError:
        data = b''
      worker.buffer += data
      alive = bool(data)
    # It may have waited for room to send until now.
    worker.since = time.monotonic()
    while (message := wire.take(worker.buffer)) is not None:
      try:
        reply = json.loads(message)
      except ValueError as error:
        raise RewardFunctionError(
            'a reward worker sent what cannot be read: does a reward function'
            ' write to sockets that it did not open?'
        ) from error
      if not worker.ready:
        if 'fatal' in reply:
          raise RewardFunctionError(reply['fatal'])
        worker.ready = True
        self._failed_starts = 0
        continue
      index, seconds = reply.pop('index'), reply.pop('seconds')
      if not worker.assigned or index != worker.assigned[0]:
        # It comes from a process that a reward function forked, or from the
        # worker after such a process.
        if 'unusable' in reply:
          raise RewardFunctionError(reply['unusable'])
        continue
      if seconds > self._timeout_s:
        # The same result as if the limit had been checked in time.
        reply = dataclasses.asdict(failed('timeout', self._specs))
      elif reply.get('error') == 'memory' and worker.is_used:
        # Leftovers of earlier answers may have filled the worker's memory, and
        # would do so for every later answer.
        self._drop(worker)
        batch.waiting.extendleft(reversed(worker.assigned))
        return True
      worker.is_used = True
      worker.assigned.popleft()
      batch.replies[index] = reply
    return alive

  def _give_up(self, worker: Worker, error: str, batch: Scoring) -> None:
    """Ends a worker; its current answer counts 0, its others wait again.

    A crash is tried once more: a worker also dies when the machine runs out of
    memory, or had died before it read the answer.
    """
    if not worker.ready:
      self._failed_starts += 1
      if error == 'crash' and self._failed_starts < _MAX_FAILED_STARTS:
        self._drop(worker)
        return
      raise RewardFunctionError(
          f'a reward worker ended with {error!r} while it loaded the reward'
          f' functions ({", ".join(s.function for s in self._specs)}).'
      )
    self._drop(worker)
    if not worker.assigned:
      return
    index = worker.assigned[0]
    if error == 'crash' and index not in batch.crashed:
      batch.crashed.add(index)
    else:
      worker.assigned.popleft()
      batch.replies[index] = dataclasses.asdict(failed(error, self._specs))
    batch.waiting.extendleft(reversed(worker.assigned))

  def _drop(self, worker: Worker) -> None:
    self._workers.remove(worker)
    worker.end()
