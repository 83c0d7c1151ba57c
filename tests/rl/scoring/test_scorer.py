"""Answers are scored while others are sampled."""

import dataclasses
import time
import types

import numpy as np
import pytest

from jetrl_jax.rewards import RewardResult, RewardSpec
from jetrl_jax.rl.scoring import scorer
from jetrl_jax.rl.types import EpisodeResult
from tests.rewards.pools import custom, new_pool
from tests.rl import tiny_run

# A text says how long it is.
TOKENIZER = types.SimpleNamespace(
    eos_ids=(), decode=lambda tokens: 'x' * len(tokens)
)


def test_answers_that_ended_are_scored_before_the_last_has_ended():
  prompts = tiny_run.prompts()
  samples = 3 * tiny_run.SAMPLES  # In several waves, and so many visits.
  shape = len(prompts), samples
  limits = 1 + np.arange(np.prod(shape)).reshape(shape) % 12
  length = custom('with_kwargs', kwargs={'penalty': 1.0})
  scored = []
  with new_pool(length, timeout_s=60) as pool:
    with scorer.scorer(prompts, pool, TOKENIZER) as scores:

      def visit():
        scores.visit()
        while scores._ended and not scores._scoring.replies:
          time.sleep(0.01)  # The GPU's time.
          scores.visit()
        scored.append(len(scores._scoring.replies))

      completions = tiny_run.fp8_run().rollout(
          num_generations=samples,
          limits=limits,
          should_stop=visit,
          on_end=scores.add,
      )
      assert scored[0] == 0 < scored[-1]
      results = scores.results(completions)
  assert [r.score for r in results] == [len(c.tokens) for c in completions]


def test_functions_see_the_prompt_of_the_answer_with_all_that_it_has(tmp_path):
  path = tmp_path / 'rewards.py'
  path.write_text(
      'def trl(prompts, completions, answer, level, completion_ids):\n'
      '  assert len(completion_ids[0]) == len(completions[0])\n'
      '  return [float(prompts[0] + answer[0]) + level[0]]\n'
      'def verl(data_source, solution_str, ground_truth, extra_info):\n'
      '  return float(data_source)\n'
  )
  prompts = [
      dataclasses.replace(
          prompt,
          text=str(i),
          answer='7',
          source=f'{i}00',
          extra={'level': i / 4},
      )
      for i, prompt in enumerate(tiny_run.prompts()[:2], start=1)
  ]
  functions = [RewardSpec(function=f'{path}:{f}') for f in ('trl', 'verl')]
  first, last = (tiny_run.completions()[i] for i in (0, tiny_run.SAMPLES))
  assert [first.prompt_id, last.prompt_id] == [p.id for p in prompts]
  with new_pool(*functions, timeout_s=60) as pool:
    with scorer.scorer(prompts, pool, TOKENIZER) as scores:
      scores.add(last)
      scores.add(first)
      results = scores.results([first, last])
  assert [r.score for r in results] == [117.25, 227.5]


def test_a_stop_is_heard_while_the_last_answers_are_scored():
  class Stop(Exception):
    pass

  def stop():
    if time.monotonic() > start + 0.2:
      raise Stop

  completions = tiny_run.completions()[:4]
  slow = custom('sleeps')
  with new_pool(slow, timeout_s=60) as pool:
    start = time.monotonic()
    with pytest.raises(Stop):
      with scorer.scorer(tiny_run.prompts(), pool, TOKENIZER, stop) as scores:
        for completion in completions:
          scores.add(completion)
        scores.results(completions)
  assert len(scores._scoring.replies) < 4


def test_an_episode_brings_its_own_reward_accuracy_and_error():
  completions = [
      dataclasses.replace(
          completion,
          episode=EpisodeResult(
              reward=reward, accuracy=accuracy, turns=1, error=error
          ),
      )
      for completion, (reward, accuracy, error) in zip(
          tiny_run.completions(),
          [(3.0, 0.5, None), (0.0, 0.0, 'environment_timeout')],
          strict=False,
      )
  ]
  with scorer.scorer(tiny_run.prompts(), None, TOKENIZER) as scores:
    found = scores.results(completions)
  assert [(r.score, r.accuracy, r.error) for r in found] == [
      (3.0, 0.5, None),
      (0.0, 0.0, 'environment_timeout'),
  ]


def test_a_visit_hears_a_stop_with_and_without_workers():
  class Stop(Exception):
    pass

  def stop():
    raise Stop

  with new_pool(custom('with_kwargs')) as pool:
    for workers in (pool, None):
      with scorer.scorer([], workers, TOKENIZER, stop) as scores:
        with pytest.raises(Stop):
          scores.visit()


def _result(prediction: str, error: str | None = None) -> RewardResult:
  return RewardResult(
      score=0.0, accuracy=0.0, parts={}, prediction=prediction, error=error
  )


def test_answers_without_a_final_answer_are_known_where_one_is_read():
  results = [_result(''), _result('7'), _result('', 'timeout')]
  none, some = results[:1], results
  with new_pool(RewardSpec(function='gsm8k')) as pool:
    assert scorer.without_answer(none, pool) == none
    assert scorer.without_answer(some, pool) == none
  with new_pool(custom('with_kwargs')) as pool:
    # A function of one's own may read one, and then says so somewhere.
    assert scorer.without_answer(none, pool) == []
    assert scorer.without_answer(some, pool) == none
  assert scorer.without_answer(none, None) == []
