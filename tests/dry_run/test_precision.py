"""The precision table, and which dots run on FP8 tensor cores."""

import dataclasses
from unittest import mock

import pytest

from jetrl_jax.dry_run import precision as dry_run_precision
from jetrl_jax.kernels import dispatch
from jetrl_jax.models import published
from tests import kernels_in_use
from tests.dry_run import parts_of


def test_the_table_of_a_mixed_flow_has_two_sides():
  rows = {row.name: row for row in dry_run_precision.table(parts_of.mixed())}
  qkv = rows['layers_*/attn/qkv']
  assert qkv.rollout == 'i8 x i8 -> i32'
  assert qkv.training == 'bf16 x bf16 -> bf16'
  assert 'per channel' in qkv.granularity
  one_side = [dataclasses.replace(qkv, rollout='e4m3 x e4m3 -> bf16')]
  assert dry_run_precision.fp8_dots(one_side) == one_side
  assert dry_run_precision.fp8_dots(one_side, side='training') == []


def test_the_table_says_what_computes_in_fp8():
  rows = {row.name: row for row in dry_run_precision.table(parts_of.tiny())}
  qkv = rows['layers_*/attn/qkv']
  assert qkv.rollout == qkv.training == 'e4m3 x e4m3 -> bf16'
  assert qkv.granularity == 'per tensor' and qkv.layers == 1
  # 2 heads and 2 x 1 key and value heads of 16, width 32.
  assert qkv.shape == '64 x 32'
  assert 'e4m3 x e4m3 -> f32' in qkv.backward
  assert rows['embed.logits'].rollout == 'bf16 x bf16 -> f32'
  eight = [row.name for row in dry_run_precision.fp8_dots([*rows.values()])]
  assert eight == [
      'layers_*/attn/qkv',
      'layers_*/attn/o',
      'layers_*/mlp/gate_up',
      'layers_*/mlp/down',
  ]


@kernels_in_use.needs_mosaic
@pytest.mark.parametrize('keys', ['compute', 'float8_e4m3fn'])
def test_the_table_of_a_gpu_is_that_of_the_references(keys):
  changes = {'precision.kv_cache_dtype': keys}
  spec = parts_of.shape(published.QWEN2_5_7B, **changes)
  on_cpu = dry_run_precision.table(spec)
  kernels = dispatch.select(hardware=kernels_in_use.HOPPER)
  policy = dataclasses.replace(spec.policy, kernels=kernels)
  with mock.patch('jax.default_backend', lambda: 'gpu'):
    on_gpu = dry_run_precision.table(spec.with_policy(policy))
  dots = [row for row in on_cpu if row.shape]
  assert dots == [row for row in on_gpu if row.shape]
  eight = dry_run_precision.fp8_dots(on_gpu)
  assert eight == dry_run_precision.fp8_dots(on_cpu)
  assert [row.name.split('/')[-1] for row in eight] == [
      'qkv',
      'o',
      'gate_up',
      'down',
  ]
  (attention,) = [row for row in on_gpu if not row.shape]
  # float16 holds FP8 keys and values exactly.
  products = 'bf16 x bf16 -> f32' if keys == 'compute' else 'f16 x f16 -> f32'
  assert attention.rollout == attention.training == products


def _row(name: str) -> dry_run_precision.Row:
  return dry_run_precision.Row(
      name=name,
      shape='64 x 32',
      rollout='e4m3 x e4m3 -> bf16',
      training='',
      backward='',
      granularity='per tensor',
      layers=2,
  )


def test_gemms_without_an_fp8_call_are_named():
  hlo = '\n'.join(
      [
          '%a = custom-call(...), custom_call_target="__cublas$lt$matmul$f8",'
          ' metadata={op_name="jit(f)/Decoder/layers_11/attn/qkv/dot_general"}',
          '%b = custom-call(...), custom_call_target="__cublas$lt$matmul",'
          ' metadata={op_name="jit(f)/Decoder/layers_11/attn/o/dot_general"}',
          '%c = custom-call(...), custom_call_target="mosaic_gpu_v2",'
          ' metadata={op_name="f/layers_1/attn/o/jit(turn)/turn/mpmd_map"}',
      ]
  )
  rows = [_row('layers_*/attn/qkv'), _row('layers_*/attn/o')]
  assert dry_run_precision.not_in_fp8(hlo, rows) == ['layers_*/attn/o']


@pytest.mark.parametrize(
    'name, target, scopes',
    [
        # As a Hopper GPU's decode has them with jax 0.11.
        ('attn/qkv', '__cublas$lt$matmul$f8', 'attn/qkv.unscaled/dot_general'),
        (
            'mlp/gate_up',
            'mosaic_gpu_v2',
            'mlp/gate_up/jit(hidden)/gate_up/mpmd_map',
        ),
        (
            'mlp/down',
            'mosaic_gpu_v2',
            'mlp/down/jit(block_dot)/block_dot/mpmd_map',
        ),
    ],
)
def test_an_fp8_gemm_is_found_by_whatever_name_it_runs(name, target, scopes):
  hlo = (
      f'%a = custom-call(...), custom_call_target="{target}",'
      f' metadata={{op_name="jit(generate)/checkpoint/layers_0/{scopes}"}}'
  )
  rows = [_row(f'layers_*/{name}')]
  assert not dry_run_precision.not_in_fp8(hlo, rows)
  assert dry_run_precision.not_in_fp8(hlo.replace('layers_0', 'others_0'), rows)
