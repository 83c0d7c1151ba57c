"""Writes the tasks of the two examples with environments.

calculator: products and sums, too large for a small decoder, and a calculator
to ask. The warm start imitates solutions that trust mental arithmetic too
often: each step is a call of the calculator, or with probability `MENTAL` a
guess within `OFF_BY` of the result.

    question  47*8+35=     [47*8]=376 [376+35]=411 #411
    careless               (47*8)=371 [371+35]=406 #406

portfolio: two shares, of which A goes on as it went and B turns around. The
warm start orders at random; that the last returns foretell the next ones is
for reinforcement learning to find.

    question  A+6B-2:      a3b0;A+4B+1:a1b7;A+5B-2:...

What a problem may be used for is a hash of its text, as in the quickstart. The
files of the repository:

    python -m tools.environment_tasks --task=calculator \
        --output=examples/calculator
    python -m tools.environment_tasks --task=portfolio \
        --output=examples/portfolio
"""

import argparse
import random
from collections.abc import Callable
from typing import Any

from jetrl_jax.core.files import user_path
from tools import command, quickstart_task

SIZES = {'sft': 6000, 'train': 2000, 'heldout': 256}
MENTAL = 0.4
OFF_BY = 9
# Periods of a market; the drift of a share's return from one to the next, and
# the spread of what is new in it, in percent.
PERIODS = 4
DRIFT_A, DRIFT_B, SPREAD = 0.8, -0.8, 3.0
ALPHABETS = {
    'calculator': ' #()*+-0123456789=?[]',
    'portfolio': '+-0123456789:;ABab',
}
# Smaller than the quickstart's: the arithmetic is done elsewhere.
MODEL_CONFIG = quickstart_task.MODEL_CONFIG | {
    'hidden_size': 64,
    'intermediate_size': 192,
    'num_hidden_layers': 3,
    'num_attention_heads': 4,
    'num_key_value_heads': 2,
    'head_dim': 16,
    'initializer_range': 0.125,
}

Row = dict[str, Any]


def draw_calculation(rng: random.Random) -> tuple[str, list[tuple[str, int]]]:
  """Draws a product and one or two sums after it, none of them negative.

  Returns:
    (question, steps): a step is an operator and its right operand, and the
    first one's left operand starts the question: '47*8+35=' has the steps
    ('*', 8), ('+', 35).
  """
  first = rng.randint(12, 99)
  steps = [('*', rng.randint(3, 9))]
  total = first * steps[0][1]
  for _ in range(rng.randint(1, 2)):
    sign = rng.choice('+-') if total > 120 else '+'
    steps.append((sign, rng.randint(11, 99)))
    total += steps[-1][1] if sign == '+' else -steps[-1][1]
  question = str(first) + ''.join(f'{sign}{n}' for sign, n in steps) + '='
  return question, steps


def solve(question: str, steps: list[tuple[str, int]], guess: Callable) -> str:
  """Writes a solution with the calculator's answers in it.

  Args:
    question: what `draw_calculation` returns.
    steps: the same.
    guess: right result -> what is written instead, or None for a call.
  """
  total = int(question.partition('*')[0])
  written = ''
  for sign, n in steps:
    term = f'{total}{sign}{n}'
    total = total * n if sign == '*' else total + (n if sign == '+' else -n)
    guessed = guess(total)
    written += f'[{term}]={total} ' if guessed is None else f'({term})='
    if guessed is not None:
      total = guessed
      written += f'{total} '
  return f'{written}#{total}'


def calculation(rng: random.Random, split: str) -> Row | None:
  """Draws a row of the calculator's task; None if it is of another split."""
  question, steps = draw_calculation(rng)
  if quickstart_task.split_of(question) != split:
    return None

  def careless(result: int) -> int | None:
    if rng.random() >= MENTAL:
      return None
    return max(0, result + rng.randint(-OFF_BY, OFF_BY))

  guess = careless if split == 'sft' else lambda result: None
  answer = solve(question, steps, guess)
  # GSM8K's mark, after which the loader reads the answer.
  if split != 'sft':
    answer = f'#### {answer.rpartition("#")[2]}'
  return {'question': question, 'answer': answer}


def draw_market(rng: random.Random) -> list[tuple[int, int]]:
  """Draws the returns of A and B in percent, the first before any order."""
  market = [(rng.randint(-9, 9), rng.randint(-9, 9))]
  for _ in range(PERIODS):
    a, b = market[-1]
    market.append(
        (
            _percent(DRIFT_A * a + rng.gauss(0, SPREAD)),
            _percent(DRIFT_B * b + rng.gauss(0, SPREAD)),
        )
    )
  return market


def _percent(value: float) -> int:
  return max(-9, min(9, round(value)))


def market(rng: random.Random, split: str) -> Row | None:
  """Draws a row of the portfolio's task; None if it is of another split."""
  returns = draw_market(rng)
  quotes = [f'A{a:+d}B{b:+d}:' for a, b in returns]
  if quickstart_task.split_of(''.join(quotes)) != split:
    return None
  if split == 'sft':
    orders = []
    for following in quotes[1:]:
      tenths = rng.randint(0, 9)
      orders.append(f'a{tenths}b{rng.randint(0, min(9, 10 - tenths))};')
      orders.append(following)
    return {'question': quotes[0], 'answer': ''.join(orders[:-1])}
  # The loader wants an answer; this task has none.
  return {'question': quotes[0], 'answer': '-', 'returns': returns[1:]}


TASKS = {'calculator': calculation, 'portfolio': market}


def make_rows(
    task: str, seed: int, sizes: dict[str, int]
) -> dict[str, list[Row]]:
  """Draws distinct rows until every split is full.

  Args:
    task: a key of `TASKS`.
    seed: names the draw.
    sizes: number of rows by split.

  Returns:
    Rows with the keys 'question', 'answer' and, for the portfolio, 'returns',
    by split.
  """
  rows: dict[str, list[Row]] = {}
  for split, size in sizes.items():
    rng = random.Random(f'{task} {split} {seed}')
    seen: set[str] = set()
    rows[split] = []
    while len(rows[split]) < size:
      row = TASKS[task](rng, split)
      if row is not None and str(row) not in seen:
        seen.add(str(row))
        rows[split].append(row)
  return rows


@command.in_one_sentence
def main() -> None:
  """Runs the command line."""
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  parser.add_argument('--task', choices=sorted(TASKS), required=True)
  parser.add_argument('--output', type=user_path, required=True)
  parser.add_argument('--seed', type=int, default=0)
  flags = parser.parse_args()
  rows = make_rows(flags.task, flags.seed, SIZES)
  quickstart_task.write_problems(flags.output, rows)
  quickstart_task.write_model_folder(
      flags.output / 'model_init',
      quickstart_task.make_tokenizer(ALPHABETS[flags.task]),
      MODEL_CONFIG,
  )


if __name__ == '__main__':
  main()
