"""Tests of the rollout: the same bits as training, whatever the batching."""

import copy
import dataclasses
import importlib
import itertools

import jax
import numpy as np
import pytest

from jetrl_jax.core import rng
from jetrl_jax.core.compilation import exact_jit
from jetrl_jax.models.policy import PolicyParams
from jetrl_jax.rl import mismatch
from jetrl_jax.rl.rollout import decode_step
from jetrl_jax.rl.rollout.engine import Engine
from tests.rl import tiny_run, tiny_updates

RECIPES = ['fp8', 'bf16']


def assert_same(found, expected):
  assert len(found) == len(expected)
  for a, b in zip(found, expected, strict=True):
    assert (a.prompt_id, a.sample) == (b.prompt_id, b.sample)
    assert a.finish_reason == b.finish_reason
    for name in ('prompt_tokens', 'tokens', 'log_mu', 'logprobs'):
      one, other = getattr(a, name), getattr(b, name)
      assert one.dtype == other.dtype
      np.testing.assert_array_equal(tiny_run.bits(one), tiny_run.bits(other))


@pytest.mark.parametrize('recipe', RECIPES)
def test_rollout_score_and_accumulate_agree_to_the_bit_over_three_updates(
    recipe,
):
  for update in tiny_updates.updates(recipe):
    differ, tokens = tiny_updates.mismatched(update.batches, update.logprobs)
    assert (differ, tokens >= 100) == (0, True)
    differ, _ = tiny_updates.mismatched(update.batches, update.scores)
    assert differ == 0


@pytest.mark.parametrize('recipe', RECIPES)
def test_the_weights_that_agree_do_change(recipe):
  for update in tiny_updates.updates(recipe):
    before = jax.tree.leaves(update.before.weights['layers_0'])
    after = jax.tree.leaves(update.after.weights['layers_0'])
    for old, new in zip(before, after, strict=True):
      if old.ndim == 2:
        assert np.mean(tiny_run.bits(old) != tiny_run.bits(new)) > 0.01
  assert bool(update.info.applied)


def test_the_share_of_changed_bytes_is_what_the_update_reports():
  for update in tiny_updates.updates('fp8'):
    reported = update.info.changed_bytes['layers_0']['mlp']['down']['kernel']
    old, new = (
        s.weights['layers_0']['mlp']['down']['kernel'].values
        for s in (update.before, update.after)
    )
    share = np.mean(tiny_run.bits(old) != tiny_run.bits(new))
    np.testing.assert_allclose(float(reported), share, rtol=1e-6)
    assert share > 0.01


def test_a_planted_ulp_shows_as_one_token_of_mismatch():
  update = tiny_updates.updates('fp8')[0]
  mask = [b.loss_mask > 0 for b in update.batches]
  rollout = np.concatenate(
      [b.rollout_logprobs[m] for b, m in zip(update.batches, mask, strict=True)]
  )
  train = np.concatenate(
      [x[m] for x, m in zip(update.logprobs, mask, strict=True)]
  )
  assert mismatch.mismatch_token_frac(rollout, train) == 0.0
  rollout[7] = np.nextafter(rollout[7], np.float32(0))
  assert mismatch.mismatch_token_frac(rollout, train) == 1 / len(rollout)


def test_slots_and_steps_per_visit_change_no_bit():
  run, wide = tiny_run.fp8_run(), tiny_run.wide_engine()
  assert wide.num_slots == 2 * run.engine.num_slots
  assert_same(run.rollout(engine=wide), tiny_run.completions())


def test_the_order_of_prompts_changes_no_bit():
  prompts = tiny_run.prompts()
  order = [4, 0, 5, 2, 1, 3]
  found = tiny_run.fp8_run().rollout(prompts=[prompts[i] for i in order])
  expected = tiny_run.completions()
  samples = tiny_run.SAMPLES
  assert_same(
      found,
      [expected[i * samples + g] for i in order for g in range(samples)],
  )


def test_company_changes_no_bit():
  prompts = tiny_run.prompts()
  expected = tiny_run.completions()
  for i, prompt in enumerate(prompts):
    # Alone, a short prompt is prefilled in the short bucket.
    found = tiny_run.fp8_run().rollout(prompts=[prompt])
    assert_same(found, expected[i * tiny_run.SAMPLES :][: tiny_run.SAMPLES])


def test_fewer_samples_are_the_first_of_more():
  found = tiny_run.fp8_run().rollout(num_generations=1)
  assert_same(found, tiny_run.completions()[:: tiny_run.SAMPLES])


def test_a_prompt_of_one_token_is_answered_by_the_model():
  run, (completion, *_) = tiny_run.fp8_run(), tiny_run.completions()
  assert len(completion.prompt_tokens) == 1
  logprobs_V = tiny_updates.next_logprobs(
      run, run.start, completion.prompt_tokens, tiny_run.TEMPERATURE
  )
  # The vocabulary's probabilities add up to 1; float32 sums of 64 terms.
  assert abs(np.exp(logprobs_V.astype(np.float64)).sum() - 1) < 1e-5
  first = completion.tokens[0]
  assert tiny_run.bits(logprobs_V[first : first + 1]).tolist() == (
      tiny_run.bits(completion.logprobs[:1]).tolist()
  )


def test_samples_of_one_prompt_differ():
  completions = tiny_run.completions()
  for i in range(0, len(completions), tiny_run.SAMPLES):
    group = completions[i : i + tiny_run.SAMPLES]
    assert len({c.tokens.tobytes() for c in group}) == tiny_run.SAMPLES


def test_prompts_of_equal_tokens_are_sampled_apart():
  prompt = tiny_run.prompts()[2]
  twins = [prompt, dataclasses.replace(prompt, id=prompt.id + 1)]
  found = tiny_run.fp8_run().rollout(prompts=twins)
  assert found[0].tokens.tolist() != found[tiny_run.SAMPLES].tokens.tolist()


def test_another_step_samples_other_tokens():
  other = tiny_run.fp8_run().rollout(key_step=1)
  pairs = zip(other, tiny_run.completions(), strict=True)
  assert any(a.tokens.tolist() != b.tokens.tolist() for a, b in pairs)


def test_the_same_key_samples_the_same_bits():
  assert_same(tiny_run.fp8_run().rollout(), tiny_run.completions())


def test_without_truncation_mu_is_pi_to_the_bit():
  for c in tiny_run.completions():
    np.testing.assert_array_equal(
        tiny_run.bits(c.log_mu), tiny_run.bits(c.logprobs)
    )
    assert np.all(c.logprobs < 0)


def test_sampled_frequencies_are_those_of_the_policy():
  run, prompt = tiny_run.fp8_run(), tiny_run.prompts()[1]
  count = 2000
  found = run.rollout(
      prompts=[prompt],
      num_generations=count,
      limits=np.ones((1, count), int),
  )
  tokens = np.asarray([c.tokens[0] for c in found])
  p_V = np.exp(
      tiny_updates.next_logprobs(
          run, run.start, prompt.tokens, tiny_run.TEMPERATURE
      ).astype(np.float64)
  )
  seen_V = np.bincount(tokens, minlength=tiny_run.VOCAB)
  # Pearson's chi-square with 63 degrees of freedom: mean 63, deviation 11.2.
  chi = np.sum(np.square(seen_V - count * p_V) / (count * p_V))
  assert chi < 63 + 5 * 11.2


def test_a_response_ends_at_a_stop_token_or_at_the_limit():
  stops = tiny_run.engine_config().stop_ids
  longest = tiny_run.engine_config().max_response_length
  reasons = set()
  for c in tiny_run.completions():
    reasons.add(c.finish_reason)
    assert not set(c.tokens[:-1].tolist()) & set(stops)
    if c.finish_reason == 'stop':
      assert c.tokens[-1] in stops
    else:
      assert c.tokens[-1] not in stops and len(c.tokens) == longest
  assert reasons == {'stop', 'length'}


def test_a_limit_cuts_a_response_and_changes_none_of_its_tokens():
  expected = tiny_run.completions()
  shape = (len(tiny_run.prompts()), tiny_run.SAMPLES)
  limits = (1 + np.arange(np.prod(shape)).reshape(shape)) % 14
  ended, reached = [], False
  found = tiny_run.fp8_run().rollout(limits=limits, on_end=ended.append)
  assert sorted(map(id, ended)) == sorted(map(id, found))
  assert len(ended[0].tokens) < len(ended[-1].tokens)
  for c, whole, limit in zip(found, expected, limits.reshape(-1), strict=True):
    # 0 is read as 1, and 13 as max_response_length, which one would reach.
    length = min(max(limit, 1), len(whole.tokens))
    reached |= limit > len(whole.tokens) and whole.finish_reason == 'length'
    assert c.tokens.tolist() == whole.tokens[:length].tolist()
    assert len(c.sampled) == len(c.weight_version) == length
    np.testing.assert_array_equal(
        tiny_run.bits(c.logprobs), tiny_run.bits(whole.logprobs[:length])
    )
    ended = whole.finish_reason == 'stop' and length == len(whole.tokens)
    assert c.finish_reason == ('stop' if ended else 'length')
  assert reached


def test_a_completion_says_where_it_comes_from():
  found = tiny_run.fp8_run().rollout(weight_version=7)
  places = [(c.prompt_id, c.sample) for c in found]
  assert places == [
      (p.id, g) for p in tiny_run.prompts() for g in range(tiny_run.SAMPLES)
  ]
  for c in found:
    assert c.weight_version.tolist() == [7] * len(c.tokens)
    assert c.weight_version.dtype == c.tokens.dtype == np.int32
    assert c.logprobs.dtype == c.log_mu.dtype == np.float32
    assert len(c.tokens) == len(c.logprobs) == len(c.log_mu)


def test_greedy_takes_the_most_probable_token_whatever_the_key():
  run = tiny_run.fp8_run()
  greedy = run.rollout(temperature=0.0, num_generations=1)
  other = run.rollout(
      temperature=0.0,
      num_generations=1,
      base_key=rng.key(9, rng.EVALUATION, 5),
  )
  assert_same(greedy, other)
  for c in greedy[:2]:
    assert not c.log_mu.any()
    for t in range(3):
      context = np.concatenate([c.prompt_tokens, c.tokens[:t]])
      # Greedy rows are not tempered: log pi is that of temperature 1.
      logprobs_V = tiny_updates.next_logprobs(run, run.start, context, 1.0)
      assert c.tokens[t] == np.argmax(logprobs_V)
      assert c.logprobs[t] == logprobs_V[c.tokens[t]]


def test_prompts_that_share_an_id_are_refused():
  prompt = tiny_run.prompts()[0]
  with pytest.raises(ValueError, match=r'ids \[3\] occur twice'):
    tiny_run.fp8_run().rollout(prompts=[prompt, prompt])


@pytest.mark.parametrize('length', [0, 21])
def test_a_prompt_that_does_not_fit_is_refused(length):
  prompt = dataclasses.replace(
      tiny_run.prompts()[0], tokens=np.full(length, 5, np.int32)
  )
  with pytest.raises(ValueError, match='allowed: 1 to 20'):
    tiny_run.fp8_run().rollout(prompts=[prompt])


@pytest.mark.parametrize('value', [-1.0, float('nan'), float('inf'), 1e-4])
def test_a_temperature_that_no_flag_takes_is_refused(value):
  with pytest.raises(ValueError, match=r'0.001 to 1000.0, or 0 for greedy'):
    tiny_run.fp8_run().rollout(temperature=value)


@pytest.mark.parametrize('token', [-1, tiny_run.VOCAB, 2**33])
def test_a_token_outside_of_the_vocabulary_is_refused(token):
  prompt = dataclasses.replace(
      tiny_run.prompts()[0], tokens=np.asarray([5, token])
  )
  with pytest.raises(ValueError, match=rf'token {token}; allowed: 0 to 63'):
    tiny_run.fp8_run().rollout(prompts=[prompt])


def test_weights_of_another_recipe_are_refused():
  fp8, bf16 = tiny_run.fp8_run(), tiny_run.bf16_run()
  message = r"attn/\w+ are in 8 bits, .* 'bf16' are not: the state is"
  with pytest.raises(ValueError, match=message):
    bf16.rollout(fp8.start)
  with pytest.raises(ValueError, match=r"not in 8 bits, .* 'fp8_delayed' are"):
    fp8.rollout(bf16.start)


@pytest.mark.parametrize('id', [-1, 2**32])
def test_a_prompt_id_that_no_key_holds_is_refused(id):
  prompt = dataclasses.replace(tiny_run.prompts()[0], id=id)
  with pytest.raises(ValueError, match=rf'id {id}; allowed: 0 to 4294967295'):
    tiny_run.fp8_run().rollout(prompts=[prompt])


def test_a_rollout_can_be_abandoned_between_visits():
  visits = []

  def stop():
    visits.append(1)
    if len(visits) == 2:
      raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    tiny_run.fp8_run().rollout(should_stop=stop)
  assert len(visits) == 2


def test_nothing_is_compiled_twice():
  programs = []

  def note(event, _, fun_name='', **__):
    if event == '/jax/core/compile/backend_compile_duration':
      programs.append(fun_name)

  jax.monitoring.register_event_duration_secs_listener(note)
  exact_jit(lambda: jax.numpy.zeros(3))()
  assert programs == ['jit(<lambda>)']
  run = tiny_run.fp8_run()
  before = run.start
  for i in range(2):
    programs.clear()
    packed = tiny_updates.batches(run.rollout(before, i))
    gradients, _ = run.accumulate(before, packed)
    before, _ = run.apply(before, gradients)
    rolled = run.step.roll_inputs(before.fp8_state)
    before = dataclasses.replace(before, fp8_state=rolled)
  assert programs == []


@pytest.mark.slow
@pytest.mark.parametrize(
    'family, recipe',
    [
        ('qwen3', 'fp8'),
        pytest.param('qwen2', 'fp8', marks=pytest.mark.soak),
        pytest.param('llama', 'fp8', marks=pytest.mark.soak),
        pytest.param('qwen3', 'bf16', marks=pytest.mark.soak),
    ],
)
def test_every_family_of_two_layers_agrees_over_three_updates(family, recipe):
  run = tiny_run.two_layer_run(family, recipe)
  before = run.start
  for i in range(3):
    packed = tiny_updates.batches(run.rollout(before, i))
    gradients, logprobs = run.accumulate(before, packed)
    differ, tokens = tiny_updates.mismatched(packed, logprobs)
    assert (differ, tokens >= 100) == (0, True)
    before, info = run.apply(before, gradients)
    assert bool(info.applied)
    rolled = run.step.roll_inputs(before.fp8_state)
    before = dataclasses.replace(before, fp8_state=rolled)


@pytest.mark.parametrize('tokens', [32, 96])
def test_sequences_that_wait_for_pages_have_the_same_bits(tokens):
  # 32 tokens are one page: a sequence at a time; the others are parked.
  engine = tiny_run.small_engine(tokens)
  found = tiny_run.fp8_run().rollout(engine=engine)
  for a, b in zip(found, tiny_run.completions(), strict=True):
    for name in ('tokens', 'log_mu', 'logprobs'):
      tiny_run.assert_same_bits(getattr(a, name), getattr(b, name))
  assert not engine.pages.preempted


def test_the_caches_of_one_prefill_are_alive_at_a_time(monkeypatch):
  # By its name in `sys.modules`: the room has a function of that name.
  module = importlib.import_module('jetrl_jax.rl.rollout.scheduler')
  monkeypatch.setattr(module, 'PREFILL_ROWS', 2)
  engine, events = copy.copy(tiny_run.fp8_run().engine), []

  def recorder(name):
    call = getattr(engine, name)

    def recorded(*args, **kwargs):
      events.append(name)
      return call(*args, **kwargs)

    return recorded

  for name in ('prefill_batch', 'bulk_insert'):
    monkeypatch.setattr(engine, name, recorder(name))
  tiny_run.fp8_run().rollout(engine=engine)
  assert events.count('prefill_batch') >= 2
  for before, after in itertools.pairwise(events):
    assert (before, after) != ('prefill_batch', 'prefill_batch')


def test_what_waited_is_computed_again_in_one_shape_a_length(monkeypatch):
  # A shape is a program, and on a GPU each takes seconds to compile.
  monkeypatch.setattr('jetrl_jax.rl.rollout.engine._PREFILL_TOKENS', 64)
  engine, shapes = tiny_run.small_engine(96), []
  prefill = decode_step.prefill

  def recorded(policy, params, tokens_PT, lengths_P):
    shapes.append(tokens_PT.shape)
    return prefill(policy, params, tokens_PT, lengths_P)

  monkeypatch.setattr(decode_step, 'prefill', recorded)
  monkeypatch.setattr(engine, '_programs', {})
  tiny_run.fp8_run().rollout(engine=engine)
  # Traced once each: prompts by sixteen, what waited in 64 tokens or so.
  lengths = [length for rows, length in shapes if rows < 16]
  assert lengths and len(lengths) == len(set(lengths))


def test_fp8_keys_and_values_agree_in_rollout_and_training():
  run = tiny_run.fp8_run()
  of = dataclasses.replace(run.policy, kv_cache_dtype='float8_e4m3fn')
  # Few pages: sequences are parked, and their values prefilled again.
  config = tiny_run.engine_config(kv_cache_tokens=96)
  samples = run.rollout(engine=Engine(of, config, run.mesh))
  packed = tiny_updates.batches(samples)
  score = exact_jit(of.logprobs)
  params = PolicyParams(run.start.weights, run.start.fp8_state)
  temperature = jax.numpy.float32(tiny_run.TEMPERATURE)
  logprobs = [score(params, batch, temperature)[0] for batch in packed]
  differ, tokens = tiny_updates.mismatched(packed, logprobs)
  assert (differ, tokens >= 100) == (0, True)
  # And the rounding is there.
  finer = tiny_run.completions()
  assert any(
      a.logprobs[0] != b.logprobs[0]
      for a, b in zip(samples, finer, strict=True)
  )
