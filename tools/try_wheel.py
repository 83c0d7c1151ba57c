"""Tries the wheel as a newcomer does: python -m tools.try_wheel.

Builds sdist and wheel, installs the wheel into an empty environment outside the
clone, and runs the commands there: training by the name of an example, an
evaluation, a report, an export, a config file of the user's own, and a server
that is asked a question. Needs the network for the packages. Takes minutes.
"""

import argparse
import os
import pathlib
import re
import subprocess
import sys
import tempfile

_ROOT = pathlib.Path(__file__).parents[1]
_SHORT = (
    '--config.trainer.total_training_steps=2',
    '--config.trainer.test_freq=2',
    '--config.data.val_max_samples=16',
)
_OWN_CONFIG = """
from configs import quickstart


def get_config():
  config = quickstart.get_config()
  config.trainer.total_training_steps = 1
  return config
"""


def _run(*command: str | pathlib.Path, cwd: pathlib.Path) -> str:
  """Runs a command; returns what it prints."""
  print('+', *command, flush=True)
  environment = os.environ | {'JAX_PLATFORMS': 'cpu'}
  environment.pop('PYTHONPATH', None)
  done = subprocess.run(
      command,
      cwd=cwd,
      env=environment,
      stdout=subprocess.PIPE,
      text=True,
      check=True,
  )
  print(done.stdout, flush=True)
  return done.stdout


def _build(tools: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
  """Builds sdist and wheel, the wheel from the sdist; returns the wheel."""
  _run(sys.executable, '-m', 'venv', tools, cwd=folder)
  _run(tools / 'bin/pip', 'install', '-qq', 'build', cwd=folder)
  out = folder / 'dist'
  _run(tools / 'bin/python', '-m', 'build', '-o', out, _ROOT, cwd=folder)
  (wheel,) = out.glob('*.whl')
  return wheel


def _try(wheel: pathlib.Path, folder: pathlib.Path) -> None:
  """Installs a wheel into an empty environment, and uses it."""
  _run(sys.executable, '-m', 'venv', folder / 'empty', cwd=folder)
  bin_folder = folder / 'empty/bin'
  _run(bin_folder / 'pip', 'install', '-qq', f'{wheel}[serve]', cwd=folder)
  command = bin_folder / 'jetrl_jax'
  _run(command, '--version', cwd=folder)
  _run(command, 'train', '--config=quickstart', *_SHORT, cwd=folder)
  code = 'from jetrl_jax.config import examples as e; print(e.folder("{}"))'
  data = _run(
      *(bin_folder / 'python', '-c', code.format('quickstart')), cwd=folder
  ).strip()
  run = 'runs/quickstart'
  _run(
      *(command, 'evaluate', f'--checkpoint={run}'),
      *(f'--data={data}/heldout.jsonl', '--max_samples=16', '--output=found'),
      cwd=folder,
  )
  _run(command, 'report', run, cwd=folder)
  _run(command, 'export', f'--workdir={run}', '--out=exported', cwd=folder)
  (folder / 'mine.py').write_text(_OWN_CONFIG)
  _run(command, 'train', '--config=mine.py', '--dry_run', cwd=folder)
  _serve(command, run, folder)


def _serve(command: pathlib.Path, run: str, folder: pathlib.Path) -> None:
  """Starts a server and asks it."""
  server = subprocess.Popen(
      [command, 'serve', f'--checkpoint={run}', '--port=0'],
      cwd=folder,
      env=os.environ | {'JAX_PLATFORMS': 'cpu'},
      stdout=subprocess.PIPE,
      text=True,
  )
  try:
    assert server.stdout is not None
    line = server.stdout.readline()
    print(line, flush=True)
    found = re.search(r'http://(127\.0\.0\.1:\d+)/v1', line)
    if found is None:
      raise RuntimeError('the server did not start')
    ask = command, 'ask', f'--address={found[1]}', '--prompt=3+4-2='
    _run(*ask, cwd=folder)
  finally:
    server.terminate()
    server.wait(60)


def main() -> None:
  """Builds and tries; ends with an error where a command does."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--wheel', type=pathlib.Path, help='try this one')
  arguments = parser.parse_args()
  with tempfile.TemporaryDirectory(prefix='jetrl_jax_wheel_') as name:
    folder = pathlib.Path(name)
    wheel = arguments.wheel or _build(folder / 'tools', folder)
    _try(wheel.resolve(), folder)
  print('The wheel works.')


if __name__ == '__main__':
  main()
