"""The sums that configs/smollm2_135m.py learns: right, disjoint, committed."""

import json
import pathlib

from tools import quickstart_task, sums_task

_SHIPPED = pathlib.Path(__file__).parents[2] / 'examples' / 'sums'


def _rows(split: str) -> list[dict[str, str]]:
  lines = (_SHIPPED / f'{split}.jsonl').read_text(encoding='utf-8').splitlines()
  return [json.loads(line) for line in lines]


def test_every_shipped_answer_is_right_and_every_sum_is_there_once():
  rows = _rows('train') + _rows('heldout')
  sums = []
  for row in rows:
    a, b = row['question'].removeprefix('What is ').removesuffix('?').split('+')
    assert int(row['answer']) == int(a) + int(b)
    sums.append((int(a), int(b)))
  assert len(set(sums)) == len(sums) == 20 * 20


def test_a_quarter_is_held_out():
  # 400 draws of 1/4: a standard deviation is 8.7.
  assert abs(len(_rows('heldout')) - 100) < 20


def test_the_committed_files_are_what_the_command_writes(tmp_path):
  quickstart_task.write_problems(tmp_path, sums_task.make_problems())
  for split in ('train', 'heldout'):
    made = (tmp_path / f'{split}.jsonl').read_bytes()
    assert made == (_SHIPPED / f'{split}.jsonl').read_bytes()
