"""Serves a policy: python -m jetrl_jax.serve --checkpoint=runs/quickstart."""

import ipaddress
import signal
import socket
import sys
import threading
from typing import NoReturn

from absl import app, flags

from jetrl_jax.config import flags as config_flags
from jetrl_jax.config import saved_policy
from jetrl_jax.core import device_memory
from jetrl_jax.metrics.console import show_own_sentences
from jetrl_jax.serve.requests import Limits

_CHECKPOINT = flags.DEFINE_string(
    'checkpoint',
    None,
    "A run's workdir, or a Hugging Face checkpoint (folder or id).",
    required=True,
)
_STEP = flags.DEFINE_integer(
    'step', None, "Which of a run's checkpoints; by default the newest."
)
_HOST = flags.DEFINE_string(
    'host',
    '127.0.0.1',
    'Address to listen on. There is no encryption and nobody is asked for a'
    ' password: leave it on loopback, or put a proxy before it.',
)
_PORT = flags.DEFINE_integer(
    'port', 9000, '0 is any free port.', lower_bound=0, upper_bound=65535
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
    'queue_size', 64, 'Requests that may wait while all slots are taken.'
)
_MAX_MESSAGE_KIB = flags.DEFINE_integer(
    'max_message_kib', 1024, 'Size of one message that is received.'
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
    _serve()
  except ModuleNotFoundError as error:
    if error.name is None or error.name.partition('.')[0] not in (
        'grpc',
        'jetstream',
    ):
      raise
    _refuse(
        f'{error.name} is not installed; it comes with the extra: pip install'
        " 'jetrl_jax[jetstream]', or pip install -e '.[jetstream]' in a clone"
    )
  except ValueError as error:
    _refuse(str(error))


def _serve() -> None:
  """Builds the server, and waits for a signal."""
  # Not at the top: where JetStream is not installed `main` says so.
  from jetrl_jax.serve import server as servers

  _check_port(_HOST.value, _PORT.value)
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
  saved = saved_policy.load(_CHECKPOINT.value, step=_STEP.value)
  limits = Limits(
      max_prompt_length=_or(_MAX_PROMPT_LENGTH.value, saved.max_prompt_length),
      max_tokens=_or(_MAX_TOKENS.value, saved.max_response_length),
      queue_size=_QUEUE_SIZE.value,
      max_message_kib=_MAX_MESSAGE_KIB.value,
  )
  if asked.is_set():
    return
  server = servers.start(
      saved,
      limits,
      num_slots=_NUM_SLOTS.value,
      host=_HOST.value,
      port=_PORT.value,
      grace_s=_GRACE_S.value,
  )
  if asked.is_set():  # While it compiled.
    server.stop()
    return
  print(
      f'Serving {saved.origin} ({saved.policy.recipe.name}) on'
      f' {_HOST.value}:{server.port}: prompts to {limits.max_prompt_length}'
      f' tokens, responses to {limits.max_tokens}. Ctrl-C stops it.',
      flush=True,
  )
  asked.wait()
  print(f'{received[0]}: waiting for running requests', flush=True)
  server.stop()
  print('Stopped.')


def _or(value: int | None, default: int) -> int:
  return default if value is None else value


def _check_port(host: str, port: int) -> None:
  """Refuses an address that cannot be had, before a checkpoint is loaded."""
  if not host:
    raise ValueError(
        '--host is empty; give an address, such as 127.0.0.1 or 0.0.0.0'
    )
  try:
    family = socket.AF_INET6 if ':' in host else socket.AF_INET
    with socket.socket(family) as probe:
      probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
      probe.bind((host.strip('[]'), port))
      address = ipaddress.ip_address(probe.getsockname()[0])
  except OSError as error:
    raise ValueError(
        f'cannot listen on {host}:{port} ({error.strerror}); give another'
        ' --host or --port'
    ) from error
  if not address.is_loopback:
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
