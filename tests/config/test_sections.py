"""The table of settings: names, defaults and meanings have one writer."""

import dataclasses

import pytest

from configs import base
from jetrl_jax.config import sections
from jetrl_jax.fp8.recipes import Recipe
from jetrl_jax.optim.adamw import OptimizerConfig
from jetrl_jax.rl.objective import LossConfig
from jetrl_jax.rl.settings import OverlongBuffer, RunConfig
from tools import config_reference

_SETTINGS = {
    f'{section}.{name}'.lstrip('.'): setting
    for section, settings in sections.SECTIONS.items()
    for name, setting in settings.items()
}
_OWNERS = {setting.owner for setting in _SETTINGS.values()}


@pytest.mark.parametrize('name', _SETTINGS)
def test_a_setting_has_the_default_of_its_dataclass_and_a_meaning(name):
  setting, config = _SETTINGS[name], base.get_config()
  assert config[name] == setting.field.default
  assert type(config[name]) is type(setting.field.default)
  meaning = config_reference.meaning(setting)
  assert len(meaning) > 10 and meaning.endswith('.')


def test_a_field_is_one_setting():
  fields = [(s.owner, s.field.name) for s in _SETTINGS.values()]
  assert len(fields) == len(set(fields)) > 120


def test_a_dataclass_made_of_the_defaults_is_that_of_no_arguments():
  complete = 0
  for owner in _OWNERS:
    fields = dataclasses.fields(owner)
    if all(f.default is not dataclasses.MISSING for f in fields):
      assert sections.take(owner, base.get_config()) == owner()
      complete += 1
  assert complete > 10


def test_a_dataclass_takes_its_settings_from_all_sections():
  config = base.get_config()
  config.seed, config.rollout.temperature = 7, 0.5
  config.trainer.save_freq, config.precision.recipe = 3, 'int8'
  run = sections.take(RunConfig, config)
  assert (run.seed, run.temperature, run.save_freq) == (7, 0.5, 3)
  assert sections.take(Recipe, config).name == 'int8'
  # A setting of another dataclass, with the same name.
  made = sections.take(OptimizerConfig, config, seed=1)
  assert made == OptimizerConfig(seed=1)
  buffer = sections.take(OverlongBuffer, config, max_response_length=5)
  assert buffer.max_response_length == 5


def test_a_list_in_the_place_of_a_tuple_becomes_one():
  config = base.get_config()
  with config.unlocked(), config.ignore_type():
    config.optim.betas = [0.5, 0.75]
  assert sections.take(OptimizerConfig, config).betas == (0.5, 0.75)


def test_a_setting_that_is_none_knows_its_type():
  config = base.get_config()
  assert config.algorithm.get_type('clip_ratio_low') is float
  config.algorithm.clip_ratio_low = 0.1
  assert sections.take(LossConfig, config).clip_ratio_low == 0.1
  with pytest.raises(TypeError):
    config.algorithm.clip_ratio_low = 'low'


def test_a_config_that_lacks_a_setting_is_not_filled_up():
  config = base.get_config()
  with config.unlocked():
    del config.optim.lr
  with pytest.raises(KeyError, match="'lr'"):
    sections.take(OptimizerConfig, config)


def test_two_dataclasses_of_a_section_share_no_name():
  settings = sections.SECTIONS['optim']
  with pytest.raises(AssertionError, match='lr'):
    sections._section(settings, settings)
