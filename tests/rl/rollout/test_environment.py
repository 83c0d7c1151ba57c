"""Tests of the environment's interface: loading, limits, what is refused."""

import copy

import numpy as np
import pytest

from jetrl_jax.rl.rollout.environment import (
    Environment,
    EnvironmentConfig,
    Outcome,
    load_environment,
)
from tests.rl.rollout import scripted


class Half(Environment):
  """Has no step."""


def _config(make=scripted.Letters, **changes):
  return EnvironmentConfig(
      **(dict(make=make, tokenizer=scripted.tokenizer(), max_turns=3) | changes)
  )


def test_a_class_is_found_by_its_dotted_path():
  found = load_environment('tests.rl.rollout.scripted:Letters')
  assert found.__name__ == 'Letters' and issubclass(found, Environment)


def test_a_class_is_found_in_a_file(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  code = (
      'from jetrl_jax.rl.rollout.environment import Environment, Outcome\n'
      'class Echo(Environment):\n'
      '  def step(self, text):\n'
      '    return Outcome(observation=text)\n'
  )
  (tmp_path / 'mine.py').write_text(code)
  for name in ('mine.py:Echo', f'{tmp_path}/mine.py:Echo'):
    assert load_environment(name)().step('x').observation == 'x'
  for code, error in (
      ('1 / 0', 'ZeroDivisionError'),
      ('import sys; sys.exit(2)', 'SystemExit: 2'),
  ):
    (tmp_path / 'broken.py').write_text(code)
    with pytest.raises(ValueError, match=f"'broken.py' failed with {error}"):
      load_environment('broken.py:Echo')


@pytest.mark.parametrize(
    ('name', 'sentence'),
    [
        (
            'tests.rl.rollout.scripted.Letters',
            "write 'file.py:Class' or 'package.module:Class'",
        ),
        ('games/mine.py:Game', 'there is no file /'),
        ('tests.rl.nowhere:Letters', 'failed with ModuleNotFoundError'),
        ('tests.rl.rollout.scripted:Absent', "it has ['Digits', 'Down', "),
        ('tests.rl.rollout.scripted:tokenizer', "no class 'tokenizer'"),
        (f'{__name__}:Half', "no class 'Half' that implements Environment"),
    ],
)
def test_what_is_no_environment_is_refused(name, sentence):
  with pytest.raises(ValueError) as error:
    load_environment(name)
  assert sentence in str(error.value)


@pytest.mark.parametrize(
    ('changes', 'sentence'),
    [
        ({'max_turns': 0}, 'max_turns is 0'),
        ({'timeout_s': 0.0}, 'timeout_s is 0.0'),
        ({'observation_template': 'x'}, "must hold '{observation}'"),
    ],
)
def test_limits_that_cannot_hold_are_refused(changes, sentence):
  with pytest.raises(ValueError) as error:
    _config(**changes)
  assert sentence in str(error.value)


@pytest.mark.parametrize('strings', [('',), ('é',), (3,), '</tool>', None])
def test_a_stop_string_that_cannot_be_found_in_tokens_is_refused(strings):
  class Stops(scripted.Letters):
    stop_strings = strings

  with pytest.raises(ValueError, match='allowed: (ASCII strings|a tuple)'):
    _config(make=Stops)


@pytest.mark.parametrize(
    ('fields', 'sentence'),
    [
        ({'reward': float('nan')}, 'the reward is nan'),
        ({'reward': float('-inf')}, 'the reward is -inf'),
        ({'accuracy': 1.5}, 'the accuracy is 1.5'),
        ({'observation': None}, 'the observation is None'),
    ],
)
def test_an_outcome_of_the_wrong_kind_is_refused(fields, sentence):
  with pytest.raises(ValueError, match=sentence):
    Outcome(**fields)


def test_an_observation_stands_in_its_template():
  config = _config(observation_template='<{observation}>{}')
  expected = scripted.tokenizer().encode('<ab>{}', add_special_tokens=False)
  np.testing.assert_array_equal(config.observation_tokens('ab'), expected)
  assert config.observation_tokens('').tolist() == []


def test_an_observation_brings_no_token_that_begins_a_text():
  # As Llama's tokenizers put one before each text.
  tokenizer = copy.copy(scripted.tokenizer())
  encode = tokenizer.encode
  tokenizer.encode = lambda text, *, add_special_tokens: np.append(
      np.full(int(add_special_tokens), 9, np.int32),
      encode(text, add_special_tokens=False),
  )
  tokens = _config(tokenizer=tokenizer).observation_tokens('ab')
  assert len(tokens) == 2
  np.testing.assert_array_equal(tokens, _config().observation_tokens('ab'))


def test_an_environment_need_not_have_a_first_observation():
  class Plain(Environment):

    def step(self, text):
      return Outcome(done=True)

  assert Plain().reset(None, np.random.default_rng(0)) == ''
  assert _config(make=Plain).stop_strings == ()
