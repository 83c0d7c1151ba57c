"""Tests of episodes: turns inside a rollout, and what they do not change."""

import copy
import dataclasses
import functools
import string
import threading

import numpy as np
import pytest

from jetrl_jax.rl.rollout.environment import Outcome
from jetrl_jax.rl.scoring import experience, scorer
from tests.rl import tiny_run, tiny_updates
from tests.rl.rollout import scripted
from tests.rl.rollout.test_scheduler import assert_same

CAPITALS = frozenset(scripted.Letters.stop_strings)


def _rollout(make=scripted.Letters, limits=None, max_turns=9, **changes):
  return tiny_run.fp8_run().rollout(
      environment=scripted.config(make, max_turns=max_turns, **limits or {}),
      **changes,
  )


@functools.cache
def _episodes():
  return _rollout()


def _text(tokens):
  return scripted.tokenizer().decode(tokens, skip_special_tokens=False)


def _assert_same_episodes(found, expected):
  assert_same(found, expected)
  for one, other in zip(found, expected, strict=True):
    assert one.sampled.tolist() == other.sampled.tolist()
    assert one.episode == other.episode


def _spans(completion):
  """Splits a response into (whether sampled, text) by turns.

  The text is what an environment reads: without special tokens, and without
  the stop token that ended the turn (tiny_run's are 1, 2 and the letter a, 3).
  """
  edges = np.flatnonzero(np.diff(completion.sampled.astype(int))) + 1
  spans = []
  for part in np.split(np.arange(len(completion.tokens)), edges):
    tokens, sampled = completion.tokens[part], bool(completion.sampled[part[0]])
    if sampled and tokens[-1] in tiny_run.engine_config().stop_ids:
      tokens = tokens[:-1]
    spans.append((sampled, scripted.tokenizer().decode(tokens)))
  return spans


def test_episodes_have_turns_and_observations_and_all_ways_to_end():
  found = _episodes()
  assert {c.finish_reason for c in found} == {'stop', 'length'}
  assert max(c.episode.turns for c in found) == 3
  assert sum(not c.sampled.all() for c in found) > len(found) / 3
  assert len({c.tokens.tobytes() for c in found}) > len(found) / 2


def test_a_turn_ends_with_its_stop_string_and_the_observation_follows():
  seen = 0
  for completion in _episodes():
    spans = _spans(completion)
    for (sampled, text), (_, following) in zip(spans, spans[1:], strict=False):
      if not sampled:
        continue
      # Only the last character of a turn is a capital.
      assert not CAPITALS & set(text[:-1])
      assert following[:-1] == f'<{text[-1:]}'
      seen += 1
  assert seen > 10


def test_a_reward_is_the_sum_over_turns_of_what_the_policy_wrote():
  whole = [c for c in _episodes() if c.finish_reason == 'stop']
  assert whole
  for completion in whole:
    text = ''.join(text for sampled, text in _spans(completion) if sampled)
    assert completion.episode.reward == len(text)
    assert completion.episode.accuracy == 0.5


def test_observations_have_no_loss_and_count_in_no_length():
  samples = _episodes()
  for sequence, completion in zip(
      tiny_updates.sequences(samples), samples, strict=True
  ):
    mask = sequence.loss_mask[len(completion.prompt_tokens) :]
    assert mask.tolist() == completion.sampled.astype(float).tolist()
  joined = experience.join_sampled(samples, [c.tokens for c in samples])
  assert len(joined) == sum(int(c.sampled.sum()) for c in samples)


def test_rollout_and_training_agree_on_every_token_of_every_turn():
  run, samples = tiny_run.fp8_run(), _episodes()
  batches = tiny_updates.batches(samples)
  _, logprobs = run.accumulate(run.start, batches)
  assert tiny_updates.mismatched(batches, logprobs)[0] == 0
  # On the given tokens too, which the mask leaves out.
  everywhere = [
      dataclasses.replace(b, loss_mask=(b.rollout_logprobs != 0).astype('f4'))
      for b in batches
  ]
  differ, tokens = tiny_updates.mismatched(everywhere, logprobs)
  assert (differ, tokens) == (0, sum(len(c.tokens) for c in samples))


@pytest.mark.parametrize('decode_block', [1, 3, 64])
def test_steps_per_visit_change_no_bit(decode_block):
  # A copy shares what is compiled: the number of steps is an argument.
  engine = copy.copy(tiny_run.fp8_run().engine)
  engine.config = tiny_run.engine_config(decode_block=decode_block)
  _assert_same_episodes(_rollout(engine=engine), _episodes())


def test_without_stop_strings_a_turn_ends_with_its_stop_token():
  class Whole(scripted.Letters):
    stop_strings = ()

  turns = []
  for c, plain in zip(_rollout(Whole), tiny_run.completions(), strict=True):
    # Without an observation before it, the first turn is what is sampled
    # without an environment.
    if c.sampled[0]:
      length = len(plain.tokens)
      assert c.tokens[:length].tolist() == plain.tokens.tolist()
      assert (c.episode.turns > 0) == (plain.finish_reason == 'stop')
      turns.append(c.episode.turns)
  assert len(turns) == 12 and min(turns) == 0 < max(turns)


def test_an_end_token_that_begins_the_template_is_not_repeated():
  # As '<|im_end|>' of a chat template does. Some turns end with it, others with
  # a stop string.
  limits = {'observation_template': 'a{observation}'}
  (end,) = scripted.tokenizer().encode('a', add_special_tokens=False)
  assert end in tiny_run.engine_config().stop_ids
  ended_with = set()
  for c in _rollout(limits=limits):
    starts = np.flatnonzero(np.diff(c.sampled.astype(int)) == -1) + 1
    for start in starts:
      last, first = c.tokens[start - 1 : start + 1].tolist()
      assert [last, first].count(end) == 1
      ended_with.add(last == end)
  assert ended_with == {True, False}


def test_a_stop_string_of_two_tokens_ends_a_turn_wherever_visits_fall():
  class Pairs(scripted.Letters):
    stop_strings = tuple(
        a + b for a in scripted.ALPHABET for b in string.ascii_uppercase
    )

  # In this step a stop token ends turns before others begin with a capital:
  # the two are no pair.
  rollout = functools.partial(_rollout, Pairs, key_step=5)
  samples, ends = rollout(), []
  for c in samples:
    edges = np.flatnonzero(np.diff(c.sampled.astype(int))) + 1
    for part in np.split(np.arange(len(c.tokens)), edges)[:-1]:
      if c.sampled[part[0]]:
        text = _text(c.tokens[part])
        found = [s for s in Pairs.stop_strings if s in text]
        assert found in ([], [text[-2:]])
        # A turn without one ended with its stop token.
        assert bool(found) == (
            c.tokens[part[-1]] not in tiny_run.engine_config().stop_ids
        )
        ends.append(bool(found))
  assert 5 < sum(ends) < len(ends)
  engine = copy.copy(tiny_run.fp8_run().engine)
  engine.config = tiny_run.engine_config(decode_block=1)
  _assert_same_episodes(rollout(engine=engine), samples)


def test_slots_and_company_change_no_bit():
  wide = tiny_run.wide_engine()
  _assert_same_episodes(_rollout(engine=wide), _episodes())
  prompts = tiny_run.prompts()[::-1]
  found = _rollout(prompts=prompts)
  samples = tiny_run.SAMPLES
  groups = [found[i : i + samples] for i in range(0, len(found), samples)]
  _assert_same_episodes(sum(groups[::-1], []), _episodes())


def test_episodes_that_wait_for_pages_have_the_same_bits():
  engine = tiny_run.small_engine(96)
  _assert_same_episodes(_rollout(engine=engine), _episodes())
  assert engine.pages.times_preempted and not engine.pages.preempted


def test_another_step_has_other_randomness_in_the_environment():
  def first(found):
    return [_text(c.tokens[:1]) for c in found if not c.sampled[0]]

  other = first(_rollout(key_step=1))
  assert len(other) == len(first(_episodes())) == 12
  assert other != first(_episodes())


def test_every_episode_has_randomness_of_its_own_in_the_environment():
  # One digit of four, for three prompts and four samples each.
  first = [_text(c.tokens[:1]) for c in _episodes() if not c.sampled[0]]
  first_PG = np.reshape(first, (3, tiny_run.SAMPLES))
  assert any(len(set(of_prompt)) > 1 for of_prompt in first_PG)
  assert any(len(set(of_sample)) > 1 for of_sample in first_PG.T)


def test_a_turn_limit_ends_the_episode_after_its_last_turn():
  expected = _episodes()
  for c, whole in zip(_rollout(max_turns=1), expected, strict=True):
    length = len(c.tokens)
    assert c.tokens.tolist() == whole.tokens[:length].tolist()
    if whole.episode.turns:
      assert c.episode.turns == 1 and c.finish_reason == 'turns'
      assert c.sampled[-1]
    else:
      assert c.finish_reason == 'length'


def test_an_observation_that_does_not_fit_ends_the_episode():
  class Talker(scripted.Letters):

    def step(self, text):
      return Outcome(observation='y' * 100, reward=1.0)

  for c in _rollout(Talker):
    assert c.finish_reason == 'length'
    assert c.episode.reward == c.episode.turns <= 1
    assert len(c.tokens) <= 12


def test_an_observation_that_the_model_has_no_row_for_costs_its_episode():
  tokenizer = copy.copy(scripted.tokenizer())
  encode = tokenizer.encode
  tokenizer.encode = lambda text, **how: encode(text, **how) + tiny_run.VOCAB
  found = tiny_run.fp8_run().rollout(
      environment=scripted.config(tokenizer=tokenizer)
  )
  for c in found:
    assert c.sampled.all() and (c.tokens < tiny_run.VOCAB).all()
  assert {c.episode.error for c in found if c.prompt_id % 20 != 3} == {
      'environment_raised'
  }


@pytest.mark.parametrize(('observation', 'sampled'), [(11, [12]), (12, [])])
def test_an_observation_fits_with_room_for_a_token_after_it(
    observation, sampled
):
  class Opening(scripted.Letters):

    def reset(self, prompt, rng):
      super().reset(prompt, rng)
      return 'y' * observation

  found = _rollout(Opening, num_generations=1)
  for c in found:
    assert (np.flatnonzero(c.sampled) + 1).tolist() == sampled
    assert len(c.tokens) == sum(sampled)


class Faulty(scripted.Letters):
  """Fails in every way, by the prompt."""

  block, unheard = threading.Event(), []

  def reset(self, prompt, rng):
    if prompt.id == 3:
      raise SystemExit('no reset')
    return super().reset(prompt, rng)

  def step(self, text):
    match self.prompt.id:
      case 13:
        raise KeyError(text)
      case 23:
        return Outcome(reward=float('nan'))
      case 33:
        return 'not an outcome'
      case 43:
        if not self.block.wait(60):
          self.unheard.append(text)
    return super().step(text)


def test_an_environment_that_fails_costs_its_own_episode_and_is_counted():
  found = _rollout(Faulty, {'timeout_s': 1.0})
  # Its limit ended the episode, and not the call's own end.
  assert not Faulty.unheard
  Faulty.block.set()
  expected = {c.prompt_id: [] for c in found}
  for c in found:
    expected[c.prompt_id].append(c)
  assert all(not len(c.tokens) for c in expected[3])
  for prompt_id, kind in (
      (3, 'raised'),
      (13, 'raised'),
      (23, 'raised'),
      (33, 'raised'),
      (43, 'timeout'),
  ):
    failed = [c for c in expected[prompt_id] if c.finish_reason == 'error']
    assert failed, prompt_id
    for c in failed:
      assert c.episode.error == f'environment_{kind}'
      assert c.episode.reward == c.episode.accuracy == 0.0
  whole = [c for c in _episodes() if c.prompt_id == 53]
  _assert_same_episodes(expected[53], whole)
  results = scorer.Scorer([], None, None).results(found)
  assert [r.error for r in results] == [c.episode.error for c in found]
  assert [r.score for r in results] == [c.episode.reward for c in found]


def test_a_huge_observation_takes_its_own_time_and_no_other(monkeypatch):
  config, threads = scripted.config(max_turns=2), set()
  encode = config.tokenizer.encode

  def slow(text, **how):
    threads.add(threading.current_thread())
    return encode(text, **how)

  monkeypatch.setattr(config.tokenizer, 'encode', slow)
  found = tiny_run.fp8_run().rollout(environment=config)
  assert threads and threading.main_thread() not in threads
  # A process that ends waits for none that hangs.
  assert all(thread.daemon for thread in threads)
  assert len(found) == len(_episodes())


def test_a_waiting_environment_holds_up_no_other_episode():
  another_is_done = threading.Event()
  waited = []

  class Patient(scripted.Letters):

    def step(self, text):
      outcome = super().step(text)
      if self.prompt.id == 13:
        waited.append(another_is_done.wait(60))
      elif outcome.done:
        another_is_done.set()
      return outcome

  found = _rollout(Patient, {'timeout_s': 90.0})
  assert waited and all(waited)
  _assert_same_episodes(found, _episodes())


def test_an_environment_that_starts_late_changes_no_bit():
  another_is_done = threading.Event()
  waited = []

  class Late(scripted.Letters):

    def reset(self, prompt, rng):
      if prompt.id == 13:
        waited.append(another_is_done.wait(60))
      return super().reset(prompt, rng)

    def step(self, text):
      outcome = super().step(text)
      if outcome.done:
        another_is_done.set()
      return outcome

  # Others decode meanwhile, and no slot of this prompt may.
  found = _rollout(Late, {'timeout_s': 90.0})
  assert waited and all(waited)
  _assert_same_episodes(found, _episodes())


def test_metrics_of_turns_are_there_with_an_environment_only():
  def metrics(completions):
    return experience.experience_metrics(
        experience.Experience(
            prompts=tiny_run.prompts(),
            completions=completions,
            scores_PG=np.zeros((6, 4)),
            rewards_PG=np.zeros((6, 4)),
            accuracy_PG=np.zeros((6, 4)),
            overlong_PG=np.zeros((6, 4)),
            kl_penalty_PG=np.zeros((6, 4)),
            errors={},
            advantages_PG=np.zeros((6, 4), np.float32),
        )
    )

  found, plain = metrics(_episodes()), metrics(tiny_run.completions())
  assert set(found) - set(plain) == {
      'num_turns/mean',
      'num_turns/max',
      'num_turns/min',
      'environment/observation_frac',
      'environment/turn_limit_frac',
  }
  turns = [c.episode.turns for c in _episodes()]
  assert found['num_turns/mean'] == np.mean(turns)
  assert 0 < found['environment/observation_frac'] < 1
