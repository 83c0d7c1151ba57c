"""JetStream's real orchestrator and server over our engine."""

# ruff: noqa: E402
# Without google-jetstream the imports below the skip would fail.

import asyncio
import concurrent.futures
import contextlib
import json
import logging
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import types

import pytest

pytest.importorskip('jetstream', reason='needs google-jetstream')
pytestmark = pytest.mark.jetstream

import grpc
import jax

from jetrl_jax.serve.jetstream import server as servers
from jetrl_jax.serve.jetstream.client import Client
from jetrl_jax.serve.jetstream.engine import JetStreamEngine, JetStreamTokenizer
from jetrl_jax.serve.jetstream.orchestrator import Driver
from jetrl_jax.serve.jetstream.shim import (
    engine_api,
    jetstream_pb2,
    orchestrator,
    tokenizer_api,
)
from tests import whole_run
from tests.serve import served


@contextlib.contextmanager
def _serving(saved, limits):
  server = servers.start(
      saved, limits, num_slots=16, host='127.0.0.1', port=0, grace_s=0.5
  )
  with Client(f'127.0.0.1:{server.port}', timeout_s=200) as client:
    client.server = server
    yield client
  server.stop()


@pytest.fixture(scope='module', name='client')
def _client():
  with _serving(served.trained(), served.LIMITS) as client:
    yield client


@pytest.fixture(scope='module', name='endless')
def _endless():
  with _serving(served.quantized(), served.LONG) as client:
    yield client


_LONG = served.LONG.max_tokens


def _questions(count: int) -> list[str]:
  file = served.ROOT / 'examples/quickstart/heldout.jsonl'
  lines = file.read_text().splitlines()[:count]
  return [json.loads(line)['question'] for line in lines]


def _tokens(text: str) -> list[int]:
  tokenizer = served.trained().tokenizer
  return tokenizer.encode(text, add_special_tokens=True).tolist()


def _without_stop(completion) -> list[int]:
  """JetStream's 0.2.2 leaves out the token that ended the response."""
  ends = completion.finish_reason == 'stop'
  return completion.tokens.tolist()[: -1 if ends else None]


def _wait_until(condition, seconds: float = 60.0):
  end = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < end
    time.sleep(0.01)


# --- the same tokens ------------------------------------------------------


def test_many_clients_at_once_get_the_tokens_of_the_rollout(client):
  # 20 for 16 slots: four wait until slots are free, and slots are used again.
  questions = _questions(20)
  with concurrent.futures.ThreadPoolExecutor(20) as pool:
    found = list(pool.map(lambda q: client.decode(q, max_tokens=24), questions))
  tokenizer = served.trained().tokenizer
  completions = served.expected(
      served.trained(), served.LIMITS, [_tokens(q) for q in questions]
  )
  assert {c.finish_reason for c in completions} == {'stop'}
  for response, completion in zip(found, completions, strict=True):
    assert list(response.tokens) == _without_stop(completion)
    assert response.text == tokenizer.decode(completion.tokens)


def test_token_ids_are_taken_as_they_are_and_end_at_max_tokens(client):
  tokens = _tokens(_questions(1)[0])
  (whole,) = served.expected(served.trained(), served.LIMITS, [tokens])
  length = len(whole.tokens)
  for max_tokens in (1, 3, length - 1, length):
    response = client.decode(tokens, max_tokens=max_tokens)
    ends = 'stop' if max_tokens == length else 'length'
    assert response.finish_reason == ends
    assert list(response.tokens) == _without_stop(whole)[:max_tokens]
    assert response.text == ''


def test_a_seed_gives_the_tokens_of_the_rollout_with_that_address(client):
  prompts = [_tokens(q) for q in _questions(3)]
  found = [
      [
          list(
              client.decode(p, max_tokens=24, temperature=1.5, seed=seed).tokens
          )
          for p in prompts
      ]
      for seed in (7, 2**32 - 1, 7)
  ]
  assert found[0] == found[2] != found[1]
  for row, seed in zip(found, (7, 2**32 - 1), strict=False):
    completions = served.expected(
        served.trained(), served.LIMITS, prompts, seed=seed, temperature=1.5
    )
    assert row == [_without_stop(c) for c in completions]


def test_an_fp8_flow_serves_the_tokens_of_its_rollout(endless):
  prompts = [_tokens(q) for q in _questions(4)]
  found = [list(endless.decode(p, max_tokens=40).tokens) for p in prompts]
  completions = served.expected(
      served.quantized(), served.LONG, prompts, max_tokens=40
  )
  assert found == [_without_stop(c) for c in completions]


def test_jetstream_s_own_driver_and_service_run_our_engine_unchanged():
  saved = served.trained()
  engine = servers.make_adapter(saved, served.LIMITS, 16)
  assert isinstance(engine, engine_api.Engine)
  driver = orchestrator.Driver(
      prefill_engines=[engine],
      generate_engines=[engine],
      prefill_params=[engine.load_params()],
      generate_params=[engine.load_params()],
      interleaved_mode=True,
      jax_padding=False,
  )
  service = orchestrator.LLMOrchestrator(driver)

  async def decode(question):
    request = jetstream_pb2.DecodeRequest(
        max_tokens=24,
        text_content=jetstream_pb2.DecodeRequest.TextContent(text=question),
    )
    return [
        sample
        async for response in service.Decode(request)
        for sample in response.stream_content.samples
    ]

  async def decode_all(questions):
    return await asyncio.gather(*map(decode, questions))

  questions = _questions(18)
  # The driver's threads answer into the event loop, and die when it is closed.
  with asyncio.Runner() as runner:
    found = runner.run(decode_all(questions))
    driver.stop()
  completions = served.expected(
      saved, served.LIMITS, [_tokens(q) for q in questions]
  )
  for samples, completion in zip(found, completions, strict=True):
    tokens = [token for sample in samples for token in sample.token_ids]
    assert tokens == _without_stop(completion)
    # ASCII: each token is whole characters.
    text = ''.join(sample.text for sample in samples)
    assert text == saved.tokenizer.decode(completion.tokens)


class _LateSlots(queue.Queue):
  """Free slots: one that a response frees shows when the next is put back.

  The thread that generates puts a slot back when no request waits for it. So
  the last response always ends after that thread has seen a slot in use.
  """

  def __init__(self, size):
    super().__init__(size)
    self.freed, self.count = [], 0

  def put(self, item, block=True, timeout=None):
    thread = threading.current_thread().name
    if thread.startswith('detokenize'):
      self.freed.append(item)
      return
    super().put(item, block, timeout)
    while thread.startswith('generate') and self.freed:
      super().put(self.freed.pop(), block=False)
      self.count += 1


class _LateDriver(Driver):
  late: list[_LateSlots]

  @property
  def _generate_slots(self):
    return self.late

  @_generate_slots.setter
  def _generate_slots(self, queues):
    self.late = [_LateSlots(each.maxsize) for each in queues]


def test_a_last_response_that_ends_at_any_moment_ends_nothing_else(monkeypatch):
  deaths = []
  system = types.SimpleNamespace(
      getpid=os.getpid, kill=lambda *a: deaths.append(a)
  )
  monkeypatch.setattr(orchestrator, 'os', system)
  monkeypatch.setattr(servers, 'Driver', _LateDriver)
  with _serving(served.trained(), served.LIMITS) as client:
    (slots,) = client.server._driver.late
    for count, question in enumerate(_questions(3)):
      assert len(client.decode(question, max_tokens=4).tokens) == 4
      _wait_until(lambda seen=count: slots.count > seen)
      time.sleep(0.2)  # Otherwise a failure would wait for its next response.
      assert deaths == []


# --- wrong requests -------------------------------------------------------


def _code(call) -> tuple[grpc.StatusCode, str]:
  with pytest.raises(grpc.RpcError) as error:
    call()
  return error.value.code(), error.value.details()


@pytest.mark.parametrize(
    ('prompt', 'settings', 'message'),
    [
        ('', {}, 'the prompt is empty'),
        ([], {}, 'the prompt has 0 tokens'),
        ('1+' * 20, {}, 'the prompt has 40 tokens; allowed: 1 to 16'),
        ([3] * 17, {}, 'the prompt has 17 tokens; allowed: 1 to 16'),
        ([10**6], {}, 'are not in the vocabulary'),
        ('1', {'max_tokens': 0}, 'max_tokens is 0; allowed: 1 to 24'),
        ('1', {'max_tokens': 25}, 'max_tokens is 25'),
        ('1', {'temperature': -1}, 'temperature is -1'),
        ('1', {'seed': -1}, 'seed is -1'),
    ],
)
def test_a_wrong_request_is_told_why_and_the_next_one_served(
    client, prompt, settings, message
):
  code, details = _code(
      lambda: client.decode(prompt, **({'max_tokens': 4} | settings))
  )
  assert code == grpc.StatusCode.INVALID_ARGUMENT and message in details
  assert client.decode('1+1=', max_tokens=1).tokens
  assert client.is_live()


def test_a_request_without_content_or_with_a_session_is_refused(client):
  text = jetstream_pb2.DecodeRequest.TextContent(text='1')
  for fields, message in (
      ({}, 'neither text_content nor token_content'),
      ({'session_cache': '{}', 'text_content': text}, 'session_cache is set'),
  ):
    request = jetstream_pb2.DecodeRequest(max_tokens=1, **fields)
    code, details = _code(lambda r=request: list(client._stub.Decode(r)))
    assert code == grpc.StatusCode.INVALID_ARGUMENT and message in details


@pytest.mark.parametrize('method', ['Decode', 'HealthCheck'])
def test_bytes_that_are_no_message_are_told_so(client, method, caplog):
  service = 'jetstream_proto.Orchestrator'
  make = client._channel.unary_stream
  call = make(f'/{service}/{method}')  # Bytes as they are.
  code, details = _code(lambda: list(call(b'\xff\xff\xff')))
  assert code == grpc.StatusCode.INVALID_ARGUMENT
  assert details.startswith('the message is no protobuf of this method')
  assert client.is_live() and not caplog.records


def test_a_message_that_is_too_large_is_refused(client):
  code, details = _code(lambda: client.decode('1' * 2**21, max_tokens=1))
  assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
  assert 'larger than max' in details


# --- clients that leave, full queues, the end -----------------------------


def _open(client, count: int):
  """Streams that have given their first token, and have many to come."""
  streams = [
      client.stream(served.ENDLESS, max_tokens=_LONG) for _ in range(count)
  ]
  for stream in streams:
    next(stream)
  return streams


def test_a_full_server_says_so_and_clients_that_leave_free_their_slots(endless):
  streams = _open(endless, 16)
  code, details = _code(lambda: endless.decode('1', max_tokens=1))
  assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
  assert '16 requests are running or waiting' in details
  slots = endless.server._driver._generate_slots[0]
  assert slots.qsize() == 0
  start = time.monotonic()
  for stream in streams:
    stream.close()
  # JetStream's thread holds one in its hand while it waits for a request.
  _wait_until(lambda: slots.qsize() >= 15)
  left = time.monotonic() - start
  start = time.monotonic()
  whole = endless.decode(served.ENDLESS, max_tokens=_LONG)
  assert whole.finish_reason == 'length' and len(whole.tokens) == _LONG
  assert left < (time.monotonic() - start) / 2


def test_stopping_ends_running_requests_and_all_threads():
  before = set(threading.enumerate())
  with _serving(served.quantized(), served.LONG) as client:
    stream = _open(client, 1)[0]
    port, thread = client.server.port, threading.Thread(
        target=client.server.stop
    )
    thread.start()
    code, details = _code(lambda: list(stream))
    assert code == grpc.StatusCode.UNAVAILABLE
    assert details == 'the server is shutting down; ask another one, or later'
    thread.join(20)
    client.server.stop = lambda: None
  assert not thread.is_alive()
  left = set(threading.enumerate()) - before
  assert not [t.name for t in left if t.name.startswith(_THREADS)]
  with Client(f'127.0.0.1:{port}') as late:
    code, _ = _code(late.is_live)
  assert code == grpc.StatusCode.UNAVAILABLE


_THREADS = ('prefill', 'transfer', 'generate', 'detokenize', 'grpc', 'tokenize')


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_the_command_serves_and_a_signal_ends_it_cleanly(number):
  process = whole_run.start(
      *('--grpc', '--port=0', f'--checkpoint={served.CHECKPOINT}'),
      *('--max_prompt_length=16', '--max_tokens=24'),
      module='jetrl_jax.serve',
  )
  try:
    line = process.stdout.readline()
    port = re.search(r'on 127\.0\.0\.1:(\d+): prompts to 16', line).group(1)
    done = subprocess.run(
        [
            *(sys.executable, '-m', 'jetrl_jax.serve.jetstream.ask'),
            *(f'--address=127.0.0.1:{port}', '--prompt=3+4-2='),
            '--max_tokens=24',
        ],
        cwd=served.ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and done.stderr == '\n(stop)\n'
    assert re.fullmatch(r'[0-9# -]+', done.stdout)
    process.send_signal(number)
    output, errors = process.communicate(timeout=120)
  finally:
    process.kill()
  assert process.returncode == 0
  said = f'Read checkpoint {served.CHECKPOINT}; compiling, minutes where'
  assert errors.startswith(said) and errors.count('\n') == 1
  assert output.splitlines() == [
      f'{number.name}: waiting for running requests',
      'Stopped.',
  ]


# --- the shim -------------------------------------------------------------


def test_the_shim_leaves_logging_and_other_libraries_alone():
  code = (
      'import logging, sys; root = logging.getLogger();'
      ' before = root.level, list(root.handlers);'
      ' import jetrl_jax.serve.jetstream.shim;'
      ' assert before == (root.level, root.handlers), root.handlers;'
      ' assert not {"seqio", "tiktoken", "tensorflow"} & set(sys.modules)'
  )
  subprocess.run([sys.executable, '-c', code], cwd=served.ROOT, check=True)
  assert not hasattr(jax, 'tree_map')
  assert logging.getLogger().level != logging.DEBUG


def test_our_tokenizer_is_jetstream_s():
  tokenizer = served.trained().tokenizer
  made = JetStreamEngine(None, tokenizer).build_tokenizer(None)
  assert isinstance(made, tokenizer_api.Tokenizer)
  assert isinstance(made, JetStreamTokenizer)
  padded, length = made.encode('1+2=', max_prefill_length=16, jax_padding=False)
  assert length == 4 and padded.shape == (16,)
  assert padded[:4].tolist() == _tokens('1+2=')
  assert set(padded[4:].tolist()) == {made.pad_id}
  assert made.decode(padded[:4]) == '1+2='
  assert made.stop_tokens == set(tokenizer.eos_ids)
  assert made.eos_id in made.stop_tokens
