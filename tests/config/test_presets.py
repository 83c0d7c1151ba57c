"""Flows by name."""

import logging

import pytest

from configs import base
from jetrl_jax.config import build as configs
from jetrl_jax.config import presets as config_presets
from tests import whole_run


def _resolved(flow: str, **changes):
  config = base.get_config()
  config.update_from_flattened_dict({'flow': flow} | changes)
  return config_presets.resolve(config)


@pytest.mark.parametrize(
    'flow, recipe, rollout, old, correction',
    [
        ('', 'fp8_delayed', '', 'rollout', 'none'),
        ('jetrl', 'fp8_delayed', '', 'rollout', 'none'),
        ('bf16', 'bf16', '', 'rollout', 'none'),
        ('jetrl_inexact', 'fp8_delayed', '', 'recompute', 'none'),
        ('bf16_inexact', 'bf16', '', 'recompute', 'none'),
        ('fp8_rollout', 'bf16', 'fp8_token', 'recompute', 'none'),
        ('flashrl', 'bf16', 'int8', 'recompute', 'token'),
        ('qurl', 'bf16', 'int8', 'recompute', 'acr'),
    ],
)
def test_one_override_is_a_whole_flow(flow, recipe, rollout, old, correction):
  config = _resolved(flow)
  assert config.precision.recipe == recipe
  assert config.precision.rollout_recipe == rollout
  assert config.algorithm.old_logprobs == old
  assert config.algorithm.rollout_is == correction
  assert config.precision.exact == (not flow.endswith('_inexact'))


@pytest.mark.parametrize('flow', config_presets.FLOWS)
def test_every_flow_builds_a_run(flow):
  spec = configs.build(whole_run.config(flow=flow))
  assert spec.is_mixed == (flow in ('fp8_rollout', 'flashrl', 'qurl'))
  for policy in (spec.policy, spec.rollout_policy):
    assert policy.exact == (not flow.endswith('_inexact'))
  # What is kept in the workdir says what was run.
  assert f'"flow": "{flow}"' in spec.config_text
  assert f'"recipe": "{spec.policy.recipe.name}"' in spec.config_text


def test_an_unknown_flow_is_answered_with_those_that_there_are():
  with pytest.raises(
      ValueError, match="flow is 'flashlr'; allowed: jetrl, bf16, jetrl_inexact"
  ):
    _resolved('flashlr')


@pytest.mark.parametrize(
    'flow, name, found, usual',
    [
        ('jetrl', 'precision.rollout_recipe', 'bf16', ''),
        ('flashrl', 'precision.rollout_recipe', 'bf16', 'int8'),
        ('flashrl', 'algorithm.rollout_is', 'icepop', 'token'),
        ('bf16', 'precision.recipe', 'int8', 'bf16'),
    ],
)
def test_a_setting_that_contradicts_its_flow_is_refused(
    flow, name, found, usual
):
  with pytest.raises(
      ValueError,
      match=f"flow='{flow}' is a run with {name}='{usual}', and the"
      f" config has '{found}'; leave one of the two out",
  ):
    _resolved(flow, **{name: found})


def test_a_default_that_the_user_has_chosen_is_not_replaced():
  config = base.get_config()
  config.flow, chosen = 'flashrl', ['flow', 'precision.recipe']
  with pytest.raises(ValueError, match="with precision.recipe='bf16', and the"):
    config_presets.resolve(config, chosen)
  config.precision.recipe = 'bf16'
  assert config_presets.resolve(config, chosen).precision.recipe == 'bf16'


def test_the_8_bits_of_a_mixed_flow_are_a_choice():
  config = _resolved('flashrl', **{'precision.rollout_recipe': 'fp8_token'})
  assert config.precision.rollout_recipe == 'fp8_token'
  assert config.algorithm.rollout_is == 'token'


def test_a_flow_leaves_the_config_that_it_was_given_alone():
  config = base.get_config()
  config.flow = 'flashrl'
  config_presets.resolve(config)
  assert config.precision.recipe == 'fp8_delayed'


def test_resolving_twice_changes_nothing_more():
  once = _resolved('flashrl')
  assert config_presets.resolve(once) == once


@pytest.mark.parametrize(
    ('changes', 'warned'),
    [
        ({'flow': 'bf16', 'precision.min_sqnr_db': 20.0}, 'min_sqnr_db is 20'),
        (
            {
                'flow': 'bf16',
                'precision.high_precision_layers': ('layers_0/.*',),
            },
            'high_precision_layers is',
        ),
        ({'flow': 'fp8_rollout', 'precision.min_sqnr_db': 20.0}, ''),
    ],
)
def test_a_choice_of_dots_that_nothing_reads_is_warned_of(
    changes, warned, caplog
):
  with caplog.at_level(logging.WARNING):
    configs.build(whole_run.config(**changes))
  assert ('which is not read' in caplog.text) == bool(warned)
  assert warned in caplog.text
