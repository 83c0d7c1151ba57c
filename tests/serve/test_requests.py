"""What a request may ask for."""

import pathlib

import pytest

from jetrl_jax.data import PlainFormat, Tokenizer
from jetrl_jax.serve.requests import Limits, PromptReader

_FOLDER = pathlib.Path(__file__).parents[2] / 'examples/quickstart/checkpoint'
_LIMITS = Limits(max_prompt_length=4, max_tokens=8)


def _reader(template='{prompt}'):
  tokenizer = Tokenizer(_FOLDER)
  return PromptReader(tokenizer, PlainFormat(template=template), _LIMITS, 40)


def test_text_is_put_into_the_prompt_format_and_tokens_are_not():
  reader, tokenizer = _reader('{prompt}='), Tokenizer(_FOLDER)
  plain = tokenizer.encode('1+2=', add_special_tokens=True).tolist()
  assert reader.of_text('1+2') == plain
  assert reader.of_tokens(plain[:2]) == plain[:2]


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        ('', 'the prompt is empty; send some text'),
        ('1+1+1', r'the prompt has 5 tokens; allowed: 1 to 4'),
        ('\ud800', 'cannot tokenise'),
    ],
)
def test_a_text_that_does_not_fit_is_refused(text, message):
  with pytest.raises(ValueError, match=message):
    _reader().of_text(text)


@pytest.mark.parametrize(
    ('tokens', 'message'),
    [
        ([], 'the prompt has 0 tokens; allowed: 1 to 4'),
        ([1] * 5, 'the prompt has 5 tokens; allowed: 1 to 4'),
        ([1, 40, -1], r'token ids \[40, -1\] are not in the vocabulary; .*39'),
    ],
)
def test_token_ids_that_do_not_fit_are_refused(tokens, message):
  with pytest.raises(ValueError, match=message):
    _reader().of_tokens(tokens)


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'max_prompt_length': 0}, 'max_prompt_length is 0; allowed: 1 to'),
        ({'max_tokens': 0}, 'max_tokens is 0; allowed: 1 to'),
        ({'queue_size': -1}, 'queue_size is -1; allowed: 0 to'),
        ({'max_message_kib': 0}, 'max_message_kib is 0; allowed: 1 to 2097151'),
        ({'max_message_kib': 2**21}, 'max_message_kib is 2097152; allowed'),
    ],
)
def test_limits_that_let_nothing_through_are_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    Limits(**({'max_prompt_length': 1, 'max_tokens': 1} | changes))
