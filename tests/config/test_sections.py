"""The table of settings: names, defaults and meanings have one writer."""

import dataclasses
import re

import pytest

from configs import base
from jetrl_jax.config import sections
from jetrl_jax.fp8.recipes import Recipe
from jetrl_jax.optim.adamw import OptimizerConfig
from jetrl_jax.rl.objective import LossConfig
from jetrl_jax.rl.settings import GuardConfig, OverlongBuffer, RunConfig
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


@pytest.mark.parametrize(
    'least, names',
    [
        (0, ('save_freq', 'keep_best', 'stop_after_idle_steps')),
        (1, ('keep_latest', 'max_skipped_updates', 'val_num_generations')),
        (1, ('calibration_prompts', 'calibration_tokens')),
    ],
)
def test_a_count_below_its_least_is_refused(least, names):
  for name in names:
    RunConfig(**{name: least})
    message = f'{name} is {least - 1}; it must be >= {least}'
    with pytest.raises(ValueError, match=message):
      RunConfig(**{name: least - 1})


@pytest.mark.parametrize(
    'owner, name, value, said',
    [
        (OptimizerConfig, 'optim.lr', -1.0, 'optim.lr is -1.0; it must be > 0'),
        (
            OptimizerConfig,
            'optim.weight_decay',
            -1.0,
            'optim.weight_decay is -1.0, optim.lr_warmup_steps is 0; both must'
            ' be >= 0',
        ),
        (
            RunConfig,
            'trainer.train_batch_size',
            -4,
            'trainer.train_batch_size is -4; it must be >= 1',
        ),
        (
            RunConfig,
            'rollout.num_generations',
            1,
            'rollout.num_generations is 1; a group advantage needs at least 2'
            ' samples per prompt',
        ),
        (RunConfig, 'seed', -1, 'seed is -1; it must be >= 0'),
        # Under another name than the field's.
        (
            Recipe,
            'precision.recipe',
            'fp8',
            "precision.recipe is 'fp8'; allowed",
        ),
        # With the section already.
        (GuardConfig, 'guard.max_k3', -1.0, 'guard.max_k3 is -1.0 nats; it mu'),
    ],
)
def test_a_value_out_of_range_is_said_with_its_section(
    owner, name, value, said
):
  config = base.get_config()
  config.update_from_flattened_dict({name: value})
  with pytest.raises(ValueError, match=f'^{re.escape(said)}'):
    sections.take(owner, config)


def test_a_section_within_a_section_and_what_is_given_are_named_in_full():
  config = base.get_config()
  config.reward.overlong_buffer.enable = True
  with pytest.raises(ValueError, match='^reward.overlong_buffer.len is') as e:
    sections.take(OverlongBuffer, config, max_response_length=5)
  assert 'before rollout.max_response_length=5, so' in str(e.value)
  assert 'or set reward.overlong_buffer.enable=False' in str(e.value)
  # Of the top level, and given to the optimiser.
  said = sections._as_in_config('seed is 0', {'lr': 'optim.lr'}, ['seed'])
  assert said == 'seed is 0'


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
