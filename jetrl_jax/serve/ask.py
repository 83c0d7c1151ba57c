"""Asks a server: jetrl_jax ask --prompt='3+4-2='.

The server may be any that speaks OpenAI's API. The answer is shown while it
comes.
"""

import json
import os
import sys
import urllib.error
import urllib.request
from typing import Any, NoReturn

from absl import app, flags

_ADDRESS = flags.DEFINE_string(
    'address', '127.0.0.1:8000', "The server's host:port, or its base URL."
)
_PROMPT = flags.DEFINE_string(
    'prompt', None, "Text; put into the policy's prompt format."
)
_MAX_TOKENS = flags.DEFINE_integer(
    'max_tokens', None, "Most tokens of the response; by default the server's."
)
_TEMPERATURE = flags.DEFINE_float('temperature', 0.0, '0 is greedy.')
_SEED = flags.DEFINE_integer('seed', 0, 'The same seed, the same response.')
_TIMEOUT_S = flags.DEFINE_float(
    'timeout_s', 600.0, 'Seconds without a word from the server.'
)


def main(argv: list[str]) -> None:
  """Prints one response while it comes."""
  if len(argv) > 1:
    _refuse(f'unknown arguments {argv[1:]}')
  if _PROMPT.value is None:
    _refuse("--prompt is missing, the text to send: --prompt='3+4-2='")
  try:
    with _call('/models', None) as answer:
      model = json.load(answer)['data'][0]['id']
    body: dict[str, Any] = {
        'model': model,
        'messages': [{'role': 'user', 'content': _PROMPT.value}],
        'temperature': _TEMPERATURE.value,
        'seed': _SEED.value,
        'stream': True,
    }
    if _MAX_TOKENS.value is not None:
      body['max_tokens'] = _MAX_TOKENS.value
    with _call('/chat/completions', body) as answer:
      reason = _show(answer)
  except urllib.error.HTTPError as error:
    _refuse(_said(error))
  except (OSError, ValueError, KeyError, IndexError) as error:
    why = getattr(error, 'reason', error)
    _refuse(
        f'no answer from {_ADDRESS.value} ({why}); does jetrl_jax serve run'
        ' there (--address)?'
    )
  print(f'\n({reason})', file=sys.stderr)


def _call(path: str, body: dict[str, Any] | None) -> Any:
  """Opens one of the server's routes."""
  base = _ADDRESS.value.rstrip('/')
  if '://' not in base:
    base = f'http://{base}/v1'
  headers = {'Content-Type': 'application/json'}
  if token := os.environ.get('JETRL_JAX_TOKEN'):
    headers['Authorization'] = f'Bearer {token}'
  data = None if body is None else json.dumps(body).encode()
  request = urllib.request.Request(base + path, data, headers)
  return urllib.request.urlopen(request, timeout=_TIMEOUT_S.value)


def _show(answer: Any) -> str:
  """Prints a stream's text; returns why it ended."""
  reason = ''
  for line in answer:
    data = line.decode().removeprefix('data: ').strip()
    if not data or data == '[DONE]':
      continue
    event = json.loads(data)
    if 'error' in event:
      _refuse(event['error']['message'])
    for choice in event['choices']:
      print(choice['delta'].get('content') or '', end='', flush=True)
      reason = choice['finish_reason'] or reason
  return reason


def _said(error: urllib.error.HTTPError) -> str:
  """Returns what the server says is wrong."""
  text = error.read().decode(errors='replace')
  try:
    return json.loads(text)['error']['message']
  except (ValueError, KeyError, TypeError):
    return (
        f'{_ADDRESS.value} answers {error.code} ({error.reason}), and not as'
        " OpenAI's API does; is it the right --address?"
    )


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
