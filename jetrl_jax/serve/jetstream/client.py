"""A client: it speaks JetStream's protocol, so it works with any such server.

The sampler's settings and the reason of the end are this project's. Nothing
else of it is imported here, so that a question does not wait for JAX.
"""

import contextlib
import dataclasses
import importlib
from collections.abc import Iterator, Sequence
from typing import Any

# Names of gRPC metadata, which are lower case.
TEMPERATURE = 'temperature'
SEED = 'seed'
# In the metadata that ends a response: 'stop' or 'length'.
FINISH_REASON = 'finish-reason'
_PROTOCOL = 'jetstream.core.proto.jetstream'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
  """A part of a response.

  Attributes:
    text: what it adds; '' for a prompt of tokens.
    tokens: their ids.
  """

  text: str
  tokens: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Response:
  """A whole response.

  Attributes:
    text: all pieces joined.
    tokens: token ids, without the one that ended it.
    finish_reason: 'stop', 'length', or '' from another server.
  """

  text: str
  tokens: tuple[int, ...]
  finish_reason: str


class Client(contextlib.AbstractContextManager):
  """A connection to one server.

  Args:
    address: 'host:port'.
    timeout_s: seconds that a response may take.

  Attributes:
    finish_reason: the finish reason of the last response that was read to its
      end.
  """

  def __init__(self, address: str, *, timeout_s: float = 600.0):
    import grpc

    # By name, because the type checker's environment does not have the package.
    self._proto: Any = importlib.import_module(f'{_PROTOCOL}_pb2')
    services: Any = importlib.import_module(f'{_PROTOCOL}_pb2_grpc')
    self._timeout_s = timeout_s
    self._channel = grpc.insecure_channel(address)
    self._stub = services.OrchestratorStub(self._channel)
    self.finish_reason = ''

  def __exit__(self, *_) -> None:
    self._channel.close()

  def is_live(self) -> bool:
    """Asks the server whether its orchestrator runs."""
    request = self._proto.HealthCheckRequest()
    return self._stub.HealthCheck(request, timeout=self._timeout_s).is_live

  def stream(
      self,
      prompt: str | Sequence[int],
      *,
      max_tokens: int,
      temperature: float = 0.0,
      seed: int = 0,
  ) -> Iterator[Piece]:
    """Yields the parts of a response as they come.

    Closing the iterator early ends the request on the server too.

    Args:
      prompt: text, which the server puts into the policy's prompt format; or
        token ids, which it takes as they are.
      max_tokens: most tokens of the response, the stop token included.
      temperature: 0 is greedy.
      seed: the same seed gives the same tokens.

    Raises:
      ValueError: a number does not fit in 32 bits, or the text is no Unicode.
      grpc.RpcError: the server refuses the request or cannot be reached.
    """
    kind = self._proto.DecodeRequest
    try:
      if isinstance(prompt, str):
        content = {'text_content': kind.TextContent(text=prompt)}
      else:
        content = {'token_content': kind.TokenContent(token_ids=prompt)}
      request = kind(max_tokens=max_tokens, **content)
    except ValueError as error:
      raise ValueError(
          f'the request cannot be sent: {error}. max_tokens and token ids are'
          ' integers of 32 bits, text is Unicode'
      ) from error
    call = self._stub.Decode(
        request,
        metadata=((TEMPERATURE, str(temperature)), (SEED, str(seed))),
        timeout=self._timeout_s,
    )
    try:
      for response in call:
        for sample in response.stream_content.samples:
          yield Piece(text=sample.text, tokens=tuple(sample.token_ids))
      ended = dict(call.trailing_metadata())
      self.finish_reason = ended.get(FINISH_REASON, '')
    finally:
      call.cancel()

  def decode(self, prompt: str | Sequence[int], **settings) -> Response:
    """Returns a whole response; arguments as of `stream`."""
    pieces = list(self.stream(prompt, **settings))
    return Response(
        text=''.join(piece.text for piece in pieces),
        tokens=tuple(token for piece in pieces for token in piece.tokens),
        finish_reason=self.finish_reason,
    )
