"""Bodies of OpenAI's API: what is read, and what is refused by name."""

import json
import pathlib

import pytest

from jetrl_jax.data import PlainFormat, Tokenizer
from jetrl_jax.serve import openai_requests
from jetrl_jax.serve.requests import Limits, PromptReader, Sampling

_FOLDER = pathlib.Path(__file__).parents[2] / 'examples/quickstart/checkpoint'
_LIMITS = Limits(max_prompt_length=8, max_tokens=24)


@pytest.fixture(scope='module', name='reader')
def _reader():
  tokenizer = Tokenizer(_FOLDER)
  return PromptReader(tokenizer, PlainFormat(template='{prompt}='), _LIMITS, 40)


def _chat(reader, **body):
  body = {'messages': [{'role': 'user', 'content': '1+2'}], 'seed': 0} | body
  return openai_requests.read_chat(body, reader, _LIMITS)


def _completion(reader, **body):
  body = {'prompt': '1+2', 'seed': 0} | body
  return openai_requests.read_completion(body, reader, _LIMITS)


def _tokens(text):
  return Tokenizer(_FOLDER).encode(text, add_special_tokens=True).tolist()


def test_a_chat_is_put_into_the_prompt_format_and_a_prompt_is_not(reader):
  assert _chat(reader).prompts == [_tokens('1+2=')]
  assert _completion(reader).prompts == [_tokens('1+2')]


def test_what_is_left_out_is_as_openai_has_it(reader):
  chat, completion = _chat(reader), _completion(reader)
  assert chat.sampling == Sampling(max_tokens=24, temperature=1.0, seed=0)
  # 16 tokens, where the server allows as many.
  assert completion.sampling == Sampling(max_tokens=16, temperature=1, seed=0)
  assert (chat.n, chat.stop, chat.stream, chat.logprobs) == (
      1,
      (),
      False,
      False,
  )


def test_without_a_seed_two_requests_have_two(reader):
  asked = [
      openai_requests.read_completion({'prompt': '1'}, reader, _LIMITS)
      for _ in range(2)
  ]
  assert asked[0].sampling.seed != asked[1].sampling.seed


@pytest.mark.parametrize(
    ('prompt', 'count'),
    [('1', 1), (['1', '2+3'], 2), ([3, 4, 5], 1), ([[3], [4, 5]], 2)],
)
def test_a_prompt_is_text_or_tokens_or_several_of_them(reader, prompt, count):
  assert len(_completion(reader, prompt=prompt).prompts) == count


def test_parts_of_text_are_joined(reader):
  parts = [{'type': 'text', 'text': '1'}, {'type': 'text', 'text': '+2'}]
  messages = [{'role': 'user', 'content': parts, 'name': None}]
  assert _chat(reader, messages=messages).prompts == [_tokens('1+2=')]


def test_log_probs_are_a_number_here_and_a_flag_there(reader):
  asked = _completion(reader, logprobs=3)
  assert (asked.logprobs, asked.top, asked.needs_forward) == (True, 3, True)
  asked = _completion(reader, logprobs=0)
  assert (asked.logprobs, asked.top, asked.needs_forward) == (True, 0, False)
  asked = _chat(reader, logprobs=True, top_logprobs=2)
  assert (asked.logprobs, asked.top, asked.needs_forward) == (True, 2, True)


def test_a_prompt_may_be_scored_without_a_response(reader):
  asked = _completion(reader, echo=True, logprobs=1, max_tokens=0)
  assert asked.sampling is None and asked.needs_forward


def test_what_changes_nothing_is_let_through(reader):
  _chat(reader, user='me', frequency_penalty=0, tools=[], tool_choice='auto')
  body = json.dumps({'prompt': '1', 'suffix': None, 'best_of': None}).encode()
  body = openai_requests.parse_body(body)
  openai_requests.read_completion(body, reader, _LIMITS)


@pytest.mark.parametrize(
    ('body', 'message'),
    [
        ({'messages': []}, r'messages is \[\]; send a list of'),
        ({'messages': [3]}, r'messages\[0\] is 3; allowed: an object'),
        (
            {'messages': [{'role': 'user', 'content': 3}]},
            r'messages\[0\] must have a role and a content, both text',
        ),
        (
            {
                'messages': [
                    {'role': 'user', 'content': [{'type': 'image_url'}]}
                ]
            },
            r'messages\[0\]: only parts of the type text are supported',
        ),
        (
            {'messages': [{'role': 'user', 'content': '1', 'tool_calls': [1]}]},
            r"messages\[0\] has \['tool_calls'\], which are not supported",
        ),
        (
            {'messages': [{'role': 'system', 'content': '1'}] * 2},
            'this policy has no chat template: it takes one message of the',
        ),
        ({'temprature': 1}, "'temprature'; did you mean 'temperature'?"),
        ({'temperature': 'warm'}, "temperature is 'warm'; allowed: a number"),
        ({'temperature': -1}, r'temperature is -1.0; allowed: 0.001 to'),
        ({'temperature': 10**400}, 'temperature is inf; allowed: a finite'),
        ({'top_p': 0}, 'top_p is 0.0; allowed: above 0, up to 1'),
        ({'top_p': True}, 'top_p is True; allowed: a number'),
        ({'n': 0}, 'n is 0; allowed: 1 to 128'),
        ({'seed': -1}, 'seed is -1; allowed: 0 to 4294967295'),
        ({'max_tokens': 25}, 'max_tokens is 25; allowed: 1 to 24'),
        ({'max_completion_tokens': 25}, 'max_completion_tokens is 25; allowed'),
        ({'max_tokens': 1.5}, 'max_tokens is 1.5; allowed: 1 to 24'),
        ({'stop': [3]}, r'stop is \[3\]; allowed: text, or at most 16 texts'),
        ({'stop': ['a', '']}, 'at most 16 texts, none of them empty'),
        ({'stream': 1}, 'stream is 1; allowed: true, false'),
        ({'top_logprobs': 2}, 'top_logprobs needs "logprobs": true'),
        (
            {'logprobs': True, 'top_logprobs': 21},
            'top_logprobs is 21; allowed: 0 to 20',
        ),
        ({'tools': [{}]}, 'tools is not supported; leave it out'),
        ({'frequency_penalty': 0.5}, 'frequency_penalty is not supported'),
    ],
)
def test_a_chat_that_cannot_be_answered_is_refused(reader, body, message):
  with pytest.raises(ValueError, match=message):
    _chat(reader, **body)


@pytest.mark.parametrize(
    ('body', 'message'),
    [
        ({'prompt': []}, r'prompt is \[\]; allowed: text, a list of texts'),
        ({'prompt': ['1', 2]}, 'allowed: text, a list of texts'),
        ({'prompt': [[True]]}, 'allowed: text, a list of texts'),
        ({'prompt': [-1]}, r'token ids \[-1\] are not in the vocabulary'),
        ({'prompt': '1+2+3+4+5'}, 'the prompt has 9 tokens; allowed: 1 to 8'),
        ({'prompt': '\ud800'}, 'cannot tokenise .*: it is not valid Unicode'),
        ({'max_tokens': 0}, 'max_tokens is 0; allowed: 1 to 24'),
        ({'logprobs': 21}, 'logprobs is 21; allowed: 0 to 20'),
        ({'messages': []}, "unknown name 'messages'"),
        ({'best_of': 2}, 'best_of is not supported'),
    ],
)
def test_a_prompt_that_cannot_be_answered_is_refused(reader, body, message):
  with pytest.raises(ValueError, match=message):
    _completion(reader, **body)


@pytest.mark.parametrize(
    ('body', 'message'),
    [
        (b'{', 'the body is not valid JSON: '),
        (b'\xff', 'the body is not valid JSON: '),
        (b'[' * 100_000, 'the body is not valid JSON: '),
        (b'[]', 'the body must be a JSON object'),
    ],
)
def test_a_body_that_is_no_object_is_refused(body, message):
  with pytest.raises(ValueError, match=message):
    openai_requests.parse_body(body)
