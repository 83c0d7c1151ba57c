"""Asks a gRPC server: python -m jetrl_jax.serve.jetstream.ask --prompt=1+1=."""

import sys
from typing import NoReturn

from absl import app, flags

from jetrl_jax.serve.jetstream.client import Client

_ADDRESS = flags.DEFINE_string(
    'address', '127.0.0.1:9000', "The server's host:port."
)
_PROMPT = flags.DEFINE_string(
    'prompt', None, "Text; put into the policy's prompt format."
)
_MAX_TOKENS = flags.DEFINE_integer(
    'max_tokens', 32, 'Most tokens of the response.'
)
_TEMPERATURE = flags.DEFINE_float('temperature', 0.0, '0 is greedy.')
_SEED = flags.DEFINE_integer('seed', 0, 'The same seed, the same response.')
_TIMEOUT_S = flags.DEFINE_float(
    'timeout_s', 600.0, 'Seconds that the response may take.'
)


def main(argv: list[str]) -> None:
  """Prints one response while it comes."""
  if len(argv) > 1:
    _refuse(f'unknown arguments {argv[1:]}')
  if _PROMPT.value is None:
    _refuse("--prompt is missing, the text to send: --prompt='3+4-2='")
  try:
    import grpc

    client = Client(_ADDRESS.value, timeout_s=_TIMEOUT_S.value)
  except ModuleNotFoundError as error:
    _refuse(
        f"{error.name} is not installed; pip install 'jetrl_jax[jetstream]', or"
        " pip install -e '.[jetstream]' in a clone"
    )
  try:
    with client:
      for piece in client.stream(
          _PROMPT.value,
          max_tokens=_MAX_TOKENS.value,
          temperature=_TEMPERATURE.value,
          seed=_SEED.value,
      ):
        print(piece.text, end='', flush=True)
  except ValueError as error:
    _refuse(str(error))
  except grpc.RpcError as error:
    # A call that failed is an RpcError and a Call; the stubs know the former.
    call: grpc.Call = error  # pyright: ignore[reportAssignmentType]
    hint = (
        f'; does jetrl_jax serve --grpc run at {_ADDRESS.value} (--address)?'
        if call.code() is grpc.StatusCode.UNAVAILABLE
        else ''
    )
    _refuse(f'{call.code().name}: {call.details()}{hint}')
  print(f'\n({client.finish_reason})', file=sys.stderr)


def _refuse(sentence: str) -> NoReturn:
  print(f'error: {sentence}', file=sys.stderr)
  sys.exit(2)


def _parse(argv: list[str]) -> list[str]:
  try:
    return flags.FLAGS(argv)
  except flags.Error as error:
    _refuse(str(error))


if __name__ == '__main__':
  app.run(main, flags_parser=_parse)
