"""Starts a command as several processes, as a launcher would."""

import contextlib
import os
import pathlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

_ROOT = pathlib.Path(__file__).parent.parent
_LAUNCHERS = ('JAX_', 'SLURM_', 'OMPI_')


def by_hand(rank: int, count: int, port: int) -> dict[str, str]:
  """The three variables that a user sets."""
  return {
      'JAX_COORDINATOR_ADDRESS': f'127.0.0.1:{port}',
      'JAX_NUM_PROCESSES': str(count),
      'JAX_PROCESS_ID': str(rank),
  }


def srun(rank: int, count: int, port: int) -> dict[str, str]:
  """What Slurm's `srun` sets in every task; JAX makes a port of the job id."""
  return {
      'SLURM_JOB_ID': str(port - 61440),
      'SLURM_STEP_NODELIST': '127.0.0.1',
      'SLURM_STEP_NUM_NODES': '1',
      'SLURM_NTASKS': str(count),
      'SLURM_PROCID': str(rank),
      'SLURM_LOCALID': str(rank),
  }


def free_port() -> int:
  """A port among those that JAX's Slurm support takes, which is free now.

  It is bound seconds later, so workers of pytest look in places of their own.
  """
  worker = int(os.environ.get('PYTEST_XDIST_WORKER', 'gw0')[2:])
  first = 61440 + 1000 * (worker % 4) + os.getpid() % 500
  for port in range(first, 65535):
    with socket.socket() as found, contextlib.suppress(OSError):
      found.bind(('127.0.0.1', port))
      return port
  raise RuntimeError('no port is free')


@contextlib.contextmanager
def processes(
    command: list[str],
    *,
    count: int,
    devices: int = 1,
    launcher=by_hand,
    kept: int | None = None,
    cwd: pathlib.Path = _ROOT,
) -> Iterator[list[subprocess.Popen]]:
  """Starts `python -m COMMAND` `count` times; kills what is left at the end.

  Args:
    command: module and arguments.
    count: processes; 1 is started without any launcher.
    devices: CPU devices of each.
    launcher: makes the variables of a process.
    kept: how many of them are started, by default all.
    cwd: working directory.
  """
  port, started = free_port(), []
  inherited = {
      name: value
      for name, value in os.environ.items()
      # A cache that tests share is welcome; a launcher of theirs is not.
      if not name.startswith(_LAUNCHERS)
      or name.startswith('JAX_PERSISTENT')
      or name == 'JAX_COMPILATION_CACHE_DIR'
  }
  try:
    for rank in range(kept or count):
      env = inherited | {
          'PYTHONPATH': str(_ROOT),
          'JAX_PLATFORMS': 'cpu',
          'XLA_FLAGS': f'--xla_force_host_platform_device_count={devices}',
          # As in benchmarks/launch.py.
          'NPROC': str(max(os.cpu_count() or 1, count * devices)),
      }
      if count > 1:
        env |= launcher(rank, count, port)
      started.append(
          subprocess.Popen(
              [sys.executable, '-m', *command],
              cwd=cwd,
              env=env,
              stdout=subprocess.PIPE,
              stderr=subprocess.STDOUT,
              text=True,
          )
      )
    yield started
  finally:
    for one in started:
      if one.poll() is None:
        one.kill()
      one.communicate()


def ended(started: list[subprocess.Popen], seconds: float) -> list[str]:
  """Waits for all; returns what each has printed."""
  end = time.monotonic() + seconds
  return [
      one.communicate(timeout=max(0.1, end - time.monotonic()))[0]
      for one in started
  ]
