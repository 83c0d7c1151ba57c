"""JetStream's orchestrator, which checks each request first.

The threads, queues and slots are JetStream's own. They have no answer to a bad
request but to end the process, so nothing reaches them unchecked. The
subclasses add limits, the sampler's settings, the end of a request whose
client has gone, and text that is right where a character spans tokens.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent import futures
from typing import Any

import grpc

from jetrl_jax.data import Tokenizer
from jetrl_jax.serve.jetstream.client import FINISH_REASON
from jetrl_jax.serve.jetstream.engine import JetStreamEngine, PromptTokens
from jetrl_jax.serve.jetstream.sampling import from_text, sampling_of, to_text
from jetrl_jax.serve.jetstream.shim import jetstream_pb2, orchestrator
from jetrl_jax.serve.requests import Limits, PromptReader
from jetrl_jax.serve.text import TextStream

_NO_MESSAGE = 'the message is no protobuf of this method (jetstream.proto)'
_STOPPING = 'the server is shutting down; ask another one, or later'


class _Request(orchestrator.ActiveRequest):
  """A request that ends once its client disconnects.

  JetStream continues to decode for a client that has disconnected. It compares
  the tokens so far with `max_tokens` at each step, so 0 ends the response.
  """

  @property
  def max_tokens(self) -> int:
    """Most tokens of the response; 0 once the client has disconnected."""
    channel = self.return_channel
    gone = channel is None or channel.cancelled()
    return 0 if gone else self._max_tokens

  @max_tokens.setter
  def max_tokens(self, value: int) -> None:
    self._max_tokens = value


class Driver(orchestrator.Driver):
  """JetStream's driver: one engine that prefills and generates in turn.

  Args:
    engine: ours, as JetStream's.
  """

  def __init__(self, engine: JetStreamEngine):
    params = engine.load_params()
    super().__init__(
        prefill_engines=[engine],
        generate_engines=[engine],
        prefill_params=[params],
        generate_params=[params],
        interleaved_mode=True,
        jax_padding=False,
    )

  def place_request_on_prefill_queue(self, request) -> None:
    """Queues a request, as one that ends with its client."""
    super().place_request_on_prefill_queue(
        _Request(
            max_tokens=request.max_tokens,
            return_channel=request.return_channel,
            history_path=request.history_path,
            prefill_content=request.prefill_content,
            is_client_side_tokenization=request.is_client_side_tokenization,
        )
    )

  def _process_prefill_content(
      self, request, tokenizer, is_bos: bool, max_prefill_length: int
  ) -> tuple[PromptTokens, int]:
    """Hands the prompt to the engine as it was checked.

    JetStream's own puts the BOS id before token ids that a client sends, and
    has no place for the sampler's settings.
    """
    # `Orchestrator` has done it already.
    del tokenizer, is_bos, max_prefill_length
    sampling = from_text(request.history_path)
    tokens = PromptTokens.make(request.prefill_content, sampling)
    return tokens, len(tokens)


class Orchestrator(orchestrator.LLMOrchestrator):
  """JetStream's gRPC service, with limits.

  Args:
    driver: started.
    reader: from a request's prompt to tokens.
    tokenizer: the tokenizer of the policy.
    limits: the limits of the server.
    num_slots: requests that are decoded at once.
  """

  def __init__(
      self,
      driver: Driver,
      reader: PromptReader,
      tokenizer: Tokenizer,
      limits: Limits,
      num_slots: int,
  ):
    super().__init__(driver)
    self._reader, self._tokenizer, self._limits = reader, tokenizer, limits
    self._most_at_once = num_slots + limits.queue_size
    self._at_once = 0  # Only the event loop's thread changes it.
    # The first is set when the server stops, the second when it no longer waits
    # for running requests.
    self._draining, self._over = False, asyncio.Event()

  async def HealthCheck(self, request, context):
    """Tells whether the orchestrator runs."""
    if request is None:
      await context.abort(grpc.StatusCode.INVALID_ARGUMENT, _NO_MESSAGE)
    return await super().HealthCheck(request, context)

  def close(self) -> None:
    """Ends what reads the prompts."""
    self._reader.close()

  async def drain(self, seconds: float) -> None:
    """Refuses calls, and ends those that have not ended in time."""
    self._draining = True
    end = asyncio.get_running_loop().time() + seconds
    while self._at_once and asyncio.get_running_loop().time() < end:
      await asyncio.sleep(0.02)
    self._over.set()

  async def Decode(self, request, context) -> AsyncIterator[Any]:
    """Streams the response to one request.

    Text comes for a prompt that was text, token ids always. The metadata that
    end the call say 'stop' or 'length' under `finish-reason`.
    """
    if request is None:
      await context.abort(grpc.StatusCode.INVALID_ARGUMENT, _NO_MESSAGE)
    if self._draining:
      await context.abort(grpc.StatusCode.UNAVAILABLE, _STOPPING)
    if self._at_once >= self._most_at_once:
      await context.abort(
          grpc.StatusCode.RESOURCE_EXHAUSTED,
          f'{self._at_once} requests are running or waiting, which is all that'
          ' this server takes; try again later',
      )
    self._at_once += 1
    try:
      prepared = await self._prepared_or_refused(request, context)
      stream = self._stream(request, prepared, context)
      while (response := await self._next(stream, context)) is not None:
        yield response
    except futures.CancelledError:
      pass  # The client has gone; nobody is there to be told.
    finally:
      self._at_once -= 1

  async def _next(self, stream: AsyncGenerator[Any], context) -> Any:
    """Returns the next response; None at the end.

    Once the server waits no longer, the call ends with a sentence.
    """
    tasks = [
        asyncio.ensure_future(anext(stream, None)),
        asyncio.ensure_future(self._over.wait()),
    ]
    try:
      await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
      if tasks[0].done():
        return tasks[0].result()
    finally:
      for task in tasks:
        task.cancel()
    await context.abort(grpc.StatusCode.UNAVAILABLE, _STOPPING)

  async def _prepared_or_refused(self, request, context):
    # Tokenising may take a while, so it runs outside of the event loop's
    # thread.
    loop, metadata = asyncio.get_running_loop(), context.invocation_metadata()
    try:
      return await loop.run_in_executor(
          None, self._prepare, request, metadata or ()
      )
    except ValueError as error:
      await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
      raise  # `abort` has raised already.

  async def _stream(self, request, prepared, context) -> AsyncGenerator[Any]:
    """Adds the text to what JetStream streams, and says how it ended."""
    as_text = request.WhichOneof('content') == 'text_content'
    text, count = TextStream(self._tokenizer), 0
    async for response in super().Decode(prepared, context):
      (sample,) = response.stream_content.samples
      count += len(sample.token_ids)
      if as_text:
        sample.text = text.push(sample.token_ids)
      if sample.token_ids:  # The step that finds the end has no tokens.
        yield response
    if as_text and (rest := text.flush()):
      yield _response(rest)
    ended = 'length' if count == request.max_tokens else 'stop'
    context.set_trailing_metadata(((FINISH_REASON, ended),))

  def _prepare(self, request, metadata):
    """Returns the request in the form that `Driver` takes; checks all of it.

    Raises:
      ValueError: what the client should do differently.
    """
    if request.session_cache:
      raise ValueError('session_cache is set; prefixes are not kept here')
    sampling = sampling_of(request.max_tokens, metadata, self._limits)
    match request.WhichOneof('content'):
      case 'text_content':
        tokens = self._reader.of_text(request.text_content.text)
      case 'token_content':
        tokens = self._reader.of_tokens(request.token_content.token_ids)
      case _:
        raise ValueError(
            'the request has neither text_content nor token_content'
        )
    return jetstream_pb2.DecodeRequest(
        # The one free text that reaches the driver beside the prompt.
        session_cache=to_text(sampling),
        max_tokens=request.max_tokens,
        token_content=jetstream_pb2.DecodeRequest.TokenContent(
            token_ids=tokens
        ),
    )


def _response(text: str):
  stream = jetstream_pb2.DecodeResponse.StreamContent
  return jetstream_pb2.DecodeResponse(
      stream_content=stream(samples=[stream.Sample(text=text)])
  )
