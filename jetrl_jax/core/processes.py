"""Several processes of one run: who they are, where they meet, who is missing.

A launcher (Slurm, Open MPI, Kubernetes, or three variables set by hand) starts
the same command several times. `start` joins them through `jax.distributed`.
Then all processes compile and run the same programs over one mesh. What exists
only on the host, such as sampled responses and their rewards, passes through
`together`. After it every process knows the same and decides the same. In a run
of a single process every function here just does its work.

    together      every process works, then each gets the results of all
    from_first    process 0 works, the others get its result
    barrier       for background threads

A watch in every process tells the others once a second that it lives and what
it does. If a process dies, is stopped or fails, the others say which one and
end, so that the launcher can start all of them again.
"""

import contextlib
import importlib.util
import json
import logging as std_logging
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from absl import logging
from jax.experimental import multihost_utils

from jetrl_jax.core import interrupt
from jetrl_jax.core.interrupt import StopRequested

# The key-value store of jax.distributed. JAX has no public name for it, and
# neither has Orbax, which uses this one too. The public collectives
# (`multihost_utils`) need the devices, which a stopped or hanging process
# blocks, so they cannot tell which process that is. Nor can `live_devices`
# there: it leaves out processes that have died, and waits for one that hangs.
from jax._src import distributed  # isort: skip

T = TypeVar('T')

# What JAX takes from the environment or from us, where no launcher says it.
ADDRESS = 'JAX_COORDINATOR_ADDRESS'
COUNT = 'JAX_NUM_PROCESSES'
RANK = 'JAX_PROCESS_ID'
# Seconds without a sign of life after which a process counts as lost.
SILENT_S = 25.0
# Seconds that a process may do nothing while another one waits for it.
STALLED_S = 60.0

_BEAT_S = 1.0
# Longer values travel over the devices: the store is in one process.
_INLINE_BYTES = 1 << 16
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
    self.barriers: dict[str, int] = {}
    self.watch = _Watch(self)

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


def launched() -> int:
  """Returns how many processes the launcher has started, by its variables.

  0 is an indexed Job of Kubernetes, which only its API knows the size of.

  Raises:
    ValueError: the variables of `ADDRESS`, `COUNT` and `RANK` are incomplete.
  """
  env = os.environ
  by_hand = {name: env.get(name, '') for name in (ADDRESS, COUNT, RANK)}
  if by_hand[COUNT] == '1':
    return 1
  if by_hand[COUNT] or by_hand[RANK]:
    if missing := [name for name, value in by_hand.items() if not value]:
      raise ValueError(
          f'{", ".join(missing)} is not set, but'
          f' {", ".join(n for n, v in by_hand.items() if v)} is; several'
          f' processes need all three: {ADDRESS}=host:port of process 0,'
          f' {COUNT} and {RANK} (from 0)'
      )
    for name in (COUNT, RANK):
      if not by_hand[name].isdecimal():
        raise ValueError(
            f'{name} is {by_hand[name]!r}; allowed: integers from 0'
        )
    if int(by_hand[RANK]) >= int(by_hand[COUNT]):
      raise ValueError(
          f'{RANK} is {by_hand[RANK]}; allowed with {COUNT}={by_hand[COUNT]}:'
          f' 0 to {int(by_hand[COUNT]) - 1}'
      )
    return int(by_hand[COUNT])
  # `srun` sets the list of a step's nodes; a batch script does not have it.
  if env.get('SLURM_STEP_NODELIST') and env.get('SLURM_PROCID'):
    return int(env.get('SLURM_NTASKS', '1'))
  if env.get('OMPI_MCA_orte_hnp_uri'):
    return int(env.get('OMPI_COMM_WORLD_SIZE', '1'))
  if (
      env.get('KUBERNETES_SERVICE_HOST')
      and env.get('JOB_COMPLETION_INDEX')
      and importlib.util.find_spec('kubernetes')
  ):
    return 0
  if by_hand[ADDRESS]:
    raise ValueError(
        f'{ADDRESS} is set, but neither {COUNT} and {RANK} nor the variables of'
        ' Slurm or Open MPI are; set them, or unset it for one process'
    )
  return 1


def local_devices(env: Mapping[str, str]) -> list[int] | None:
  """Returns which of the visible GPUs a task of Slurm or Open MPI takes.

  JAX would take one, of the task's number on its host. That is wrong where the
  launcher shows each task its own GPUs only, and where a task has several.

  Args:
    env: the environment.

  Returns:
    Positions in CUDA_VISIBLE_DEVICES; None to leave it to JAX.
  """
  rank = env.get('SLURM_LOCALID', env.get('OMPI_COMM_WORLD_LOCAL_RANK'))
  visible = [id for id in env.get('CUDA_VISIBLE_DEVICES', '').split(',') if id]
  if rank is None or not visible or env.get('JAX_LOCAL_DEVICE_IDS'):
    return None
  tasks = _tasks_here(env)
  shown = 'SLURM_GPUS_PER_TASK' in env or 'SLURM_TRES_PER_TASK' in env
  if shown or len(visible) < tasks or len(visible) % tasks:
    return list(range(len(visible)))
  each = len(visible) // tasks
  return list(range(int(rank) * each, (int(rank) + 1) * each))


def _tasks_here(env: Mapping[str, str]) -> int:
  """Returns the number of tasks on this host, of '2(x3),1' for example."""
  if (size := env.get('OMPI_COMM_WORLD_LOCAL_SIZE')) is not None:
    return int(size)
  nodes: list[int] = []
  for part in env.get('SLURM_STEP_TASKS_PER_NODE', '1').split(','):
    tasks, _, times = part.partition('(x')
    nodes += [int(tasks)] * int(times.rstrip(')') or 1)
  return nodes[int(env.get('SLURM_NODEID', '0'))]


def start() -> None:
  """Joins the processes that the launcher has started; alone, does nothing.

  Call it before JAX first looks for devices.

  Raises:
    ValueError: see `launched`.
    RuntimeError: the other processes did not come.
  """
  global _group
  if _group is not None or launched() == 1:
    return
  # JAX's own service would take SIGTERM away from `Interrupt`.
  jax.config.update('jax_enable_preemption_service', False)
  by_hand: dict[str, Any] = {}
  if not os.environ.get(COUNT):
    by_hand = {'local_device_ids': local_devices(os.environ)}
  else:
    by_hand = {
        'num_processes': int(os.environ[COUNT]),
        'process_id': int(os.environ[RANK]),
        'cluster_detection_method': 'deactivate',
    }
  jax.distributed.initialize(**by_hand, shutdown_timeout_seconds=60)
  state = distributed.global_state
  if state.num_processes == 1:
    return
  _group = _Group(state.process_id, state.num_processes)
  _group.watch.start()


def count() -> int:
  """Returns the number of processes."""
  return _group.count if _group else 1


def rank() -> int:
  """Returns this process's number, from 0."""
  return _group.rank if _group else 0


def is_first() -> bool:
  """Whether this is the process that writes the run's files."""
  return rank() == 0


def share(total: int) -> list[int]:
  """Returns which of `total` things this process does: every count-th one."""
  return list(range(rank(), total, count()))


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
  value, stopped = None, None
  try:
    value = work()
  except StopRequested as stop:
    stopped = str(stop)
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
  # Whoever is here has read all of the last turn.
  if turn:
    group.delete(f'meet/{turn - 1}/{group.rank}')
  for r, (other, *_) in enumerate(found):
    if other != what:
      raise RuntimeError(
          f'process {r} is at {other!r} while process {group.rank} is at'
          f' {what!r}: they must run the same command on the same files'
      )
  for _, why, *_ in found:
    if why is not None:
      raise StopRequested(why)
  bodies = [inline for *_, inline in found]
  if any(inline is None for inline in bodies):
    bodies = _all_bytes(body, [size for _, _, size, _ in found])
  touch(what)
  return [pickle.loads(body) for body in bodies]


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
    if where := watch.stalled(other, since):
      fail(
          f'process {other} has done nothing for {STALLED_S:.0f} s ({where});'
          f' process {_group.rank} waits for it after {what}'
      )
  return pickle.loads(value)


def _all_bytes(body: bytes, sizes: list[int]) -> list[bytes]:
  """Returns the bytes of all processes, which travel over the devices."""
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
  watch.touch(where)
  watch.patience += 1
  try:
    yield
  finally:
    watch.patience -= 1
    watch.touch()


def watch_for_hangs() -> None:
  """Starts to end processes that hang; call it once a whole step has run.

  From now on a process counts as hanging (in a collective, for example) if it
  makes no progress for `STALLED_S`, and for five times its longest pause so
  far.
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


def verdict(seconds: float = 2 * SILENT_S + 5) -> None:
  """Gives the watch time to find which process is lost.

  A collective whose peer has died fails at once, with an error that does not
  name the process. If one is lost, the watch ends this process.
  """
  if _group is not None:
    time.sleep(seconds)


class _Watch:
  """Tells the others that this process lives, and looks after them."""

  def __init__(self, group: _Group):
    self._group = group
    self._where, self._progress = 'start-up', 0
    self.patience = 0
    self.armed = False
    self._touched = time.monotonic()
    self._longest = 0.0
    # For each process: its last record, and when it and its progress changed.
    self._records: dict[int, dict] = {}
    self._heard: dict[int, float] = {}
    self._moved: dict[int, float] = {}
    self._answered = time.monotonic()
    self._stopping = threading.Event()
    self._main = threading.main_thread().ident
    self._told_stop = False
    self._sent = 0
    self._warnings: list[str] = []
    self._said: set[str] = set()
    self._held: list[tuple[float, int, str]] = []
    self._lock = threading.Lock()
    self._ending = False

  # --- called by the main thread

  def start(self) -> None:
    now = time.monotonic()
    for other in range(self._group.count):
      self._heard[other] = self._moved[other] = now
    logging.get_absl_logger().addHandler(_Collector(self))
    threading.Thread(target=self._beat, daemon=True, name='beat').start()
    threading.Thread(target=self._judge, daemon=True, name='judge').start()

  def stop(self) -> None:
    self._stopping.set()
    if self._group.rank == 0:
      self._take_warnings()
      self._print_warnings(0.0)

  def touch(self, where: str | None = None) -> None:
    now = time.monotonic()
    if self.armed and not self.patience:
      self._longest = max(self._longest, now - self._touched)
    self._touched = now
    self._progress += 1
    if where is not None:
      self._where = where

  def stalled(self, other: int, since: float) -> str | None:
    """Returns what another process is at if it does nothing, else None."""
    record = self._records.get(other)
    if record is None:
      return None
    idle = time.monotonic() - max(since, self._moved[other])
    return record['where'] if idle > STALLED_S else None

  def warned(self, text: str) -> None:
    """Notes a warning of this process."""
    with self._lock:
      if self._group.rank == 0:
        self._said.add(text)
      else:
        self._warnings.append(text)

  def fail(self, why: str) -> None:
    """Tells the others why this process ends, and ends it."""
    with contextlib.suppress(Exception):
      self._group.set(f'failed/{self._group.rank}', why.encode())
    self._end(f'error: {why}')

  # --- the threads

  def _beat(self) -> None:
    """Exchanges signs of life with the others through the store."""
    group, number = self._group, 0
    while not self._stopping.wait(_BEAT_S if number else 0):
      number += 1
      try:
        record = {
            'beat': number,
            'where': self._where,
            'progress': self._progress,
            'busy': self._is_busy(),
        }
        group.set(f'beat/{group.rank}', json.dumps(record).encode(), again=True)
        self._read(group.folder('beat'))
        self._pass_on_stop(group)
        self._pass_on_warnings(group)
        for other, why in group.folder('failed').items():
          if int(other) != group.rank:
            self._end(f'process {other} of this run has ended: {why.decode()}')
        self._answered = time.monotonic()
      except jax.errors.JaxRuntimeError as error:
        if self._stopping.is_set():
          return
        logging.debug('The store does not answer: %s', error)

  def _read(self, records: dict[str, bytes]) -> None:
    now = time.monotonic()
    for other, text in records.items():
      r, record = int(other), json.loads(text)
      old = self._records.get(r, {})
      if record['beat'] != old.get('beat'):
        self._heard[r] = now
      if record['progress'] != old.get('progress'):
        self._moved[r] = now
      self._records[r] = record
    # Others may wait in a collective for whoever is busy.
    if any(record['busy'] for record in self._records.values()):
      self._moved = dict.fromkeys(self._moved, now)

  def _pass_on_stop(self, group: _Group) -> None:
    if (here := interrupt.asked()) and not self._told_stop:
      self._told_stop = True
      group.set(f'stop/{group.rank}', here.encode())
    for name in group.folder('stop').values():
      interrupt.ask(name.decode())

  def _pass_on_warnings(self, group: _Group) -> None:
    if group.rank:
      self.send_warnings()
      return
    self._take_warnings()
    # Not at once: process 0 may be about to say the same.
    self._print_warnings(3 * _BEAT_S)

  def send_warnings(self) -> None:
    """Sends what this process has warned of to process 0."""
    with self._lock:
      mine, self._warnings = self._warnings, []
      self._sent += bool(mine)
    if mine:
      key = f'warned/{self._group.rank}_{self._sent}'
      self._group.set(key, json.dumps(mine).encode())

  def _take_warnings(self) -> None:
    now = time.monotonic()
    for name, texts in self._group.folder('warned').items():
      self._group.delete(f'warned/{name}')
      with self._lock:
        self._held += [
            (now, int(name.partition('_')[0]), text)
            for text in json.loads(texts)
        ]

  def _print_warnings(self, age: float) -> None:
    """Says once what other processes warn of, and this one does not."""
    now = time.monotonic()
    with self._lock:
      due = [item for item in self._held if now - item[0] >= age]
      self._held = [item for item in self._held if item not in due]
      for _, other, text in due:
        if text not in self._said:
          print(f'[process {other}] {text}', file=sys.stderr, flush=True)
        self._said.add(text)

  def _judge(self) -> None:
    """Ends this process when another one is lost."""
    last = time.monotonic()
    while not self._stopping.wait(_BEAT_S):
      now = time.monotonic()
      if now - last > 5 * _BEAT_S:
        # This process itself was stopped for a while.
        for r in self._heard:
          self._heard[r] += now - last
        self._answered += now - last
        self._touched += now - last
      last = now
      self._judge_itself(now)
      if now - self._answered > SILENT_S:
        self._end(self._lost(0, now - self._answered))
      if now - self._answered > 3 * _BEAT_S:
        continue  # Nothing was heard of anybody.
      for r, heard in self._heard.items():
        # One thread may hold up all of a process that loads or compiles.
        busy = self._records.get(r, {}).get('busy', True)
        if r != self._group.rank and now - heard > SILENT_S * (1 + busy):
          self._end(self._lost(r, now - heard))

  def _judge_itself(self, now: float) -> None:
    if self._is_busy():
      self._touched = now
      return
    idle = now - self._touched
    if idle > max(STALLED_S, 5 * self._longest):
      self.fail(
          f'process {self._group.rank} has done nothing for {idle:.0f} s, at:'
          f' {self._where}'
      )

  def _lost(self, other: int, seconds: float) -> str:
    record = self._records.get(other)
    at = f'; it was at: {record["where"]}' if record else ''
    return (
        f'process {other} of this run has not been heard of for'
        f' {seconds:.0f} s{at}. Process {self._group.rank}, at:'
        f' {self._where}, ends. The same command resumes from the newest'
        ' checkpoint'
    )

  def _is_busy(self) -> bool:
    """Whether this process may do nothing that is seen for minutes."""
    return not self.armed or self.patience > 0 or self._compiles()

  def _compiles(self) -> bool:
    frame = sys._current_frames().get(self._main or 0)
    while frame is not None:
      if frame.f_code.co_name == 'backend_compile_and_load':
        return True
      frame = frame.f_back
    return False

  def _end(self, sentence: str) -> None:
    with self._lock:
      if self._ending:
        # Another thread ends the process.
        time.sleep(60)
      self._ending = True
    print(f'[process {self._group.rank}] {sentence}', file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
      with contextlib.suppress(Exception):
        stream.flush()
    if self._group.rank == 0:
      # The store is here, and the others have yet to read why.
      time.sleep(4 * _BEAT_S)
    os._exit(1)


class _Collector(std_logging.Handler):
  """Hands warnings to the watch."""

  def __init__(self, watch: _Watch):
    super().__init__(std_logging.WARNING)
    self._watch = watch

  def emit(self, record: std_logging.LogRecord) -> None:
    with contextlib.suppress(Exception):
      self._watch.warned(record.getMessage())
