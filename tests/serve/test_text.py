"""Text while tokens arrive: the pieces joined are the text of the whole."""

import json
import pathlib

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from jetrl_jax.data import Tokenizer
from jetrl_jax.serve.text import StoppedText, TextStream, token_text


@pytest.fixture(scope='module', name='tokenizer')
def _tokenizer(tmp_path_factory) -> Tokenizer:
  """One token per byte, as in the byte-level vocabularies of Qwen and Llama."""
  folder = tmp_path_factory.mktemp('bytes')
  alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  made = tokenizers.Tokenizer(
      tokenizers.models.BPE(
          vocab={c: i for i, c in enumerate(alphabet)}, merges=[]
      )
  )
  made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
      add_prefix_space=False
  )
  made.decoder = tokenizers.decoders.ByteLevel()
  made.save(str(folder / 'tokenizer.json'))
  end = {'eos_token': alphabet[0]}
  pathlib.Path(folder, 'tokenizer_config.json').write_text(json.dumps(end))
  return Tokenizer(folder)


def _pieces(tokenizer, tokens):
  stream = TextStream(tokenizer)
  return [*(stream.push([token]) for token in tokens), stream.flush()]


def test_a_character_comes_with_its_last_byte(tokenizer):
  tokens = tokenizer.encode('aé€!', add_special_tokens=False)
  # 1, 2, 3 and 1 bytes.
  expected = ['a', '', 'é', '', '', '€', '!', '']
  assert _pieces(tokenizer, tokens) == expected


def test_half_a_character_at_the_end_is_told_as_such(tokenizer):
  tokens = tokenizer.encode('a€', add_special_tokens=False)[:-1]
  assert _pieces(tokenizer, tokens) == ['a', '', '', '\ufffd']


def test_several_tokens_may_come_at_once(tokenizer):
  tokens = tokenizer.encode('né', add_special_tokens=False).tolist()
  stream = TextStream(tokenizer)
  assert stream.push(tokens[:2]) == ''  # n, and half of é: wait for both.
  assert stream.push(tokens[2:]) == 'né'
  assert stream.flush() == ''


@given(st.text(max_size=20))
def test_all_pieces_are_the_whole_text(tokenizer, text):
  text = text.encode('utf-8', 'ignore').decode()
  tokens = tokenizer.encode(text, add_special_tokens=False)
  assert ''.join(_pieces(tokenizer, tokens)) == text


@given(st.lists(st.integers(0, 255), max_size=20))
def test_no_bytes_make_a_piece_that_has_to_be_taken_back(tokenizer, tokens):
  # Any bytes: also what no text encodes to.
  pieces = _pieces(tokenizer, tokens)
  assert len(pieces) == len(tokens) + 1
  assert ''.join(pieces) == tokenizer.decode(tokens)


def _stopped(tokenizer, text: str, stop: list[str]) -> tuple[str, int, bool]:
  """The text that was let go, after how many tokens, and whether it stopped."""
  stream, found = StoppedText(tokenizer, stop), ''
  tokens = tokenizer.encode(text, add_special_tokens=False).tolist()
  for count, token in enumerate(tokens, 1):
    found += stream.push(token)
    if stream.stopped:
      return found, count, True
  return found + stream.flush(), len(tokens), stream.stopped


@pytest.mark.parametrize(
    ('text', 'stop', 'expected'),
    [
        ('one two', ['tw'], ('one ', 6, True)),
        # The beginning of a stop string that is none waits, and then comes.
        ('one', ['nex', 'two'], ('one', 3, False)),
        ('aab', ['ab'], ('a', 3, True)),
        # The earliest of those that the same token completes.
        ('abcd', ['cd', 'bcd'], ('a', 4, True)),
        ('né!', ['é'], ('n', 3, True)),
        ('x', [], ('x', 1, False)),
    ],
)
def test_a_text_ends_before_its_first_stop_string(
    tokenizer, text, stop, expected
):
  assert _stopped(tokenizer, text, stop) == expected


def test_text_that_may_begin_a_stop_string_is_held_back(tokenizer):
  stream = StoppedText(tokenizer, ['\n\n'])
  tokens = tokenizer.encode('a\nb', add_special_tokens=False).tolist()
  assert [stream.push(token) for token in tokens] == ['a', '', '\nb']


def test_a_token_that_is_half_a_character_has_a_text_of_its_own(tokenizer):
  tokens = tokenizer.encode('a€', add_special_tokens=False).tolist()
  found = [token_text(tokenizer, token) for token in tokens]
  assert found == ['a', r'bytes:\xe2', r'bytes:\x82', r'bytes:\xac']
  assert b''.join(map(tokenizer.token_bytes, tokens)) == 'a€'.encode()
