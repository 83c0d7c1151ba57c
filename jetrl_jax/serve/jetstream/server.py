"""The server: a policy, JetStream's orchestrator over it, and a port."""

import asyncio
import functools
import threading
from concurrent import futures

import grpc
import numpy as np
from google.protobuf import message as protobuf_message

from jetrl_jax.config.saved_policy import SavedPolicy
from jetrl_jax.serve.decoder import make_engine
from jetrl_jax.serve.jetstream.engine import JetStreamEngine
from jetrl_jax.serve.jetstream.orchestrator import Driver, Orchestrator
from jetrl_jax.serve.jetstream.shim import jetstream_pb2, server_lib
from jetrl_jax.serve.requests import Limits, PromptReader

# Requests that are tokenised at once.
_THREADS = 4
# Seconds for the last messages to reach their clients.
_FLUSH_S = 1.0


class Server(server_lib.JetStreamServer):
  """JetStream's gRPC server on a host of our choice, with limits.

  JetStream's own listens on every interface, takes no options, and stops its
  threads before the calls that wait for them.

  Args:
    driver: started; `stop` stops it.
    orchestrator: the service.
    host: address to listen on.
    port: 0 for any free one.
    limits: for the size of messages.
    grace_s: seconds that running calls have to end in `stop`.

  Attributes:
    port: the one that is listened on.

  Raises:
    ValueError: the port cannot be had.
  """

  def __init__(
      self,
      driver: Driver,
      orchestrator: Orchestrator,
      *,
      host: str,
      port: int,
      limits: Limits,
      grace_s: float,
  ):
    self._driver, self._grace_s = driver, grace_s
    self._orchestrator = orchestrator
    self._executor = futures.ThreadPoolExecutor(_THREADS, 'tokenize')
    self._loop = asyncio.new_event_loop()
    self._loop.set_default_executor(self._executor)
    self._loop_thread = threading.Thread(
        target=self._loop.run_forever, name='grpc', daemon=True
    )
    self._loop_thread.start()

    async def bind() -> int:
      self._grpc_server = grpc.aio.server(
          self._executor,
          options=[
              ('grpc.max_receive_message_length', limits.max_message_kib << 10),
              # Otherwise a second server takes half of the first one's calls.
              ('grpc.so_reuseport', 0),
          ],
      )
      self._grpc_server.add_generic_rpc_handlers((_handlers(orchestrator),))
      bracketed = ':' in host and not host.startswith('[')
      name = f'[{host}]' if bracketed else host
      return self._grpc_server.add_insecure_port(f'{name}:{port}')

    try:
      self.port = self._await(bind())
    except BaseException as error:
      self._end()  # Threads of the driver would keep the process.
      if isinstance(error, RuntimeError):
        raise ValueError(
            f'cannot listen on {host}:{port} ({error}); give another host or'
            ' port'
        ) from error
      raise

  def stop(self) -> None:
    """Refuses calls, lets the running ones end, stops all threads.

    Calls that do not end in time are told why: gRPC's own stop would cancel
    them without a word, and so those that come meanwhile.
    """
    self._await(self._orchestrator.drain(self._grace_s))
    self._await(self._grpc_server.stop(_FLUSH_S))
    self._end()

  def _end(self) -> None:
    self._driver.stop()
    self._orchestrator.close()
    self._loop.call_soon_threadsafe(self._loop.stop)
    self._loop_thread.join()
    self._loop.close()
    self._executor.shutdown()

  def _await(self, coroutine):
    return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


def _handlers(service: Orchestrator):
  """Returns the service's methods, with our own reading of messages.

  A message that is no message would be answered without a sentence, and each
  one logged with a traceback.
  """
  described = jetstream_pb2.DESCRIPTOR.services_by_name['Orchestrator']
  makers = {
      'Decode': grpc.unary_stream_rpc_method_handler,
      'HealthCheck': grpc.unary_unary_rpc_method_handler,
  }
  methods = {}
  for name, make in makers.items():
    message = described.methods_by_name[name]
    kind = getattr(jetstream_pb2, message.input_type.name)
    answer = getattr(jetstream_pb2, message.output_type.name)
    methods[name] = make(
        getattr(service, name),
        request_deserializer=functools.partial(_read, kind),
        response_serializer=answer.SerializeToString,
    )
  return grpc.method_handlers_generic_handler(described.full_name, methods)


def _read(kind, data: bytes):
  """Returns a message, or None where the bytes are none of this kind."""
  try:
    return kind.FromString(data)
  except protobuf_message.DecodeError:
    return None


def make_adapter(
    saved: SavedPolicy, limits: Limits, num_slots: int
) -> JetStreamEngine:
  """Returns JetStream's engine over ours, with all that it runs compiled.

  Args:
    saved: the policy.
    limits: bound prompts and responses.
    num_slots: requests decoded at once; rounded up to 16 per device.

  Raises:
    ValueError: see `make_engine`.
  """
  engine = make_engine(saved, limits, num_slots)
  adapter = JetStreamEngine(engine, saved.tokenizer)
  params, state = adapter.load_params(), adapter.init_decode_state()
  for bucket in engine.buckets:
    length = min(bucket, limits.max_prompt_length)
    tokens = np.zeros(length, np.int32)
    prefix = adapter.prefill(
        params=params, padded_tokens=tokens, true_length=length
    )
    state = adapter.insert(prefix, state, 0)
  adapter.generate(params, state)
  return adapter


def start(
    saved: SavedPolicy,
    limits: Limits,
    *,
    num_slots: int,
    host: str,
    port: int,
    grace_s: float,
) -> Server:
  """Serves a policy; returns once requests are taken.

  Args:
    saved: the policy.
    limits: what the server takes.
    num_slots: requests decoded at once; rounded up to 16 per device.
    host: address to listen on.
    port: 0 for any free one.
    grace_s: seconds that running calls have to end in `stop`.

  Raises:
    ValueError: see `make_engine` and `Server`.
  """
  adapter = make_adapter(saved, limits, num_slots)
  driver = Driver(adapter)
  reader = PromptReader(
      saved.tokenizer,
      saved.prompt_format,
      limits,
      saved.policy.model.vocab_size,
  )
  service = Orchestrator(
      driver, reader, saved.tokenizer, limits, adapter.max_concurrent_decodes
  )
  server = Server(
      driver, service, host=host, port=port, limits=limits, grace_s=grace_s
  )
  server.start()
  return server
