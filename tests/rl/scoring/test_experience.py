"""From completions to weighted sequences, and their metrics, by hand."""

import dataclasses
import types
from typing import Any

import numpy as np
import pytest

from jetrl_jax.data import Prompt
from jetrl_jax.rl.scoring import experience
from jetrl_jax.rl.settings import AlgorithmConfig, OverlongBuffer
from jetrl_jax.rl.types import Completion, EpisodeResult

# Two answers to each of three prompts; prompt p has p + 1 tokens.
_LENGTHS = [1, 3, 2, 4, 4, 2]
_REASONS = ['stop', 'stop', 'stop', 'length', 'length', 'stop']
_SCORES = [1.0, 0.0, 0.5, 0.5, 0.0, 2.0]
_CONFIG = AlgorithmConfig(adv_estimator='dr_grpo')


def _prompts() -> list[Prompt]:
  return [
      Prompt(
          id=p,
          tokens=np.full(p + 1, 5, np.int32),
          text='',
          answer='',
          source='',
          extra={},
      )
      for p in range(3)
  ]


def _completions() -> list[Completion]:
  return [
      Completion(
          prompt_id=i // 2,
          sample=i % 2,
          prompt_tokens=np.full(i // 2 + 1, 5, np.int32),
          tokens=np.full(length, 7, np.int32),
          log_mu=np.zeros(length, np.float32),
          logprobs=np.zeros(length, np.float32),
          weight_version=np.zeros(length, np.int32),
          finish_reason=reason,
          sampled=np.ones(length, bool),
      )
      for i, (length, reason) in enumerate(zip(_LENGTHS, _REASONS, strict=True))
  ]


def _experience(config=_CONFIG, completions=None):
  return experience.from_scores(
      _prompts(),
      completions or _completions(),
      np.asarray(_SCORES),
      np.asarray([1, 0, 1, 1, 0, 0]),
      {'timeout': 2},
      config,
  )


def test_the_metrics_of_a_rollout_by_hand():
  assert experience.experience_metrics(_experience()) == {
      'critic/acc/mean': 0.5,
      'critic/score/mean': pytest.approx(4 / 6),
      'critic/score/max': 2.0,
      'critic/score/min': 0.0,
      'critic/rewards/mean': pytest.approx(4 / 6),
      'critic/rewards/max': 2.0,
      'critic/rewards/min': 0.0,
      # +-1/2, 0 and 0, -+1.
      'critic/advantages/mean': 0.0,
      'critic/advantages/max': 1.0,
      'critic/advantages/min': -1.0,
      'critic/advantages/std': pytest.approx((2.5 / 6) ** 0.5),
      'critic/mixed_group_frac': pytest.approx(2 / 3),
      'alarm/swapped': 0,
      'response_length/mean': pytest.approx(16 / 6),
      'response_length/max': 4.0,
      'response_length/min': 1.0,
      'response_length/clip_ratio': pytest.approx(2 / 6),
      'prompt_length/mean': 2.0,
      'prompt_length/max': 3.0,
      'prompt_length/min': 1.0,
      'reward/timeout': 2,
  }


def test_the_metrics_of_the_overlong_penalty_by_hand():
  # From 2 tokens on, 1/2 per token: 0, -1/2, 0, -1, -1, 0.
  buffer = OverlongBuffer(
      enable=True, len=2, max_response_length=4, penalty_factor=1.0
  )
  config = dataclasses.replace(_CONFIG, overlong_buffer=buffer)
  found = experience.experience_metrics(_experience(config))
  assert found['critic/overlong_penalty/mean'] == pytest.approx(-2.5 / 6)
  assert found['critic/overlong_penalty/frac'] == 0.5
  assert found['critic/rewards/mean'] == pytest.approx(1.5 / 6)
  # What the functions said, without the penalty.
  assert found['critic/score/mean'] == pytest.approx(4 / 6)


def test_the_metrics_of_episodes_by_hand():
  # The second one saw two observed tokens of its three; the last met a limit.
  completions = [
      dataclasses.replace(
          c,
          sampled=np.arange(len(c.tokens)) < (1 if i == 1 else 9),
          finish_reason='turns' if i == 5 else c.finish_reason,
          episode=EpisodeResult(reward=0, accuracy=0, turns=i + 1, error=None),
      )
      for i, c in enumerate(_completions())
  ]
  found = experience.experience_metrics(_experience(completions=completions))
  assert found['num_turns/mean'] == 3.5
  assert (found['num_turns/min'], found['num_turns/max']) == (1, 6)
  assert found['environment/observation_frac'] == 2 / 16
  assert found['environment/turn_limit_frac'] == 1 / 6
  # That limit is no length: the answers that were cut are those of before.
  assert found['response_length/clip_ratio'] == pytest.approx(2 / 6)
  joined = experience.join_sampled(
      completions, (np.arange(len(c.tokens)) for c in completions)
  )
  assert joined.tolist() == [0, 0, *range(2), *range(4), *range(4), *range(2)]


def test_a_group_is_mixed_by_the_answers_that_have_a_score():
  # Two prompts of three answers: one without a score, and all of them.
  scores = np.asarray([1.0, 0.0, *[np.nan] * 4])
  exp = experience.from_scores(
      _prompts()[:2], _completions(), scores, scores, {}, _CONFIG
  )
  found = experience.experience_metrics(exp)
  assert found['critic/mixed_group_frac'] == 1 / 2


def test_advantages_are_divided_by_the_std_where_the_config_says_so():
  for norm in (True, False):
    config = AlgorithmConfig(adv_estimator='grpo', norm_adv_by_std=norm)
    last = _experience(config).advantages_PG[2]
    # Scores 0 and 2: deviations of 1, and a sample std of sqrt(2).
    size = 0.5**0.5 if norm else 1.0
    np.testing.assert_allclose(last, [-size, size], rtol=1e-5)


def test_a_response_is_read_without_its_stop_token():
  tokenizer: Any = types.SimpleNamespace(
      eos_ids=(2, 9), decode=lambda tokens: tokens.tolist()
  )
  completion = _completions()[0]
  for tokens, text in (
      ([7, 2], [7]),
      ([7, 8], [7, 8]),
      ([2, 7], [2, 7]),
      # One token ends an answer; what stands before it is its own.
      ([9, 2], [9]),
      ([2], []),
      ([], []),
  ):
    completion = dataclasses.replace(
        completion, tokens=np.asarray(tokens, np.int32)
    )
    assert experience.response_text(completion, tokenizer) == text


def test_mini_batches_are_whole_groups_with_weights_of_their_own():
  exp = _experience()
  first, second = experience.mini_batches(
      exp, _CONFIG, mini_batch_size=2, max_response_length=4
  )
  assert [s.origin for s in first] == [0, 1, 2, 3]
  # Three prompts in mini-batches of two: the last one has the rest.
  assert [s.origin for s in second] == [4, 5]
  # 'token-mean': 1 + 3 + 2 + 4 tokens, and 4 + 2.
  for batch, tokens in ((first, 10), (second, 6)):
    for s in batch:
      prompt = len(exp.completions[s.origin].prompt_tokens)
      assert not s.loss_weight[:prompt].any()
      np.testing.assert_allclose(s.loss_weight[prompt:], 1 / tokens, 1e-6)
      advantage = exp.advantages_PG.reshape(-1)[s.origin]
      np.testing.assert_array_equal(s.advantages[prompt:], advantage)


@pytest.mark.parametrize('factor, weight', [(None, 1 / 8), (2.0, 1 / 4)])
def test_the_constant_divisor_is_the_longest_response_by_default(
    factor, weight
):
  config = dataclasses.replace(
      _CONFIG,
      loss_agg_mode='seq-mean-token-sum-norm',
      loss_scale_factor=factor,
  )
  (one, _), *_ = experience.mini_batches(
      _experience(config), config, mini_batch_size=1, max_response_length=4
  )
  # Two sequences times the divisor.
  assert one.loss_weight[-1] == weight


def test_a_truncated_answer_that_is_masked_counts_no_tokens():
  config = dataclasses.replace(_CONFIG, mask_truncated_completions=True)
  _, (cut, whole), _ = experience.mini_batches(
      _experience(config), config, mini_batch_size=1, max_response_length=4
  )[:3]
  assert whole.loss_weight[-1] == 0 and cut.loss_weight[-1] == 1 / 2
  # Out of the mask too, or it would count in the means of metrics.
  assert not whole.loss_mask.any() and cut.loss_mask.sum() == 2
  # Nor does it count in whitening: 1 + 3 + 2 + 2 tokens, not 16.
  config = dataclasses.replace(
      config, adv_estimator='reinforce_plus_plus_baseline'
  )
  exp = _experience(config)
  counted = np.repeat(exp.advantages_PG.reshape(-1), [1, 3, 2, 0, 0, 2])
  np.testing.assert_allclose(counted.mean(), 0.0, atol=1e-6)


def test_an_answer_without_a_score_teaches_nothing_and_counts_nowhere():
  config = dataclasses.replace(_CONFIG, loss_agg_mode='token-mean')
  scores = [1.0, 0.0, np.nan, 0.5, 3.0, np.nan]
  exp = experience.from_scores(
      _prompts(),
      _completions(),
      np.asarray(scores),
      np.asarray([1, 0, np.nan, 1, 0, np.nan]),
      {'unscored': 2},
      config,
  )
  np.testing.assert_array_equal(
      exp.advantages_PG, [[0.5, -0.5], [0, 0], [0, 0]]
  )
  first, second = experience.mini_batches(
      exp, config, mini_batch_size=2, max_response_length=4
  )
  # Tokens of 1 + 3 + 4 and of 4: those without a score are not in the loss.
  for batch, tokens in ((first, 8), (second, 4)):
    for s in batch:
      scored = not np.isnan(scores[s.origin])
      assert s.loss_mask.any() == scored
      assert s.loss_weight[-1] == (np.float32(1 / tokens) if scored else 0)
  found = experience.experience_metrics(exp)
  assert found['critic/acc/mean'] == 0.5
  assert found['critic/score/mean'] == 4.5 / 4
  assert found['critic/rewards/mean'] == 4.5 / 4
  assert found['critic/rewards/max'] == 3.0
  std = pytest.approx(np.std([0.5, -0.5, 0, 0]), 1e-6)
  assert found['critic/advantages/std'] == std
  assert found['critic/mixed_group_frac'] == 1 / 3
  assert found['reward/unscored'] == 2


def test_each_reward_function_has_a_mean_over_what_it_applied_to():
  parts = {
      'math': np.asarray([1, 0, 1, 1, 0, 0]),
      'length': np.asarray([np.nan, 3.0, np.nan, 4.0, np.nan, 2.0]),
      'nowhere': np.full(6, np.nan),
  }
  exp = experience.from_scores(
      _prompts(),
      _completions(),
      np.asarray(_SCORES),
      np.zeros(6),
      {},
      _CONFIG,
      parts,
  )
  found = experience.experience_metrics(exp)
  assert found['rewards/math/mean'] == 0.5
  assert found['rewards/length/mean'] == 3.0
  assert 'rewards/nowhere/mean' not in found


def test_a_rollout_without_any_score_has_no_metrics_of_scores():
  nothing = np.full(6, np.nan)
  exp = experience.from_scores(
      _prompts(), _completions(), nothing, nothing, {'unscored': 6}, _CONFIG
  )
  assert not exp.advantages_PG.any()
  found = experience.experience_metrics(exp)
  assert not [name for name in found if name.startswith('critic/')]
  assert found['response_length/max'] == 4.0


@pytest.mark.parametrize(
    ('scores', 'accuracy', 'may_be'),
    [
        ([0, 1, 1, 0], [0, 1, 1, 0], False),
        # The reward is shaped, the accuracy is none.
        ([0.1, 0.9, 1.0, 0.0], [0, 1, 1, 0], False),
        ([0, 1, 1, 0], [0.1, 0.9, 1.0, 0.0], True),
        # All tests passed, beside the share of them.
        ([0, 1, 0, 0], [0.5, 1.0, 0.75, 0.0], False),
        # A score of its own kind, not an accuracy.
        ([0.5, 1, 0, 0], [0.5, 0.9, 0.75, 0.0], False),
    ],
)
def test_a_reward_whose_score_and_accuracy_look_swapped(
    scores, accuracy, may_be
):
  two = _prompts()[:2]
  made = experience.from_scores(
      two, _completions()[:4], np.asarray(scores), accuracy, {}, _CONFIG
  )
  assert experience.experience_metrics(made)['alarm/swapped'] == may_be
