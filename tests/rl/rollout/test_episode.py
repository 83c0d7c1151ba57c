"""Tests of one episode by itself: what its turns come to, and its faults."""

import threading
import time
import types

import numpy as np
import pytest

from jetrl_jax.rl.rollout.environment import Outcome
from jetrl_jax.rl.rollout.episodes import Episode, StopStrings
from tests.rl import tiny_run
from tests.rl.rollout import scripted


@pytest.mark.parametrize(
    'seconds, limit, error',
    [(0.1, 0.05, 'environment_timeout'), (0.0, 5.0, None)],
)
def test_a_call_fails_if_it_took_too_long_however_late_it_is_looked_at(
    monkeypatch, seconds, limit, error
):
  class Slow(scripted.Letters):

    def reset(self, prompt, rng):
      time.sleep(seconds)
      return ''

  prompt, rng = tiny_run.prompts()[0], np.random.default_rng(0)
  ended = threading.Event()
  config = scripted.config(Slow, timeout_s=limit)
  episode = Episode(config, prompt, rng, ended, tiny_run.VOCAB)
  assert ended.wait(30)
  later = types.SimpleNamespace(monotonic=lambda: time.monotonic() + 60)
  monkeypatch.setattr('jetrl_jax.rl.rollout.episodes.time', later)
  answer = episode.poll()
  assert answer is not None and answer.over == (error is not None)
  assert episode.result().error == error


@pytest.mark.parametrize(
    ('outcomes', 'reason', 'reward', 'accuracy'),
    [
        # Without an accuracy of its own an episode has its reward as that.
        ([Outcome(reward=0.25), Outcome(done=True)], 'stop', 0.25, 0.25),
        # The last one given; 0 is one.
        (
            [Outcome(accuracy=1.0), Outcome(reward=2.0, accuracy=0.0)],
            'turns',
            2.0,
            0.0,
        ),
        ([Outcome(reward=2.0, accuracy=0.5), Outcome()], 'turns', 2.0, 0.5),
        # It ended by itself, at the turn that would have been its last. Of
        # what it says then nobody makes tokens, which these could not become.
        (
            [Outcome(), Outcome(observation='\ud800', reward=1.0, done=True)],
            'stop',
            1.0,
            1.0,
        ),
        # NumPy's numbers, which no line of JSON could be made of.
        (
            [
                Outcome(reward=np.float32(2), accuracy=np.float32(0.5)),
                Outcome(done=np.True_),
            ],
            'stop',
            2.0,
            0.5,
        ),
        # Two numbers whose sum is none, which no advantage could be made of.
        ([Outcome(reward=1e308)] * 2, 'error', 0.0, 0.0),
    ],
)
def test_what_its_turns_come_to_is_what_an_episode_came_to(
    outcomes, reason, reward, accuracy
):
  class Says(scripted.Letters):

    def step(self, text):
      return outcomes[int(text)]

  prompt, rng = tiny_run.prompts()[0], np.random.default_rng(0)
  ended = threading.Event()
  config = scripted.config(Says, max_turns=2)
  episode = Episode(config, prompt, rng, ended, tiny_run.VOCAB)
  over = []
  for turn in ('0', '1', ''):
    assert ended.wait(30)
    ended.clear()
    answer = episode.poll()
    assert answer is not None
    over.append(answer.over)
    if turn:
      episode.step(turn)
  assert over == [False, False, True]
  assert episode.finish_reason() == reason
  result = episode.result()
  assert (result.reward, result.accuracy, result.turns) == (reward, accuracy, 2)
  assert type(result.reward) is type(result.accuracy) is float


class Unprintable(Exception):

  def __str__(self):
    raise RuntimeError


@pytest.mark.parametrize(
    'answer',
    [
        lambda: Outcome(done=np.zeros(2, bool)),
        lambda: Outcome(accuracy=np.ones(1)),
        lambda: Outcome(observation='\ud800'),
        lambda: Outcome(observation='y'),
        lambda: (_ for _ in ()).throw(Unprintable()),
    ],
)
def test_whatever_an_environment_says_fails_at_most_its_episode(answer):
  class Odd(scripted.Letters):

    def step(self, text):
      return answer()

  prompt, rng = tiny_run.prompts()[0], np.random.default_rng(0)
  ended = threading.Event()
  # All observations but 'y' and later letters fit the model.
  (vocab_size,) = scripted.tokenizer().encode('y', add_special_tokens=False)
  episode = Episode(scripted.config(Odd), prompt, rng, ended, int(vocab_size))
  assert ended.wait(30) and episode.poll() is not None
  ended.clear()
  episode.step('a')
  assert ended.wait(30)
  found = episode.poll()
  assert found is not None and found.over
  assert episode.result().error == 'environment_raised'


# Beside a longer one, of which more characters are kept from look to look.
@pytest.mark.parametrize('other', ['zz', 'z' * 7])
def test_a_stop_string_may_span_tokens_and_looks(other):
  finder = StopStrings(('<ab', other), scripted.tokenizer())
  tokens = scripted.tokenizer().encode('x<a<abz', add_special_tokens=False)
  assert finder.find(tokens, '') == (6, '')
  for cut in range(6):
    found, tail = finder.find(tokens[:cut], '')
    assert found is None
    assert finder.find(tokens[cut:], tail) == (6 - cut, '')
  # A string that ended in an earlier turn is not found again.
  assert finder.find(tokens[6:], '') == (None, 'z')


def test_a_stop_string_may_be_a_special_token():
  tokenizer = scripted.tokenizer()
  special = tokenizer.decode([1], skip_special_tokens=False)
  tokens = [*tokenizer.encode('ab', add_special_tokens=False), 1]
  finder = StopStrings((special,), tokenizer)
  assert finder.find(np.asarray(tokens), '') == (3, '')
