"""The study's arms: what they are, and that nothing else differs."""

import importlib

import pytest

from jetrl_jax.config import presets as config_presets
from study.arms import (
    ARMS,
    BITS,
    CORRECTIONS,
    GROUPS,
    PAIRS,
    PRIMARY,
    SECONDARY,
    TOY,
    named,
    runs_of,
)
from study.run import Plan

# What an arm may set.
_MADE_OF = {
    'flow',
    'precision.recipe',
    'precision.rollout_recipe',
    'precision.exact',
    'precision.quantize_lm_head',
    'algorithm.old_logprobs',
    'algorithm.rollout_is',
}


_TOYS = [arm for arm in ARMS.values() if arm.cell is TOY]


def _config(arm):
  """The cell's config, before the arm's settings."""
  module = arm.cell.config.removesuffix('.py').replace('/', '.')
  config = importlib.import_module(module).get_config()
  config.update_from_flattened_dict(dict(arm.cell.settings))
  return config


def _resolved(arm):
  config = _config(arm)
  config.update_from_flattened_dict(dict(arm.settings))
  return config_presets.resolve(config)


def _flat(config, path=''):
  found = {}
  for key, value in config.items():
    name = f'{path}{key}'
    if hasattr(value, 'items'):
      found |= _flat(value, f'{name}.')
    else:
      found[name] = value
  return found


@pytest.mark.parametrize('arm', ARMS.values(), ids=lambda arm: arm.name)
def test_an_arm_runs_the_recipes_it_says_and_differs_in_nothing_else(arm):
  config = _resolved(arm)
  rollout = config.precision.rollout_recipe or config.precision.recipe
  assert (config.precision.recipe, rollout) == (arm.train, arm.rollout)
  assert config.precision.exact == ('inexact' not in arm.name)
  assert config.precision.quantize_lm_head == ('head8' in arm.name)
  # Nothing weighs the mismatch but in the arms that say so, and pi_old is
  # training's own where it exists.
  kinds = [kind for kind in CORRECTIONS if f'_{kind}' in arm.name]
  kinds += ['token'] * arm.name.endswith('flashrl')
  kinds += ['acr'] * arm.name.endswith('qurl')
  assert [config.algorithm.rollout_is] == (kinds or ['none'])
  recompute = arm.is_mixed or 'inexact' in arm.name
  assert (config.algorithm.old_logprobs == 'recompute') == recompute
  base, made = _flat(_config(arm)), _flat(config)
  more = set()
  if arm.cell is not TOY:
    more = {'precision.kv_cache_dtype', 'precision.invariant_scale'}
  assert {k for k in base if base[k] != made[k]} <= _MADE_OF | more


def test_the_two_by_two_has_every_corner_once():
  corners = {(a.train, a.rollout) for a in named(['2x2'])}
  assert corners == {
      (train, rollout)
      for train in ('bf16', 'fp8_token')
      for rollout in ('bf16', 'fp8_token')
  }


def test_the_control_has_a_mixed_and_a_unified_arm_of_every_format():
  names = {arm.name for arm in named(['control', 'control_long'])}
  for bits in BITS:
    for side in ('mixed', 'unified'):
      for length in ('', '_long'):
        asked = bits != 'int3'  # Only by name.
        assert (f'{side}_{bits}{length}' in names) == asked
  pairs = (*PAIRS, PRIMARY, *SECONDARY)
  assert all(a in ARMS and b in ARMS for a, b in pairs)


def test_the_cells_have_the_arms_and_seeds_of_the_design():
  main = named(['gsm8k'])
  assert [len(arm.seeds) for arm in main] == [5, 5, 5, 3, 3, 3, 3, 3]
  for cell in ('math', 'stress'):
    arms = named([cell])
    assert [arm.name for arm in arms] == [
        arm.name.replace('gsm8k', cell) for arm in main[:3]
    ]
    assert {arm.seeds for arm in arms} == {(1, 2, 3)}
  for cell, count, rate, updates in (
      ('sums', 4, 1e-5, 1),
      ('sums_stress', 4, 5e-5, 1),
      ('sums_four', 3, 1e-5, 4),
  ):
    also = ['int8', 'fake_e4m3'] if cell == 'sums_four' else []
    sums = named([cell])
    assert [arm.name for arm in sums] == [
        *(arm.name.replace('gsm8k', cell) for arm in main[:count]),
        *(f'{cell}_{name}' for name in also),
    ]
    for arm in sums:
      config = _config(arm)
      assert len(arm.seeds) == 10 and config.optim.lr == rate
      trainer = config.trainer
      assert trainer.train_batch_size == updates * trainer.mini_batch_size
  # FP8 keys where the rollout trains as it samples, and nowhere else.
  for arm in (*main, *named(['sums', 'sums_stress', 'sums_four'])):
    fp8_keys = _resolved(arm).precision.kv_cache_dtype == 'float8_e4m3fn'
    assert fp8_keys == (arm.train == arm.rollout != 'bf16')


def test_an_arm_named_by_itself_runs_any_seed_one_of_a_group_those_it_has():
  group = runs_of(['gsm8k'], [1, 4])
  of_four = {arm.name for arm, seed in group if seed == 4}
  assert of_four == {'gsm8k_jetrl', 'gsm8k_bf16', 'gsm8k_fp8_rollout'}
  assert [arm.name for arm, _ in runs_of(['gsm8k_qurl'], [6])] == ['gsm8k_qurl']
  with pytest.raises(ValueError, match='--seeds=6: no arm of --arms=gsm8k has'):
    runs_of(['gsm8k'], [6])


def test_an_unknown_arm_is_answered_with_all_that_there_are():
  with pytest.raises(ValueError, match="arm 'fp4' is unknown; allowed: 2x2, e"):
    named(['bf16', 'fp4'])
  assert [arm.name for arm in named(['jetrl', '2x2'])] == [
      'jetrl',
      *(name for name in GROUPS['2x2'] if name != 'jetrl'),
  ]


def test_runs_of_one_seed_differ_in_the_arm_alone(tmp_path):
  plan = Plan(folder=tmp_path, more={'optim.lr': '1e-5'})
  for is_long in (False, True):
    arms = [arm for arm in _TOYS if arm.is_long == is_long]
    shared = [
        {k: v for k, v in plan.settings(arm, 2).items() if k not in _MADE_OF}
        for arm in arms
    ]
    assert all(settings == shared[0] for settings in shared)
    assert shared[0]['seed'] == 2 and shared[0]['optim.lr'] == '1e-5'


def test_long_answers_are_those_of_the_same_problems(tmp_path):
  plan = Plan(folder=tmp_path)
  short, long = (plan.settings(ARMS[n], 1) for n in ('jetrl', 'jetrl_long'))
  assert str(short['data.val_files']).endswith("heldout_1.jsonl',)")
  assert str(long['data.val_files']).endswith("heldout_10.jsonl',)")
  assert long['rollout.max_response_length'] == 1984
  with pytest.raises(ValueError, match="arm 'jetrl_long' has the long answers"):
    other = Plan(folder=tmp_path, config='configs/quickstart.py')
    other.settings(ARMS['jetrl_long'], 1)
