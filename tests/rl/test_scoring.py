"""Answers are scored while others are sampled."""

import time
import types

import numpy as np

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
    with scoring.scorer(prompts, pool, TOKENIZER) as scores:

      def look():
        time.sleep(0.05)  # The GPU's time.
        scored.append(len(scores._scoring.replies))

      completions = tiny_run.fp8_run().rollout(
          num_generations=samples,
          limits=limits,
          should_stop=scores.at_visits(look),
          on_end=scores.add,
      )
      results = scores.results(completions)
  assert [r.score for r in results] == [len(c.tokens) for c in completions]
  assert scored[0] == 0 < scored[-1]
