import re

import pytest

from jetrl_jax.fp8 import Recipe, adaptive, scaling_state


def _dot(input_db=None, kernel_db=None, grad_db=1.0):
  entries = {'input': input_db, 'kernel': kernel_db, 'output_grad': grad_db}
  return {
      operand: {'amax': 1.0} | ({} if db is None else {'sqnr_db': db})
      for operand, db in entries.items()
  }


def test_a_dot_is_chosen_by_the_worse_of_input_and_kernel():
  summary = {
      'layers_0/attn/qkv': _dot(31.0, 25.0),
      'layers_0/attn/o': _dot(29.9, 31.0),
      'layers_0/mlp/down': _dot(30.0, 31.0),  # Not below.
      'layers_1/attn/qkv': _dot(31.0),  # Its kernel lost nothing.
      'layers_1/attn/o': _dot(),
  }
  assert adaptive.choose({'fp8_token': summary}, 30.0) == {
      'layers_0/attn/qkv': 25.0,
      'layers_0/attn/o': 29.9,
  }


def test_a_dot_of_a_mixed_flow_is_chosen_by_the_worse_of_its_two_sides():
  training = {'qkv': _dot(31.0, 31.0), 'o': _dot(29.0, 31.0), 'up': _dot(31.0)}
  rollout = {'qkv': _dot(20.0, 40.0), 'o': _dot(41.0, 41.0), 'up': _dot()}
  sides = {'fp8_delayed': training, 'int8': rollout}
  assert adaptive.choose(sides, 30.0) == {'qkv': 20.0, 'o': 29.0}
  # No dot is left that both sides would keep: 31 dB is the best.
  message = 'no dot keeps that much with recipe fp8_delayed and int8 (the best'
  with pytest.raises(ValueError, match=re.escape(message) + ' has 31.0 dB'):
    adaptive.choose(sides, 35.0)


def test_a_threshold_above_every_dot_is_refused():
  summary = {'a': _dot(31.0, 31.5), 'b': _dot(30.0, 33.0)}
  message = 'min_sqnr_db is 40.0, and no dot keeps that much with recipe int8'
  with pytest.raises(ValueError, match=re.escape(message)) as error:
    adaptive.choose({'int8': summary}, 40.0)
  assert 'the best has 31.0 dB' in str(error.value)


def test_where_no_dot_is_quantised_none_is_chosen():
  assert adaptive.choose({'fp8_delayed': {}}, 30.0) == {}


def test_a_recipe_that_keeps_dots_takes_their_paths_literally():
  recipe = Recipe(high_precision_layers=('.*/o',)).with_high_precision(
      ('layers_1/a.b',)
  )
  assert not recipe.quantizes('layers_1/a.b')
  assert not recipe.quantizes('layers_7/attn/o')
  assert recipe.quantizes('layers_1/axb') and recipe.quantizes('layers_10/a.b')


@pytest.mark.parametrize('name', ['fp8_delayed', 'int8'])
def test_what_is_kept_has_no_dot_state_and_the_others_keep_theirs(name):
  recipe = Recipe(name=name)
  make = (
      (lambda: scaling_state.init_dot_state(4))
      if recipe.is_delayed
      else scaling_state.init_dynamic_dot_state
  )
  state = {'layers_0': {'attn': {'o': make(), 'qkv': make()}, 'mlp': make()}}
  kept = scaling_state.restrict(
      state, recipe.with_high_precision(('layers_0/attn/o',))
  )
  assert scaling_state.dot_paths(kept) == [
      'layers_0/attn/qkv',
      'layers_0/mlp',
  ]
  assert kept['layers_0']['mlp'] is state['layers_0']['mlp']
  every = recipe.with_high_precision(('layers_0/mlp', 'layers_0/attn/o'))
  every = every.with_high_precision(('layers_0/attn/qkv',))
  assert scaling_state.restrict(state, every) == {}
