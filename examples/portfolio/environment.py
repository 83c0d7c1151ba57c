"""Investing by turns as an environment.

    market  A+3B-2:      policy  a6b1;      market  A+2B+3:      ...

The market says what the shares A and B returned in the last period, in
percent; the policy how many tenths of its money go into each for the next
one, the rest staying in cash. The reward is the growth of the money.
"""

import math
import re

import numpy as np

from jetrl_jax.data import Prompt
from jetrl_jax.rl.rollout.environment import Environment, Outcome

_ORDER = re.compile(r'a(\d)b(\d);')
# What an order that cannot be carried out costs, as a share of the money.
FEE = 0.01


class Portfolio(Environment):
  """One account in the market of the prompt's row.

  All samples of a prompt trade in the same market, so that they differ by
  their decisions alone. The sum of the rewards is the log of the growth: a
  loss of half weighs as much as a doubling, which is what makes risk cost.
  """

  stop_strings = (';',)

  def reset(self, prompt: Prompt, rng: np.random.Generator) -> str:
    """Opens the account; the market is in the row."""
    del rng
    self.returns = [tuple(pair) for pair in prompt.extra['returns']]
    self.period = 0
    return ''

  def step(self, text: str) -> Outcome:
    """Carries out an order and lets one period pass."""
    percent_a, percent_b = self.returns[self.period]
    self.period += 1
    order = _ORDER.fullmatch(text)
    tenths = (int(order[1]), int(order[2])) if order else (10, 10)
    if sum(tenths) > 10:
      growth = 1 - FEE
    else:
      growth = 1 + (tenths[0] * percent_a + tenths[1] * percent_b) / 1000
    return Outcome(
        observation=quote(percent_a, percent_b),
        reward=math.log(growth),
        done=self.period == len(self.returns),
    )


def quote(percent_a: int, percent_b: int) -> str:
  """Writes the returns of one period."""
  return f'A{percent_a:+d}B{percent_b:+d}:'
