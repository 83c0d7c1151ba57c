"""Advantages: how much better a response is than the others of its group.

They are computed once per step, on the host and in float64. P x G numbers cost
nothing, and the result does not depend on the backend, the batch order or the
number of devices.
"""

import functools
from collections.abc import Callable

import numpy as np

from jetrl_jax.core.typing import Array, Bool, Float, Int, NpArray, Shaped

ESTIMATORS = ('grpo', 'dr_grpo', 'rloo', 'reinforce_plus_plus_baseline')

# Added to the standard deviation, as in other GRPO implementations. It matters
# only for groups whose rewards are nearly equal.
STD_EPSILON = 1e-6
# Added to the variance when whitening, as in verl.
VARIANCE_EPSILON = 1e-8


def estimate(
    rewards_PG: Shaped[Array | NpArray, 'P G'],  # float, int or bool
    lengths_PG: Int[NpArray, 'P G'],
    *,
    adv_estimator: str,
    norm_by_std: bool,
    scored_PG: Bool[NpArray, 'P G'] | None = None,
) -> Float[NpArray, 'P G']:
  """Turns the rewards of a rollout into one advantage per response.

  A response without a score is left out: its group is compared without it,
  and its own advantage is 0. One that is left alone has that of a group of
  equal rewards.

  Args:
    rewards_PG: rewards, one row per prompt.
    lengths_PG: tokens in each response's loss mask; only
      'reinforce_plus_plus_baseline' reads them.
    adv_estimator: one of `ESTIMATORS`.
    norm_by_std: for 'grpo'; without it 'grpo' is 'dr_grpo'.
    scored_PG: False where a response has no score, whose reward is not read;
      None where all have one.

  Returns:
    float32 advantages.

  Raises:
    ValueError: the estimator is unknown, a group has one sample, or a reward is
      not finite.
  """
  match adv_estimator:
    case 'grpo':
      by_std = functools.partial(group_advantages, norm_by_std=norm_by_std)
      return _of_scored(by_std, rewards_PG, scored_PG)
    case 'dr_grpo':
      plain = functools.partial(group_advantages, norm_by_std=False)
      return _of_scored(plain, rewards_PG, scored_PG)
    case 'rloo':
      return _of_scored(leave_one_out_advantages, rewards_PG, scored_PG)
    case 'reinforce_plus_plus_baseline':
      return whitened_advantages(rewards_PG, lengths_PG, scored_PG)
    case _:
      raise ValueError(
          f'adv_estimator is {adv_estimator!r}; allowed are'
          f' {", ".join(ESTIMATORS)}.'
      )


def group_advantages(
    rewards_PG: Shaped[Array | NpArray, 'P G'],  # float, int or bool
    *,
    norm_by_std: bool,
) -> Float[NpArray, 'P G']:
  """Compares each reward with the mean reward of its prompt (GRPO).

      A = (R - mean(R)) / (std(R) + 1e-6)      norm_by_std
      A = R - mean(R)                          otherwise

  mean and std run over the G samples of one prompt; std is the sample standard
  deviation (divisor G - 1). A group of equal rewards gets exactly 0. The
  formula alone does not give that: the float64 mean of (0.1, 0.1, 0.1) is not
  0.1, and 1e-6 in the denominator would magnify the error.

  Args:
    rewards_PG: rewards, one row per prompt.
    norm_by_std: whether to divide by the group's standard deviation (GRPO) or
      not (Dr. GRPO).

  Returns:
    float32 advantages.

  Raises:
    ValueError: the rewards have not two axes, a group has fewer than two
      samples, or a reward is not finite.

  References:
    GRPO: Shao et al. 2024, arXiv:2402.03300, section 4.1.2.
    Without the division: Dr. GRPO, Liu et al. 2025, arXiv:2503.20783.
  """
  rewards_PG = _checked(rewards_PG)
  advantages_PG = _centred(rewards_PG)
  if norm_by_std:
    std_P1 = rewards_PG.std(axis=1, ddof=1, keepdims=True)
    advantages_PG = advantages_PG / (std_P1 + STD_EPSILON)
  return advantages_PG.astype(np.float32)


def leave_one_out_advantages(
    rewards_PG: Shaped[Array | NpArray, 'P G'],
) -> Float[NpArray, 'P G']:
  """Compares each reward with the mean of its prompt's other rewards (RLOO).

      A_i = R_i - mean over j != i of R_j = G / (G - 1) (R_i - mean(R))

  The baseline does not contain R_i, so it is independent of response i. A group
  of equal rewards gets exactly 0.

  Args:
    rewards_PG: rewards, one row per prompt.

  Returns:
    float32 advantages.

  Raises:
    ValueError: a group of one, or a reward that is not finite.

  References:
    Ahmadian et al. 2024, arXiv:2402.14740, section 2.2.
  """
  rewards_PG = _checked(rewards_PG)
  group = rewards_PG.shape[1]
  return (group / (group - 1) * _centred(rewards_PG)).astype(np.float32)


def whitened_advantages(
    rewards_PG: Shaped[Array | NpArray, 'P G'],
    lengths_PG: Int[NpArray, 'P G'],
    scored_PG: Bool[NpArray, 'P G'] | None = None,
) -> Float[NpArray, 'P G']:
  """Subtracts the group's mean, then whitens over the tokens of the batch.

      a = R - mean of the group
      A = (a - m) / sqrt(v + 1e-8)

  m and v are the mean and sample variance (divisor N - 1) of a over the N
  tokens of all responses, so each response counts once per token. Unlike in
  GRPO, the whole rollout has one scale, so easy and hard prompts keep the size
  of their rewards. A group of equal rewards gets -m / sqrt(v + 1e-8), which is
  0 only if lengths and rewards are uncorrelated. If all groups have equal
  rewards, all advantages are 0.

  Args:
    rewards_PG: rewards, one row per prompt.
    lengths_PG: tokens in each response's loss mask.
    scored_PG: see `estimate`.

  Returns:
    float32 advantages.

  Raises:
    ValueError: a group of one, or a reward that is not finite.

  References:
    REINFORCE++ with baseline: Hu 2025, arXiv:2501.03262, section 3.2. The
    tokens and the 1e-8 are verl's (`masked_whiten`).

  Two differences from verl: a batch with fewer than two tokens gives 0 and not
  an error, and tokens that a rejection drops still count.
  """
  centred_PG = _of_scored(
      lambda rewards_PG: _centred(_checked(rewards_PG)), rewards_PG, scored_PG
  )
  if scored_PG is not None:
    lengths_PG = np.where(scored_PG, lengths_PG, 0)
  assert lengths_PG.shape == centred_PG.shape, (
      lengths_PG.shape,
      centred_PG.shape,
  )
  tokens = lengths_PG.sum()
  if tokens < 2:
    return np.zeros(centred_PG.shape, np.float32)
  mean = (lengths_PG * centred_PG).sum() / tokens
  squares = (lengths_PG * np.square(centred_PG - mean)).sum()
  scale = 1.0 / np.sqrt(squares / (tokens - 1) + VARIANCE_EPSILON)
  advantages_PG = ((centred_PG - mean) * scale).astype(np.float32)
  if scored_PG is not None:
    advantages_PG = np.where(scored_PG, advantages_PG, np.float32(0.0))
  return advantages_PG


def _of_scored(
    estimator: Callable[[NpArray], NpArray],
    rewards_PG: Array | NpArray,
    scored_PG: NpArray | None,
) -> NpArray:
  """Applies an estimator of groups to the responses that have a score."""
  if scored_PG is None or scored_PG.all():
    return estimator(np.asarray(rewards_PG))
  # No values: this checks the group size and the dtype alone.
  of_none = estimator(np.zeros((0, scored_PG.shape[1])))
  found_PG = np.zeros(scored_PG.shape, of_none.dtype)
  rows = zip(np.asarray(rewards_PG), scored_PG, strict=True)
  for p, (rewards_G, scored_G) in enumerate(rows):
    if scored_G.sum() > 1:
      found_PG[p, scored_G] = estimator(rewards_G[None, scored_G])[0]
  return found_PG


def _checked(rewards_PG: Array | NpArray) -> NpArray:
  """Returns the rewards as float64, after checking them."""
  rewards_PG = np.asarray(rewards_PG, np.float64)
  if rewards_PG.ndim != 2:
    raise ValueError(
        f'the rewards have the shape {rewards_PG.shape}; allowed: [prompts,'
        ' samples of a prompt], such as np.reshape(rewards, (-1,'
        ' num_generations))'
    )
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
  return rewards_PG


def _centred(rewards_PG: NpArray) -> NpArray:
  """Subtracts the group's mean; equal rewards give exactly 0."""
  centred_PG = rewards_PG - rewards_PG.mean(axis=1, keepdims=True)
  equal_P1 = np.ptp(rewards_PG, axis=1, keepdims=True) == 0.0
  return np.where(equal_P1, 0.0, centred_PG)
