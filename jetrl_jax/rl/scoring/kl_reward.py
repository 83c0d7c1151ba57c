"""The KL to the reference policy as a part of the reward, by the k1 estimator.

    reward = score - kl_reward_coef * sum_t (log pi_old(y_t) - log pi_ref(y_t))

The sum runs over the tokens that the policy sampled. As a loss, k1 has zero
expected gradient. In the reward it has the gradient of the KL itself, through
the advantages.

References:
  Ziegler et al. 2019, arXiv:1909.08593, eq. 2. verl: use_kl_in_reward with
  kl_penalty='kl'; verl's coefficient may adapt, this one is constant.
"""

import dataclasses

import numpy as np

from jetrl_jax.rl.losses import MAX_LOG_RATIO
from jetrl_jax.rl.packing import Sequence
from jetrl_jax.rl.scoring import experience
from jetrl_jax.rl.scoring.experience import Experience
from jetrl_jax.rl.settings import AlgorithmConfig


def subtract(
    exp: Experience, batches: list[list[Sequence]], config: AlgorithmConfig
) -> tuple[Experience, list[list[Sequence]]]:
  """Lowers rewards by the KL penalty and computes the advantages again.

  Args:
    exp: a rewarded rollout without the penalty.
    batches: its mini-batches, with old and reference log-probs.
    config: coefficient and estimator.

  Returns:
    (exp, batches) with new rewards and advantages; loss weights stay the same.
  """
  nats_B = np.zeros(len(exp.completions))
  for sequence in (s for batch in batches for s in batch):
    completion = exp.completions[sequence.origin]
    start = len(completion.prompt_tokens)
    # k1 in NumPy, because JAX would compile for every length.
    x_T = sequence.old_logprobs[start:] - sequence.ref_logprobs[start:]
    nats_T = np.clip(x_T, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    nats_B[sequence.origin] = nats_T[completion.sampled].sum(dtype=np.float64)
  penalty_PG = config.kl_reward_coef * nats_B.reshape(exp.rewards_PG.shape)
  rewards_PG = exp.rewards_PG - penalty_PG
  exp = dataclasses.replace(
      exp,
      rewards_PG=rewards_PG,
      kl_penalty_PG=penalty_PG,
      advantages_PG=experience.estimate_advantages(
          rewards_PG, exp.scored_PG, exp.completions, config
      ),
  )
  return exp, [[_with_advantage(s, exp) for s in batch] for batch in batches]


def _with_advantage(sequence: Sequence, exp: Experience) -> Sequence:
  start = len(exp.completions[sequence.origin].prompt_tokens)
  advantages_T = np.zeros_like(sequence.advantages)
  advantages_T[start:] = exp.advantages_PG.reshape(-1)[sequence.origin]
  return dataclasses.replace(sequence, advantages=advantages_T)
