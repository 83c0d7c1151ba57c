"""Advantages: how much better an answer was than the others of its group.

Computed once per step on the host, in float64: P x G numbers cost nothing, and
the result does not depend on a backend, a batch order or a number of devices.
"""

import numpy as np

from jetrl_jax.typing import Array, Float, NpArray, Shaped

# Added to the standard deviation, as GRPO's implementations do. It matters
# only for groups whose rewards nearly agree.
STD_EPSILON = 1e-6


def group_advantages(
    rewards_PG: Shaped[Array | NpArray, 'P G'],  # float, int or bool
    *,
    norm_by_std: bool,
) -> Float[NpArray, 'P G']:
  """Compares each reward with the other rewards of its prompt.

      A = (R - mean(R)) / (std(R) + 1e-6)      norm_by_std
      A = R - mean(R)                          otherwise

  mean and std run over the G samples of one prompt; std is the sample standard
  deviation (divisor G - 1). A group of equal rewards gets exactly 0, which the
  formula alone does not give: the float64 mean of (0.1, 0.1, 0.1) is not 0.1,
  and 1e-6 in the denominator would blow that error up.

  Args:
    rewards_PG: rewards, one row per prompt.
    norm_by_std: divide by the group's standard deviation (GRPO), or do not
      (Dr. GRPO).

  Returns:
    float32 advantages.

  Raises:
    ValueError: a group has fewer than two samples, or a reward is not finite.

  References:
    GRPO: Shao et al. 2024, arXiv:2402.03300, section 4.1.2.
    Without the division: Liu et al. 2025, arXiv:2503.20783.
  """
  rewards_PG = np.asarray(rewards_PG, np.float64)
  if rewards_PG.shape[1] < 2:
    raise ValueError(
        f'num_generations is {rewards_PG.shape[1]}, but a group advantage'
        ' compares samples of one prompt: it needs at least 2.'
    )
  if not np.isfinite(rewards_PG).all():
    p, g = np.argwhere(~np.isfinite(rewards_PG))[0]
    raise ValueError(
        f'The reward of prompt {p}, sample {g} is {rewards_PG[p, g]}; rewards'
        ' must be finite. Let the reward function return a number, e.g. 0.'
    )
  advantages_PG = rewards_PG - rewards_PG.mean(axis=1, keepdims=True)
  if norm_by_std:
    std_P1 = rewards_PG.std(axis=1, ddof=1, keepdims=True)
    advantages_PG = advantages_PG / (std_P1 + STD_EPSILON)
  equal_P1 = np.ptp(rewards_PG, axis=1, keepdims=True) == 0.0
  return np.where(equal_P1, 0.0, advantages_PG).astype(np.float32)
