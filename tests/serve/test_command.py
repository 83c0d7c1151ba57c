"""The commands: what they refuse, with one sentence and exit code 2."""

import http.server
import importlib
import importlib.util
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import types

import pytest

from tests import commands

_ROOT = pathlib.Path(__file__).parents[2]
_CHECKPOINT = '--checkpoint=examples/quickstart/checkpoint'
_INSTALLED = importlib.util.find_spec('jetstream') is not None
_NEEDS_SERVE = pytest.mark.skipif(
    importlib.util.find_spec('uvicorn') is None, reason='needs the extra serve'
)


def _refused(
    *arguments: str, module: str = 'jetrl_jax.serve', missing: str = ''
) -> str:
  """The one line on stderr; `missing` names a package that is not there."""
  code, output, errors = commands.run(
      *arguments, module=module, cwd=_ROOT, missing=missing
  )
  assert code == 2, errors
  assert output == '' and 'Traceback' not in errors
  *before, refusal = errors.splitlines()
  assert all(line.startswith('Read checkpoint ') for line in before)
  assert refusal.startswith('error: ')
  return refusal.removeprefix('error: ').strip()


def test_a_server_without_a_checkpoint_is_refused():
  assert _refused().startswith('--checkpoint is missing (A run')


def test_a_flag_out_of_range_is_refused():
  assert 'port' in _refused(_CHECKPOINT, '--port=70000')
  assert 'chekpoint' in _refused('--chekpoint=runs/quickstart')


def test_a_server_that_is_stopped_while_it_compiles_says_so(
    monkeypatch, capsys
):
  command = importlib.import_module('jetrl_jax.serve.__main__')
  monkeypatch.setattr(command.device_memory, 'take_most', lambda: None)
  stopped, handlers = [], {}
  for number in (signal.SIGTERM, signal.SIGINT):
    handlers[number] = signal.getsignal(number)

  def start(asked):
    os.kill(os.getpid(), signal.SIGTERM)
    assert asked.wait(10)
    return types.SimpleNamespace(stop=lambda: stopped.append(1)), '', 0, 0

  try:
    command._serve(start)
  finally:
    for number, handler in handlers.items():
      signal.signal(number, handler)
  assert stopped == [1]
  assert capsys.readouterr().out == 'SIGTERM: stopped before it served.\n'


@pytest.mark.parametrize(
    'module', ['jetrl_jax.serve.ask', 'jetrl_jax.serve.jetstream.ask']
)
def test_a_client_without_a_prompt_is_refused(module):
  assert _refused(module=module).startswith('--prompt is missing, the text')


def test_a_client_does_not_wait_for_jax():
  script = (
      'import sys, jetrl_jax.serve.ask, jetrl_jax.serve.jetstream.client;'
      ' sys.exit("jax" in sys.modules)'
  )
  subprocess.run([sys.executable, '-c', script], cwd=_ROOT, check=True)


@pytest.mark.parametrize(
    ('module', 'arguments', 'missing', 'extra'),
    [
        ('jetrl_jax.serve', [_CHECKPOINT], 'uvicorn', 'serve'),
        ('jetrl_jax.serve', [_CHECKPOINT, '--grpc'], 'jetstream', 'jetstream'),
        ('jetrl_jax.serve.jetstream.ask', ['--prompt=1'], 'grpc', 'jetstream'),
    ],
)
def test_without_the_extra_the_command_says_what_to_install(
    module, arguments, missing, extra
):
  if missing == 'jetstream' and importlib.util.find_spec('grpc') is None:
    missing = 'grpc'
  found = _refused(*arguments, module=module, missing=missing)
  assert found.startswith(f'{missing} is not installed')
  assert f"pip install 'jetrl_jax[{extra}]'" in found


@_NEEDS_SERVE
def test_other_machines_are_served_with_a_token_only(tmp_path):
  found = _refused(_CHECKPOINT, '--host=0.0.0.0', '--port=0')
  assert found.startswith('--host=0.0.0.0 can be reached from other machines')
  assert '--token_file or JETRL_JAX_TOKEN' in found
  file = tmp_path / 'token'
  file.write_text('two words')
  found = _refused(_CHECKPOINT, '--port=0', f'--token_file={file}')
  assert found.endswith('must hold one word of ASCII, the token')


@pytest.mark.slow
@_NEEDS_SERVE
def test_an_address_and_limits_that_cannot_be_had_are_refused():
  with socket.create_server(('127.0.0.1', 0)) as taken:
    port = taken.getsockname()[1]
    found = _refused(_CHECKPOINT, f'--port={port}')
  assert found.startswith(f'cannot listen on 127.0.0.1:{port} (')
  assert _refused(_CHECKPOINT, '--host=').startswith('--host is empty')
  found = _refused('--checkpoint=examples/nothing/here', '--port=0')
  assert 'no such folder' in found
  found = _refused(_CHECKPOINT, '--port=0', '--max_tokens=100000')
  assert 'max_prompt_length + max_tokens is' in found


def test_a_client_says_where_no_server_is():
  found = _refused(
      '--prompt=1', '--address=127.0.0.1:1', module='jetrl_jax.serve.ask'
  )
  assert found.startswith('no answer from 127.0.0.1:1 (')
  assert 'does jetrl_jax serve run there' in found


class _Elsewhere(http.server.BaseHTTPRequestHandler):
  """A server that has no such API."""

  def do_GET(self):
    self.send_error(404)

  def log_message(self, *args):
    del args


def test_a_client_says_that_a_server_has_another_api():
  with http.server.HTTPServer(('127.0.0.1', 0), _Elsewhere) as server:
    threading.Thread(target=server.handle_request).start()
    address = f'127.0.0.1:{server.server_port}'
    found = _refused(
        *('--prompt=1', f'--address={address}'), module='jetrl_jax.serve.ask'
    )
  assert found.startswith(f'{address} answers 404 (Not Found), and not as')
  assert '\n' not in found


@pytest.mark.skipif(not _INSTALLED, reason='needs google-jetstream')
@pytest.mark.jetstream
def test_the_grpc_server_refuses_alike():
  found = _refused('--grpc', '--checkpoint=examples/nothing/here', '--port=0')
  assert 'no such folder' in found
  found = _refused(
      '--grpc', _CHECKPOINT, '--port=0', f'--max_message_kib={2**21}'
  )
  assert found.startswith('max_message_kib is 2097152; allowed')
  found = _refused(
      '--prompt=1',
      '--address=127.0.0.1:1',
      module='jetrl_jax.serve.jetstream.ask',
  )
  assert found.startswith('UNAVAILABLE: ')
