"""The configs' files: one layout, and nothing held out among the training."""

import json
import pathlib
import sys

import pytest

from configs import qwen0_5b, qwen7b
from tools import math_data

_GSM8K = [
    {'question': 'How many are 3 and 4?', 'answer': '3+4=<<3+4=7>>7\n#### 7'},
    {'question': 'Half of 2,000?', 'answer': 'It is 1,000.\n#### 1,000'},
]
_MATH = [
    {'problem': 'What is $\\frac12$ of 6?', 'solution': 'x', 'answer': '3'},
    {'problem': 'Simplify $1+i^2$.', 'solution': 'y', 'answer': '0'},
    {'problem': 'No answer.', 'solution': 'z', 'answer': ''},
]


def _run(
    monkeypatch, tmp_path: pathlib.Path, *extra: str, math500=_MATH[1:2]
) -> dict[str, list[dict]]:
  files = {'gsm8k_train': _GSM8K, 'gsm8k_test': _GSM8K[:1]}
  files |= {'math_train': _MATH, 'math500': math500}
  arguments = ['math_data', f'--output={tmp_path / "data"}']
  for name, rows in files.items():
    path = tmp_path / f'{name}_published.json'
    path.write_text(json.dumps(rows))
    columns = 'question' if 'gsm8k' in name else 'problem'
    arguments.append(f'--{name}={path},{columns},answer')
  monkeypatch.setattr(sys, 'argv', [*arguments, *extra])
  math_data.main()
  return {
      f'data/{path.name}': [
          json.loads(line) for line in path.read_text().splitlines()
      ]
      for path in (tmp_path / 'data').iterdir()
  }


def test_all_files_of_the_configs_have_one_layout(monkeypatch, tmp_path):
  written = _run(monkeypatch, tmp_path)
  for module in (qwen0_5b, qwen7b):
    data = module.get_config().data
    assert {*data.train_files, *data.val_files} <= {*written}
  for rows in written.values():
    assert all(set(row) == {'question', 'answer'} for row in rows)
  answers = [row['answer'] for row in written['data/gsm8k_train.jsonl']]
  assert answers == ['7', '1,000']


def test_no_problem_is_trained_on_and_held_out(monkeypatch, tmp_path):
  written = _run(monkeypatch, tmp_path)
  questions = [row['question'] for row in written['data/math_train.jsonl']]
  # One is in MATH-500, one has no answer.
  assert questions == ['What is $\\frac12$ of 6?']
  assert len(written['data/math500.jsonl']) == 1


@pytest.mark.parametrize('source', ['math.jsonl', 'math.jsonl,problem', ',,'])
def test_a_source_without_its_columns_is_refused(source):
  with pytest.raises(ValueError, match='write FILE,QUESTION,ANSWER'):
    math_data.rows(source)


@pytest.mark.parametrize(
    'extra, message',
    [
        ('--math500=absent.jsonl,problem,answer', 'absent.jsonl: there is no'),
        ('--gsm8k_test={}/math500_published.json,a,b', "no column 'b'"),
        ('--output={}/math500_published.json', 'File exists'),
    ],
)
def test_what_cannot_be_read_or_written_ends_in_a_sentence(
    monkeypatch, tmp_path, extra, message
):
  with pytest.raises(SystemExit, match=f'error: .*{message}'):
    _run(monkeypatch, tmp_path, extra.format(tmp_path))


def test_a_missing_extra_ends_in_a_sentence(monkeypatch, tmp_path):
  monkeypatch.setitem(sys.modules, 'datasets', None)
  with pytest.raises(SystemExit, match='error: hf:a/b:test needs the package'):
    _run(monkeypatch, tmp_path, '--math500=hf:a/b:test,problem,answer')


def test_a_training_set_that_is_all_held_out_is_refused(monkeypatch, tmp_path):
  with pytest.raises(SystemExit, match='error: math_train: all 2 problems'):
    _run(monkeypatch, tmp_path, math500=_MATH[:2])
  assert not (tmp_path / 'data').exists()
