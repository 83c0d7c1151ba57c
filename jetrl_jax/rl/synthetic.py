"""Synthetic rewards and response lengths, for runs with random weights.

Random weights solve nothing and never emit a stop token. All rewards would be
0, no gradient would flow, and an exactness claim would be about weights that
never change. These numbers have an address like every random number here.
"""

import numpy as np

from jetrl_jax.data import Prompt


def _uniform(seed: int, step: int, prompt: Prompt, samples: int, what: int):
  # Drawing increments the counter's first word, by one for every four numbers.
  # The prompt's id must not be there, or neighbouring prompts would share
  # numbers.
  bits = np.random.Philox(key=[seed, step], counter=[0, 0, what, prompt.id])
  return np.random.Generator(bits).random(samples)


# Name -> function from a uniform number in [0, 1) to a share of the longest
# response. 'uniform' is from 1/2 to 1. 'long_tail' is exponential with mean
# 1/8; the longest of 256 responses is then about 3/4.
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
    seed: the run's seed.
    step: the training step.
    prompts: P prompts.
    samples: samples per prompt, G.
    maximum: longest response, tokens.
    lengths: the distribution, one of `LENGTHS`.
  """
  uniform_PG = np.stack(
      [_uniform(seed, step, prompt, samples, 0) for prompt in prompts]
  )
  shares_PG = LENGTHS[lengths](uniform_PG)
  return np.maximum(1, np.ceil(shares_PG * maximum)).astype(int)


def scores(
    seed: int, step: int, prompts: list[Prompt], samples: int
) -> np.ndarray:
  """Returns float64 [P, G] rewards in [0, 1) that vary within each group."""
  return np.stack(
      [_uniform(seed, step, prompt, samples, 1) for prompt in prompts]
  )
