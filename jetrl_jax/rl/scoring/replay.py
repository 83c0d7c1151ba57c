"""Reads a saved rollout, so that its update can be computed again.

With the checkpoint of the step before, `Learner.learn` on this rollout gives
the next state to the bit. So a step can be studied after the run.
"""

import os

import numpy as np

from jetrl_jax.data import PromptDataset
from jetrl_jax.rl.scoring import experience, store
from jetrl_jax.rl.scoring.experience import Experience
from jetrl_jax.rl.settings import AlgorithmConfig


def load_experience(
    path: str | os.PathLike, data: PromptDataset, config: AlgorithmConfig
) -> Experience:
  """Reads one step's rollout and rewards.

  Args:
    path: `workdir/rollouts/<step>.npz`.
    data: the run's training prompts.
    config: the run's settings; advantages are computed again.

  Returns:
    The experience, without reward errors, which the file does not hold.

  Raises:
    ValueError: the file is damaged, the data lacks one of its prompts, or the
      settings give other advantages than the run had.
  """
  completions, extra = store.load_rollouts(path)
  by_id = {prompt.id: prompt for prompt in data}
  # Prompt by prompt, each with all its samples.
  ids = list(dict.fromkeys(c.prompt_id for c in completions))
  absent = [i for i in ids if i not in by_id]
  if absent:
    raise ValueError(
        f'{path} has prompts {absent[:5]}, which the data lacks; use the'
        " run's own config"
    )
  found = experience.from_scores(
      [by_id[i] for i in ids],
      completions,
      extra['score'],
      extra['accuracy'],
      {},
      config,
  )
  if not np.array_equal(found.advantages_PG.reshape(-1), extra['advantage']):
    raise ValueError(
        f'the advantages in {path} differ from those that'
        f' algorithm.adv_estimator={config.adv_estimator} with'
        f" norm_adv_by_std={config.norm_adv_by_std} gives; use the run's own"
        ' config'
    )
  return found
