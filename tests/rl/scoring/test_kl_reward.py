"""The KL penalty in the reward."""

import dataclasses

import numpy as np
import pytest

from jetrl_jax.rl.scoring import experience, kl_reward
from jetrl_jax.rl.settings import AlgorithmConfig, OverlongBuffer
from jetrl_jax.rl.types import Completion


def _completion(sample, logprobs, sampled):
  logprobs = np.asarray(logprobs, np.float32)
  return Completion(
      prompt_id=0,
      sample=sample,
      prompt_tokens=np.asarray([5, 6, 7], np.int32),
      tokens=np.arange(len(logprobs), dtype=np.int32),
      log_mu=logprobs,
      logprobs=logprobs,
      weight_version=np.zeros(len(logprobs), np.int32),
      finish_reason='stop',
      sampled=np.asarray(sampled),
  )


# Two answers; the second has an observation in its middle.
_COMPLETIONS = [
    _completion(0, [-1.0, -2.0], [True, True]),
    _completion(1, [-1.0, -9.0, -0.5], [True, False, True]),
]
# By token of the answers: log pi_ref. x = 0.5 + 0.25, and -0.5 + 2 (the
# observation's 9 nats do not count).
_REFERENCE = [[-1.5, -2.25], [-0.5, 0.0, -2.5]]


def _subtracted(scores=(1.0, 0.0), **settings):
  config = AlgorithmConfig(norm_adv_by_std=False, **settings)
  exp = experience.from_scores(
      [None], _COMPLETIONS, np.asarray(scores), np.zeros(2), {}, config
  )
  batches = experience.mini_batches(
      exp, config, mini_batch_size=1, max_response_length=4
  )
  batches = [
      [
          dataclasses.replace(
              s,
              ref_logprobs=np.asarray(
                  [0.0, 0.0, 0.0, *_REFERENCE[s.origin]], np.float32
              ),
              # pi_old may be computed again: the rollout's is not read.
              rollout_logprobs=s.rollout_logprobs - 1,
          )
          for s in batch
      ]
      for batch in batches
  ]
  return exp, batches, *kl_reward.subtract(exp, batches, config)


def test_the_reward_is_the_score_less_k1_summed_over_sampled_tokens():
  before, _, after, batches = _subtracted(kl_reward_coef=0.1)
  np.testing.assert_allclose(after.kl_penalty_PG, [[0.075, 0.15]], rtol=1e-6)
  np.testing.assert_allclose(after.rewards_PG, [[0.925, -0.15]], rtol=1e-6)
  # Half the difference of the two rewards, above and below their mean.
  np.testing.assert_allclose(
      after.advantages_PG, [[0.5375, -0.5375]], rtol=1e-6
  )
  np.testing.assert_array_equal(after.scores_PG, before.scores_PG)
  metrics = experience.experience_metrics(
      dataclasses.replace(after, prompts=[_COMPLETIONS[0]])
  )
  assert metrics['critic/kl_penalty/mean'] == pytest.approx(0.1125)
  assert 'critic/overlong_penalty/mean' not in metrics
  ((first, second),) = batches
  for sequence, advantage in ((first, 0.5375), (second, -0.5375)):
    np.testing.assert_array_equal(sequence.advantages[:3], 0)
    np.testing.assert_allclose(sequence.advantages[3:], advantage, rtol=1e-6)


def test_the_penalty_comes_on_top_of_that_for_length():
  buffer = OverlongBuffer(enable=True, len=2, max_response_length=4)
  _, _, after, _ = _subtracted(kl_reward_coef=0.1, overlong_buffer=buffer)
  # The second answer has one token of the two that are punished.
  np.testing.assert_allclose(after.rewards_PG, [[0.925, -0.65]], rtol=1e-6)


def test_an_answer_without_a_score_stays_without_an_advantage():
  _, _, after, _ = _subtracted(scores=(1.0, np.nan), kl_reward_coef=0.1)
  np.testing.assert_array_equal(after.advantages_PG, [[0.0, 0.0]])


def test_a_policy_that_is_the_reference_loses_nothing():
  config = AlgorithmConfig(kl_reward_coef=0.5)
  exp, batches, _, _ = _subtracted(kl_reward_coef=0.5)
  batches = [
      [dataclasses.replace(s, ref_logprobs=s.old_logprobs) for s in batch]
      for batch in batches
  ]
  after, _ = kl_reward.subtract(exp, batches, config)
  np.testing.assert_array_equal(after.kl_penalty_PG, 0)
  np.testing.assert_array_equal(after.rewards_PG, exp.rewards_PG)


def test_a_token_that_the_reference_would_hardly_have_drawn_costs_20_nats():
  config = AlgorithmConfig(kl_reward_coef=0.5)
  exp, batches, _, _ = _subtracted(kl_reward_coef=0.5)
  batches = [
      [dataclasses.replace(s, ref_logprobs=s.old_logprobs - 99) for s in batch]
      for batch in batches
  ]
  after, _ = kl_reward.subtract(exp, batches, config)
  # Two sampled tokens in each answer.
  np.testing.assert_array_equal(after.kl_penalty_PG, [[20.0, 20.0]])


def test_nothing_but_advantages_changes_in_the_sequences():
  _, batches, _, after = _subtracted(kl_reward_coef=0.1)
  for old, new in zip(batches[0], after[0], strict=True):
    for field in dataclasses.fields(old):
      if field.name != 'advantages':
        np.testing.assert_array_equal(
            getattr(old, field.name), getattr(new, field.name)
        )


def test_a_negative_coefficient_is_refused():
  with pytest.raises(ValueError, match='kl_reward_coef is -1.0; it must be'):
    AlgorithmConfig(kl_reward_coef=-1.0)
