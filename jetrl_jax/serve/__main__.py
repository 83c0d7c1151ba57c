"""Serves a policy: jetrl_jax serve --checkpoint=runs/quickstart.

The server speaks OpenAI's API over HTTP, so any client of it works with the
base URL http://127.0.0.1:8000/v1. With --grpc it is JetStream's server instead.
See docs/serving.md.
"""

import importlib
import os
import pathlib
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from absl import app, flags

from jetrl_jax.config import flags as config_flags
from jetrl_jax.config import saved_policy
from jetrl_jax.config.saved_policy import SavedPolicy
from jetrl_jax.core import device_memory, launchers
from jetrl_jax.core.files import user_path
from jetrl_jax.metrics.console import show_own_sentences
from jetrl_jax.serve import address
from jetrl_jax.serve.requests import Limits

# Name of an environment variable, because all users of a machine can see flags.
_TOKEN = 'JETRL_JAX_TOKEN'
_HTTP_PORT, _GRPC_PORT = 8000, 9000
# For each way to serve: the module that it imports, and the extra that installs
# it.
_EXTRAS = {
    'starlette': 'serve',
    'uvicorn': 'serve',
    'prometheus_client': 'serve',
    'grpc': 'jetstream',
    'jetstream': 'jetstream',
}

_CHECKPOINT = flags.DEFINE_string(
    'checkpoint',
    None,
    "A run's workdir, or a Hugging Face checkpoint (folder or id).",
    required=True,
)
_STEP = flags.DEFINE_integer(
    'step', None, "Which of a run's checkpoints; by default the newest."
)
_NAME = flags.DEFINE_string(
    'name',
    None,
    'What clients call the model; by default as --checkpoint.',
)
_GRPC = flags.DEFINE_bool(
    'grpc', False, "Serve with JetStream's orchestrator and gRPC server."
)
_HOST = flags.DEFINE_string(
    'host',
    '127.0.0.1',
    'Address to listen on. There is no encryption: for other machines put a'
    ' proxy before it.',
)
_PORT = flags.DEFINE_integer(
    'port',
    None,
    f'By default {_HTTP_PORT}, with --grpc {_GRPC_PORT}; 0 is any free port.',
    lower_bound=0,
    upper_bound=65535,
)
_TOKEN_FILE = flags.DEFINE_string(
    'token_file',
    None,
    'A file with the bearer token that clients must send; by default the'
    f' environment variable {_TOKEN}. Needed for any host but loopback.',
)
_NUM_SLOTS = flags.DEFINE_integer(
    'num_slots',
    16,
    'Requests decoded at once; rounded up to a multiple of 16 per device.',
    lower_bound=1,
)
_MAX_PROMPT_LENGTH = flags.DEFINE_integer(
    'max_prompt_length', None, "Tokens; by default the run's, else 1024."
)
_MAX_TOKENS = flags.DEFINE_integer(
    'max_tokens', None, "Response tokens; by default the run's, else 1024."
)
_QUEUE_SIZE = flags.DEFINE_integer(
    'queue_size',
    Limits.queue_size,
    'Requests that may wait while all slots are taken.',
)
_MAX_MESSAGE_KIB = flags.DEFINE_integer(
    'max_message_kib', Limits.max_message_kib, 'Size of one request.'
)
_TIMEOUT_S = flags.DEFINE_float(
    'timeout_s',
    600.0,
    'Seconds that an answer may take, its time in the queue included.',
    lower_bound=0.1,
)
_GRACE_S = flags.DEFINE_float(
    'grace_s',
    10.0,
    'Seconds that running requests have to end after SIGTERM or SIGINT.',
    lower_bound=0.0,
)


def main(argv: list[str]) -> None:
  """Serves until SIGTERM or SIGINT."""
  if len(argv) > 1:
    _refuse(f'unknown arguments {argv[1:]}')
  show_own_sentences()
  try:
    launchers.check_alone()
    _serve(_start_grpc if _GRPC.value else _start_http)
  except ModuleNotFoundError as error:
    missing = (error.name or '').partition('.')[0]
    if missing not in _EXTRAS:
      raise
    extra = _EXTRAS[missing]
    _refuse(
        f'{missing} is not installed; it comes with the extra: pip install'
        f" 'jetrl_jax[{extra}]', or pip install -e '.[{extra}]' in a clone"
    )
  except (ValueError, OSError, RuntimeError) as error:
    _refuse(device_memory.explained(error))


def _serve(start: Callable[..., Any]) -> None:
  """Builds the server, and waits for a signal.

  Args:
    start: (what is to be told when it fails, whether to give up) to (server,
      its address), or None if the start was given up.
  """
  asked = threading.Event()
  received = []

  def stop(number, frame):
    del frame
    received.append(signal.Signals(number).name)
    asked.set()
    # A second one ends the process at once.
    signal.signal(number, signal.SIG_DFL)

  for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, stop)
  device_memory.take_most()
  started = start(asked)
  if started is not None and received:  # The signal came during compilation.
    started[0].stop()
    started = None
  if started is None:
    print(f'{", ".join(received)}: stopped before it served.', flush=True)
    return
  server, where, saved, limits = started
  print(
      f'Serving {saved.origin} ({saved.policy.recipe.name}) on {where}:'
      f' prompts to {limits.max_prompt_length} tokens, responses to'
      f' {limits.max_tokens}. Ctrl-C stops it.',
      flush=True,
  )
  asked.wait()
  if not received:
    server.stop()
    raise RuntimeError('the engine failed, see above; the server has ended')
  print(f'{received[0]}: waiting for running requests', flush=True)
  server.stop()
  print('Stopped.')


def _start_http(asked: threading.Event):
  """Starts the server of OpenAI's API."""
  # Imported here, because `main` reports a missing extra first.
  from jetrl_jax.serve import server as servers
  from jetrl_jax.serve.app import Access

  port = _HTTP_PORT if _PORT.value is None else _PORT.value
  listener = address.listen(_HOST.value, port)
  token = _token()
  if not token and not address.is_loopback(listener):
    raise ValueError(
        f'--host={_HOST.value} can be reached from other machines: give a token'
        f' that clients must send, by --token_file or {_TOKEN}, or leave the'
        ' host on 127.0.0.1'
    )
  saved, limits = _load()
  if asked.is_set():
    return None
  server = servers.start(
      saved,
      limits,
      listener,
      name=_NAME.value or _CHECKPOINT.value,
      access=Access(token=token, timeout_s=_TIMEOUT_S.value),
      num_slots=_NUM_SLOTS.value,
      grace_s=_GRACE_S.value,
      on_failure=asked.set,
  )
  host = f'[{_HOST.value}]' if ':' in _HOST.value else _HOST.value
  return server, f'http://{host}:{server.port}/v1', saved, limits


def _start_grpc(asked: threading.Event):
  """Starts JetStream's server."""
  # By name: its room comes after this one.
  servers: Any = importlib.import_module('jetrl_jax.serve.jetstream.server')
  port = _GRPC_PORT if _PORT.value is None else _PORT.value
  _check_port(_HOST.value, port)
  saved, limits = _load()
  if asked.is_set():
    return None
  server = servers.start(
      saved,
      limits,
      num_slots=_NUM_SLOTS.value,
      host=_HOST.value,
      port=port,
      grace_s=_GRACE_S.value,
  )
  return server, f'{_HOST.value}:{server.port}', saved, limits


def _load() -> tuple[SavedPolicy, Limits]:
  """Loads the policy, settles the limits, and says that it compiles."""
  saved = saved_policy.load(_CHECKPOINT.value, step=_STEP.value)
  limits = Limits(
      max_prompt_length=_or(_MAX_PROMPT_LENGTH.value, saved.max_prompt_length),
      max_tokens=_or(_MAX_TOKENS.value, saved.max_response_length),
      queue_size=_QUEUE_SIZE.value,
      max_message_kib=_MAX_MESSAGE_KIB.value,
  )
  print(
      f'Read {saved.origin}; compiling, minutes where the model is large.',
      file=sys.stderr,
      flush=True,
  )
  return saved, limits


def _or(value: int | None, default: int) -> int:
  return default if value is None else value


def _token() -> str:
  """Returns the token that clients must send; '' for none."""
  if _TOKEN_FILE.value is None:
    return os.environ.get(_TOKEN, '').strip()
  file: pathlib.Path = user_path(_TOKEN_FILE.value)
  try:
    token = file.read_text(encoding='utf-8').strip()
  except (OSError, UnicodeError) as error:
    raise ValueError(f'--token_file={file} cannot be read: {error}') from error
  if not token or not token.isascii() or len(token.split()) != 1:
    raise ValueError(
        f'--token_file={file} must hold one word of ASCII, the token'
    )
  return token


def _check_port(host: str, port: int) -> None:
  """Refuses an address that cannot be had, and warns of an open one."""
  with address.listen(host, port) as probe:
    loopback = address.is_loopback(probe)
  if not loopback:
    print(
        f'warning: {host} can be reached from other machines, without'
        ' encryption or password',
        file=sys.stderr,
    )


def _refuse(sentence: str) -> NoReturn:
  print(f'error: {sentence}', file=sys.stderr)
  sys.exit(2)


def _parse(argv: list[str]) -> list[str]:
  try:
    return flags.FLAGS(argv)
  except flags.Error as error:
    _refuse(config_flags.said(error))


if __name__ == '__main__':
  app.run(main, flags_parser=_parse)
