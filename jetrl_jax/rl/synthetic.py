"""Seeded scores and response lengths, for runs with random weights.

Random weights solve nothing and never stop: rewards would all be 0, no
gradient would flow, and an exactness claim would be about weights that never
change. These numbers have an address like every other random number here.
"""

import numpy as np

from jetrl_jax.data import Prompt


def _uniform(seed: int, step: int, prompt: Prompt, samples: int, what: int):
  bits = np.random.Philox(key=[seed, step], counter=[prompt.id, what, 0, 0])
  return np.random.Generator(bits).random(samples)


def response_limits(
    seed: int, step: int, prompts: list[Prompt], samples: int, maximum: int
) -> np.ndarray:
  """Returns int [P, G] response lengths, uniform in [maximum / 2, maximum]."""
  uniform_PG = np.stack(
      [_uniform(seed, step, prompt, samples, 0) for prompt in prompts]
  )
  return np.maximum(1, np.ceil((0.5 + 0.5 * uniform_PG) * maximum)).astype(int)


def scores(
    seed: int, step: int, prompts: list[Prompt], samples: int
) -> np.ndarray:
  """Returns float64 [P, G] scores in [0, 1) that vary inside every group."""
  return np.stack(
      [_uniform(seed, step, prompt, samples, 1) for prompt in prompts]
  )
