"""A GPU without 8-bit floats is named before a kernel fails to compile."""

import dataclasses
import types

import jax
import pytest

from jetrl_jax.config import build as configs
from jetrl_jax.fp8 import Recipe
from jetrl_jax.rl.run import fp8_support
from tests import whole_run
from tests.rl import tiny_run

_FP8, _BF16, _FAKE = (
    tiny_run.policy(recipe)
    for recipe in (Recipe(), tiny_run.BF16, Recipe(name='fake_e4m3'))
)


def _of(monkeypatch, capability: str):
  device = types.SimpleNamespace(
      device_kind='NVIDIA A100-SXM4-80GB', compute_capability=capability
  )
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  monkeypatch.setattr(jax, 'devices', lambda: [device])


@pytest.mark.parametrize('capability', ['8.0', '8.6', '7.5', 'gfx942'])
def test_all_that_asks_for_fp8_is_named_with_its_fix(monkeypatch, capability):
  _of(monkeypatch, capability)
  cached = dataclasses.replace(_BF16, kv_cache_dtype='float8_e4m3fn')
  with pytest.raises(ValueError) as caught:
    fp8_support.check({'precision.recipe': _FP8, 'other': cached}, 'fp8')
  assert str(caught.value) == (
      "precision.recipe='fp8_delayed',"
      " precision.kv_cache_dtype='float8_e4m3fn', optim.moments='fp8' need"
      ' 8-bit floats, which NVIDIA A100-SXM4-80GB'
      f' (compute capability {capability}) lacks; allowed are GPUs of compute'
      ' capability 8.9 and above (Ada, Hopper). Set precision.recipe=bf16,'
      ' precision.kv_cache_dtype=compute, optim.moments=float32'
  )


@pytest.mark.parametrize('capability', ['8.9', '9.0', '10.0', '12.0'])
def test_newer_ones_have_it(monkeypatch, capability):
  _of(monkeypatch, capability)
  fp8_support.check({'precision.recipe': _FP8}, 'fp8')


def test_bf16_and_fake_bits_need_none(monkeypatch):
  _of(monkeypatch, '8.0')
  fp8_support.check({'one': _BF16, 'other': _FAKE}, 'float32')


def test_a_cpu_computes_them_by_xla():
  fp8_support.check({'precision.recipe': _FP8}, 'fp8')


def test_a_named_device_is_looked_up():
  asked = {'precision.recipe': _FP8}
  assert fp8_support.why_not(asked, device='NVIDIA H200') is None
  problem = fp8_support.why_not(asked, device='NVIDIA A100-SXM4-80GB')
  assert problem and 'needs 8-bit floats, which NVIDIA A100' in problem


def test_the_rollout_of_a_mixed_flow_is_named_by_its_own_setting():
  changes = {
      'precision.recipe': 'bf16',
      'precision.rollout_recipe': 'fp8_token',
      'algorithm.old_logprobs': 'recompute',
      'optim.moments': 'float32',
  }
  spec = configs.build(whole_run.config(**changes))
  assert fp8_support.of_run(spec) is None
  problem = fp8_support.of_run(spec, 'NVIDIA A100-SXM4-80GB')
  assert problem
  assert problem.startswith("precision.rollout_recipe='fp8_token' needs 8-bit")
  assert problem.endswith('Set precision.rollout_recipe=bf16')


def test_recipes_of_evaluations_count_too():
  changes = {
      'precision.recipe': 'bf16',
      'trainer.val_recipes': ('int8', 'fp8_token'),
      'optim.moments': 'float32',
  }
  spec = configs.build(whole_run.config(**changes))
  problem = fp8_support.of_run(spec, 'NVIDIA A100-SXM4-80GB')
  assert problem
  assert problem.startswith("trainer.val_recipes='fp8_token' needs 8-bit")
  assert problem.endswith('Set trainer.val_recipes=()')
