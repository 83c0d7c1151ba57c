r"""Lowers programs for a Hopper GPU, for the shapes of many models.

    XLA_FLAGS=--xla_force_host_platform_device_count=4 JAX_PLATFORMS=cpu \
        python -m benchmarks.lowered_models --output=benchmarks/results/NAME

Mosaic looks for the layouts of a kernel's arrays when a program is lowered. It
may find none for a number of heads or of columns that nobody has tried, and a
newer jax may refuse what the one before took. This says so without a GPU: it
lowers a layer's decode step, and its update, in each precision, on one device
and on several that share sequences. Nothing is compiled or runs. jax 0.11 or
later.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import numpy as np
import optax
from absl import app, flags

from benchmarks import common
from benchmarks.absent_gpus import state_of, update_arguments
from jetrl_jax.core import collectives, rng, sharding
from jetrl_jax.fp8 import Recipe
from jetrl_jax.kernels import dispatch
from jetrl_jax.models import published, tensor_parallel
from jetrl_jax.models.policy import Policy, PolicyParams
from jetrl_jax.models.types import ModelConfig
from jetrl_jax.optim.adamw import OptimizerConfig
from jetrl_jax.optim.types import TrainState
from jetrl_jax.rl.objective import LossConfig, policy_loss
from jetrl_jax.rl.rollout import decode_step
from jetrl_jax.rl.rollout.buckets import STEPS_PER_SYNC
from jetrl_jax.rl.rollout.engine import Engine, EngineConfig
from jetrl_jax.rl.run.gradients import UpdatePrograms

# Model -> (one of its family, D, query heads, KV heads, their size, F, V).
_MODELS = {
    'Qwen2.5-0.5B': ('qwen2', 896, 14, 2, 64, 4864, 151936),
    'Qwen2.5-1.5B': ('qwen2', 1536, 12, 2, 128, 8960, 151936),
    'Qwen2.5-3B': ('qwen2', 2048, 16, 2, 128, 11008, 151936),
    'Qwen2.5-7B': ('qwen2', 3584, 28, 4, 128, 18944, 152064),
    'Qwen2.5-14B': ('qwen2', 5120, 40, 8, 128, 13824, 152064),
    'Qwen2.5-32B': ('qwen2', 5120, 40, 8, 128, 27648, 152064),
    'Qwen2.5-72B': ('qwen2', 8192, 64, 8, 128, 29568, 152064),
    'Qwen3-0.6B': ('qwen3', 1024, 16, 8, 128, 3072, 151936),
    'Qwen3-1.7B': ('qwen3', 2048, 16, 8, 128, 6144, 151936),
    'Qwen3-4B': ('qwen3', 2560, 32, 8, 128, 9728, 151936),
    'Qwen3-8B': ('qwen3', 4096, 32, 8, 128, 12288, 151936),
    'Qwen3-14B': ('qwen3', 5120, 40, 8, 128, 17408, 151936),
    'Qwen3-32B': ('qwen3', 5120, 64, 8, 128, 25600, 151936),
    'SmolLM2-135M': ('llama', 576, 9, 3, 64, 1536, 49152),
    'SmolLM2-360M': ('llama', 960, 15, 5, 64, 2560, 49152),
    'SmolLM2-1.7B': ('llama', 2048, 32, 32, 64, 8192, 49152),
    'Llama-3.2-1B': ('llama', 2048, 32, 8, 64, 8192, 128256),
    'Llama-3.2-3B': ('llama', 3072, 24, 8, 128, 8192, 128256),
    'Llama-3.1-8B': ('llama', 4096, 32, 8, 128, 14336, 128256),
    'Llama-3.1-70B': ('llama', 8192, 64, 8, 128, 28672, 128256),
}
_FAMILIES = {
    'qwen2': published.QWEN2_5_7B,
    'qwen3': published.QWEN3_8B,
    'llama': published.LLAMA_3_1_8B,
}
_NAMES = flags.DEFINE_list('models', list(_MODELS), 'Which.')
_VARIANTS = flags.DEFINE_list(
    'variants',
    ['fp8_delayed+kv8', 'fp8_delayed+head8', 'bf16', 'fp8_token', 'fp8_block'],
    'A recipe, with FP8 keys and values (kv8) or an FP8 head (head8).',
)
_TENSORS = flags.DEFINE_list('tensors', ['1', '2', '4'], 'See mesh.tensor.')
_SLOTS = flags.DEFINE_integer('slots', 64, 'Of the decode step.')
_PROGRAMS = flags.DEFINE_list('programs', ['decode', 'update'], 'Which.')

_COLUMNS = (
    ('model', 'model', ''),
    ('lowered', 'lowered', 'd'),
    ('refused', 'refused by recipe or `mesh.tensor`', 'd'),
    ('failed', 'failed', 'd'),
    ('slowest_s', 'slowest s', '.1f'),
)


def _model(name: str) -> ModelConfig:
  family, dim, heads, kv_heads, head_dim, ffn_dim, vocab = _MODELS[name]
  return dataclasses.replace(
      _FAMILIES[family],
      num_layers=1,
      model_dim=dim,
      num_heads=heads,
      num_kv_heads=kv_heads,
      head_dim=head_dim,
      ffn_dim=ffn_dim,
      vocab_size=vocab,
  )


def _policy(name: str, variant: str, tensor: int) -> Policy:
  """Returns the policy, with the kernels of a Hopper GPU.

  Raises:
    ValueError: so many devices cannot share the model in this recipe.
  """
  recipe, *options = variant.split('+')
  found = Recipe(name=recipe, quantize_lm_head='head8' in options)
  axes, model = collectives.Axes(tensor=tensor), _model(name)
  tensor_parallel.check(model, found, axes)
  hopper = dispatch.Hardware('gpu', (9, 0), dispatch.has_mosaic())
  return Policy(
      model=model,
      recipe=found,
      tile=64,
      axes=axes,
      kernels=dispatch.select(hardware=hopper),
      kv_cache_dtype='float8_e4m3fn' if 'kv8' in options else 'compute',
  )


def _decode(policy: Policy, state: TrainState, mesh: jax.sharding.Mesh) -> Any:
  config = EngineConfig(
      num_slots=_SLOTS.value,
      max_prompt_length=128,
      max_response_length=256,
      stop_ids=(),
  )
  engine = Engine(policy, config, mesh)
  params = PolicyParams(state.weights, state.fp8_state)
  if policy.axes.tensor > 1:
    engine._params_spec = policy.placed_specs(params)
  program = engine._decode_program(decode_step.generate, STEPS_PER_SYNC, 0)
  return program.trace(
      policy.replicated_shapes(params, mesh),
      engine._idle.eval_shape(),
      jax.eval_shape(lambda: rng.key(0, rng.ROLLOUT, 0)),
      np.int32(STEPS_PER_SYNC),
  )


def _update(policy: Policy, state: TrainState, mesh: jax.sharding.Mesh) -> Any:
  state, batch, temperature = update_arguments(state, mesh, 2, 512)
  loss = functools.partial(policy_loss, LossConfig())
  step = UpdatePrograms(
      policy, loss, optax.identity(), OptimizerConfig(), mesh, state
  )
  gradients = step.gradient_shapes(state)
  return step.accumulate.trace(state, gradients, batch, temperature)


_TRACED: dict[str, Callable[..., Any]] = {'decode': _decode, 'update': _update}


def _lowered(name: str, variant: str, tensor: int, program: str) -> dict:
  """Returns what came of one program."""
  found: dict[str, Any] = {
      'model': name,
      'variant': variant,
      'tensor': tensor,
      'program': program,
  }
  mesh = sharding.make_mesh(tensor=tensor)
  try:
    policy = _policy(name, variant, tensor)
    state = state_of(policy, 'bfloat16', optax.identity())
  except ValueError as refused:
    return found | {'refused': str(refused)}
  begin = time.monotonic()
  try:
    with mock.patch.object(jax, 'default_backend', lambda: 'gpu'):
      traced = _TRACED[program](policy, state, mesh)
      text = traced.lower(lowering_platforms=('cuda',)).as_text()
    found['kernels'] = text.count('custom_call @mosaic_gpu')
  except Exception as error:  # Of any kind: it is what is looked for.
    found['error'] = f'{type(error).__name__}: {str(error)[:300]}'
  return found | {'seconds': time.monotonic() - begin}


def _summary(rows: list[dict]) -> list[dict]:
  """Returns a row for each model."""
  return [
      {
          'model': name,
          'lowered': sum('kernels' in row for row in mine),
          'refused': sum('refused' in row for row in mine),
          'failed': sum('error' in row for row in mine),
          'slowest_s': max(row.get('seconds', 0.0) for row in mine),
      }
      for name in dict.fromkeys(row['model'] for row in rows)
      for mine in [[row for row in rows if row['model'] == name]]
  ]


def main(argv: list[str]) -> None:
  """Lowers all, and fails if one of them does."""
  del argv
  if not dispatch.has_mosaic():
    raise app.UsageError(f'jax {jax.__version__} has no kernels: 0.11 or later')
  rows: list[dict] = []
  failed: list[dict] = []
  for name in _NAMES.value:
    for variant in _VARIANTS.value:
      for tensor in map(int, _TENSORS.value):
        for program in _PROGRAMS.value:
          rows.append(_lowered(name, variant, tensor, program))
          print(rows[-1], flush=True)
    failed = [row for row in rows if 'error' in row]
    shown = common.table(_summary(rows), _COLUMNS)
    said = {
        f'{row["model"]}, {row["variant"]}, tensor={row["tensor"]},'
        f' {row["program"]}': row['error']
        for row in failed
    }
    common.write(
        rows, said, shown, 'none: lowered for a Hopper GPU, nothing ran'
    )
  if failed:
    raise SystemExit(f'{len(failed)} programs were not lowered')


if __name__ == '__main__':
  common.run(main)
