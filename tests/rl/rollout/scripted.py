"""An environment and a tokenizer for the 64 tokens of `tiny_run`."""

import functools
import pathlib
import string
import tempfile

from jetrl_jax.data import Tokenizer
from jetrl_jax.rl.rollout.environment import (
    Environment,
    EnvironmentConfig,
    Outcome,
)
from tools import quickstart_task

# 61 characters after 3 special tokens.
ALPHABET = (string.ascii_letters + string.digits)[:57] + '<>{}'


@functools.cache
def tokenizer() -> Tokenizer:
  """One token per character; the end token is id 1."""
  with tempfile.TemporaryDirectory() as folder:
    quickstart_task.write_model_folder(
        pathlib.Path(folder), quickstart_task.make_tokenizer(ALPHABET)
    )
    return Tokenizer(folder)


class Letters(Environment):
  """Answers with the turn's last letter in brackets and a random digit.

  A turn ends at a capital letter, so that random weights have many turns; the
  third is the last one. Its reward is the length of the turn's text.
  """

  stop_strings = tuple(string.ascii_uppercase)

  def reset(self, prompt, rng):
    self.rng, self.turns, self.texts = rng, 0, []
    self.prompt = prompt
    return '' if prompt.id % 20 == 3 else f'{rng.integers(4)}'

  def step(self, text):
    self.turns += 1
    self.texts.append(text)
    return Outcome(
        observation=f'<{text[-1:]}{self.rng.integers(4)}',
        reward=len(text),
        done=self.turns == 3,
        accuracy=None if self.turns < 3 else 0.5,
    )


def config(make=Letters, **changes) -> EnvironmentConfig:
  """Nine turns at most."""
  return EnvironmentConfig(
      **(dict(make=make, tokenizer=tokenizer(), max_turns=9) | changes)
  )


class Digits(Environment):
  """For the quickstart's alphabet: a turn ends at a digit above 4.

  Real-valued and random rewards; prompts of odd totals fail at times.
  """

  stop_strings = tuple('56789')

  def __init__(self, turns: int = 3):
    self.left = turns

  def reset(self, prompt, rng):
    self.rng, self.answer = rng, int(prompt.answer)
    return f'{rng.integers(10)}='

  def step(self, text):
    if self.answer % 2 and self.rng.random() < 0.2:
      raise RuntimeError('odd')
    self.left -= 1
    return Outcome(
        observation=f' {self.rng.integers(10)}',
        reward=float(self.rng.normal()) + text.count('4'),
        done=not self.left,
    )


class Down(Digits):
  """Fails before the first turn, as one whose service is down."""

  def reset(self, prompt, rng):
    raise RuntimeError('down')


class Keyless(Digits):
  """Cannot be made, as where a variable of the shell is missing."""

  def __init__(self, turns: int = 3):
    raise KeyError('SERVICE_KEY')
