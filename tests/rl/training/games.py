"""An environment that takes its time, for runs of several processes."""

import time

import numpy as np

from jetrl_jax.core import processes
from jetrl_jax.data import Prompt
from jetrl_jax.rl.rollout.environment import Environment, Outcome


class Counting(Environment):
  """Tells how much was written, three times.

  Only processes of an even rank may ask it: with two processes to a sequence
  those are the first of each two.
  """

  stop_strings = ('7', '=')

  def reset(self, prompt: Prompt, rng: np.random.Generator) -> str:
    """Starts with a random digit."""
    del prompt
    assert processes.rank() % 2 == 0, 'asked by two processes'
    self._turns = 0
    return str(rng.integers(10))

  def step(self, text: str) -> Outcome:
    """Answers after up to 0.2 s."""
    assert processes.rank() % 2 == 0, 'asked by two processes'
    self._turns += 1
    time.sleep(0.2 * (time.monotonic() % 1))
    return Outcome(
        observation=str(len(text)),
        reward=sum(c.isdigit() for c in text) / 12,
        done=self._turns == 3,
        accuracy=0.0,
    )
