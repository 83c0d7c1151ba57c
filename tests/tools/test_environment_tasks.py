"""Tests of the examples' tasks: rows, environments, splits."""

import json
import math
import pathlib
import random

import numpy as np
import pytest

from examples.calculator.environment import Calculator
from examples.portfolio.environment import FEE, Portfolio
from jetrl_jax.data import Prompt
from tools import environment_tasks as tasks
from tools import quickstart_task

EXAMPLES = pathlib.Path(__file__).parents[2] / 'examples'


def _start(environment, row):
  prompt = Prompt(
      id=0,
      tokens=np.zeros(1, np.int32),
      text=row['question'],
      answer=row['answer'].removeprefix('#### '),
      source='',
      extra=row,
  )
  assert environment.reset(prompt, np.random.default_rng(0)) == ''
  return environment


def _rows(task, split):
  lines = (EXAMPLES / task / f'{split}.jsonl').read_text().splitlines()
  return [json.loads(line) for line in lines]


@pytest.mark.parametrize('task', sorted(tasks.TASKS))
def test_the_committed_files_are_what_the_command_writes(task):
  made = tasks.make_rows(task, 0, tasks.SIZES)
  for split, rows in made.items():
    # Tuples are lists in JSON.
    assert _rows(task, split) == json.loads(json.dumps(rows))


@pytest.mark.parametrize('task', sorted(tasks.TASKS))
def test_no_held_out_problem_is_in_another_split(task):
  def keys(split):
    return {
        row['question'] + str(row['returns'] if task == 'portfolio' else '')
        for row in _rows(task, split)
    }

  heldout = keys('heldout')
  assert len(heldout) == tasks.SIZES['heldout']
  assert not heldout & keys('train')
  if task == 'calculator':  # The portfolio's warm start lacks the last returns.
    assert not heldout & keys('sft')


def test_calls_lead_to_the_right_answer():
  for row in _rows('calculator', 'heldout')[:20]:
    calculator = _start(Calculator(), row)
    question = row['question'].rstrip('=')
    # Left to right, as the product comes first.
    total, written = question.split('*')[0], ''
    for term in question.replace('+', ' +').replace('-', ' -').split():
      operator, number = (
          ('*', term.split('*')[1]) if '*' in term else (term[0], term[1:])
      )
      outcome = calculator.step(f'{written}[{total}{operator}{number}]')
      assert not outcome.done and outcome.reward == 0
      total = outcome.observation.removeprefix('=').strip()
    assert int(total) == eval(question)
    assert calculator.step(f'#{total}').reward == 1.0


@pytest.mark.parametrize(
    ('text', 'observation'),
    [
        ('[7*8]', '=56 '),
        ('(1+1)=3 [3-5]', '=-2 '),
        ('[7*]', '=? '),
        ('[7**8]', '=? '),
        ('[9999999*1]', '=? '),
        (']', '=? '),
    ],
)
def test_the_calculator_computes_one_operation_or_says_that_it_cannot(
    text, observation
):
  calculator = _start(Calculator(), {'question': '', 'answer': '5'})
  assert calculator.step(text).observation == observation


@pytest.mark.parametrize(
    ('text', 'reward'), [('#5', 1.0), ('x#5', 1.0), ('#6', 0.0), ('5', 0.0)]
)
def test_a_turn_without_a_call_is_the_answer(text, reward):
  calculator = _start(Calculator(), {'question': '', 'answer': '5'})
  outcome = calculator.step(text)
  assert (outcome.reward, outcome.accuracy) == (reward, reward)
  assert outcome.done


def test_an_account_grows_with_what_was_ordered():
  returns = [[5, -2], [-10, 4], [1, 1]]
  row = {'question': 'A+0B+0:', 'answer': '-', 'returns': returns}
  account = _start(Portfolio(), row)
  first = account.step('a6b3;')
  # 0.6 * 5% - 0.3 * 2% = 2.4%.
  assert math.isclose(first.reward, math.log(1.024))
  assert (first.observation, first.done) == ('A+5B-2:', False)
  # 1.1 of the money cannot be spent.
  second = account.step('a6b5;')
  assert math.isclose(second.reward, math.log(1 - FEE))
  third = account.step('buy!;')
  assert math.isclose(third.reward, math.log(1 - FEE)) and third.done


def test_markets_go_on_in_a_and_turn_around_in_b():
  rng = random.Random(1)
  markets = [tasks.draw_market(rng) for _ in range(2000)]
  before = np.asarray([m[:-1] for m in markets], float).reshape(-1, 2)
  after = np.asarray([m[1:] for m in markets], float).reshape(-1, 2)
  for share, drift in ((0, tasks.DRIFT_A), (1, tasks.DRIFT_B)):
    slope = np.polyfit(before[:, share], after[:, share], 1)[0]
    # Clipping at 9 percent flattens it a little.
    assert abs(slope - drift) < 0.1
  assert np.abs(before).max() <= 9


def test_careless_solutions_are_wrong_where_they_guess():
  written = tasks.solve('47*8+35=', [('*', 8), ('+', 35)], lambda r: None)
  assert written == '[47*8]=376 [376+35]=411 #411'
  written = tasks.solve('47*8+35=', [('*', 8), ('+', 35)], lambda r: r - 5)
  assert written == '(47*8)=371 (371+35)=401 #401'


@pytest.mark.parametrize('task', sorted(tasks.TASKS))
def test_every_row_fits_the_config_and_the_alphabet(task):
  alphabet = set(tasks.ALPHABETS[task])
  assert len(alphabet) + len(quickstart_task.SPECIAL_TOKENS) <= 32
  for split in tasks.SIZES:
    for row in _rows(task, split):
      assert len(row['question']) <= 16
      if split == 'sft':
        assert len(row['answer']) < 48
        assert set(row['question'] + row['answer']) <= alphabet
