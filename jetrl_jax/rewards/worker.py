"""The processes that score: a fork server that forks workers, and the workers.

The fork server is a fresh interpreter with one thread that has loaded
math-verify and warmed its parser; a worker is a fork of it. Starting one takes
milliseconds instead of seconds, so replacing a killed worker costs nothing, and
no fork ever copies the threads of JAX. Users' functions are imported in the
worker: what they start (threads, libraries) must not be forked either.

    pool --'fork' + socket--> fork server --fork--> worker --socket--> pool

Workers die with the fork server (a signal from the kernel), the fork server
dies with the pool (its socket closes, or its parent changes).
"""

import contextlib
import ctypes
import dataclasses
import gc
import json
import os
import pickle
import resource
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence

from jetrl_jax.rewards import output, wire
from jetrl_jax.rewards.functions import WeightedSum, build_term
from jetrl_jax.rewards.math_answer import warm_up
from jetrl_jax.rewards.types import (
    Columns,
    RewardFunctionError,
    RewardRequest,
    RewardResult,
    RewardSpec,
)

_PR_SET_PDEATHSIG = 1
_PID_BYTES = 8


def fork_server_main(descriptor: int) -> None:
  """Runs the fork server: gets its settings, warms up, forks on request.

  Args:
    descriptor: number of an inherited stream socket to the pool.
  """
  parent = os.getppid()
  # The trainer handles Ctrl-C.
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  control = socket.socket(fileno=descriptor)
  specs, columns, memory_limit_mb = pickle.loads(wire.receive(control))
  output.bound()
  if any(spec.function == 'math' for spec in specs):
    warm_up()
  # The workers share the heap as it is now, because no collection writes to it.
  gc.collect()
  gc.freeze()
  control.sendall(wire.pack(b'ready'))
  while True:
    ready, _, _ = select.select([control], [], [], 1.0)
    # The socket also stays open while a fork of the pool's process holds it.
    if os.getppid() != parent:
      return
    if not ready:
      continue
    data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
    if not data:
      return
    fork_server = os.getpid()
    sys.stdout.flush()
    # Dead workers are reaped only now. Until then the pool can find what they
    # left by their process ids.
    with contextlib.suppress(ChildProcessError):
      while os.waitpid(-1, os.WNOHANG)[0]:
        pass
    pid = os.fork()
    if pid == 0:
      # A process group of its own: processes that a reward function starts are
      # killed with it.
      os.setpgid(0, 0)
      control.close()
      _run_worker(descriptors[0], specs, columns, memory_limit_mb, fork_server)
    os.close(descriptors[0])
    with contextlib.suppress(OSError):
      # Set here too, so that the group exists before the pool learns of it.
      os.setpgid(pid, pid)
    control.sendall(wire.pack(pid.to_bytes(_PID_BYTES, 'little')))


def _run_worker(
    descriptor: int,
    specs: Sequence[RewardSpec],
    columns: Columns,
    memory_limit_mb: int,
    fork_server: int,
) -> None:
  """Runs one worker in the forked process and never returns."""
  try:
    _die_with(fork_server)
    with socket.socket(fileno=descriptor) as sock:
      # The pool must have opened the worker before it can fail. Once it has
      # ended and the fork server forks again, its process id means nothing.
      wire.receive(sock)
      _work(sock, specs, columns, memory_limit_mb)
  except (EOFError, OSError):
    pass  # The pool is gone or has dropped this worker.
  finally:
    sys.stdout.flush()
    # Not sys.exit, which would unwind the fork server's stack.
    os._exit(0)


def _work(
    sock: socket.socket,
    specs: Sequence[RewardSpec],
    columns: Columns,
    memory_limit_mb: int,
) -> None:
  """Loads the terms, then answers batches until the pool hangs up."""
  try:
    terms = [build_term(spec, columns) for spec in specs]
    score = WeightedSum(specs=specs, terms=terms)
  except RewardFunctionError as error:
    _send(sock, {'fatal': str(error)})
    return
  except BaseException:
    said = f'a reward function could not be loaded:\n{traceback.format_exc()}'
    _send(sock, {'fatal': said})
    return
  _limit_memory(memory_limit_mb)
  _send(sock, {'ready': True})
  worker = os.getpid()
  while True:
    batch = pickle.loads(wire.receive(sock))
    for index, request in batch:
      start = time.monotonic()
      reply = _score_one(score, request, worker)
      # Without the time to send, because sending waits until the pool has room.
      head = {'index': index, 'seconds': time.monotonic() - start}
      if os.getpid() != worker:
        _send(sock, head | _forked(specs))
        os._exit(0)  # The parent continues with the next answers.
      _send(sock, head | reply)


def _score_one(score: WeightedSum, request: RewardRequest, worker: int) -> dict:
  try:
    return dataclasses.asdict(score(request))
  except MemoryError:
    return dataclasses.asdict(failed('memory', score.specs))
  except RewardFunctionError as error:
    if isinstance(error.__cause__, SystemExit) and os.getpid() != worker:
      os._exit(0)  # A child that a reward function has forked.
    return {'unusable': str(error)}
  except BaseException:
    return {'fatal': traceback.format_exc()}


def _forked(specs: Sequence[RewardSpec]) -> dict:
  names = [spec.function for spec in specs]
  return {
      'unusable': f'one of the rewards {names} forks and returns in both'
      ' processes, so that an answer has two scores; end the child with'
      ' os._exit(0), or use subprocess.'
  }


def failed(error: str, specs: Sequence[RewardSpec]) -> RewardResult:
  """Returns the result of an answer that broke a limit: 0 in every term."""
  return RewardResult(
      score=0.0,
      accuracy=0.0,
      parts={spec.label: 0.0 for spec in specs},
      prediction='',
      error=error,
  )


def _send(sock: socket.socket, reply: dict) -> None:
  # JSON and not pickle, because the pool must be able to read whatever a worker
  # sends.
  sock.sendall(wire.pack(json.dumps(reply).encode()))


def _die_with(fork_server: int) -> None:
  """Asks Linux to kill this process when the fork server dies."""
  if sys.platform == 'linux':
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != fork_server:
      os._exit(0)


def _limit_memory(megabytes: int) -> None:
  """Limits the address space to its present size plus `megabytes`."""
  mapped = 0
  if sys.platform == 'linux':
    with open('/proc/self/statm', encoding='ascii') as pages:
      mapped = int(pages.read().split()[0]) * resource.getpagesize()
  limit = mapped + megabytes * 2**20
  # Where all processes have a limit already (ulimit -v) it cannot be raised.
  _, most = resource.getrlimit(resource.RLIMIT_AS)
  if most != resource.RLIM_INFINITY:
    limit = min(limit, most)
  resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
  # A crashing worker would write its core into the user's folder.
  resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
