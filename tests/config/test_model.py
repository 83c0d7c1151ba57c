"""From a config to the policy: which kernels it has."""

import dataclasses
import logging
import re

import jax
import pytest

from jetrl_jax.config import model as config_model
from jetrl_jax.kernels import dispatch
from tests import whole_run
from tests.kernels_in_use import HOPPER

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
