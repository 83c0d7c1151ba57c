import json
import pathlib
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetrl_jax.data import load_examples

FIXTURES = pathlib.Path(__file__).parent / 'fixtures'


def _write(path, *rows):
  path.write_text(''.join(json.dumps(r) + '\n' for r in rows))
  return str(path)


def _load(*files, **kwargs):
  keys = {'prompt_key': 'q', 'answer_key': 'a', **kwargs}
  return load_examples(files, **keys)


def test_a_gsm8k_row_answers_with_what_follows_the_marks():
  examples = load_examples(
      [str(FIXTURES / 'gsm8k.jsonl')],
      prompt_key='question',
      answer_key='answer',
  )
  assert [e.answer for e in examples] == ['18', '3', '70000']
  assert [e.id for e in examples] == [0, 1, 2]
  assert str(examples[0].prompt).startswith('Janet')
  assert examples[0].source == 'gsm8k'
  assert examples[0].extra['answer'].endswith('#### 18')


def test_math_rows_load_from_a_json_list():
  examples = load_examples(
      [str(FIXTURES / 'math.json')], prompt_key='problem', answer_key='answer'
  )
  assert len(examples) == 3
  assert examples[0].extra['type'] == 'Algebra'


def test_ids_run_on_over_files(tmp_path):
  a = _write(tmp_path / 'a.jsonl', {'q': 'x', 'a': 1}, {'q': 'y', 'a': 2.5})
  b = _write(tmp_path / 'b.jsonl', {'q': 'z', 'a': '3'})
  examples = _load(a, b)
  assert [(e.id, e.source, e.answer) for e in examples] == [
      (0, 'a', '1'),
      (1, 'a', '2.5'),
      (2, 'b', '3'),
  ]


def test_verls_parquet_layout_is_read_through_dotted_keys(tmp_path):
  pyarrow = pytest.importorskip('pyarrow', reason='pyarrow is an extra')
  parquet = pytest.importorskip('pyarrow.parquet')
  row = {
      'data_source': 'openai/gsm8k',
      'prompt': [{'role': 'user', 'content': 'What is 1 + 1?'}],
      'ability': 'math',
      'reward_model': {'style': 'rule', 'ground_truth': '2'},
      'extra_info': {'index': 7, 'split': 'train'},
  }
  path = tmp_path / 'train.parquet'
  parquet.write_table(pyarrow.Table.from_pylist([row]), path)
  (example,) = load_examples(
      [str(path)],
      prompt_key='prompt',
      answer_key='reward_model.ground_truth',
      source_key='data_source',
  )
  assert example.prompt == row['prompt']
  assert example.answer == '2'
  assert example.source == 'openai/gsm8k'
  assert example.id == 0
  assert example.extra == row


def test_a_malformed_line_is_named_by_file_and_number(tmp_path):
  path = tmp_path / 'bad.jsonl'
  path.write_text('{"q": "x", "a": "1"}\n\n{"q": \n')
  with pytest.raises(ValueError, match=r'bad\.jsonl:3: not valid JSON'):
    _load(str(path))
  path.write_bytes(b'\xff\xfe\n')
  with pytest.raises(
      ValueError, match=r'bad\.jsonl:1: not valid JSON in UTF-8'
  ):
    _load(str(path))


def test_a_deeply_nested_line_is_a_value_error(tmp_path):
  path = tmp_path / 'deep.jsonl'
  path.write_text('[' * 200_000)
  with pytest.raises(ValueError, match=r'deep\.jsonl:1: not valid JSON'):
    _load(str(path))


def test_a_missing_column_lists_the_columns_and_the_nearest(tmp_path):
  path = _write(tmp_path / 'd.jsonl', {'question': 'x', 'a': '1'})
  with pytest.raises(
      ValueError,
      match=r"no column 'questoin'; columns here: \['a', 'question'\]."
      r" Did you mean 'question'\?",
  ):
    _load(path, prompt_key='questoin')


@pytest.mark.parametrize(
    'row, message',
    [
        ({'q': 'x', 'a': {'b': '\ud800'}}, 'half of a surrogate pair'),
        ({'q': 'x', 'a': [float('nan')]}, "'a' is [nan]; allowed: a string, a"),
        ({'q': 3, 'a': '1'}, "'q' is 3; allowed: a string, or a list of"),
        ({'q': [{'role': 'user'}], 'a': '1'}, 'with text in both'),
        ({'q': '', 'a': '1'}, "'q' is empty"),
        ({'q': 'x\ud800', 'a': '1'}, r"'q' has '\ud800' at character 1, half"),
        (
            {'q': [{'role': 'user', 'content': '\udfff'}], 'a': '1'},
            r"'q' has '\udfff' at character 0, half",
        ),
        ({'q': 'x', 'a': 'so ####'}, "'a' is empty"),
        ({'q': 'x', 'a': '1\ud800'}, r"'a' has '\ud800' at character 1, half"),
        ([1, 2], 'a row must be an object'),
    ],
)
def test_a_wrongly_typed_row_is_refused_by_place(tmp_path, row, message):
  path = _write(tmp_path / 'd.jsonl', {'q': 'x', 'a': '1'}, row)
  with pytest.raises(ValueError, match=r'd\.jsonl:2') as error:
    _load(path)
  assert message in str(error.value)


def test_rows_without_an_answer_are_left_out_and_counted(tmp_path, caplog):
  rows = [{'q': 'x', 'a': None}, {'q': 'y', 'a': 2}, {'q': 'z', 'a': ' \n'}]
  rows.append({'q': 'w', 'a': float('nan')})
  path = _write(tmp_path / 'd.jsonl', *rows)
  examples = _load(path)
  assert [(e.id, e.prompt) for e in examples] == [(1, 'y')]
  assert "Left out 3 of 4 rows whose 'a' is empty" in caplog.text
  path = _write(tmp_path / 'd.jsonl', rows[0])
  with pytest.raises(ValueError, match="'a' is empty in every row"):
    _load(path)


def test_rows_need_no_answer_where_no_column_of_answers_is_named(tmp_path):
  chat = [{'role': 'user', 'content': 'y'}]
  rows = [{'q': 'x'}, {'q': chat, 'a': '1'}]
  path = _write(tmp_path / 'd.jsonl', *rows)
  examples = _load(path, answer_key='')
  assert [(e.prompt, e.answer) for e in examples] == [('x', ''), (chat, '')]
  with pytest.raises(ValueError, match="'q' is empty"):
    _load(_write(tmp_path / 'd.jsonl', {'q': ''}), answer_key='')
  path = _write(tmp_path / 'd.jsonl', rows[0])
  with pytest.raises(ValueError, match=r"\['q'\]\. .* set answer_key to '' \("):
    _load(path)


def test_an_answer_may_be_any_value_of_json(tmp_path):
  # As verl's countdown and Search-R1 have them.
  answers = [
      {'target': 24, 'numbers': [1, 2, 12]},
      {'target': ['Paris', 'the capital #### of France']},
      ['a'],
      False,
  ]
  rows = [{'q': 'x', 'r': {'truth': answer}} for answer in answers]
  path = _write(tmp_path / 'd.jsonl', *rows)
  assert [e.answer for e in _load(path, answer_key='r.truth')] == answers
  empty = [{'q': 'x', 'a': {}}, {'q': 'x', 'a': []}, {'q': 'x', 'a': [0]}]
  examples = _load(_write(tmp_path / 'd.jsonl', *empty))
  assert [e.id for e in examples] == [2]


def test_a_number_is_read_without_an_exponent(tmp_path):
  rows = [{'q': 'x', 'a': a} for a in (5e-05, 1e20, 18.0, -3)]
  examples = _load(_write(tmp_path / 'd.jsonl', *rows))
  answers = ['0.00005', '1' + '0' * 20, '18.0', '-3']
  assert [e.answer for e in examples] == answers


def test_a_file_may_be_in_the_home_folder_and_begin_with_a_mark(
    monkeypatch, tmp_path
):
  monkeypatch.setenv('HOME', str(tmp_path))
  # Some editors write a byte order mark, which is no JSON.
  (tmp_path / 'd.jsonl').write_text('\ufeff{"q": "x", "a": "1"}\n')
  (example,) = _load('~/d.jsonl')
  assert (example.prompt, example.source) == ('x', 'd')


class _Dataset:
  """What is read of a `datasets.Dataset`: it yields dicts, and is no list."""

  def __init__(self, rows):
    self.rows = rows

  def __iter__(self):
    return iter(self.rows)


def test_paths_and_rows_in_memory_are_read_like_files(tmp_path):
  rows = [
      {'question': '6 * 7?', 'answer': '6 * 7 = 42 #### 42', 'level': 1},
      {'question': '1 + 1?', 'answer': 2},
  ]
  path = tmp_path / 'rows.jsonl'
  path.write_text('\n'.join(map(json.dumps, rows)))
  keys = dict(prompt_key='question', answer_key='answer')
  expected = load_examples([str(path)], **keys)
  assert [e.answer for e in expected] == ['42', '2']
  for source in ([path], rows, tuple(rows), [rows], _Dataset(rows)):
    assert load_examples(source, **keys) == expected
  both = load_examples([path, _Dataset(rows)], **keys)
  assert [e.id for e in both] == [0, 1, 2, 3]
  # The caller's rows are not the examples' columns.
  assert load_examples(rows, **keys)[0].extra is not rows[0]
  with pytest.raises(ValueError, match=r'files\[0\]\[1\], answer_key: no col'):
    load_examples([rows[0], {'question': 'x'}], **keys)
  for source, message in (
      (path, r"is the path '.*rows.jsonl'; pass a sequence of paths, \["),
      (7, r'files\[0\] is 7; allowed: a path to .* or rows in memory'),
      ({'train': rows}, r"files\[0\] is {'train'.* one split of"),
      ([path, rows[0]], r"files\[1\] is {'question'"),
      ([[3]], r'files\[0\]\[0\]: a row must be a dict .* found 3'),
  ):
    with pytest.raises(ValueError, match=message):
      load_examples(source, **keys)


def test_files_that_cannot_be_read_are_refused(tmp_path):
  empty = tmp_path / 'empty.jsonl'
  empty.write_text('\n')
  with pytest.raises(ValueError, match='empty.jsonl has no rows.'):
    _load(str(empty))
  with pytest.raises(ValueError, match='there is no such file'):
    _load(str(tmp_path / 'none.jsonl'))
  with pytest.raises(
      ValueError, match='unknown format; allowed: .jsonl, .json'
  ):
    _load('rows.csv')
  with pytest.raises(ValueError, match='files is empty'):
    _load()
  with pytest.raises(ValueError, match='pass a sequence'):
    load_examples('rows.jsonl', prompt_key='q', answer_key='a')
  parquet = tmp_path / 'p.parquet'
  parquet.write_bytes(b'PAR1 nothing')
  pytest.importorskip('pyarrow', reason='pyarrow is an extra')
  with pytest.raises(ValueError, match='not a readable Parquet file'):
    _load(str(parquet))
  one = tmp_path / 'one.json'
  one.write_text('{"q": "x"}')
  with pytest.raises(ValueError, match='expected a list of rows'):
    _load(str(one))


def test_a_missing_extra_is_answered_with_the_install_command(monkeypatch):
  with pytest.raises(ValueError, match='write hf:<repo>:<split>'):
    _load('hf:openai/gsm8k')
  # As if it were not installed.
  monkeypatch.setitem(sys.modules, 'datasets', None)
  with pytest.raises(ValueError) as error:
    _load('hf:openai/gsm8k:main:test')
  assert str(error.value).endswith(
      "pip install 'jetrl_jax[data]', or pip install -e '.[data]' in a clone."
  )


@pytest.mark.parametrize(
    ('keys', 'columns', 'meant'),
    [
        # MATH-500.
        (
            {'prompt_key': 'question', 'answer_key': 'answer'},
            ['answer', 'level', 'problem', 'solution', 'subject', 'unique_id'],
            'problem',
        ),
        (
            {'prompt_key': 'problem', 'answer_key': 'answer'},
            ['problem', 'solution', 'answers'],
            'solution',
        ),
        ({'prompt_key': 'quesiton'}, ['a', 'question', 'problem'], 'question'),
    ],
)
def test_a_missing_column_is_led_to_the_one_that_is_meant(
    tmp_path, keys, columns, meant
):
  path = _write(tmp_path / 'd.jsonl', dict.fromkeys(columns, 'x'))
  with pytest.raises(ValueError, match=f"Did you mean '{meant}'"):
    _load(path, **keys)


def test_prompts_with_a_nul_are_counted(tmp_path, caplog):
  chat = [{'role': 'user', 'content': 'a\0b'}]
  rows = [{'q': q, 'a': '1'} for q in ('x', 'y\0', chat)]
  assert len(_load(_write(tmp_path / 'd.jsonl', *rows))) == 3
  assert '2 of 3 prompts hold the character NUL, the first at ' in caplog.text
  assert 'd.jsonl:2' in caplog.text
  caplog.clear()
  _load(_write(tmp_path / 'd.jsonl', rows[0]))
  assert not caplog.text


_TEXT = st.text(
    st.characters(exclude_characters='#', codec='utf-8'), min_size=1
)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text('qa'), inner),
    max_leaves=8,
)


@given(st.lists(st.tuples(_TEXT, _TEXT), min_size=1, max_size=5))
def test_rows_of_any_text_come_back_as_they_were_written(
    tmp_path_factory, rows
):
  path = tmp_path_factory.getbasetemp() / 'written.jsonl'
  examples = _load(_write(path, *({'q': q, 'a': a} for q, a in rows)))
  assert [(e.prompt, e.answer) for e in examples] == rows


@given(_JSON | st.lists(st.fixed_dictionaries({'q': _JSON, 'a': _JSON})))
def test_any_json_is_rows_or_a_named_mistake(tmp_path_factory, value):
  path = tmp_path_factory.getbasetemp() / 'any.json'
  path.write_text(json.dumps(value))
  _loads_or_names(path)


@given(st.binary(max_size=60))
def test_any_bytes_are_rows_or_a_named_mistake(tmp_path_factory, data):
  path = tmp_path_factory.getbasetemp() / 'any.jsonl'
  path.write_bytes(data)
  _loads_or_names(path)


def _loads_or_names(path):
  try:
    examples = _load(str(path))
  except ValueError as error:
    assert path.name in str(error)
  else:
    assert all(e.prompt and e.answer for e in examples)
