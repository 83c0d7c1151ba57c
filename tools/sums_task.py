"""Writes the sums that configs/smollm2_135m.py learns: examples/sums.

    python -m tools.sums_task --output=examples/sums

All sums of two numbers from 1 to 20, as one would ask them: `What is 12 + 7?`.
A small model of language knows many of them and talks around most. GRPO sees
only whether the last number of an answer is right. A hash of the question says
whether it is for training or held out.
"""

import argparse
import hashlib

from jetrl_jax.core.files import user_path
from tools import command
from tools.quickstart_task import write_problems

LARGEST = 20


def split_of(question: str) -> str:
  """Says what a question is for: a quarter of all are held out."""
  digest = hashlib.sha256(question.encode()).digest()
  return 'train' if digest[0] % 4 else 'heldout'


def make_problems() -> dict[str, list[dict[str, str]]]:
  """Returns all problems, by split: rows with 'question' and 'answer'."""
  problems = {'train': [], 'heldout': []}
  for a in range(1, LARGEST + 1):
    for b in range(1, LARGEST + 1):
      question = f'What is {a} + {b}?'
      row = {'question': question, 'answer': str(a + b)}
      problems[split_of(question)].append(row)
  return problems


@command.in_one_sentence
def main() -> None:
  """Runs the command line."""
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  parser.add_argument('--output', type=user_path, required=True)
  write_problems(parser.parse_args().output, make_problems())


if __name__ == '__main__':
  main()
