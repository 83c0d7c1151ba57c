import dataclasses
import re

import jax.numpy as jnp
import pytest

from jetrl_jax.fp8.recipes import Recipe

DOTS = ('attn/qkv', 'attn/o', 'mlp/gate_up', 'mlp/down')


@pytest.mark.parametrize(
    'field, value, message',
    [
        (
            'name',
            'fp8',
            "recipe is 'fp8'; allowed: fp8_delayed, fp8_token, fp8_block,",
        ),
        ('compute_dtype', 'float16', "'float16'; allowed: bfloat16, float32"),
        ('grad_format', 'e8m0', "'e8m0'; allowed: e4m3, e5m2"),
        ('amax_history_length', 1, 'is 1; allowed: 2 (one'),
        ('margin', 17, 'is 17 bits; allowed: 0 to 16'),
        ('margin', -1, 'is -1 bits; allowed: 0 to 16'),
        ('min_sqnr_db', 101.0, 'is 101.0 dB; allowed: 0 (off) to 100'),
        ('min_sqnr_db', -1.0, 'is -1.0 dB; allowed: 0 (off) to 100'),
        ('high_precision_layers', ('layers_[0/.*',), "'layers_[0/.*' is no"),
    ],
)
def test_a_wrong_setting_is_refused_with_what_was_found(field, value, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    Recipe(**{field: value})


@pytest.mark.parametrize(
    'name, meant',
    [
        ('fp8', "; did you mean 'fp8_delayed'?"),
        ('FP8_BLOCK', "; did you mean 'fp8_block'?"),
        ('bfloat16', "; did you mean 'bf16'?"),
        ('', ', bf16'),
        ('xyz', ', bf16'),
    ],
)
def test_the_nearest_recipe_is_named_where_one_is_near(name, meant):
  with pytest.raises(ValueError, match=f'{re.escape(meant)}$'):
    Recipe(name=name)


@pytest.mark.parametrize('dot', DOTS)
def test_fp8_delayed_quantises_every_dot_of_a_block_and_bf16_none(dot):
  assert Recipe().quantizes(f'layers_7/{dot}')
  assert not Recipe(name='bf16').quantizes(f'layers_7/{dot}')


@pytest.mark.parametrize('path', ['lm_head', 'embed', 'embed/embedding'])
def test_head_and_embedding_are_not_quantised_unless_asked_for(path):
  assert not Recipe().quantizes(path)
  asked = Recipe(quantize_lm_head=True)
  assert asked.quantizes(path) == (path == 'lm_head')
  kept = dataclasses.replace(asked, high_precision_layers=('lm_head',))
  assert not kept.quantizes(path)


def test_a_layer_pattern_must_match_the_whole_path():
  # As a prefix, 'layers_1' would also take layers_10 and layers_1/mlp/down.
  recipe = Recipe(high_precision_layers=('layers_1/mlp/.*', 'layers_1'))
  assert not recipe.quantizes('layers_1/mlp/down')
  assert recipe.quantizes('layers_10/mlp/down')
  assert recipe.quantizes('layers_1/attn/o')


def test_a_start_calibrates_delayed_scales_and_a_choice_by_noise():
  assert Recipe().needs_calibration
  for name in ('fp8_token', 'fp8_block', 'int8', 'fake_int4', 'bf16'):
    assert not Recipe(name=name).needs_calibration
    chooses = Recipe(name=name, min_sqnr_db=20.0)
    assert chooses.needs_calibration == (name != 'bf16')


def test_only_delayed_scales_that_are_powers_of_two_may_come_late():
  assert Recipe().may_scale_late
  assert not Recipe(power_of_two_scales=False).may_scale_late
  assert not Recipe(calibrating=True).may_scale_late
  for name in ('fp8_token', 'fp8_block', 'int8', 'fake_e4m3', 'bf16'):
    assert not Recipe(name=name).may_scale_late


def test_equal_recipes_are_equal_keys():
  # A compiled function is cached by its recipe.
  assert hash(Recipe(margin=1)) == hash(Recipe(margin=1))
  assert Recipe(margin=1) != Recipe(margin=2)


def test_a_recipe_cannot_change():
  with pytest.raises(dataclasses.FrozenInstanceError):
    Recipe().margin = 3


def test_the_compute_dtype_is_a_dtype():
  assert Recipe(compute_dtype='float32').dtype == jnp.float32
