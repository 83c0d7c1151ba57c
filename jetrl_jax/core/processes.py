"""Several processes of one run: who they are, and where they meet.

A launcher (Slurm, Open MPI, Kubernetes, or three variables set by hand) starts
the same command several times. `start` joins them through `jax.distributed`.
Then all processes compile and run the same programs over one mesh. What exists
only on the host, such as sampled responses and their rewards, passes through
`together`. After it every process knows the same and decides the same. In a run
of a single process every function here just does its work.

    together      every process works, then each gets the results of all
    from_first    process 0 works, the others get its result
    TensorGroup   processes that sample the same sequences: the first decides
    barrier       for background threads

`process_watch.py` finds who is missing; `touch`, `slow` and `watch_for_hangs`
tell it what to expect.
"""

import contextlib
import os
import pathlib
import pickle
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from jetrl_jax.core import launchers, process_watch
from jetrl_jax.core.interrupt import StopRequested
from jetrl_jax.core.process_watch import Watch

# The key-value store of jax.distributed. JAX has no public name for it, and
# neither has Orbax, which uses this one too. The public collectives
# (`multihost_utils`) need the devices, which a stopped or hanging process
# blocks, so they cannot tell which process that is. Nor can `live_devices`
# there: it leaves out processes that have died, and waits for one that hangs.
from jax._src import distributed  # isort: skip

T = TypeVar('T')

# Seconds in which all processes must have come, and between two lines on who
# is missing.
COME_S = 300.0
MISSING_S = 30.0
# A longer value does not travel with the message that announces it.
_INLINE_BYTES = 1 << 16
# Of a value in the store: gRPC takes 4 MiB in a message.
_PIECE_BYTES = 1 << 20
# What the store, which is in one process, passes on of one meeting. More
# travels over the devices, where each new size is compiled.
_STORE_BYTES = 1 << 22
_STORE = 'jetrl_jax'


class _Group:
  """The processes of a run.

  Args:
    rank: this process, from 0.
    count: number of processes.
  """

  def __init__(self, rank: int, count: int):
    self.rank, self.count = rank, count
    self.client: Any = distributed.global_state.client
    self.turn = 0
    # What `TensorGroup.from_leader` has passed on so far.
    self.told = 0
    # What is still in the store and has been read by all after the next turn.
    self.stale: list[str] = []
    self.barriers: dict[str, int] = {}
    self.watch = Watch(self)

  def set(self, key: str, value: bytes, *, again: bool = False) -> None:
    self.client.key_value_set_bytes(
        f'{_STORE}/{key}', value, allow_overwrite=again
    )

  def get(self, key: str, seconds: float) -> bytes | None:
    """Returns a value; None if it is not there in time."""
    try:
      return self.client.blocking_key_value_get_bytes(
          f'{_STORE}/{key}', max(1, int(1000 * seconds))
      )
    except jax.errors.JaxRuntimeError as error:
      if 'DEADLINE_EXCEEDED' in str(error):
        return None
      raise

  def folder(self, key: str) -> dict[str, bytes]:
    found = self.client.key_value_dir_get_bytes(f'{_STORE}/{key}/')
    return {name.rpartition('/')[2]: value for name, value in found}

  def delete(self, key: str) -> None:
    self.client.key_value_delete(f'{_STORE}/{key}')


_group: _Group | None = None


# --- who ------------------------------------------------------------------


def start() -> None:
  """Joins the processes that the launcher has started; alone, does nothing.

  Call it before JAX first looks for devices.

  Raises:
    ValueError: see `launchers.launched`.
    RuntimeError: the other processes did not come.
  """
  global _group
  if _group is not None or launchers.launched() == 1:
    return
  # JAX's own service would take SIGTERM away from `Interrupt`.
  jax.config.update('jax_enable_preemption_service', False)
  by_hand: dict[str, Any] = {}
  if not os.environ.get(launchers.COUNT):
    by_hand = {'local_device_ids': launchers.local_devices(os.environ)}
  else:
    by_hand = {
        'num_processes': int(os.environ[launchers.COUNT]),
        'process_id': int(os.environ[launchers.RANK]),
        'cluster_detection_method': 'deactivate',
    }
  # JAX itself would end this process without a word on who is missing.
  joined = threading.Event()
  threading.Thread(target=_await_all, args=(joined,), daemon=True).start()
  try:
    jax.distributed.initialize(
        **by_hand,
        initialization_timeout=int(COME_S) + 60,
        shutdown_timeout_seconds=60,
    )
  finally:
    joined.set()
  state = distributed.global_state
  if state.num_processes == 1:
    return
  _group = _Group(state.process_id, state.num_processes)
  _group.watch.start()


def _await_all(joined: threading.Event) -> None:
  """Says who is missing, and ends this process if they do not come in time."""
  begin = time.monotonic()
  # The first line soon: who starts processes by hand still looks.
  wait = min(10.0, MISSING_S, COME_S)
  while not joined.wait(wait):
    rank, missing = distributed.global_state.process_id or 0, _missing()
    spent = time.monotonic() - begin
    if joined.is_set():
      return
    if spent >= COME_S:
      print(
          f'[process {rank}] error: {missing or "not all processes have come"}'
          f' in {COME_S:.0f} s. Those that print this line are there; see what'
          ' the launcher says of the others',
          file=sys.stderr,
          flush=True,
      )
      os._exit(1)
    if missing:
      print(
          f'[process {rank}] {missing}; waits {COME_S - spent:.0f} s more',
          file=sys.stderr,
          flush=True,
      )
    wait = min(MISSING_S, COME_S - spent)


def _missing() -> str:
  """Says who is missing, as far as this process can know; else ''."""
  state = distributed.global_state
  host, _, port = str(state.coordinator_address).rpartition(':')
  if state.process_id:
    try:
      socket.create_connection((host.strip('[]'), int(port)), timeout=5).close()
    except (OSError, ValueError):
      return f'process 0 does not answer at {host}:{port}'
    return ''  # Process 0 says more.
  if state.service is None:
    return ''
  if not (found := _connected(int(port))):
    return ''
  return f'{found} of {state.num_processes} processes have come'


def _connected(port: int) -> int:
  """Returns how many processes hold a connection to a port of this one.

  JAX has no public way to ask who has joined, and its store does not answer
  before all have. Linux lists all connections; elsewhere it is 0: unknown.
  """
  lines: list[str] = []
  for table in ('tcp', 'tcp6'):
    with contextlib.suppress(OSError):
      found = pathlib.Path('/proc/net', table).read_text(encoding='ascii')
      lines += found.splitlines()[1:]
  ends = [line.split()[1:4] for line in lines]
  here = f':{port:04X}'
  return sum(at.endswith(here) and state == '01' for at, _, state in ends)


def count() -> int:
  """Returns the number of processes."""
  return _group.count if _group else 1


def rank() -> int:
  """Returns this process's number, from 0."""
  return _group.rank if _group else 0


def is_first() -> bool:
  """Whether this is the process that writes the run's files."""
  return rank() == 0


# --- where they meet --------------------------------------------------------


def together(
    what: str,
    work: Callable[[], T],
    meanwhile: Callable[[], None] | None = None,
) -> list[T]:
  """Does this process's work and returns the results of all, by rank.

  A request to stop that reaches one process during its work reaches all.

  Args:
    what: names the work, for messages; the same in all processes.
    work: returns what can be pickled.
    meanwhile: called again and again during the wait for the others; a request
      to stop that it raises is left for the next work.

  Raises:
    StopRequested: raised by the work of any process.
    RuntimeError: the processes are not at the same work.
  """
  if _group is None:
    return [work()]
  touch(what)
  value, stopped = _worked(work)
  body = pickle.dumps(value)
  inline = body if len(body) <= _INLINE_BYTES else None
  group, turn = _group, _group.turn
  group.turn += 1
  touch(f'waiting for the others after {what}')
  _store(f'meet/{turn}/{group.rank}', (what, stopped, len(body), inline))
  found = [
      _awaited(f'meet/{turn}/{r}', r, what, meanwhile)
      for r in range(group.count)
  ]
  # Whoever is here has read all of the last turn, and what it was told.
  while group.stale:
    group.delete(group.stale.pop())
  group.stale.append(f'meet/{turn}/{group.rank}')
  for r, (other, *_) in enumerate(found):
    _check_same_work(r, other, what)
  for _, why, *_ in found:
    if why is not None:
      raise StopRequested(why)
  bodies = [inline for *_, inline in found]
  if any(inline is None for inline in bodies):
    sizes = [size for _, _, size, _ in found]
    if sum(sizes) * group.count <= _STORE_BYTES:
      bodies = _through_store(f'body/{turn}', body, what)
    else:
      bodies = _over_devices(body, sizes)
  touch(what)
  return [pickle.loads(body) for body in bodies]


def _worked(work: Callable[[], T]) -> tuple[T | None, str | None]:
  """Returns (the result, None), or (None, the reason to stop)."""
  try:
    return work(), None
  except StopRequested as stop:
    return None, str(stop)


def _check_same_work(other: int, there: str, here: str) -> None:
  """Raises where another process is not at the same work."""
  if there != here:
    raise RuntimeError(
        f'process {other} is at {there!r} while process {rank()} is at'
        f' {here!r}: they must run the same command on the same files'
    )


def from_first(what: str, work: Callable[[], T]) -> T:
  """Returns the result of the work, which process 0 alone does."""

  def first() -> T | None:
    if not is_first():
      return None
    with slow(what):  # Files are read.
      return work()

  return together(what, first)[0]  # type: ignore[return-value]


def stop_together(what: str, check: Callable[[], None]) -> None:
  """Raises in all processes the request to stop that `check` raises in one."""
  together(what, check)


def barrier(name: str) -> None:
  """Waits until all processes are here; for background threads, in order."""
  if _group is None:
    return
  number = _group.barriers.get(name, 0)
  _group.barriers[name] = number + 1
  _group.client.wait_at_barrier(f'{_STORE}/{name}/{number}', 24 * 3600 * 1000)


class TensorGroup:
  """Processes whose devices share sequences: neighbours in rank.

  They do the same work in the same order. What could differ between them (a
  signal, a clock, code of the user) the first of them decides: the leader.

  Args:
    size: number of processes; 1 where `mesh.tensor` lies inside a process.

  Attributes:
    leads: whether this process is the leader.
  """

  def __init__(self, size: int = 1):
    assert count() % size == 0
    self._size = size
    self.leads = rank() % size == 0

  def share(self, total: int) -> list[int]:
    """Returns which of `total` things this group does: every n-th of n."""
    return list(range(rank() // self._size, total, count() // self._size))

  def leaders(self, parts: list[T]) -> list[T]:
    """Returns the leaders' parts of those of all processes."""
    return parts[:: self._size]

  def from_leader(self, what: str, work: Callable[[], T]) -> T:
    """Returns the result of the work, which the leader alone does.

    Args:
      what: names the work, for messages; the same in all processes.
      work: returns what can be pickled.

    Raises:
      StopRequested: raised by the work.
      RuntimeError: the processes are not at the same work.
    """
    if self._size == 1:
      return work()
    assert _group is not None
    group, leader = _group, rank() // self._size * self._size
    key = f'told/{leader}/{group.told}'
    group.told += 1
    if self.leads:
      value, stopped = _worked(work)
      body = pickle.dumps((what, stopped, value))
      _store_in_pieces(key, body)
      if f'told/{group.rank}' not in group.stale:
        group.stale.append(f'told/{group.rank}')
    else:
      body = _awaited_in_pieces(key, leader, what)
      there, stopped, value = pickle.loads(body)
      _check_same_work(leader, there, what)
    touch()
    if stopped is not None:
      raise StopRequested(stopped)
    return value  # type: ignore[return-value]


def _store(key: str, value: Any) -> None:
  assert _group is not None
  _group.set(key, pickle.dumps(value))


def _awaited(
    key: str, other: int, what: str, meanwhile: Callable[[], None] | None
) -> Any:
  """Waits for another process's value."""
  assert _group is not None
  watch, since = _group.watch, time.monotonic()
  while (value := _group.get(key, 0.05 if meanwhile else 1.0)) is None:
    if meanwhile is not None:
      with contextlib.suppress(StopRequested):
        meanwhile()
    watch.waits()
    if where := watch.stalled(other, since):
      fail(
          f'process {other} has done nothing for'
          f' {process_watch.STALLED_S:.0f} s ({where}); process'
          f' {_group.rank} waits for it after {what}'
      )
  return pickle.loads(value)


def _store_in_pieces(key: str, body: bytes) -> None:
  pieces = [
      body[i : i + _PIECE_BYTES] for i in range(0, len(body), _PIECE_BYTES)
  ]
  for i, piece in enumerate(pieces):
    _store(f'{key}/{i}', (len(pieces), piece))


def _awaited_in_pieces(key: str, other: int, what: str) -> bytes:
  number, first = _awaited(f'{key}/0', other, what, None)
  others = [_awaited(f'{key}/{i}', other, what, None) for i in range(1, number)]
  return b''.join([first, *(piece for _, piece in others)])


def _through_store(key: str, body: bytes, what: str) -> list[bytes]:
  """Returns the bytes of all processes."""
  assert _group is not None
  own = f'{key}/{_group.rank}'
  _store_in_pieces(own, body)
  _group.stale.append(own)
  return [
      body if r == _group.rank else _awaited_in_pieces(f'{key}/{r}', r, what)
      for r in range(_group.count)
  ]


def _over_devices(body: bytes, sizes: list[int]) -> list[bytes]:
  """Returns the bytes of all processes, which have so many."""
  # Powers of two, so that few programs are compiled.
  padded = np.zeros(1 << (max(sizes) - 1).bit_length(), np.uint8)
  padded[: len(body)] = np.frombuffer(body, np.uint8)
  rows = multihost_utils.process_allgather(padded)
  return [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]


# --- who is missing ---------------------------------------------------------


def touch(where: str | None = None) -> None:
  """Notes that this process makes progress, and at what."""
  if _group is not None:
    _group.watch.touch(where)


@contextlib.contextmanager
def slow(where: str) -> Iterator[None]:
  """Marks a block that may take minutes without progress: not a hang."""
  if _group is None:
    yield
    return
  watch = _group.watch
  before = watch.where
  # What fails in a collective closes its files before it ends.
  watch.touch(where if where == before else f'{where}, after {before}')
  watch.patience += 1
  try:
    yield
  finally:
    watch.patience -= 1
    watch.touch(before)


def watch_for_hangs() -> None:
  """Starts to end processes that hang; call it once a whole step has run.

  From now on a process counts as hanging (in a collective, for example) if it
  makes no progress for a minute (`process_watch.STALLED_S`), and for five times
  its longest pause so far.
  """
  if _group is not None:
    _group.watch.armed = True


def finish() -> None:
  """Waits for all processes at the end of a command."""
  if _group is not None:
    _group.watch.send_warnings()
    together('the end of the command', lambda: None)
    _group.watch.stop()


def fail(why: str) -> None:
  """Ends this process and, through their watches, all others; see `ended`."""
  if _group is None:
    raise RuntimeError(why)
  _group.watch.fail(why)


def verdict(seconds: float = 2 * process_watch.SILENT_S + 5) -> None:
  """Gives the watch time to find which process is lost.

  A collective whose peer has died fails at once, with an error that does not
  name the process. If one is lost, the watch ends this process.
  """
  if _group is not None:
    time.sleep(seconds)
