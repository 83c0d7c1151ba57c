"""Every setting with values that it cannot have."""

import math
import re

import pytest

from configs import base
from jetrl_jax.config import build as configs
from jetrl_jax.config import presets as config_presets
from jetrl_jax.config import schema as config_schema
from tests import whole_run

_BASE = base.get_config()
_NAMES = config_schema.names(_BASE)
# By the type of the default; None takes the place of any value in ConfigDict.
_WRONG = {
    int: (None, True, 2**31, -(10**30)),
    float: (None, math.nan, math.inf, -math.inf, 1e300, 5e-324),
    str: (None,),
    bool: (None,),
    tuple: (None, (None,), ((),), ({},), (math.nan,), (True,)),
}
# What the right type can hold and a setting seldom can.
_ODD = {
    int: (-(2**31) + 1, -1, 0, 1, 3, 2**31 - 1),
    float: (-3e38, -1.0, -1e-30, 0.0, 1e-30, 1.0, 3e38),
    str: ('', 'nope', '{}', '{prompt}{x}', 'a' * 5000, '\0', 'x.y:z', 'é'),
    bool: (False, True),
    tuple: ((), ('',), ('(',), ('a' * 5000 + '.jsonl',), (1.0, 2.0), (3e38,)),
}


def _with(config, name, value):
  """Puts a value where only a config file's own code could."""
  section, _, key = name.rpartition('.')
  owner = config[section] if section else config
  with config.unlocked(), config.ignore_type():
    owner[key] = value
  return config


def _type_of(name):
  section, _, key = name.rpartition('.')
  return (_BASE[section] if section else _BASE).get_type(key)


def _has_none(name):
  section, _, key = name.rpartition('.')
  return (_BASE[section] if section else _BASE)[key] is None


@pytest.mark.parametrize('name', _NAMES)
def test_a_value_of_the_wrong_type_or_no_number_is_refused_by_name(name):
  for value in _WRONG[_type_of(name)]:
    if value is None and _has_none(name):
      continue
    wrong = _with(base.get_config(), name, value)
    with pytest.raises(ValueError, match=f'^{re.escape(name)}.*allowed: '):
      config_schema.check(wrong, _BASE)


@pytest.mark.parametrize('theirs, ours', config_schema.OURS.items())
def test_a_name_of_trl_or_verl_is_led_to_ours(theirs, ours):
  assert ours in _NAMES
  section = ours.partition('.')[0]
  for name in (theirs, f'{section}.{theirs}'):
    said = config_schema.unknown_name(name, _NAMES)
    assert f"did you mean '{ours}'?" in said


@pytest.mark.parametrize(
    'theirs, ours',
    [
        ('actor_rollout_ref.actor.optim.lr', 'optim.lr'),
        ('actor_rollout_ref.rollout.n', 'rollout.num_generations'),
        (
            'actor_rollout_ref.rollout.val_kwargs.n',
            'trainer.val_num_generations',
        ),
        (
            'reward_model.overlong_buffer.enable',
            'reward.overlong_buffer.enable',
        ),
        ('algorithm.rollout_correction.rollout_is', 'algorithm.rollout_is'),
    ],
)
def test_a_longer_name_of_another_library_is_led_by_its_end(theirs, ours):
  assert f"did you mean '{ours}'?" in config_schema.unknown_name(theirs, _NAMES)


@pytest.mark.parametrize(
    'name, instead',
    [
        ('trainer.total_epochs', 'there are no epochs; '),
        ('output_dir', 'the flag --workdir takes its place'),
        ('per_device_train_batch_size', 'trainer.micro_batch_size, in packed'),
        ('trainer.nnodes', 'trainer.* are '),
        ('role_to_mesh', 'docs/migrating.md'),
    ],
)
def test_a_name_that_none_of_ours_is_like_is_led_to_none(name, instead):
  said = config_schema.unknown_name(name, _NAMES)
  assert instead in said and 'did you mean' not in said


def test_stop_texts_are_led_to_the_stop_tokens():
  said = config_schema.unknown_name('rollout.stop', _NAMES)
  assert 'eos_token_id in generation_config.json' in said
  assert 'did you mean' not in said


@pytest.mark.parametrize(
    'name, text, reason, example',
    [
        ('reward.functions', "('math'", "'(' was never closed", "('math',)"),
        ('reward.functions', "'math", 'unterminated string', "('math',)"),
        ('reward.functions', '(math,format)', 'texts need quotes', "('math',)"),
        ('model.freeze', "['embed/.*'", "'[' was never closed", "('a', 'b')"),
        ('optim.betas', '(0.9,0.99', "'(' was never closed", '(0.9, 0.999)'),
    ],
)
def test_a_literal_that_cannot_be_read_is_no_entry(name, text, reason, example):
  config = _with(base.get_config(), name, (text,))
  with pytest.raises(ValueError) as error:
    config_schema.check(config, _BASE)
  said = str(error.value)
  assert said.startswith(f'{name} is {text!r}, which cannot be read ({reason}')
  assert said.endswith(f'--config.{name}="{example}" on the command line')


@pytest.mark.parametrize(
    'name, text',
    [
        ('reward.functions', 'math'),
        ('reward.functions', 'rewards/my own.py:digits'),
        ('model.freeze', '(embed|lm_head)/.*'),
        ('model.freeze', '(layers_[0-9]{1,2}/.*)'),
        ('model.freeze', '[el].*'),
    ],
)
def test_one_text_needs_neither_brackets_nor_quotes(name, text):
  config_schema.check(_with(base.get_config(), name, (text,)), _BASE)


def test_a_whole_number_may_stand_for_a_float_and_a_list_for_a_tuple():
  config = _with(base.get_config(), 'optim.lr', 1)
  config = _with(config, 'optim.betas', [0, 0.5])
  config = _with(config, 'algorithm.clip_ratio_low', None)
  config_schema.check(config, _BASE)


def test_whatever_a_setting_is_a_run_is_built_or_refused_in_a_sentence():
  cases = [
      (name, value)
      for name in _NAMES
      if not name.startswith(('sft.', 'logger.'))
      for value in _ODD[_type_of(name)]
  ]
  refused = 0
  for name, value in cases:
    config = _with(whole_run.config(), name, value)
    try:
      config_schema.check(config, _BASE)
      configs.build(config_presets.resolve(config))
    except ValueError as error:
      assert name.rpartition('.')[2] in str(error), (name, value)
      refused += 1
  assert refused > 400
