"""Responses decoded again, token by token, with every token given."""

import dataclasses

import jax
import numpy as np
import pytest

from jetrl_jax.mismatch.forced_decode import forced_logprobs
from jetrl_jax.models.policy import PolicyParams
from tests.rl import tiny_run


def _forced(engine, completions, weights=None):
  start = tiny_run.fp8_run().start
  return forced_logprobs(
      engine,
      PolicyParams(weights or start.weights, start.fp8_state),
      completions,
      temperature=tiny_run.TEMPERATURE,
  )


@pytest.mark.parametrize('engine', ['few_pages', 'wide'])
def test_given_tokens_have_the_log_probs_that_they_were_sampled_with(engine):
  # 24 responses: two fillings of 16 slots, of which three have pages at a time;
  # one of 32.
  engines = {
      'few_pages': tiny_run.small_engine(96),
      'wide': tiny_run.wide_engine(),
  }
  # Last come those of the prompt of one token, here empty.
  completions = [
      c
      if len(c.prompt_tokens) > 1
      else dataclasses.replace(c, tokens=c.tokens[:0], logprobs=c.logprobs[:0])
      for c in reversed(tiny_run.completions())
  ]
  found = _forced(engines[engine], completions)
  for logprobs, completion in zip(found, completions, strict=True):
    tiny_run.assert_same_bits(logprobs, completion.logprobs)


def test_other_weights_give_the_same_tokens_other_log_probs():
  start = tiny_run.fp8_run().start
  moved = jax.tree.map(lambda x: x, start.weights)
  scale = moved['final_norm']['scale']
  moved['final_norm'] = {'scale': scale * 2}
  for logprobs, completion in zip(
      _forced(tiny_run.fp8_run().engine, tiny_run.completions(), moved),
      tiny_run.completions(),
      strict=True,
  ):
    assert np.any(logprobs != completion.logprobs)
