"""Seeded scores and response lengths, for runs with random weights.

Random weights solve nothing and never stop: rewards would all be 0, no
gradient would flow, and an exactness claim would be about weights that never
change. These numbers have an address like every other random number here.
"""

import numpy as np

from jetrl_jax.data import Prompt


def _uniform(seed: int, step: int, prompt: Prompt, samples: int, what: int):
  # Drawing counts the first word up, one for every four numbers: a prompt's id
  # there would give it the numbers that the prompt before it ends with.
  bits = np.random.Philox(key=[seed, step], counter=[0, 0, what, prompt.id])
  return np.random.Generator(bits).random(samples)


# Shares of the longest response, of numbers that are uniform in [0, 1):
# 'uniform' from a half to the whole; 'long_tail' exponential with a mean of an
# eighth, where 256 responses have a longest of three quarters.
LENGTHS = {
    'uniform': lambda u: 0.5 + 0.5 * u,
    'long_tail': lambda u: np.minimum(-np.log1p(-u) / 8, 1.0),
}


def response_limits(
    seed: int,
    step: int,
    prompts: list[Prompt],
    samples: int,
    maximum: int,
    lengths: str,
) -> np.ndarray:
  """Returns int [P, G] response lengths from 1 to maximum.

  Args:
    seed: of the run.
    step: of the run.
    prompts: P of them.
    samples: G of each.
    maximum: longest response.
    lengths: how they are spread, one of `LENGTHS`.
  """
  uniform_PG = np.stack(
      [_uniform(seed, step, prompt, samples, 0) for prompt in prompts]
  )
  shares_PG = LENGTHS[lengths](uniform_PG)
  return np.maximum(1, np.ceil(shares_PG * maximum)).astype(int)


def scores(
    seed: int, step: int, prompts: list[Prompt], samples: int
) -> np.ndarray:
  """Returns float64 [P, G] scores in [0, 1) that vary inside every group."""
  return np.stack(
      [_uniform(seed, step, prompt, samples, 1) for prompt in prompts]
  )
