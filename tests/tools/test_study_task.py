"""Tests of the study's task: problems, lengths, splits, tokenizer, shape."""

import math
import random
import statistics

import pytest

from jetrl_jax.data import Tokenizer
from jetrl_jax.models import load_config
from jetrl_jax.models.hf import layout as hf_layout
from jetrl_jax.rewards import RewardRequest
from jetrl_jax.rewards.functions import gsm8k
from tools import quickstart_task
from tools import study_task as task

_DIFFICULTY = task.Difficulty()
_PROBLEM = task.Problem(
    things='pens',
    start={'Ann': 34, 'Bob': 8},
    events=(('Bob', 'finds', 5), ('Ann', 'loses', -6)),
    asked='Ann',
)


def test_a_worked_answer_writes_sums_checks_and_the_number():
  assert task.question(_PROBLEM, 2) == (
      'Ann has 34 pens, Bob has 8 pens. 1. Bob finds 5 pens. 2. Ann loses 6'
      ' pens. How many pens has Ann? Check 2 times.\n'
  )
  # The second check starts from the second person.
  assert task.solve(_PROBLEM, 2) == (
      '1. Bob 8 + 5 = 13. check 1: Ann 34, Bob 13. check 2: Bob 13, Ann 34.'
      ' 2. Ann 34 - 6 = 28. check 1: Ann 28, Bob 13. check 2: Bob 13, Ann 28.'
      ' #### 28'
  )


def test_a_careless_answer_gets_carries_and_borrows_wrong():
  # 8 + 5 without the carry is 03; 34 - 6 by the smaller digit from the larger
  # is 32.
  assert task.solve(_PROBLEM, 0, 1.0, random.Random(0)) == (
      '1. Bob 8 + 5 = 3. 2. Ann 34 - 6 = 32. #### 32'
  )


def test_length_changes_neither_the_problem_nor_the_careless_result():
  short = task.make_rows('sft', 3, 20, _DIFFICULTY, (1,))
  long = task.make_rows('sft', 3, 20, _DIFFICULTY, (10,))
  for one, ten in zip(short, long, strict=True):
    assert one['question'] == ten['question'].replace('Check 10', 'Check 1')
    assert one['answer'].split()[-1] == ten['answer'].split()[-1]


def test_about_256_and_about_2000_tokens_are_reached(tmp_path):
  quickstart_task.write_model_folder(
      tmp_path, task.make_tokenizer(), task.MODEL_CONFIG
  )
  tokenizer = Tokenizer(tmp_path)
  for checks, low, high in ((1, 256, 280), (10, 1850, 1960)):
    rows = task.make_rows('sft', 0, 20, _DIFFICULTY, (checks,))
    lengths = []
    for row in rows:
      ids = tokenizer.encode(row['answer'], add_special_tokens=False)
      assert tokenizer.decode(ids, skip_special_tokens=True) == row['answer']
      assert ids.min() > 2
      lengths.append(len(ids))
    assert low <= statistics.mean(lengths) <= high


def test_a_share_of_careless_answers_is_right_that_the_difficulty_foretells():
  problems = task.problems_of('sft', 0, _DIFFICULTY)
  right, count = 0, 600
  for _ in range(count):
    problem, rng = next(problems)
    careless = task.solve(problem, 0, 0.5, rng)
    right += careless.split()[-1] == task.solve(problem, 0).split()[-1]
  # (1 - 0.45 / 2)^4, give or take three standard errors of 600 draws.
  assert abs(right / count - 0.775**4) < 3 * math.sqrt(0.36 * 0.64 / count)


def test_more_steps_are_harder_and_no_longer_than_as_many_others():
  hard = task.Difficulty(steps=6, others=2)
  for seed in range(5):
    one = task.draw_problem(random.Random(seed), _DIFFICULTY)
    two = task.draw_problem(random.Random(seed), hard)
    assert len(one.events) == len(two.events) == 8
    assert sum(name == one.asked for name, _, _ in one.events) == 4
    assert sum(name == two.asked for name, _, _ in two.events) == 6


def test_splits_are_disjoint_for_any_seeds_and_lengths():
  texts = {}
  for split in ('sft', 'train', 'heldout'):
    texts[split] = {
        row['question'].partition(' Check')[0]
        for seed in (0, 7)
        for checks in (1, 10)
        for row in task.make_rows(split, seed, 200, _DIFFICULTY, (checks,))
    }
    assert len(texts[split]) == 400  # Two seeds; a length adds no problem.
  assert not texts['sft'] & texts['train']
  assert not texts['heldout'] & (texts['sft'] | texts['train'])


def test_the_reward_reads_the_number_of_a_right_answer():
  row = task.make_rows('heldout', 0, 1, _DIFFICULTY, (1,))[0]
  problem, _ = next(task.problems_of('heldout', 0, _DIFFICULTY))
  part = gsm8k(
      RewardRequest(
          source='',
          prompt_text=row['question'],
          response_text=task.solve(problem, 1),
          answer=row['answer'].removeprefix('#### '),
          extra={},
      )
  )
  assert part.value == 1.0


def test_the_model_has_at_most_20m_parameters_and_a_checkpoint_below_40_mib(
    tmp_path,
):
  quickstart_task.write_model_folder(
      tmp_path, task.make_tokenizer(), task.MODEL_CONFIG
  )
  rows = hf_layout.layout(load_config(tmp_path))
  count = sum(math.prod(row.shape) for row in rows)
  assert 15e6 < count <= 20e6
  assert 2 * count < 40 * 2**20
  for row in rows:
    if row.path.endswith('/kernel'):
      assert not [dim for dim in row.shape if dim % 128], row.path


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        ({'people': 1}, 'people is 1'),
        ({'steps': 0}, 'steps is 0'),
        ({'careless': 1.5}, 'careless is 1.5'),
    ],
)
def test_a_difficulty_that_cannot_be_drawn_is_refused(arguments, message):
  with pytest.raises(ValueError, match=message):
    task.Difficulty(**arguments)


def test_an_unknown_split_is_refused():
  with pytest.raises(ValueError, match='allowed: one of'):
    task.make_rows('test', 0, 1, _DIFFICULTY, (1,))


@pytest.mark.parametrize('tool', [task, quickstart_task])
def test_the_command_writes_to_the_home_folder(monkeypatch, tmp_path, tool):
  monkeypatch.setenv('HOME', str(tmp_path))
  few = ['tool', '--sft=-1', '--train=1', '--heldout=1']
  monkeypatch.setattr('sys.argv', [*few, '--output=~/task'])
  tool.main()
  assert (tmp_path / 'task/model_init/tokenizer.json').is_file()
