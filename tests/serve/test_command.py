"""The commands: what they refuse, with one sentence and exit code 2."""

import importlib.util
import os
import pathlib
import socket
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).parents[2]
_CHECKPOINT = '--checkpoint=examples/quickstart/checkpoint'
_INSTALLED = importlib.util.find_spec('jetstream') is not None


def _refused(*arguments: str, module: str = 'jetrl_jax.serve') -> str:
  done = subprocess.run(
      [sys.executable, '-m', module, *arguments],
      cwd=_ROOT,
      env=os.environ | {'JAX_PLATFORMS': 'cpu'},
      capture_output=True,
      text=True,
      timeout=200,
  )
  assert done.returncode == 2, done.stderr
  assert done.stdout == '' and 'Traceback' not in done.stderr
  assert done.stderr.startswith('error: ')
  return done.stderr.removeprefix('error: ').strip()


def test_a_server_without_a_checkpoint_is_refused():
  assert _refused().startswith('--checkpoint is missing (A run')


def test_a_flag_out_of_range_is_refused():
  assert 'port' in _refused(_CHECKPOINT, '--port=70000')
  assert 'chekpoint' in _refused('--chekpoint=runs/quickstart')


def test_a_client_without_a_prompt_is_refused():
  found = _refused(module='jetrl_jax.serve.ask')
  assert '--prompt must have a value' in found.replace('Flag ', '')


def test_a_client_does_not_wait_for_jax():
  script = 'import sys, jetrl_jax.serve.ask; sys.exit("jax" in sys.modules)'
  subprocess.run([sys.executable, '-c', script], cwd=_ROOT, check=True)


@pytest.mark.skipif(_INSTALLED, reason='google-jetstream is installed')
@pytest.mark.parametrize(
    ('module', 'argument'),
    [
        ('jetrl_jax.serve', _CHECKPOINT),
        ('jetrl_jax.serve.ask', '--prompt=1'),
    ],
)
def test_without_the_extra_the_command_says_what_to_install(module, argument):
  found = _refused(argument, module=module)
  assert found.startswith('jetstream is not installed')
  assert "pip install 'jetrl_jax[jetstream]'" in found


@pytest.mark.skipif(not _INSTALLED, reason='needs google-jetstream')
@pytest.mark.jetstream
def test_a_port_in_use_and_a_missing_folder_are_refused():
  with socket.create_server(('127.0.0.1', 0)) as taken:
    port = taken.getsockname()[1]
    found = _refused(_CHECKPOINT, f'--port={port}')
  assert found.startswith(f'cannot listen on 127.0.0.1:{port} (')
  found = _refused('--checkpoint=examples/nothing/here', '--port=0')
  assert 'no such folder' in found
  found = _refused(_CHECKPOINT, '--port=0', '--max_tokens=100000')
  assert 'max_prompt_length + max_tokens is' in found
  found = _refused(_CHECKPOINT, '--port=0', f'--max_message_kib={2**21}')
  assert found.startswith('max_message_kib is 2097152; allowed')
  assert _refused(_CHECKPOINT, '--host=').startswith('--host is empty')
  found = _refused(
      '--prompt=1', '--address=127.0.0.1:1', module='jetrl_jax.serve.ask'
  )
  assert found.startswith('UNAVAILABLE: ')
