"""Responses decoded again, token by token, with every token given."""

import jax
import numpy as np
import pytest

from jetrl_jax.rl.forced_decode import forced_logprobs
from jetrl_jax.rl.policy import PolicyParams
from tests.rl import tiny_run


def _forced(engine, weights=None):
  start = tiny_run.fp8_run().start
  return forced_logprobs(
      engine,
      PolicyParams(weights or start.weights, start.fp8_state),
      tiny_run.completions(),
      temperature=tiny_run.TEMPERATURE,
  )


@pytest.mark.parametrize('engine', ['own', 'wide'])
def test_given_tokens_have_the_log_probs_that_they_were_sampled_with(engine):
  # 24 responses: two fillings of 16 slots, one of 32.
  engines = {'own': tiny_run.fp8_run().engine, 'wide': tiny_run.wide_engine()}
  found = _forced(engines[engine])
  for logprobs, completion in zip(found, tiny_run.completions(), strict=True):
    tiny_run.assert_same_bits(logprobs, completion.logprobs)


def test_other_weights_give_the_same_tokens_other_log_probs():
  start = tiny_run.fp8_run().start
  moved = jax.tree.map(lambda x: x, start.weights)
  scale = moved['final_norm']['scale']
  moved['final_norm'] = {'scale': scale * 2}
  for logprobs, completion in zip(
      _forced(tiny_run.fp8_run().engine, moved),
      tiny_run.completions(),
      strict=True,
  ):
    assert np.any(logprobs != completion.logprobs)
