"""A pocket calculator as an environment.

    question  47*8+35=
    policy    [47*8]      calculator  =376     policy    [376+35]
    calculator  =411     policy    #411

What stands in square brackets is computed; what follows '#' is the answer.
"""

import re

import numpy as np

from jetrl_jax.data import Prompt
from jetrl_jax.rl.rollout.environment import Environment, Outcome

_CALL = re.compile(r'\[(\d{1,6})([*+-])(\d{1,6})\]$')
_ANSWER = re.compile(r'#(-?\d{1,6})$')


class Calculator(Environment):
  """Computes one operation per call; reward 1 for the right answer."""

  stop_strings = (']',)

  def reset(self, prompt: Prompt, rng: np.random.Generator) -> str:
    """Remembers the answer; nothing here is random."""
    del rng
    self.answer = int(prompt.answer)
    return ''

  def step(self, text: str) -> Outcome:
    """Answers a call, or judges a turn that makes none."""
    if text.endswith(']'):
      return Outcome(observation=f'={_compute(text)} ')
    found = _ANSWER.search(text)
    right = found is not None and int(found[1]) == self.answer
    return Outcome(reward=float(right), accuracy=float(right), done=True)


def _compute(text: str) -> str:
  call = _CALL.search(text)
  if call is None:
    return '?'
  one, other = int(call[1]), int(call[3])
  if call[2] == '*':
    return str(one * other)
  return str(one + other if call[2] == '+' else one - other)
