"""Writes responses as OpenAI's API has them: whole, or chunks of a stream."""

import dataclasses
import time
import uuid
from typing import Any

from jetrl_jax.data import Tokenizer
from jetrl_jax.serve.answers import Piece, Token
from jetrl_jax.serve.openai_requests import Asked
from jetrl_jax.serve.text import token_text


@dataclasses.dataclass(kw_only=True)
class _Whole:
  """A response whose pieces are joined."""

  text: str = ''
  tokens: list[Token] = dataclasses.field(default_factory=list)
  finish_reason: str | None = None


class Writer:
  """Writes the answer to one request.

  Args:
    asked: the request.
    model: name that the server has for its policy.
    tokenizer: the tokenizer of the policy.
  """

  def __init__(self, asked: Asked, model: str, tokenizer: Tokenizer):
    self._asked, self._tokenizer = asked, tokenizer
    kind = 'chatcmpl' if asked.chat else 'cmpl'
    self._head = {
        'id': f'{kind}-{uuid.uuid4().hex}',
        'created': int(time.time()),
        'model': model,
    }
    count = len(asked.prompts) * asked.n
    self._sampled = [0] * count
    self._offset = [0] * count
    self._started = [False] * count
    self._wholes = [_Whole() for _ in range(count)]

  @property
  def num_sampled(self) -> int:
    """Tokens sampled so far, in all responses."""
    return sum(self._sampled)

  def add(self, piece: Piece) -> None:
    """Takes the next piece of a whole response."""
    whole = self._wholes[piece.index]
    whole.text += piece.text
    whole.tokens += piece.tokens
    whole.finish_reason = piece.finish_reason
    self._sampled[piece.index] = piece.sampled

  def whole(self) -> dict[str, Any]:
    """Returns the answer, after all pieces were added."""
    choices = []
    for index, whole in enumerate(self._wholes):
      choice: dict[str, Any] = {
          'index': index,
          'finish_reason': whole.finish_reason,
          'logprobs': self._logprobs(index, whole.tokens),
      }
      if self._asked.chat:
        message = {'role': 'assistant', 'content': whole.text, 'refusal': None}
        choice['message'] = message
      else:
        choice['text'] = whole.text
      choices.append(choice)
    kind = 'chat.completion' if self._asked.chat else 'text_completion'
    return self._head | {
        'object': kind,
        'choices': choices,
        'usage': self._usage(),
    }

  def chunks(self, piece: Piece) -> list[dict[str, Any]]:
    """Returns the events that a stream sends for a piece."""
    self._sampled[piece.index] = piece.sampled
    logprobs = self._logprobs(piece.index, piece.tokens)
    found, end = [], {'finish_reason': piece.finish_reason}
    if not self._asked.chat:
      last = {'text': piece.text, 'logprobs': logprobs} | end
      return [self._chunk(piece.index, last)]
    if not self._started[piece.index]:
      self._started[piece.index] = True
      delta = {'role': 'assistant', 'content': ''}
      first = {'delta': delta, 'logprobs': None, 'finish_reason': None}
      found.append(self._chunk(piece.index, first))
    delta = {'content': piece.text} if piece.text or piece.tokens else {}
    last = {'delta': delta, 'logprobs': logprobs} | end
    return [*found, self._chunk(piece.index, last)]

  def usage_chunk(self) -> dict[str, Any]:
    """Returns the last chunk of a stream that was asked for its usage."""
    return self._stream_head() | {'choices': [], 'usage': self._usage()}

  def _chunk(self, index: int, choice: dict[str, Any]) -> dict[str, Any]:
    return self._stream_head() | {'choices': [{'index': index} | choice]}

  def _stream_head(self) -> dict[str, Any]:
    kind = 'chat.completion.chunk' if self._asked.chat else 'text_completion'
    return self._head | {'object': kind}

  def _usage(self) -> dict[str, int]:
    # A prompt is read once for all its samples.
    prompt_tokens = sum(map(len, self._asked.prompts))
    return {
        'prompt_tokens': prompt_tokens,
        'completion_tokens': self.num_sampled,
        'total_tokens': prompt_tokens + self.num_sampled,
    }

  def _logprobs(self, index: int, tokens: list[Token]) -> Any:
    if not self._asked.logprobs:
      return None
    if self._asked.chat:
      content = [
          self._entry(token.id, token.logprob)
          | {'top_logprobs': [self._entry(*pair) for pair in token.top]}
          for token in tokens
      ]
      return {'content': content, 'refusal': None}
    texts = [self._text(token.id) for token in tokens]
    offsets = []
    for text in texts:
      offsets.append(self._offset[index])
      self._offset[index] += len(text)
    return {
        'tokens': texts,
        'token_logprobs': [token.logprob for token in tokens],
        'top_logprobs': [self._top(token) for token in tokens]
        if self._asked.top
        else None,
        'text_offset': offsets,
    }

  def _entry(self, id: int, logprob: float | None) -> dict[str, Any]:
    return {
        'token': self._text(id),
        'logprob': logprob,
        'bytes': list(self._tokenizer.token_bytes(id)),
    }

  def _top(self, token: Token) -> dict[str, float] | None:
    """Returns texts to log-probs: the most probable tokens and this one."""
    if token.logprob is None:
      return None
    found: dict[str, float] = {}
    for id, logprob in [*token.top, (token.id, token.logprob)]:
      # Two tokens may have the same text. Then only the more probable one is
      # reported.
      text = self._text(id)
      found[text] = max(logprob, found.get(text, logprob))
    return found

  def _text(self, id: int) -> str:
    return token_text(self._tokenizer, id)
