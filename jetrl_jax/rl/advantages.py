"""Advantages: how much better an answer was than the others of its group.

Computed once per step on the host, in float64: P x G numbers cost nothing, and
the result does not depend on a backend, a batch order or a number of devices.
"""

import numpy as np

from jetrl_jax.core.typing import Array, Float, Int, NpArray, Shaped

ESTIMATORS = ('grpo', 'dr_grpo', 'rloo', 'reinforce_plus_plus_baseline')

# Added to the standard deviation, as GRPO's implementations do. It matters
# only for groups whose rewards nearly agree.
STD_EPSILON = 1e-6
# Added to the variance when whitening, as in verl.
VARIANCE_EPSILON = 1e-8


def estimate(
    rewards_PG: Shaped[Array | NpArray, 'P G'],  # float, int or bool
    lengths_PG: Int[NpArray, 'P G'],
    *,
    adv_estimator: str,
    norm_by_std: bool,
) -> Float[NpArray, 'P G']:
  """Turns the rewards of a rollout into one advantage per response.

  Args:
    rewards_PG: rewards, one row per prompt.
    lengths_PG: tokens in each response's loss mask; read by
      'reinforce_plus_plus_baseline' alone.
    adv_estimator: one of `ESTIMATORS`.
    norm_by_std: for 'grpo'; without it 'grpo' is 'dr_grpo'.

  Returns:
    float32 advantages.

  Raises:
    ValueError: an unknown estimator, a group of one, or a reward that is not
      finite.
  """
  match adv_estimator:
    case 'grpo':
      return group_advantages(rewards_PG, norm_by_std=norm_by_std)
    case 'dr_grpo':
      return group_advantages(rewards_PG, norm_by_std=False)
    case 'rloo':
      return leave_one_out_advantages(rewards_PG)
    case 'reinforce_plus_plus_baseline':
      return whitened_advantages(rewards_PG, lengths_PG)
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
  """Compares each reward with the mean of the others of its prompt (RLOO).

      A_i = R_i - mean over j != i of R_j = G / (G - 1) (R_i - mean(R))

  The baseline does not contain R_i, so it is independent of the response that
  it judges. A group of equal rewards gets exactly 0.

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
) -> Float[NpArray, 'P G']:
  """Subtracts the group's mean, then whitens over the tokens of the batch.

      a = R - mean of the group
      A = (a - m) / sqrt(v + 1e-8)

  m and v are mean and sample variance (divisor N - 1) of a over the N tokens
  of all responses, so a response counts as often as it has tokens. Unlike
  GRPO's, the scale is one for the whole rollout: easy and hard prompts keep
  the size of their rewards. A group of equal rewards gets -m / sqrt(v + 1e-8),
  which is 0 only when lengths and rewards are uncorrelated; where all groups
  have equal rewards all advantages are 0.

  Args:
    rewards_PG: rewards, one row per prompt.
    lengths_PG: tokens in each response's loss mask.

  Returns:
    float32 advantages.

  Raises:
    ValueError: a group of one, or a reward that is not finite.

  References:
    REINFORCE++ with baseline: Hu 2025, arXiv:2501.03262, section 3.2. The
    tokens and the 1e-8 are verl's (`masked_whiten`).

  Differs from verl: a batch with fewer than two tokens gives 0, not an error;
  tokens that a rejection drops count here, which verl leaves out.
  """
  centred_PG = _centred(_checked(rewards_PG))
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
  return ((centred_PG - mean) * scale).astype(np.float32)


def _checked(rewards_PG: Array | NpArray) -> NpArray:
  """Returns the rewards as float64, if groups can be formed of them."""
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
  return rewards_PG


def _centred(rewards_PG: NpArray) -> NpArray:
  """Subtracts the group's mean; equal rewards give exactly 0."""
  centred_PG = rewards_PG - rewards_PG.mean(axis=1, keepdims=True)
  equal_P1 = np.ptp(rewards_PG, axis=1, keepdims=True) == 0.0
  return np.where(equal_P1, 0.0, centred_PG)
