"""Answers are scored while others are sampled."""

import time
import types

import numpy as np
import pytest

from jetrl_jax.rl import scoring
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

    def look():
      time.sleep(0.05)  # The GPU's time.
      scored.append(len(scores._scoring.replies))

    with scoring.scorer(prompts, pool, TOKENIZER, look) as scores:
      completions = tiny_run.fp8_run().rollout(
          num_generations=samples,
          limits=limits,
          should_stop=scores.visit,
          on_end=scores.add,
      )
      results = scores.results(completions)
  assert [r.score for r in results] == [len(c.tokens) for c in completions]
  assert scored[0] == 0 < scored[-1]


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
      with scoring.scorer(tiny_run.prompts(), pool, TOKENIZER, stop) as scores:
        for completion in completions:
          scores.add(completion)
        scores.results(completions)
  assert len(scores._scoring.replies) < 4
