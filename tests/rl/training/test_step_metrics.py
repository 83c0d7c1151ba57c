"""The numbers of a step, joined."""

import dataclasses

import numpy as np
import pytest

from jetrl_jax.fp8 import scaling_state
from jetrl_jax.metrics.timer import Timer
from jetrl_jax.metrics.writer import Mean
from jetrl_jax.optim.apply import UpdateInfo
from jetrl_jax.rl.objective import LossConfig
from jetrl_jax.rl.scoring.experience import Experience
from jetrl_jax.rl.training import step_metrics
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


def _update(norm, lr, applied, changed, **metrics):
  return UpdateInfo(
      grad_norm=np.float32(norm),
      lr=np.float32(lr),
      applied=np.asarray(applied),
      changed_bytes=changed,
      metrics=metrics,
  )


def test_the_numbers_of_two_updates_by_hand():
  changed = {'layers_0': {'attn': {'o': {'kernel': np.float32(0.5)}}}}
  found = step_metrics.update_metrics(
      [
          # Averages by tokens: 3 tokens of 2 and 1 of 6.
          _update(1.0, 0.25, True, {}, kl=Mean(sum=6.0, weight=3.0)),
          _update(
              3.0,
              0.5,
              False,
              changed | {'lm_head': {'kernel': np.float32(0.25)}},
              kl=Mean(sum=6.0, weight=1.0),
              none=Mean(sum=0.0, weight=0.0),
          ),
      ]
  )
  assert found == {
      'kl': 3.0,
      'actor/grad_norm': 2.0,
      'actor/lr': 0.5,
      'training/updates': 1,
      'training/skipped_updates': 1,
      'fp8/changed_weight_bytes/mean': 0.375,
      'fp8/changed_weight_bytes/min': 0.25,
      'fp8_changed_weight_bytes': {'layers_0/attn/o': 0.5, 'lm_head': 0.25},
  }


def test_without_fp8_there_is_no_word_of_it():
  assert step_metrics._health({}, scaling_state.OPERANDS) == {}
  found = step_metrics.update_metrics([_update(1.0, 0.25, True, {})])
  assert not any(name.startswith('fp8') for name in found)


class _Timer(Timer):
  """A step of 10 seconds, 4 of them spent generating."""

  def elapsed(self) -> float:
    return 10.0

  def seconds(self, phase: str) -> float:
    return {'gen': 4.0}[phase]


def test_throughput_counts_what_was_learnt_and_what_was_generated():
  kept = _experience().completions
  # Dynamic sampling drew three times as many answers as it kept.
  found = step_metrics.throughput(kept, 3 * kept, _Timer(), 2)
  # Two answers of one token, each after two prompt tokens.
  assert found['perf/total_num_tokens'] == 6
  assert found['perf/throughput'] == 6 / 10 / 2
  assert found['perf/rollout_throughput'] == 6 / 4 / 2
  # In GiB: this process holds libraries of some hundred MiB.
  assert 0.1 < found['perf/cpu_memory_used_gb'] < 100
