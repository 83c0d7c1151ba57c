"""From a request to the pieces of its responses, as the tokens come."""

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import AsyncGenerator

from jetrl_jax.data import Tokenizer
from jetrl_jax.serve.decoder import Decoder, Event, Failed, Job, Tokens
from jetrl_jax.serve.logprobs import TokenLogprobs
from jetrl_jax.serve.openai_requests import Asked
from jetrl_jax.serve.text import StoppedText


class Unavailable(Exception):
  """The decoder ended before the response did."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Token:
  """A token of the text that is sent.

  Attributes:
    id: token id.
    logprob: in nats; None for the first token of a prompt.
    top: (token id, log-prob) of the most probable ones, in order.
  """

  id: int
  logprob: float | None
  top: list[tuple[int, float]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
  """The next part of one response.

  Attributes:
    index: the index of the response.
    text: what it adds.
    tokens: its tokens, without a stop token.
    finish_reason: 'stop' or 'length' in the last piece; None before.
    prompt_tokens: number of tokens of its prompt.
    sampled: tokens sampled so far, with the stop token.
  """

  index: int
  text: str
  tokens: list[Token]
  finish_reason: str | None
  prompt_tokens: int
  sampled: int


class _Response:
  """One response while it is made.

  Args:
    asked: the request.
    prompt: index of its prompt.
    tokenizer: the tokenizer of the policy.

  Attributes:
    prompt: token ids.
    text: all of it so far, after the prompt's in an echo.
    ids: token ids so far, without a stop token.
    logprobs: their log-probs.
    sampled: number of tokens so far, with a stop token.
    end: the reason of the end, None before.
  """

  def __init__(self, asked: Asked, prompt: int, tokenizer: Tokenizer):
    self.prompt = asked.prompts[prompt]
    self.text = ''
    if asked.echo:
      given = asked.texts[prompt]
      self.text = (
          tokenizer.decode(self.prompt, skip_special_tokens=False)
          if given is None
          else given
      )
    self.ids: list[int] = []
    self.logprobs: list[float] = []
    self.sampled = 0
    self.end: str | None = None if asked.sampling else 'length'
    self._stopped = StoppedText(tokenizer, asked.stop)

  def push(self, event: Tokens) -> None:
    """Takes tokens that were sampled, up to a stop string."""
    ids = event.ids[:-1] if event.end == 'stop' else event.ids
    for token, logprob in zip(ids, event.logprobs, strict=False):
      self.sampled += 1
      self.ids.append(token)
      self.logprobs.append(logprob)
      self.text += self._stopped.push(token)
      if self._stopped.stopped:
        self.end = 'stop'
        return
    self.sampled += len(event.ids) - len(ids)
    if event.end:
      self.text += self._stopped.flush()
      self.end = 'stop' if self._stopped.stopped else event.end


async def answer(
    asked: Asked, decoder: Decoder, tokenizer: Tokenizer
) -> AsyncGenerator[Piece, None]:
  """Yields the pieces of all responses; leaving early frees their slots.

  Where log-probs need a forward over the whole sequence, a response is one
  piece.

  Args:
    asked: the request.
    decoder: decodes and computes log-probs.
    tokenizer: the tokenizer of the policy.

  Raises:
    Full: too many requests wait.
    Stopped: the decoder takes no more.
    Unavailable: the decoder ended on the way.
  """
  loop = asyncio.get_running_loop()
  events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()

  def deliver(index: int, event: Event) -> None:
    with contextlib.suppress(RuntimeError):  # The loop is closed.
      loop.call_soon_threadsafe(events.put_nowait, (index, event))

  def job_of(index: int) -> Job:
    """Returns the next job of a response."""
    response, sampling = responses[index], asked.sampling
    if response.end is not None:
      sampling = None
    return Job(
        functools.partial(deliver, index),
        [*response.prompt, *response.ids],
        sampling,
        temperature=asked.sampling.temperature if asked.sampling else 1.0,
        sample=index % asked.n,
    )

  responses = [
      _Response(asked, prompt, tokenizer)
      for prompt in range(len(asked.prompts))
      for _ in range(asked.n)
  ]
  if asked.sampling is None and not asked.needs_forward:
    for index, response in enumerate(responses):
      yield _piece(index, response, response.text, [])
    return
  jobs = [job_of(index) for index in range(len(responses))]
  decoder.submit(jobs)
  try:
    sent = [(0, 0)] * len(responses)  # Characters and tokens.
    left = len(responses)
    while left:
      index, event = await events.get()
      response, tokens = responses[index], []
      if isinstance(event, Failed):
        raise Unavailable(event.why)
      if isinstance(event, TokenLogprobs):
        tokens = _with_alternatives(asked, response, event)
      else:
        response.push(event)
        if response.end is not None:
          # A stop string has ended it, so the decoder still runs it.
          jobs[index].cancel()
        if asked.needs_forward:
          if response.end is not None:
            jobs[index] = job_of(index)
            decoder.submit([jobs[index]], admitted=True)
          continue
        tokens = _sampled(response, sent[index][1])
      text = response.text[sent[index][0] :]
      sent[index] = len(response.text), len(response.ids)
      left -= response.end is not None
      if text or tokens or response.end is not None:
        yield _piece(index, response, text, tokens)
  finally:
    for job in jobs:
      job.cancel()


def _piece(
    index: int, response: _Response, text: str, tokens: list[Token]
) -> Piece:
  return Piece(
      index=index,
      text=text,
      tokens=tokens,
      finish_reason=response.end,
      prompt_tokens=len(response.prompt),
      sampled=response.sampled,
  )


def _sampled(response: _Response, first: int) -> list[Token]:
  """Returns the tokens of a response from `first` on."""
  pairs = zip(response.ids[first:], response.logprobs[first:], strict=True)
  return [Token(id=id, logprob=logprob, top=[]) for id, logprob in pairs]


def _with_alternatives(
    asked: Asked, response: _Response, computed: TokenLogprobs
) -> list[Token]:
  """Returns the tokens with the most probable ones in their places."""
  start, found = len(response.prompt), []
  # The log-probs of decoding; a unified flow has the same bits in both.
  logprobs = [*computed.logprobs[:start].tolist(), *response.logprobs]
  ids = [*response.prompt, *response.ids]
  for t in range(0 if asked.echo else start, len(ids)):
    if t == 0:  # No token comes before it.
      found.append(Token(id=ids[0], logprob=None, top=[]))
      continue
    top = zip(
        computed.top_ids[t, : asked.top].tolist(),
        computed.top_logprobs[t, : asked.top].tolist(),
        strict=True,
    )
    found.append(
        Token(
            id=ids[t],
            logprob=logprobs[t],
            # A token has one log-prob, to the bit, wherever it is sent.
            top=[(i, logprobs[t] if i == ids[t] else x) for i, x in top],
        )
    )
  return found
