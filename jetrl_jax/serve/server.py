"""A server: the policy on its engine, the application, and a port."""

import socket
import threading
import time

import uvicorn

from jetrl_jax.config.saved_policy import SavedPolicy
from jetrl_jax.serve.app import STOPPING, Access, Api
from jetrl_jax.serve.decoder import Decoder, make_engine
from jetrl_jax.serve.requests import Limits

# Connections beyond those that are answered or wait.
_SPARE_CONNECTIONS = 1024
# Seconds that a connection may be idle between two requests.
_KEEP_ALIVE_S = 60
# Seconds to send what is left to clients when the server stops.
_FLUSH_S = 5


class Server:
  """A running server.

  Args:
    api: what answers.
    decoder: started; `stop` stops it.
    listener: bound socket.
    grace_s: seconds that running requests have to end in `stop`.

  Attributes:
    port: the one that is listened on.
  """

  def __init__(
      self,
      api: Api,
      decoder: Decoder,
      listener: socket.socket,
      *,
      grace_s: float,
  ):
    self._api, self._decoder, self._grace_s = api, decoder, grace_s
    self._listener = listener
    self.port = listener.getsockname()[1]
    self._uvicorn = uvicorn.Server(
        uvicorn.Config(
            api.app,
            loop='asyncio',
            http='h11',
            ws='none',
            lifespan='off',
            log_config=None,
            # At 'warning' it would report each malformed request.
            log_level='error',
            access_log=False,
            proxy_headers=False,
            server_header=False,
            limit_concurrency=decoder.capacity + _SPARE_CONNECTIONS,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_FLUSH_S,
        )
    )
    self._thread = threading.Thread(
        target=self._uvicorn.run,
        kwargs={'sockets': [listener]},
        name='http',
        daemon=True,
    )

  def start(self) -> None:
    """Returns once requests are taken."""
    self._thread.start()
    while not self._uvicorn.started and self._thread.is_alive():
      time.sleep(0.01)

  def stop(self) -> None:
    """Refuses requests, lets the running ones end, stops all threads."""
    self._api.draining = True
    end = time.monotonic() + self._grace_s
    while self._api.num_open and time.monotonic() < end:
      if not self._decoder.is_live:
        break
      time.sleep(0.02)
    self._decoder.stop(STOPPING)
    self._uvicorn.should_exit = True
    self._thread.join()
    self._listener.close()
    self._api.close()


def start(
    saved: SavedPolicy,
    limits: Limits,
    listener: socket.socket,
    *,
    name: str,
    access: Access,
    num_slots: int,
    grace_s: float,
    on_failure=lambda: None,
) -> Server:
  """Serves a policy; returns once requests are taken.

  Args:
    saved: the policy.
    limits: what the server takes.
    listener: see `address.listen`.
    name: the name of the policy, as clients ask for it.
    access: who may ask.
    num_slots: sequences decoded at once; rounded up to 16 per device.
    grace_s: seconds that running requests have to end in `stop`.
    on_failure: called in another thread after the engine has failed.

  Raises:
    ValueError: see `make_engine`.
  """
  engine = make_engine(saved, limits, num_slots)
  decoder = Decoder(engine, limits.queue_size, on_failure)
  decoder.start()
  api = Api(
      saved,
      decoder,
      limits,
      name=name,
      access=access,
      num_slots=engine.num_slots,
  )
  server = Server(api, decoder, listener, grace_s=grace_s)
  server.start()
  return server
