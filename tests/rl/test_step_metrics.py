"""The numbers of a step, joined."""

import dataclasses

import numpy as np
import pytest

from jetrl_jax.rl import step_metrics
from jetrl_jax.rl.experience import Experience
from jetrl_jax.rl.objective import LossConfig
from jetrl_jax.rl.types import Completion


def _experience() -> Experience:
  """One prompt, two samples of one token each; log mu is -3 and -1."""
  completions = [
      Completion(
          prompt_id=0,
          sample=i,
          prompt_tokens=np.asarray([5, 6], np.int32),
          tokens=np.asarray([7], np.int32),
          log_mu=np.asarray([log_mu], np.float32),
          logprobs=np.asarray([log_mu], np.float32),
          weight_version=np.zeros(1, np.int32),
          finish_reason='stop',
          sampled=np.ones(1, bool),
      )
      for i, log_mu in enumerate((-3.0, -1.0))
  ]
  return Experience(
      prompts=[],
      completions=completions,
      scores_PG=np.asarray([[1.0, 0.0]]),
      rewards_PG=np.asarray([[1.0, 0.0]]),
      accuracy_PG=np.asarray([[1.0, 0.0]]),
      overlong_PG=np.zeros((1, 2)),
      kl_penalty_PG=np.zeros((1, 2)),
      errors={},
      advantages_PG=np.asarray([[1.0, -1.0]]),
  )


@pytest.mark.parametrize(
    'rollout_is, mean',
    [
        # Weights exp(-1 - -3) = e^2 and exp(-1 - -1) = 1.
        ('none', (np.e**2 + 1) / 2),
        ('token', (2.0 + 1) / 2),
    ],
)
def test_importance_weights_are_capped_only_where_the_run_caps_them(
    rollout_is, mean
):
  exp = _experience()
  # The training forward's, of two prompt tokens and the response token.
  scored = {i: np.asarray([0.0, -9.0, -1.0], np.float32) for i in range(2)}
  loss = dataclasses.replace(LossConfig(), rollout_is=rollout_is)
  metrics = step_metrics._mismatch(exp, scored, loss)
  assert metrics['rollout_corr/rollout_is_mean'] == pytest.approx(mean)
  assert metrics['training/mismatch_token_frac'] == 0.5
  # Of what was scored: -1 was sampled with -3 and with -1.
  for i, frac in ((0, 1.0), (1, 0.0)):
    alone = step_metrics._mismatch(exp, {i: scored[i]}, loss)
    assert alone['training/mismatch_token_frac'] == frac
