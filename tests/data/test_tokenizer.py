import json
import pathlib
import shutil

import numpy as np
import pytest

from jetrl_jax.data import Tokenizer
from jetrl_jax.data import tokenizer as tokenizer_module
from tests.data.small import TEMPLATE, write_tokenizer

# Qwen's own vocabulary is 7 MB and not in the repository; set this folder up
# to compare with its 25 published cases.
QWEN = pathlib.Path(__file__).parents[3] / 'shared/data/tokenizers/qwen'


@pytest.fixture(name='qwen')
def _qwen(tmp_path):
  if not QWEN.is_dir():
    pytest.skip(f'{QWEN} is not there')
  shutil.copy(QWEN / 'tokenizer.qwen2.5.json', tmp_path / 'tokenizer.json')
  shutil.copy(
      QWEN / 'qwen3_tokenizer_config.json', tmp_path / 'tokenizer_config.json'
  )
  return Tokenizer(tmp_path)


def test_the_published_cases_of_qwen_are_met(qwen):
  (cases,) = json.loads((QWEN / 'qwen2_cases.json').read_text()).values()
  assert len(cases) == 25
  for name, case in cases.items():
    ids = qwen.encode(case['text'], add_special_tokens=False)
    assert ids.tolist() == case['ids'], name
    assert qwen.decode(ids, skip_special_tokens=False) == case['decoded'], name


def test_qwens_end_and_padding_tokens_are_found(qwen):
  assert qwen.eos_ids == (151645,)
  assert qwen.pad_id == 151643


def test_text_comes_back_from_its_ids(tmp_path):
  tokenizer = Tokenizer(write_tokenizer(tmp_path))
  text = 'x² → “ok” 😀\n'
  ids = tokenizer.encode(text, add_special_tokens=False)
  assert ids.dtype == np.int32
  # One id per byte: the vocabulary has no merges.
  assert len(ids) == len(text.encode())
  assert tokenizer.decode(ids) == text


def test_the_special_tokens_of_the_file_are_added_on_request_alone(tmp_path):
  tokenizer = Tokenizer(write_tokenizer(tmp_path))
  assert len(tokenizer.encode('a', add_special_tokens=False)) == 1
  assert tokenizer.encode('a', add_special_tokens=True)[0] == 258
  ids = tokenizer.encode('a<|end|>', add_special_tokens=False)
  assert ids[-1] == 256
  assert tokenizer.decode(ids) == 'a'
  assert tokenizer.decode(ids, skip_special_tokens=False) == 'a<|end|>'


def test_a_token_that_tokenizer_config_alone_lists_is_one_id(tmp_path):
  listed = {
      '259': {'content': '<think>', 'special': False},
      '260': {'content': '<|x|>', 'special': True},
      '256': {'content': '<|end|>', 'special': True},
  }
  config = {'eos_token': '<|end|>', 'added_tokens_decoder': listed}
  tokenizer = Tokenizer(write_tokenizer(tmp_path, config=config))
  ids = tokenizer.encode('<think><|x|><|end|>', add_special_tokens=False)
  assert ids.tolist() == [259, 260, 256]
  assert tokenizer.decode(ids) == '<think>'
  assert tokenizer.vocab_size == 261


def test_several_end_ids_are_kept_and_the_tokenizers_own_is_added(tmp_path):
  write_tokenizer(
      tmp_path,
      generation={'eos_token_id': [258, 257]},
      config_json='{"eos_token_id": 0}',  # Is not read beside the other.
  )
  tokenizer = Tokenizer(tmp_path)
  assert tokenizer.eos_ids == (258, 257, 256)
  assert tokenizer.eos_id == 256
  assert tokenizer.vocab_size == 259
  assert tokenizer.pad_id == 257


def test_config_json_is_read_where_there_is_no_generation_config(tmp_path):
  write_tokenizer(tmp_path, config={}, config_json='{"eos_token_id": 258}')
  tokenizer = Tokenizer(tmp_path)
  assert tokenizer.eos_ids == (258,)
  assert tokenizer.eos_id == 258
  # No padding token named: the end token serves.
  assert tokenizer.pad_id == 258
  assert tokenizer.chat_template == ''


def test_an_old_checkpoint_names_its_tokens_in_special_tokens_map(tmp_path):
  files = {'special_tokens_map_json': '{"eos_token": "<|pad|>"}'}
  assert Tokenizer(write_tokenizer(tmp_path, **files)).eos_id == 257
  # Of one that lists its added tokens it is not read.
  config = {'eos_token': '<|end|>', 'added_tokens_decoder': {}}
  write_tokenizer(tmp_path, config=config, **files)
  assert Tokenizer(tmp_path).eos_id == 256


def test_the_chat_template_comes_from_its_file_a_text_or_a_list(tmp_path):
  assert Tokenizer(write_tokenizer(tmp_path)).chat_template == TEMPLATE
  named = [
      {'name': 'tool_use', 'template': 'T'},
      {'name': 'default', 'template': 'D'},
  ]
  config = {'eos_token': '<|end|>', 'chat_template': named}
  write_tokenizer(tmp_path, config=config)
  assert Tokenizer(tmp_path).chat_template == 'D'
  write_tokenizer(tmp_path, chat_template_jinja='F')
  assert Tokenizer(tmp_path).chat_template == 'F'


def test_tokens_outside_the_vocabulary_decode_to_nothing(tmp_path):
  tokenizer = Tokenizer(write_tokenizer(tmp_path))
  (a,) = tokenizer.encode('a', add_special_tokens=False)
  # A model's embedding may have more rows than the tokenizer has tokens.
  assert tokenizer.decode([a, 5000, a]) == 'aa'


def test_truncation_and_padding_in_the_file_are_not_obeyed(tmp_path):
  write_tokenizer(tmp_path)
  path = tmp_path / 'tokenizer.json'
  content = json.loads(path.read_text())
  content['truncation'] = {
      'direction': 'Right',
      'max_length': 2,
      'strategy': 'LongestFirst',
      'stride': 0,
  }
  content['padding'] = {
      'strategy': {'Fixed': 9},
      'direction': 'Right',
      'pad_to_multiple_of': None,
      'pad_id': 0,
      'pad_type_id': 0,
      'pad_token': '!',
  }
  path.write_text(json.dumps(content))
  tokenizer, texts = Tokenizer(tmp_path), ('abcdef', 'ab')
  for text in texts:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len(text)
  found = tokenizer.encode_all(texts, add_special_tokens=False)
  assert [len(ids) for ids in found] == [6, 2]


def test_a_lone_surrogate_is_a_value_error(tmp_path):
  tokenizer = Tokenizer(write_tokenizer(tmp_path))
  with pytest.raises(ValueError, match='cannot tokenise'):
    tokenizer.encode('a\ud800', add_special_tokens=False)


@pytest.mark.parametrize(
    'name, text, message',
    [
        ('tokenizer.json', '{}', 'is not a tokenizer'),
        (
            'tokenizer.json',
            'version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n',
            'is a Git LFS pointer, not the content that it stands for; run git',
        ),
        (
            'tokenizer_config.json',
            'version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n',
            'is a Git LFS pointer, not the content that it stands for; run git',
        ),
        ('tokenizer_config.json', '[]', 'must hold a JSON object'),
        ('tokenizer_config.json', '{', 'is not valid JSON'),
        ('tokenizer_config.json', '{}', 'names no end-of-text token'),
        (
            'tokenizer_config.json',
            '{"eos_token": "<|none|>"}',
            "'<|none|>', which is not in the vocabulary",
        ),
        (
            'tokenizer_config.json',
            '{"eos_token": 7}',
            "neither text nor an object with 'content'",
        ),
        (
            'tokenizer_config.json',
            '{"eos_token": "<|end|>", "additional_special_tokens": "<|a|>"}',
            "additional_special_tokens is '<|a|>'; allowed: a list of tokens",
        ),
        (
            'tokenizer_config.json',
            '{"eos_token": "<|end|>", "chat_template": 3}',
            'chat_template must be a text',
        ),
        (
            'tokenizer_config.json',
            '{"added_tokens_decoder": {"300": {"content": "<t>"}}}',
            "gives '<t>' the id 300, and added to tokenizer.json, which lacks"
            ' it, it has the id 259',
        ),
        (
            'tokenizer_config.json',
            '{"added_tokens_decoder": {"x": {"content": "<t>"}}}',
            'added_tokens_decoder must map ids to objects',
        ),
        (
            'generation_config.json',
            '{"eos_token_id": [256, 999]}',
            r'eos_token_id is [256, 999]; allowed: an id or a list of ids in'
            ' [0, 259)',
        ),
    ],
)
def test_a_broken_file_is_named(tmp_path, name, text, message):
  write_tokenizer(tmp_path)
  (tmp_path / name).write_text(text)
  with pytest.raises(ValueError, match=name.split('_')[0]) as error:
    Tokenizer(tmp_path)
  assert message in str(error.value)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
  with pytest.raises(ValueError, match='has no tokenizer.json'):
    Tokenizer(tmp_path)


def test_many_texts_have_the_ids_of_each(tmp_path, monkeypatch):
  monkeypatch.setattr(tokenizer_module, '_AT_ONCE', 2)
  tokenizer = Tokenizer(write_tokenizer(tmp_path))
  texts = ['abc', '', 'a<|end|>b', 'é', 'xyz']
  for special in (False, True):
    one = [tokenizer.encode(t, add_special_tokens=special) for t in texts]
    many = [*tokenizer.encode_all(texts, add_special_tokens=special)]
    assert [x.tolist() for x in many] == [x.tolist() for x in one]
    assert {x.dtype for x in many} == {np.dtype(np.int32)}
