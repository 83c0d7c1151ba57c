"""The HTTP application: OpenAI's routes, health, metrics, and who may ask."""

import asyncio
import contextlib
import dataclasses
import functools
import hmac
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from jetrl_jax.config.saved_policy import SavedPolicy
from jetrl_jax.serve import openai_requests
from jetrl_jax.serve.answers import Piece, Unavailable, answer
from jetrl_jax.serve.decoder import Decoder, Full, Stopped
from jetrl_jax.serve.metrics import Metrics
from jetrl_jax.serve.openai_requests import Asked
from jetrl_jax.serve.openai_responses import Writer
from jetrl_jax.serve.requests import Limits, PromptReader

# Seconds that a client has to send its request.
_BODY_S = 30.0
# Most bytes that are read and dropped of a body that is too long.
_DRAINED = 64 << 20
_LOOPBACK = ('localhost', '127.0.0.1', '[::1]')
STOPPING = 'the server is shutting down; ask another one, or later'


class _Refused(Exception):
  """A request that is answered with an error.

  Args:
    status: the HTTP status code.
    message: a sentence.
    **headers: of the answer.
  """

  def __init__(self, status: int, message: str, **headers: str):
    super().__init__(message)
    self.status, self.message, self.headers = status, message, headers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Access:
  """Who may ask.

  Attributes:
    token: what a client must send as bearer token; '' for none.
    timeout_s: seconds that an answer may take, its time in the queue included.
  """

  token: str = ''
  timeout_s: float = 600.0


class Api:
  """The routes of one server.

  Args:
    saved: the policy.
    decoder: started.
    limits: the limits of the requests.
    name: the name of the policy, as clients ask for it.
    access: who may ask.
    num_slots: the number of slots of the engine.

  Attributes:
    app: the ASGI application.
    draining: whether requests are refused, because the server is stopping.
    num_open: requests that are being answered.
  """

  def __init__(
      self,
      saved: SavedPolicy,
      decoder: Decoder,
      limits: Limits,
      *,
      name: str,
      access: Access,
      num_slots: int,
  ):
    self._decoder, self._limits, self._access = decoder, limits, access
    self._tokenizer = saved.tokenizer
    self._reader = PromptReader(
        saved.tokenizer,
        saved.prompt_format,
        limits,
        saved.policy.model.vocab_size,
    )
    self._metrics = Metrics(decoder, num_slots)
    self._name = name
    self._model = {
        'id': name,
        'object': 'model',
        'created': int(time.time()),
        'owned_by': 'jetrl_jax',
        'root': saved.origin,
        'recipe': saved.policy.recipe.name,
        'max_model_len': limits.max_prompt_length + limits.max_tokens,
    }
    self.draining = False
    self.num_open = 0
    chat = functools.partial(self._complete, openai_requests.read_chat)
    completion = functools.partial(
        self._complete, openai_requests.read_completion
    )
    routes: list[tuple[str, str, Callable[[Request], Awaitable[Response]]]] = [
        ('/health', 'GET', self._health),
        ('/metrics', 'GET', self._tell_metrics),
        ('/v1/models', 'GET', self._models),
        ('/v1/models/{name:path}', 'GET', self._one_model),
        ('/v1/chat/completions', 'POST', chat),
        ('/v1/completions', 'POST', completion),
    ]
    self.app = Starlette(
        routes=[
            Route(path, self._guarded(path, handler), methods=[method])
            for path, method, handler in routes
        ],
        exception_handlers={HTTPException: _http_error},
    )

  def close(self) -> None:
    """Ends what the application has started."""
    self._reader.close()

  # --- who may ask ----------------------------------------------------------

  def _guarded(self, path: str, handler: Callable) -> Callable:
    """Checks who asks, and answers what goes wrong with a sentence."""

    async def guarded(request: Request) -> Response:
      try:
        self._check_host(request)
        if path != '/health':
          self._check_token(request)
        response = await handler(request)
      except _Refused as refused:
        response = _error(refused.status, refused.message, refused.headers)
      except ClientDisconnect:
        response = _error(499, 'the client has gone', {})
      self._metrics.count(path, response.status_code)
      return response

    return guarded

  def _check_token(self, request: Request) -> None:
    if not self._access.token:
      return
    kind, _, token = request.headers.get('authorization', '').partition(' ')
    same = hmac.compare_digest(
        token.strip().encode(), self._access.token.encode()
    )
    if kind.lower() != 'bearer' or not same:
      raise _Refused(
          401,
          'this server asks for its token: Authorization: Bearer TOKEN, the'
          ' api_key of an OpenAI client',
          **{'WWW-Authenticate': 'Bearer'},
      )

  def _check_host(self, request: Request) -> None:
    """Refuses names that lead here from a page in somebody's browser.

    Without a token only this machine may ask, and a page of another site could
    let its own name point to this machine.
    """
    if self._access.token:
      return
    host = request.headers.get('host', '')
    name, colon, port = host.rpartition(':')
    if not (colon and port.isdecimal()):
      name = host
    if name not in _LOOPBACK:
      raise _Refused(
          403,
          f'the host {host!r} is not this machine: without a token only'
          f' {", ".join(_LOOPBACK)} are served; start the server with a token',
      )

  # --- routes ---------------------------------------------------------------

  async def _health(self, request: Request) -> Response:
    del request
    if self.draining or not self._decoder.is_live:
      return JSONResponse({'status': 'stopping'}, status_code=503)
    return JSONResponse({'status': 'ok'})

  async def _tell_metrics(self, request: Request) -> Response:
    del request
    return Response(
        self._metrics.text(),
        headers={'content-type': self._metrics.content_type},
    )

  async def _models(self, request: Request) -> Response:
    del request
    return JSONResponse({'object': 'list', 'data': [self._model]})

  async def _one_model(self, request: Request) -> Response:
    self._check_model(request.path_params['name'])
    return JSONResponse(self._model)

  def _check_model(self, name: str) -> None:
    if not name:
      raise _Refused(400, f'model is missing; send {self._name!r}')
    if name != self._name:
      raise _Refused(
          404, f'there is no model {name!r:.200} here; it is {self._name!r}'
      )

  async def _complete(self, read: Callable, request: Request) -> Response:
    if self.draining:
      raise _Refused(503, STOPPING, Connection='close')
    self.num_open += 1
    start, streams = time.monotonic(), False
    try:
      asked = await self._asked(read, request)
      writer = Writer(asked, self._name, self._tokenizer)
      pieces = answer(asked, self._decoder, self._tokenizer)
      try:
        async with asyncio.timeout(self._access.timeout_s):
          first = await _unless_gone(request, anext(pieces))
          self._metrics.first_piece(start)
          if asked.stream:
            streams = True
            events = self._events(asked, writer, first, pieces, start)
            return _Stream(events, functools.partial(self._left, pieces))
          writer.add(first)
          await _unless_gone(request, _add_all(writer, pieces))
      except TimeoutError:
        raise _Refused(503, self._late()) from None
      except Full:
        raise self._full(len(asked.prompts) * asked.n) from None
      except Stopped as error:
        raise _Refused(503, str(error)) from None
      except Unavailable as error:
        raise _Refused(503, str(error), Connection='close') from None
      finally:
        if not streams:
          await pieces.aclose()
      self._done(asked, writer, start)
      return JSONResponse(writer.whole())
    finally:
      if not streams:
        self.num_open -= 1

  async def _asked(self, read: Callable, request: Request) -> Asked:
    """Reads and checks a request."""
    kind = request.headers.get('content-type', 'application/json')
    # A page of another site may send other types without permission.
    if kind.partition(';')[0].strip().lower() != 'application/json':
      raise _Refused(
          415, f'the content-type is {kind!r:.80}; send application/json'
      )
    most = self._limits.max_message_kib << 10
    parts, size = [], 0
    try:
      async with asyncio.timeout(_BODY_S):
        async for part in request.stream():
          size += len(part)
          if size <= most:
            parts.append(part)
          # A client that still sends when the connection is closed may lose the
          # answer.
          elif size > most + _DRAINED:
            break
    except TimeoutError:
      raise _Refused(
          408, f'the body did not come in {_BODY_S:.0f} s', Connection='close'
      ) from None
    if size > most:
      raise _Refused(
          413,
          f'the body has more than {self._limits.max_message_kib} KiB,'
          ' which is all that this server takes (--max_message_kib)',
          Connection='close',
      )
    try:
      body = openai_requests.parse_body(b''.join(parts))
      # Tokenising may take a while, so it runs outside of the event loop's
      # thread.
      asked = await asyncio.to_thread(read, body, self._reader, self._limits)
    except ValueError as error:
      raise _Refused(400, str(error)) from None
    self._check_model(asked.model)
    count = len(asked.prompts) * asked.n
    if count > self._decoder.capacity:
      raise _Refused(
          400,
          f'{len(asked.prompts)} prompts with n={asked.n} are {count}'
          f' responses; this server takes {self._decoder.capacity} at once',
      )
    return asked

  async def _events(
      self,
      asked: Asked,
      writer: Writer,
      first: Piece,
      pieces: AsyncGenerator[Piece, None],
      start: float,
  ) -> AsyncGenerator[str, None]:
    """Yields a stream's events; the last one ends it, or is an error."""
    for chunk in writer.chunks(first):
      yield _event(chunk)
    while True:
      left = self._access.timeout_s - (time.monotonic() - start)
      try:
        async with asyncio.timeout(left):
          piece = await anext(pieces, None)
      except TimeoutError:
        yield _event(_error_body(503, self._late()))
        return
      except (Unavailable, Stopped) as error:
        yield _event(_error_body(503, str(error)))
        return
      if piece is None:
        break
      for chunk in writer.chunks(piece):
        yield _event(chunk)
    if asked.include_usage:
      yield _event(writer.usage_chunk())
    yield 'data: [DONE]\n\n'
    self._done(asked, writer, start)

  async def _left(self, pieces: AsyncGenerator[Piece, None]) -> None:
    """Ends a stream, read to its end or not."""
    self.num_open -= 1
    await pieces.aclose()

  def _done(self, asked: Asked, writer: Writer, start: float) -> None:
    count = sum(map(len, asked.prompts))
    self._metrics.done(start, count, writer.num_sampled)

  def _late(self) -> str:
    return (
        f'the answer was not ready in {self._access.timeout_s:g} s'
        ' (--timeout_s); ask for fewer tokens, or when fewer wait'
    )

  def _full(self, count: int) -> _Refused:
    taken = self._decoder.num_running + self._decoder.num_waiting
    return _Refused(
        429,
        f'{taken} sequences are running or waiting, and {count} more do not'
        f' fit in the {self._decoder.capacity} that this server takes; try'
        ' again later',
        **{'Retry-After': '1'},
    )


class _Stream(StreamingResponse):
  """A stream of events that is ended even if nobody has read it.

  Args:
    events: text of each.
    end: called at the end, whatever happened.
  """

  media_type = 'text/event-stream'

  def __init__(
      self,
      events: AsyncGenerator[str, None],
      end: Callable[[], Awaitable[None]],
  ):
    super().__init__(events, headers={'Cache-Control': 'no-cache'})
    self._events, self._end = events, end

  async def __call__(self, scope, receive, send) -> None:
    try:
      await super().__call__(scope, receive, send)
    finally:
      # Python closes it only when nobody refers to it any more.
      await self._events.aclose()
      await self._end()


async def _add_all(writer: Writer, pieces: AsyncIterator[Piece]) -> None:
  async for piece in pieces:
    writer.add(piece)


async def _unless_gone(request: Request, work: Awaitable[Any]) -> Any:
  """Returns what `work` returns; ends it when the client has gone.

  Raises:
    ClientDisconnect: it has gone.
  """

  async def gone() -> None:
    while (await request.receive())['type'] != 'http.disconnect':
      pass

  tasks = [asyncio.ensure_future(work), asyncio.ensure_future(gone())]
  try:
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    if not tasks[0].done():
      raise ClientDisconnect()
    return tasks[0].result()
  finally:
    for task in tasks:
      task.cancel()
    # What `work` holds is freed when this returns.
    for task in tasks:
      with contextlib.suppress(asyncio.CancelledError, Exception):
        await task


async def _http_error(request: Request, error: Exception) -> Response:
  assert isinstance(error, HTTPException)
  return _error(
      error.status_code,
      f'{request.method} {request.url.path}: {error.detail}',
      dict(error.headers or {}),
  )


def _error(status: int, message: str, headers: dict[str, str]) -> JSONResponse:
  return JSONResponse(
      _error_body(status, message), status_code=status, headers=headers
  )


def _error_body(status: int, message: str) -> dict[str, Any]:
  """Returns an error as OpenAI's clients read it."""
  kinds = {401: 'authentication_error', 429: 'rate_limit_error'}
  kind = kinds.get(
      status, 'invalid_request_error' if status < 500 else 'server_error'
  )
  return {
      'error': {
          'message': message,
          'type': kind,
          'param': None,
          'code': status,
      }
  }


def _event(body: dict[str, Any]) -> str:
  return f'data: {json.dumps(body)}\n\n'
