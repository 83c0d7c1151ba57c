"""The HTTP server on a real engine: what it sends is what training computes."""

# Without starlette the imports below the skip would fail.

import asyncio
import contextlib
import json
import socket
import threading
import time
import types
import urllib.request

import numpy as np
import pytest

pytest.importorskip('starlette', reason='needs the extra serve')
pytest.importorskip('uvicorn', reason='needs the extra serve')

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from starlette.testclient import TestClient

from jetrl_jax.rl import packing
from jetrl_jax.rl.run.calibration import likelihood_sequences
from jetrl_jax.rl.run.gradients import compile_logprobs
from jetrl_jax.serve import answers, openai_requests
from jetrl_jax.serve.address import listen
from jetrl_jax.serve.app import STOPPING, Access, Api
from jetrl_jax.serve.decoder import Decoder, Stopped, make_engine
from jetrl_jax.serve.logprobs import SequenceLogprobs
from jetrl_jax.serve.openai_responses import Writer
from jetrl_jax.serve.requests import PromptReader
from jetrl_jax.serve.server import Server
from tests.serve import served

_NAME = 'runs/it'
_PATIENCE_S = 60


def _api(decoder: Decoder, **access) -> Api:
  return Api(
      served.trained(),
      decoder,
      served.LIMITS,
      name=_NAME,
      access=Access(**access),
      num_slots=16,
  )


def _decoder(**settings) -> Decoder:
  engine = make_engine(served.trained(), served.LIMITS, 16)
  return Decoder(engine, served.LIMITS.queue_size, **settings)


def _client(api: Api) -> TestClient:
  return TestClient(api.app, base_url='http://localhost:8000')


@pytest.fixture(scope='module', name='decoder')
def _started():
  decoder = _decoder()
  decoder.start()
  yield decoder
  decoder.stop('the tests are over')


@pytest.fixture(scope='module', name='client')
def _served(decoder):
  with _client(_api(decoder)) as client:
    yield client


def _ask(client, kind='completions', **body):
  answer = client.post(f'/v1/{kind}', json={'model': _NAME} | body)
  assert answer.status_code == 200, answer.text
  return answer


def _choice(client, kind='completions', **body):
  (choice,) = _ask(client, kind, **body).json()['choices']
  return choice


def _questions(count: int) -> list[str]:
  file = served.ROOT / 'examples/quickstart/heldout.jsonl'
  lines = file.read_text().splitlines()[:count]
  return [json.loads(line)['question'] for line in lines]


def _tokens(text: str) -> list[int]:
  tokenizer = served.trained().tokenizer
  return tokenizer.encode(text, add_special_tokens=True).tolist()


def _expected(prompts, **settings):
  return served.expected(served.trained(), served.LIMITS, prompts, **settings)


def _wait_until(condition):
  end = time.monotonic() + _PATIENCE_S
  while not condition():
    assert time.monotonic() < end
    time.sleep(0.01)


# --- the same tokens and log-probs ------------------------------------------


def test_responses_and_log_probs_are_those_of_the_rollout_to_the_bit(client):
  questions = _questions(4)
  body = {'prompt': questions, 'max_tokens': 24, 'temperature': 0}
  answer = _ask(client, logprobs=0, **body).json()
  completions = _expected([_tokens(q) for q in questions])
  decode = served.trained().tokenizer.decode
  for choice, completion in zip(answer['choices'], completions, strict=True):
    assert completion.finish_reason == choice['finish_reason'] == 'stop'
    assert choice['text'] == decode(completion.tokens)
    # All but the stop token's, which is not sent. JSON keeps every bit.
    found = np.asarray(choice['logprobs']['token_logprobs'], np.float32)
    assert found.tobytes() == completion.logprobs[:-1].tobytes()
    assert ''.join(choice['logprobs']['tokens']) == choice['text']
  sampled = sum(len(c.tokens) for c in completions)
  assert answer['usage'] == {
      'prompt_tokens': sum(len(_tokens(q)) for q in questions),
      'completion_tokens': sampled,
      'total_tokens': answer['usage']['prompt_tokens'] + sampled,
  }


def test_a_seed_gives_the_tokens_of_the_rollout_with_that_address(client):
  (question,) = _questions(1)
  settings = {'temperature': 1.5, 'seed': 7}
  choices = _ask(
      client, prompt=question, n=2, max_tokens=24, logprobs=0, **settings
  ).json()['choices']
  (completion,) = _expected([_tokens(question)], **settings)
  decode = served.trained().tokenizer.decode
  assert choices[0]['text'] == decode(completion.tokens)
  assert choices[0]['text'] != choices[1]['text']
  found = np.asarray(choices[0]['logprobs']['token_logprobs'], np.float32)
  assert found.tobytes() == completion.logprobs[: len(found)].tobytes()


@pytest.mark.parametrize('policy', ['trained', 'quantized'])
def test_scores_are_the_log_probs_that_training_computes(policy):
  saved = getattr(served, policy)()
  texts = [_tokens(q) + _tokens(q)[:3] for q in _questions(2)]
  logprobs_of = SequenceLogprobs(saved.policy, saved.mesh, 40, P())
  # Training: both in one row, each at a tile's edge.
  tile = saved.policy.tile
  packed = packing.pack(
      likelihood_sequences([np.asarray(t) for t in texts], [1, 1]),
      row_length=2 * max(tile, 32),
      rows_per_micro_batch=1,
      tile=tile,
  )
  params = saved.params
  state = types.SimpleNamespace(
      weights=params.weights, fp8_state=params.fp8_state
  )
  run = compile_logprobs(saved.policy, saved.mesh, state)
  temperature = jnp.float32(0.7)
  trained = packing.unpack(
      [run(params, batch, temperature)[0] for batch in packed.batches], packed
  )
  for text, logprobs in zip(texts, trained, strict=True):
    scores = logprobs_of(params, text, 0.7)
    assert scores.logprobs[1:].tobytes() == logprobs[1:].tobytes()
    # The most probable tokens first; a token's own number is among them.
    assert (np.diff(scores.top_logprobs[1:], axis=1) <= 0).all()
    found = scores.top_ids == np.asarray(text)[:, None]
    own = np.broadcast_to(scores.logprobs[:, None], found.shape)
    assert found[1:].sum() > len(text) // 2
    assert (scores.top_logprobs[1:][found[1:]] == own[1:][found[1:]]).all()


def test_a_prompt_is_echoed_with_the_log_probs_that_lm_eval_reads(client):
  (question,) = _questions(1)
  tokens = _tokens(question)
  choice = _choice(
      client,
      prompt=[tokens],
      echo=True,
      logprobs=1,
      max_tokens=1,
      temperature=0,
  )
  found, count = choice['logprobs'], len(tokens)
  assert choice['text'].startswith(question)
  assert found['token_logprobs'][0] is None is found['top_logprobs'][0]
  assert len(found['token_logprobs']) == count + 1
  assert found['text_offset'] == list(range(count + 1))
  saved = served.trained()
  scores = SequenceLogprobs(saved.policy, saved.mesh, 40, P())(
      saved.params, tokens, 0.0
  )
  sent = np.asarray(found['token_logprobs'][1:count], np.float32)
  assert sent.tobytes() == scores.logprobs[1:].tobytes()
  # The one that was sampled is the most probable one, and has one number.
  assert found['token_logprobs'][-1] == max(found['top_logprobs'][-1].values())
  alone = _choice(client, prompt=[tokens], echo=True, logprobs=1, max_tokens=0)
  assert alone['logprobs']['token_logprobs'] == found['token_logprobs'][:count]
  assert alone['text'] == question and alone['finish_reason'] == 'length'
  plain = _choice(client, prompt=question, echo=True, max_tokens=0)
  assert plain['text'] == question and plain['logprobs'] is None


def test_a_small_top_p_is_greedy_and_changes_no_neighbour(client):
  (question,) = _questions(1)
  body = {'prompt': question, 'max_tokens': 24, 'seed': 3}
  greedy = _choice(client, temperature=0, **body)['text']
  sampled = _choice(client, temperature=2, **body)['text']
  assert sampled != greedy
  found = {}

  def ask(top_p):
    found[top_p] = _choice(client, temperature=2, top_p=top_p, **body)['text']

  threads = [threading.Thread(target=ask, args=(p,)) for p in (1e-6, 1.0)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert found == {1e-6: greedy, 1.0: sampled}


# --- the forms of an answer -------------------------------------------------


def _events(answer) -> list[dict]:
  lines = [line for line in answer.text.split('\n\n') if line]
  assert lines[-1] == 'data: [DONE]'
  return [json.loads(line.removeprefix('data: ')) for line in lines[:-1]]


def test_a_chat_streams_the_text_of_the_whole(client):
  body = {
      'messages': [{'role': 'user', 'content': _questions(1)[0]}],
      'temperature': 0,
      'logprobs': True,
      'top_logprobs': 2,
  }
  whole = _choice(client, 'chat/completions', **body)
  options = {'include_usage': True}
  for top in (0, 2):
    body['top_logprobs'] = top
    answer = _ask(
        client, 'chat/completions', stream=True, stream_options=options, **body
    )
    assert answer.headers['content-type'].startswith('text/event-stream')
    *chunks, last = _events(answer)
    choices = [chunk['choices'][0] for chunk in chunks]
    assert choices[0]['delta'] == {'role': 'assistant', 'content': ''}
    text = ''.join(choice['delta'].get('content', '') for choice in choices)
    assert text == whole['message']['content']
    ends = [choice['finish_reason'] for choice in choices]
    assert ends == [None] * (len(ends) - 1) + ['stop']
    sent = [
        entry
        for choice in choices
        for entry in (choice['logprobs'] or {'content': []})['content']
    ]
    if top:
      assert sent == whole['logprobs']['content']
    assert [entry['logprob'] for entry in sent] == [
        entry['logprob'] for entry in whole['logprobs']['content']
    ]
    assert last['choices'] == [] and last['usage']['total_tokens'] > 5


def test_text_ends_before_a_stop_string_and_its_slot_is_free(client, decoder):
  body = {'prompt': '3+4-2=', 'max_tokens': 24, 'temperature': 0}
  whole = _choice(client, **body)['text']
  assert whole == '7 5 #### 5'
  for stream in (False, True):
    answer = _ask(client, stop=['##', 'x'], stream=stream, **body)
    events = _events(answer) if stream else [answer.json()]
    choices = [event['choices'][0] for event in events]
    assert ''.join(choice['text'] for choice in choices) == '7 5 '
    assert choices[-1]['finish_reason'] == 'stop'
  _wait_until(lambda: decoder.num_running == 0)


def test_the_model_health_and_metrics_are_told(client):
  models = client.get('/v1/models').json()['data']
  assert [model['id'] for model in models] == [_NAME]
  assert client.get(f'/v1/models/{_NAME}').json() == models[0]
  assert client.get('/health').json() == {'status': 'ok'}
  _ask(client, prompt='1', max_tokens=2)
  found = client.get('/metrics')
  assert found.headers['content-type'].startswith('text/plain')
  assert '\njetrl_jax_slots 16.0\n' in found.text
  assert (
      'jetrl_jax_requests_total{path="/v1/completions",status="200"}'
      in found.text
  )


# --- what is refused --------------------------------------------------------


def _refused(client, status: int, method='POST', path='/v1/completions', **how):
  answer = client.request(method, path, **how)
  assert answer.status_code == status, answer.text
  error = answer.json()['error']
  assert error['code'] == status
  return error['message']


def test_a_wrong_request_is_told_why_in_the_form_of_openai(client):
  body = {'model': _NAME, 'prompt': '1'}
  said = _refused(client, 400, json=body | {'n': 0})
  assert said == 'n is 0; allowed: 1 to 128'
  said = _refused(client, 400, json=body | {'n': 25})
  assert said.endswith('n=25 are 25 responses; this server takes 24 at once')
  said = _refused(client, 404, json=body | {'model': 'gpt'})
  assert said == "there is no model 'gpt' here; it is 'runs/it'"
  said = _refused(client, 400, json={'prompt': '1'})
  assert said == "model is missing; send 'runs/it'"
  said = _refused(client, 413, json=body | {'prompt': '1' * 2**21})
  assert said.startswith('the body has more than 1024 KiB')
  said = _refused(client, 415, data={'prompt': '1'})
  assert said.endswith('send application/json')
  assert _refused(client, 404, path='/v2') == 'POST /v2: Not Found'
  assert 'Method Not Allowed' in _refused(client, 405, method='GET')
  assert _choice(client, prompt='1+1=', max_tokens=1)['text']


def test_a_body_that_is_too_long_is_read_before_the_answer(decoder):
  # Else the client, which still sends, sees a reset connection.
  left = [b'1' * 2**20] * 3

  async def receive():
    body = left.pop()
    return {'type': 'http.request', 'body': body, 'more_body': bool(left)}

  sent = []

  async def send(message):
    sent.append((message, len(left)))

  headers = {'host': 'localhost', 'content-type': 'application/json'}
  scope = {
      'type': 'http',
      'method': 'POST',
      'path': '/v1/completions',
      'headers': [(k.encode(), v.encode()) for k, v in headers.items()],
      'query_string': b'',
  }
  asyncio.run(_api(decoder).app(scope, receive, send))
  start, unread = sent[0]
  assert (start['status'], unread) == (413, 0)


def test_without_a_token_only_this_machine_is_served(client):
  for host in ('evil.example', 'evil.example:80', '', '127.0.0.1.evil.example'):
    said = _refused(
        client, 403, method='GET', path='/v1/models', headers={'Host': host}
    )
    assert said.startswith(f'the host {host!r} is not this machine')
  for host in ('127.0.0.1:8000', 'localhost', '[::1]:80'):
    assert client.get('/v1/models', headers={'Host': host}).status_code == 200


def test_with_a_token_every_route_but_health_asks_for_it(decoder):
  with _client(_api(decoder, token='secret')) as client:
    for header in (None, 'Bearer wrong', 'secret', 'Basic secret', 'Bearer é'):
      headers = {} if header is None else {'Authorization': header.encode()}
      for path in ('/v1/models', '/metrics'):
        how = {'method': 'GET', 'path': path, 'headers': headers}
        assert 'asks for its token' in _refused(client, 401, **how)
    good = {'Authorization': 'Bearer secret', 'Host': 'any.example'}
    assert client.get('/v1/models', headers=good).status_code == 200
    assert client.get('/health').status_code == 200


def test_a_full_server_and_a_late_answer_are_told(decoder, monkeypatch):
  body = {'model': _NAME, 'prompt': '1+1='}
  with _client(_api(decoder, timeout_s=0.001)) as client:
    assert 'not ready in 0.001 s' in _refused(client, 503, json=body)
  _wait_until(lambda: decoder.num_running == 0)
  api = _api(decoder)
  with _client(api) as client:
    monkeypatch.setattr(Decoder, 'num_waiting', property(lambda _: 24))
    said = _refused(client, 429, json=body)
    assert said.startswith('24 sequences are running or waiting, and 1 more do')
    monkeypatch.undo()
    api.draining = True
    assert _refused(client, 503, json=body) == STOPPING
    assert client.get('/health').status_code == 503


def test_a_stream_that_is_late_ends_with_an_error(decoder):
  asked, tokenizer = _asked(stream=True), served.trained().tokenizer
  piece = answers.Piece(
      index=0,
      text='7',
      tokens=[],
      finish_reason=None,
      prompt_tokens=1,
      sampled=1,
  )

  async def never():
    await asyncio.sleep(_PATIENCE_S)
    yield piece

  async def collect():
    events = _api(decoder, timeout_s=5)._events(
        asked,
        Writer(asked, _NAME, tokenizer),
        piece,
        never(),
        time.monotonic() - 4.9,
    )
    return [json.loads(x.removeprefix('data: ')) async for x in events]

  first, last = asyncio.run(collect())
  assert first['choices'][0]['text'] == '7'
  assert last['error']['message'].startswith('the answer was not ready in 5 s')


# --- clients that leave, and the end ----------------------------------------


def _asked(**body) -> openai_requests.Asked:
  saved = served.trained()
  reader = PromptReader(
      saved.tokenizer,
      saved.prompt_format,
      served.LIMITS,
      saved.policy.model.vocab_size,
  )
  return openai_requests.read_completion(
      {'prompt': '1', 'temperature': 2.0, 'max_tokens': 24} | body,
      reader,
      served.LIMITS,
  )


def test_a_request_that_is_left_frees_its_slots(decoder):
  async def leave():
    pieces = answers.answer(_asked(n=16), decoder, served.trained().tokenizer)
    await anext(pieces)
    await pieces.aclose()

  asyncio.run(leave())
  _wait_until(lambda: decoder.num_running == 0)


def test_an_engine_that_fails_tells_all_and_takes_no_more(monkeypatch, caplog):
  failed = threading.Event()
  decoder = _decoder(on_failure=failed.set)
  monkeypatch.setattr(decoder, '_warm_up', lambda: None)

  def broken(*_):
    raise RuntimeError('RESOURCE_EXHAUSTED: no room\nand more')

  monkeypatch.setattr(decoder._engine, 'prefill_batch', broken)
  decoder.start()
  with _client(_api(decoder)) as client:
    body = {'model': _NAME, 'prompt': '1'}
    said = _refused(client, 503, json=body)
    why = 'the engine failed: RuntimeError: RESOURCE_EXHAUSTED: no room'
    assert said == why
    assert failed.wait(_PATIENCE_S)
    assert _refused(client, 503, json=body) == why
    assert client.get('/health').status_code == 503


@contextlib.contextmanager
def _over_a_port(decoder):
  server = Server(_api(decoder), decoder, listen('127.0.0.1', 0), grace_s=0.2)
  server.start()
  try:
    yield server
  finally:
    server.stop()


def _post(port: int, **body):
  request = urllib.request.Request(
      f'http://127.0.0.1:{port}/v1/completions',
      json.dumps({'model': _NAME} | body).encode(),
      {'Content-Type': 'application/json'},
  )
  return urllib.request.urlopen(request, timeout=_PATIENCE_S)


def test_a_port_is_served_and_stopping_ends_what_runs_with_a_sentence(
    monkeypatch,
):
  before = set(threading.enumerate())
  decoder = _decoder()
  monkeypatch.setattr(decoder, '_warm_up', lambda: None)
  # As on a large model: a block takes its time.
  block = decoder._engine.generate_block

  def slow(*args):
    time.sleep(0.1)
    return block(*args[:3], 1, *args[4:])

  monkeypatch.setattr(decoder._engine, 'generate_block', slow)
  decoder.start()
  body = {'prompt': '1', 'max_tokens': 24, 'temperature': 2.0, 'seed': 1}
  with _over_a_port(decoder) as server:
    start = time.monotonic()
    whole = json.load(_post(server.port, **body))
    seconds = time.monotonic() - start
    assert whole['choices'][0]['finish_reason'] == 'length'
    # A client that breaks off, with the whole answer to come.
    text = json.dumps({'model': _NAME} | body)
    head = (
        'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n'
        f'Content-Type: application/json\r\nContent-Length: {len(text)}'
    )
    with socket.create_connection(('127.0.0.1', server.port)) as connection:
      connection.sendall(f'{head}\r\n\r\n{text}'.encode())
      _wait_until(lambda: decoder.num_running == 1)
    start = time.monotonic()
    _wait_until(lambda: decoder.num_running == 0)
    assert time.monotonic() - start < seconds / 2
    stream = _post(server.port, stream=True, **body)
    assert stream.readline().startswith(b'data: {')
    ends = threading.Thread(target=server.stop)
    ends.start()
    *_, last, blank = stream.read().decode().split('\n\n')
    assert json.loads(last.removeprefix('data: '))['error']['message'] == (
        STOPPING
    )
    assert blank == ''
    ends.join(_PATIENCE_S)
    assert not ends.is_alive()
    with pytest.raises(Stopped):
      decoder.submit([])
  left = set(threading.enumerate()) - before
  assert not [t.name for t in left if t.name in ('http', 'decoder')]
