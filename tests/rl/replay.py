"""Reads a saved rollout, so that its update can be computed again."""

import numpy as np

from jetrl_jax.rl.scoring import experience, store


def load_experience(path, data, config) -> experience.Experience:
  """Returns the experience of `workdir/rollouts/<step>.npz`."""
  completions, extra = store.load_rollouts(path)
  by_id = {prompt.id: prompt for prompt in data}
  # Prompt by prompt, each with all its samples.
  ids = dict.fromkeys(c.prompt_id for c in completions)
  found = experience.from_scores(
      [by_id[i] for i in ids],
      completions,
      extra['score'],
      extra['accuracy'],
      {},
      config,
  )
  np.testing.assert_array_equal(
      found.advantages_PG.reshape(-1), extra['advantage']
  )
  return found
