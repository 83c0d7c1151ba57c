"""Tests of what the engine samples from, and of its log mu."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np

from jetrl_jax.core import rng
from jetrl_jax.rl.rollout import decode_step
from jetrl_jax.rl.rollout.engine import Engine
from tests.rl import tiny_run, tiny_updates


@functools.cache
def _truncated():
  """Completions of top-k 12, then top-p 0.9, then min-p 0.1; no stop ids."""
  run = tiny_run.fp8_run()
  config = tiny_run.engine_config(top_k=12, top_p=0.9, min_p=0.1, stop_ids=())
  engine = Engine(run.policy, config, run.mesh)
  samples = run.rollout(engine=engine)
  greedy = run.rollout(engine=engine, temperature=0.0, num_generations=1)
  return samples, greedy


def _state(**changes):
  """What `sample` reads of 16 slots, of which every second is greedy."""
  none = jnp.zeros(16, jnp.int32)
  fields = dict(
      address=jnp.zeros((16, 2), jnp.uint32),
      emitted=none,
      given=none,
      tokens=jnp.zeros((16, 4), jnp.int32),
      temperature=jnp.asarray([0.0, 1.0] * 8),
  )
  return types.SimpleNamespace(**(fields | changes))


def test_no_stop_ids_means_that_only_limits_stop():
  longest = tiny_run.engine_config().max_response_length
  for found in _truncated():
    assert {c.finish_reason for c in found} == {'length'}
    assert {len(c.tokens) for c in found} == {longest}


def test_truncated_log_probs_are_still_those_of_the_whole_vocabulary():
  samples, _ = _truncated()
  run = tiny_run.fp8_run()
  for batch in tiny_updates.batches(samples):
    scored = [run.score(run.start, batch)]
    assert tiny_updates.mismatched([batch], scored)[0] == 0


def test_log_mu_is_of_the_truncated_distribution():
  samples, _ = _truncated()
  run = tiny_run.fp8_run()
  sizes = set()
  for c in samples[:: tiny_run.SAMPLES]:
    for t in range(min(2, len(c.tokens))):
      context = np.concatenate([c.prompt_tokens, c.tokens[:t]])
      logprobs_V = tiny_updates.next_logprobs(
          run, run.start, context, tiny_run.TEMPERATURE
      ).astype(np.float64)
      p_V = np.exp(logprobs_V)
      order = np.argsort(-p_V, kind='stable')[:12]
      before = np.cumsum(p_V[order]) - p_V[order]
      order = order[before < 0.9 * p_V[order].sum()]
      order = order[p_V[order] >= 0.1 * p_V[order[0]]]
      assert c.tokens[t] in order
      # Float32 sums of at most 12 terms, of logits below 16.
      expected = logprobs_V[c.tokens[t]] - np.log(p_V[order].sum())
      np.testing.assert_allclose(c.log_mu[t], expected, atol=1e-5)
      assert c.log_mu[t] > c.logprobs[t]
      sizes.add(len(order))
  # Some rows were cut by more than top-k.
  assert min(sizes) < 12


def test_a_top_k_of_the_whole_vocabulary_leaves_log_mu_the_policys():
  logits_BV = jax.random.normal(jax.random.key(0), (16, 30))
  state = _state(temperature=jnp.ones(16))
  config = tiny_run.engine_config(top_k=30)
  key = rng.key(0, rng.ROLLOUT, 0)
  policy = tiny_run.policy()
  _, log_mu, logprob, _ = decode_step.sample(
      policy, config, state, logits_BV, key
  )
  np.testing.assert_array_equal(log_mu, logprob)


def test_a_given_token_has_log_pi_as_its_log_mu_whatever_is_cut():
  logits_BV = jax.random.normal(jax.random.key(0), (16, 30))
  state = _state(
      given=jnp.ones(16, jnp.int32), tokens=jnp.full((16, 4), 7, jnp.int32)
  )
  config = tiny_run.engine_config(top_k=1)
  policy = tiny_run.policy()

  @jax.jit
  def sample(logits_BV, key):
    return decode_step.sample(policy, config, state, logits_BV, key)

  key = rng.key(0, rng.ROLLOUT, 0)
  token, log_mu, logprob, is_given = sample(logits_BV, key)
  # Not -inf, although 7 is seldom the first.
  assert (np.asarray(token) == 7).all() and np.asarray(is_given).all()
  np.testing.assert_array_equal(log_mu, logprob)
  assert np.isfinite(log_mu).all()


def test_a_greedy_slot_asks_no_top_p_of_its_own():
  logits_BV = jax.random.normal(jax.random.key(0), (16, 30))
  state = _state()
  policy, config = tiny_run.policy(), tiny_run.engine_config()

  @jax.jit
  def sample(logits_BV, key, top_p_B):
    return decode_step.sample(policy, config, state, logits_BV, key, top_p_B)

  key = rng.key(0, rng.ROLLOUT, 0)
  token, log_mu, *_ = sample(logits_BV, key, jnp.full(16, 0.5))
  greedy = np.arange(16) % 2 == 0
  np.testing.assert_array_equal(
      np.asarray(token)[greedy], np.argmax(logits_BV, axis=1)[greedy]
  )
  # It is sure of its token, and the others are not.
  assert not np.asarray(log_mu)[greedy].any()
  assert (np.asarray(log_mu)[~greedy] < 0).all()


def test_greedy_does_not_ask_the_truncation():
  _, greedy = _truncated()
  plain = tiny_run.fp8_run().rollout(temperature=0.0, num_generations=1)
  for a, b in zip(greedy, plain, strict=True):
    # Where the plain one stops, this one goes on: it has no stop ids.
    length = len(b.tokens)
    assert a.tokens[:length].tolist() == b.tokens.tolist()
    np.testing.assert_array_equal(a.logprobs[:length], b.logprobs)
    assert not a.log_mu.any()
