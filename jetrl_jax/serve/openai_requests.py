"""Reads the bodies of OpenAI's completions and chat completions.

Whatever would change the answer and is not supported is refused by name, and
so is a name that the API does not have. A few that change nothing here are let
through.
"""

import dataclasses
import difflib
import json
import math
import secrets
from collections.abc import Sequence
from typing import Any

from jetrl_jax.data.types import Message
from jetrl_jax.serve.logprobs import MOST_TOP
from jetrl_jax.serve.requests import Limits, PromptReader, Sampling

_MOST_STOPS = 16
# OpenAI's default for completions; a chat's is what the server allows.
_COMPLETION_TOKENS = 16
_BOTH = (
    'model',
    'max_tokens',
    'temperature',
    'top_p',
    'n',
    'stop',
    'seed',
    'stream',
    'stream_options',
    'logprobs',
)
_CHAT = (*_BOTH, 'messages', 'max_completion_tokens', 'top_logprobs')
_COMPLETION = (*_BOTH, 'prompt', 'echo')
# Accepted only with values that change nothing.
_OFF: dict[str, tuple[Any, ...]] = {
    'frequency_penalty': (0,),
    'presence_penalty': (0,),
    'logit_bias': ({},),
    'suffix': ('',),
    'best_of': (1,),
    'tools': ([],),
    'functions': ([],),
    'tool_choice': ('none', 'auto'),
    'response_format': ({'type': 'text'},),
    'modalities': (['text'],),
}
# These are about the account and not about the answer.
_IGNORED = (
    'user',
    'metadata',
    'store',
    'service_tier',
    'safety_identifier',
    'prompt_cache_key',
    'parallel_tool_calls',
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
  """A request that was read.

  Attributes:
    chat: whether it is a chat completion.
    model: name that it asked for.
    prompts: token ids of each prompt.
    texts: the texts of each prompt, for an echo; None where it came as tokens.
    sampling: the sampling settings of every response; None for only
      the log-probs of the prompts.
    n: responses to each prompt.
    stop: strings that end a response.
    stream: whether pieces are sent as they come.
    include_usage: whether a stream ends with the numbers of tokens.
    logprobs: whether log-probs are sent.
    top: most probable tokens that are sent for each token.
    echo: whether the response starts with its prompt.
  """

  chat: bool
  model: str
  prompts: list[list[int]]
  texts: list[str | None]
  sampling: Sampling | None
  n: int
  stop: tuple[str, ...]
  stream: bool
  include_usage: bool
  logprobs: bool
  top: int
  echo: bool

  @property
  def needs_forward(self) -> bool:
    """Whether the log-probs need a forward over each whole sequence."""
    return self.logprobs and (self.top > 0 or self.echo)


def parse_body(body: bytes) -> dict[str, Any]:
  """Returns a request's JSON object.

  Raises:
    ValueError: it is none.
  """
  try:
    found = json.loads(body)
  except (ValueError, RecursionError) as error:
    raise ValueError(f'the body is not valid JSON: {error}') from None
  if not isinstance(found, dict):
    raise ValueError('the body must be a JSON object')
  return {name: value for name, value in found.items() if value is not None}


def read_chat(
    body: dict[str, Any], reader: PromptReader, limits: Limits
) -> Asked:
  """Reads a chat completion.

  Raises:
    ValueError: what the client should do differently.
  """
  _check_names(body, _CHAT)
  messages = _messages(body.get('messages'))
  logprobs = _flag(body, 'logprobs')
  top = _integer(body, 'top_logprobs', 0, 0, MOST_TOP)
  if top and not logprobs:
    raise ValueError('top_logprobs needs "logprobs": true')
  names = ('max_completion_tokens', 'max_tokens')
  name = names[0] if names[0] in body else names[1]
  max_tokens = _integer(body, name, limits.max_tokens, 1, limits.max_tokens)
  return Asked(
      chat=True,
      prompts=[reader.of_messages(messages)],
      texts=[None],
      sampling=_sampling(body, max_tokens, limits),
      logprobs=logprobs,
      top=top,
      echo=False,
      **_common(body),
  )


def read_completion(
    body: dict[str, Any], reader: PromptReader, limits: Limits
) -> Asked:
  """Reads a completion.

  Raises:
    ValueError: what the client should do differently.
  """
  _check_names(body, _COMPLETION)
  asked = _prompts(body.get('prompt'))
  echo = _flag(body, 'echo')
  # A number here, and a flag in a chat. 0 is the token's own log-prob alone.
  logprobs = 'logprobs' in body and body['logprobs'] is not False
  top = 0
  if logprobs and body['logprobs'] is not True:
    top = _integer(body, 'logprobs', 0, 0, MOST_TOP)
  default = min(_COMPLETION_TOKENS, limits.max_tokens)
  least = 0 if echo else 1
  max_tokens = _integer(body, 'max_tokens', default, least, limits.max_tokens)
  return Asked(
      chat=False,
      prompts=[
          reader.of_raw_text(prompt)
          if isinstance(prompt, str)
          else reader.of_tokens(prompt)
          for prompt in asked
      ],
      texts=[prompt if isinstance(prompt, str) else None for prompt in asked],
      sampling=_sampling(body, max_tokens, limits) if max_tokens else None,
      logprobs=logprobs,
      top=top,
      echo=echo,
      **_common(body),
  )


def _common(body: dict[str, Any]) -> dict[str, Any]:
  """Returns the settings that both kinds of request share."""
  options = body.get('stream_options', {})
  if not isinstance(options, dict):
    raise ValueError(f'stream_options is {options!r:.80}; allowed: an object')
  model = body.get('model', '')
  if not isinstance(model, str):
    raise ValueError(f'model is {model!r:.80}; allowed: text')
  return {
      'model': model,
      'n': _integer(body, 'n', 1, 1, 128),
      'stop': _stop(body.get('stop', ())),
      'stream': _flag(body, 'stream'),
      'include_usage': _flag(options, 'include_usage'),
  }


def _sampling(
    body: dict[str, Any], max_tokens: int, limits: Limits
) -> Sampling:
  """Returns how responses are sampled; a seed is drawn where none is given."""
  seed = secrets.randbits(32)
  return Sampling(
      max_tokens=max_tokens,
      temperature=_number(body, 'temperature', 1.0),
      seed=_integer(body, 'seed', seed, 0, 2**32 - 1),
      top_p=_number(body, 'top_p', 1.0),
  ).check(limits)


def _check_names(body: dict[str, Any], known: Sequence[str]) -> None:
  for name, value in body.items():
    if name in known or name in _IGNORED:
      continue
    if name in _OFF:
      # Not `in`: True is 1.
      if not any(value == off for off in _OFF[name]):
        raise ValueError(
            f'{name} is not supported; leave it out (found {value!r:.80})'
        )
      continue
    near = difflib.get_close_matches(name, known, n=1)
    hint = f'; did you mean {near[0]!r}?' if near else ''
    raise ValueError(
        f'unknown name {name!r}{hint} (supported: {", ".join(known)})'
    )


def _messages(value: Any) -> list[Message]:
  if not isinstance(value, list) or not value:
    raise ValueError(
        f'messages is {value!r:.80}; send a list of'
        ' {"role": ..., "content": ...}'
    )
  return [_message(message, i) for i, message in enumerate(value)]


def _message(message: Any, i: int) -> Message:
  where = f'messages[{i}]'
  if not isinstance(message, dict):
    raise ValueError(f'{where} is {message!r:.80}; allowed: an object')
  more = {k for k, v in message.items() if v not in (None, [], '')} - {
      'role',
      'content',
  }
  if more:
    raise ValueError(
        f'{where} has {sorted(more)}, which are not supported; allowed: role,'
        ' content'
    )
  role, content = message.get('role'), message.get('content')
  if isinstance(content, list):
    parts = [
        part.get('text')
        if isinstance(part, dict) and part.get('type') == 'text'
        else None
        for part in content
    ]
    if not all(isinstance(part, str) for part in parts):
      raise ValueError(f'{where}: only parts of the type text are supported')
    content = ''.join(part for part in parts if isinstance(part, str))
  if not isinstance(role, str) or not isinstance(content, str):
    raise ValueError(f'{where} must have a role and a content, both text')
  return {'role': role, 'content': content}


def _prompts(value: Any) -> list[str | list[int]]:
  """Returns one or several prompts, each text or token ids."""
  if isinstance(value, str):
    return [value]
  if isinstance(value, list) and value:
    if all(isinstance(item, str) for item in value):
      return value
    if _are_tokens(value):
      return [value]
    if all(isinstance(item, list) and _are_tokens(item) for item in value):
      return value
  raise ValueError(
      f'prompt is {value!r:.80}; allowed: text, a list of texts, a list of'
      ' token ids, or a list of lists of token ids'
  )


def _are_tokens(value: list[Any]) -> bool:
  return all(type(item) is int for item in value)


def _stop(value: Any) -> tuple[str, ...]:
  strings = [value] if isinstance(value, str) else value
  if (
      not isinstance(strings, list | tuple)
      or not all(isinstance(string, str) for string in strings)
      or not all(strings)
      or len(strings) > _MOST_STOPS
  ):
    raise ValueError(
        f'stop is {value!r:.80}; allowed: text, or at most {_MOST_STOPS} texts,'
        ' none of them empty'
    )
  return tuple(strings)


def _flag(body: dict[str, Any], name: str) -> bool:
  value = body.get(name, False)
  if not isinstance(value, bool):
    raise ValueError(f'{name} is {value!r:.80}; allowed: true, false')
  return value


def _number(body: dict[str, Any], name: str, default: float) -> float:
  value = body.get(name, default)
  if isinstance(value, bool) or not isinstance(value, int | float):
    raise ValueError(f'{name} is {value!r:.80}; allowed: a number')
  try:
    found = float(value)
  except OverflowError:
    found = math.inf
  if not math.isfinite(found):
    raise ValueError(f'{name} is {found}; allowed: a finite number')
  return found


def _integer(
    body: dict[str, Any], name: str, default: int, least: int, most: int
) -> int:
  value = body.get(name, default)
  if isinstance(value, float) and value.is_integer():
    value = int(value)
  if type(value) is not int or not least <= value <= most:
    raise ValueError(f'{name} is {value!r:.80}; allowed: {least} to {most}')
  return value
