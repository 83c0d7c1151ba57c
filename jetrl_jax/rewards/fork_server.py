"""The pool's side of its processes: it starts the fork server and its workers.

`worker.py` is what runs in them.
"""

import collections
import contextlib
import dataclasses
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from jetrl_jax.rewards import wire
from jetrl_jax.rewards.types import Columns, RewardSpec

_MAIN = (
    'import sys; from jetrl_jax.rewards import worker;'
    ' worker.fork_server_main(int(sys.argv[1]))'
)


@dataclasses.dataclass(kw_only=True)
class Worker:
  """The pool's view of one worker.

  Attributes:
    pid: its number, and that of its process group.
    pidfd: names the process even after its number was given to another.
    sock: to the worker.
    ready: whether it has loaded its terms.
    since: when it was started, last given answers or last heard of, monotonic
      seconds.
    assigned: indices of the answers it has, the current one first.
    is_used: whether it has scored an answer.
    buffer: bytes of replies that have not arrived whole.
  """

  pid: int
  pidfd: int
  sock: socket.socket
  since: float
  ready: bool = False
  is_used: bool = False
  assigned: collections.deque[int] = dataclasses.field(
      default_factory=collections.deque
  )
  buffer: bytearray = dataclasses.field(default_factory=bytearray)

  def end(self) -> None:
    """Kills the process and its children, and closes its descriptor."""
    with contextlib.suppress(ProcessLookupError):
      # While the worker exists, its process id is its own, so no other group is
      # killed.
      signal.pidfd_send_signal(self.pidfd, 0)
      os.killpg(self.pid, signal.SIGKILL)
    os.close(self.pidfd)
    self.sock.close()


class ForkServer:
  """Starts the interpreter that workers are forked from; `end` it.

  Args:
    specs: the terms of the score.
    columns: those of the rows that it will score.
    memory_limit_mb: address space that an answer may add, in MiB.
    timeout_s: seconds that a worker may take to read what it is sent.

  Attributes:
    process: the interpreter.

  Raises:
    RuntimeError: it ended while it loaded.
  """

  def __init__(
      self,
      specs: Sequence[RewardSpec],
      columns: Columns,
      memory_limit_mb: int,
      timeout_s: float,
  ):
    self._settings = pickle.dumps((specs, columns, memory_limit_mb))
    self._timeout_s = timeout_s
    self._start()

  def _start(self) -> None:
    self._control, theirs = socket.socketpair()
    with theirs:
      self.process = subprocess.Popen(
          [sys.executable, '-c', _MAIN, str(theirs.fileno())],
          stdin=subprocess.DEVNULL,
          pass_fds=[theirs.fileno()],
          env=_worker_environment(),
          # Ctrl-C in the terminal reaches only the trainer.
          start_new_session=True,
      )
    try:
      self._control.sendall(wire.pack(self._settings))
      wire.receive(self._control)
    except BaseException as error:
      self.end()
      if isinstance(error, (EOFError, OSError)):
        raise RuntimeError(
            'the process that starts reward workers ended while it loaded; its'
            ' message is above.'
        ) from error
      raise

  def fork(self) -> Worker:
    """Returns a new worker; starts another interpreter if this one died."""
    for last_try in (False, True):
      mine, theirs = socket.socketpair()
      try:
        with theirs:
          socket.send_fds(self._control, [b'f'], [theirs.fileno()])
        pid = int.from_bytes(wire.receive(self._control), 'little')
        # A worker hangs up by ending; one that stops reading must not hold
        # the pool.
        mine.settimeout(self._timeout_s)
        worker = Worker(
            pid=pid,
            pidfd=os.pidfd_open(pid),
            sock=mine,
            since=time.monotonic(),
        )
        with contextlib.suppress(OSError):
          # If the worker was killed meanwhile, the pool finds out.
          mine.sendall(wire.pack(b'go'))
        return worker
      except (EOFError, OSError):
        mine.close()
        if last_try:
          raise
        self.end()
        self._start()
    raise AssertionError('the last try returns or raises')

  def end(self) -> None:
    """Kills the interpreter; its workers die with it."""
    self._control.close()
    self.process.kill()
    self.process.wait()


def _worker_environment() -> dict[str, str]:
  """Returns the environment in which rewards are computed."""
  return {
      **os.environ,
      # The same search path, so that a user's dotted path can be imported.
      'PYTHONPATH': os.pathsep.join(p or os.getcwd() for p in sys.path),
      # SymPy iterates over sets, whose order must be the same in all runs.
      'PYTHONHASHSEED': '0',
      # One thread per process, because the pool has a process per core.
      'OMP_NUM_THREADS': '1',
      'PYTHONUNBUFFERED': '1',
      # A reward that imports jax must not take the accelerator's memory.
      'JAX_PLATFORMS': 'cpu',
  }
