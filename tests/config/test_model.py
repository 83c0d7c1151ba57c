"""From a config to the policy: which kernels it has."""

import dataclasses
import logging
import re

import jax
import pytest

from jetrl_jax.config import model as config_model
from jetrl_jax.kernels import dispatch
from jetrl_jax.models.hf.save import save_checkpoint
from tests import whole_run
from tests.kernels_in_use import HOPPER

_BFLOAT16 = whole_run.ROOT / 'examples' / 'quickstart' / 'checkpoint'
# Heads of 128 and a tile of 64.
_RANDOM = {
    'model.init': 'random',
    'model.shape': 'qwen2.5-7b',
    'model.path': '',
}


def _kernels(**changes):
  config = whole_run.config(**_RANDOM, **changes)
  policy, _, _ = config_model.build_policy(config)
  found = dict(policy.kernels.chosen)
  assert found.pop('gather_columns') == 'reference'
  return found


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch):
  monkeypatch.setattr(dispatch, 'detect', lambda: HOPPER)


def test_a_model_that_kernels_take_has_them_all(caplog):
  found = _kernels(**{'model.attention_tile': 64})
  assert set(found.values()) == {'mosaic_sm90'} and not caplog.records


@pytest.mark.parametrize(
    'tile, kv_heads, said',
    [
        (32, 4, 'model.attention_tile=32 and'),
        (64, 1, '28 query heads a KV head, .* at most 16 query heads a KV'),
    ],
)
def test_attention_that_no_kernel_takes_is_plain_jax_on_both_sides(
    tile, kv_heads, said, caplog, monkeypatch
):
  name = _RANDOM['model.shape']
  shape = config_model.SHAPES[name]
  shape = dataclasses.replace(shape, num_kv_heads=kv_heads)
  monkeypatch.setitem(config_model.SHAPES, name, shape)
  with caplog.at_level(logging.WARNING):
    found = _kernels(**{'model.attention_tile': tile})
  plain = {name for name, made in found.items() if made == 'reference'}
  assert plain == {'attention', 'decode_attention'}
  [record] = caplog.records
  assert 'Attention is plain JAX' in record.message
  assert re.search(said, record.message)


@pytest.mark.parametrize(
    'changes, count',
    [
        # qkv, o, gate_up and down of four layers.
        ({}, 16),
        ({'model.freeze': ('layers_0/.*',)}, 12),
        ({'precision.recipe': 'bf16'}, 0),
        ({'precision.recipe': 'bf16', 'precision.rollout_recipe': 'int8'}, 16),
        ({'model.spread_masters': True}, 0),
        ({'model.master_dtype': 'bfloat16'}, 0),
        ({'precision.power_of_two_scales': False}, 0),
    ],
)
def test_masters_that_are_left_on_ties_are_warned_of(changes, count, caplog):
  config = whole_run.config(
      **{
          'model.init': 'checkpoint',
          'model.path': str(_BFLOAT16),
          'model.spread_masters': False,
      }
      | changes
  )
  policy, mesh, folder = config_model.build_policy(config)
  make_params, _ = config_model.parameters(config, policy, mesh, folder)
  caplog.clear()
  make_params()
  said = [record.getMessage() for record in caplog.records]
  assert len(said) == bool(count)
  for sentence in said:
    assert sentence.startswith(
        f'model.spread_masters is False, and {count} trained kernels of 8-bit'
    )
    assert sentence.endswith('Set model.spread_masters=True, the default')


def test_masters_of_a_float32_file_or_at_random_are_on_no_tie(tmp_path, caplog):
  off = {'model.spread_masters': False}
  config = whole_run.config(
      **{'model.init': 'checkpoint', 'model.path': str(_BFLOAT16)} | off
  )
  policy, mesh, folder = config_model.build_policy(config)
  params = config_model.parameters(config, policy, mesh, folder)[0]()
  # Thirds are no bfloat16 values.
  thirds = jax.tree.map(lambda x: x / 3, params)
  save_checkpoint(tmp_path / 'f32', thirds, policy.model, dtype='float32')
  caplog.clear()
  config.model.path = str(tmp_path / 'f32')
  config_model.parameters(config, policy, mesh, tmp_path / 'f32')[0]()
  config = whole_run.config(**off)
  policy, mesh, folder = config_model.build_policy(config)
  config_model.parameters(config, policy, mesh, folder)[0]()
  assert 'spread_masters' not in caplog.text


def test_a_named_kernel_that_does_not_take_the_model_is_refused():
  changes = {'model.attention_tile': 32, 'kernels': 'attention = mosaic_sm90'}
  with pytest.raises(ValueError, match='attention_tile=32 .*: leave attention'):
    _kernels(**changes)
  found = _kernels(**changes | {'model.attention_tile': 64})
  assert found['attention'] == 'mosaic_sm90'


def test_a_kernel_between_gpus_that_cannot_run_is_refused(monkeypatch):
  monkeypatch.setattr(jax, '__version_info__', (0, 11, 0))
  changes = {
      'model.attention_tile': 64,
      'kernels': 'gather_columns=mosaic_sm90',
      'mesh.tensor': 2,
  }
  with pytest.raises(ValueError, match='gather_columns=mosaic_sm90 and mesh.t'):
    _kernels(**changes)
