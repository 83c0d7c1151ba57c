"""Runs commands that end at once in copies of one process.

A command imports for seconds what it needs to say in milliseconds that it does
not work. One process imports most of it, and for each command it makes a copy
of itself, which runs the command as `python -m` would.
"""

import atexit
import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile

from tests import whole_run

# What commands import, but no command: these define flags.
_IMPORTED = (
    'jetrl_jax.checkpoint.restore',
    'jetrl_jax.config.flags',
    'jetrl_jax.config.saved_policy',
    'jetrl_jax.dry_run.checks',
    'jetrl_jax.report',
    'jetrl_jax.rl.training.trainer',
)
_SERVER = """
import importlib, json, os, runpy, sys
for name in sys.argv[1:]:
  importlib.import_module(name)
for line in sys.stdin:
  asked = json.loads(line)
  child = os.fork()
  if child == 0:
    for number in (1, 2):
      file = os.open(asked['files'][number - 1], os.O_WRONLY)
      os.dup2(file, number)
    os.chdir(asked['cwd'])
    os.environ.clear()
    os.environ.update(asked['env'])
    if asked['missing']:
      sys.modules[asked['missing']] = None
    sys.argv[1:] = asked['arguments']
    runpy.run_module(asked['module'], run_name='__main__', alter_sys=True)
    sys.exit()
  _, status = os.waitpid(child, 0)
  print(os.waitstatus_to_exitcode(status), flush=True)
"""


@functools.cache
def _server() -> subprocess.Popen:
  server = subprocess.Popen(
      [sys.executable, '-c', _SERVER, *_IMPORTED],
      cwd=whole_run.ROOT,
      env=whole_run.environment(),
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
  )
  atexit.register(_end, server)
  return server


def _end(server: subprocess.Popen) -> None:
  """Lets the process read that no more commands come."""
  with server:
    pass


def run(
    *arguments: str | os.PathLike,
    module: str = 'jetrl_jax.main',
    cwd: pathlib.Path | None = None,
    missing: str = '',
) -> tuple[int, str, str]:
  """Runs a command that soon ends.

  Args:
    *arguments: after the module's name.
    module: of the command.
    cwd: working directory, by default `whole_run.home()`.
    missing: a package that is not there.

  Returns:
    Exit code, and what it wrote to stdout and to stderr.
  """
  server = _server()
  assert server.stdin is not None and server.stdout is not None
  with (
      tempfile.NamedTemporaryFile('r') as output,
      tempfile.NamedTemporaryFile('r') as errors,
  ):
    asked = {
        'arguments': [str(a) for a in arguments],
        'module': module,
        'cwd': str(cwd or whole_run.home()),
        'env': whole_run.environment(),
        'missing': missing,
        'files': [output.name, errors.name],
    }
    server.stdin.write(json.dumps(asked) + '\n')
    server.stdin.flush()
    code = server.stdout.readline()
    assert code, 'the process that runs commands has ended'
    return int(code), output.read(), errors.read()
