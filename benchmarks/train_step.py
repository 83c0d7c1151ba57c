"""Times forward, backward and optimiser of a random model, FP8 beside BF16.

    python -m benchmarks.train_step --output=benchmarks/results/NAME \
      --workloads=8x4096,2x16384

A workload is ROWS x TOKENS of one micro-batch; a row holds packed segments
of --segment tokens.
"""

import functools
import gc

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from benchmarks import common
from jetrl_jax.rl.objective import LossConfig, policy_loss
from jetrl_jax.rl.optimizer import OptimizerConfig
from jetrl_jax.rl.train_step import TrainStep
from jetrl_jax.rl.types import TrainBatch

_OUTPUT = flags.DEFINE_string('output', None, 'Result path without ending.')
_COMMIT = flags.DEFINE_string('commit', '', 'Commit under test.')
_SHAPE = flags.DEFINE_string('shape', 'qwen2.5-7b', 'See model.shape.')
_LAYERS = flags.DEFINE_integer('layers', 0, 'Of the model; 0 for all.')
_WORKLOADS = flags.DEFINE_list('workloads', ['8x4096'], 'See above.')
_SEGMENT = flags.DEFINE_integer('segment', 2048, 'Tokens per segment.')
_VARIANTS = flags.DEFINE_list(
    'variants', ['fp8_delayed', 'bf16'], 'Recipes, see precision.recipe.'
)
_APPLY = flags.DEFINE_bool('apply', True, 'Time the optimiser too.')
_PROFILE = flags.DEFINE_bool('profile', False, 'Print kernels, time nothing.')
_COLUMNS = (
    ('variant', 'variant', ''),
    ('workload', 'workload', ''),
    ('accumulate_ms', 'forward + backward ms', '.0f'),
    ('apply_ms', 'optimiser ms', '.0f'),
    ('update_ms', 'update ms', '.0f'),
    ('tflops', 'model TFLOP/s', '.0f'),
    ('peak_gib', 'peak GiB', '.1f'),
)


def random_batch(rows: int, length: int, segment: int, vocab: int):
  """Returns a full micro-batch of random tokens in equal segments."""
  index = np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length))
  random = np.random.default_rng(0)
  ones = np.ones((rows, length), np.float32)
  advantages = random.choice(np.float32([-1, 1]), (rows, 1)) * ones
  return TrainBatch(
      tokens=random.integers(0, vocab, (rows, length), dtype=np.int32),
      positions=index % segment,
      segment_ids=1 + index // segment,
      loss_mask=ones * (index % segment > 0),
      loss_weight=ones / (rows * length),
      advantages=advantages,
      log_mu=-11.9 * ones,
      rollout_logprobs=-11.9 * ones,
      old_logprobs=-11.9 * ones,
      ref_logprobs=-11.9 * ones,
      weight_version=np.zeros((rows, length), np.int32),
  )


def model_flops(model, rows: int, length: int, segment: int) -> float:
  """Forward and backward: 6 per matmul weight and token, 6 N H per key seen.

  The causal triangle is counted once, recomputation not at all.
  """
  d, f, h = model.model_dim, model.ffn_dim, model.head_dim
  layer = (model.num_heads * 2 + 2 * model.num_kv_heads) * h * d + 3 * d * f
  weights = model.num_layers * layer + model.vocab_size * d
  keys = 12 * model.num_layers * model.num_heads * h * segment / 2
  return rows * length * (6.0 * weights + keys)


def measure(variant, workload, policy, mesh, make) -> dict:
  """Returns one row; or prints the kernels."""
  rows, length = map(int, workload.split('x'))
  config = OptimizerConfig(lr=1e-5, moments='fp8')
  state = common.random_state(policy, mesh, make(), config)
  step = TrainStep(
      policy,
      functools.partial(policy_loss, LossConfig()),
      config.build(),
      config,
      mesh,
      state,
  )
  gradients = step.zero_gradients(state)
  vocab = policy.model.vocab_size
  batch = jax.device_put(random_batch(rows, length, _SEGMENT.value, vocab))
  temperature = jnp.float32(1.0)

  def accumulate():
    nonlocal gradients
    gradients, logprobs, _ = step.accumulate(
        state, gradients, batch, temperature
    )
    return logprobs

  def apply():
    nonlocal state, gradients
    state, gradients, info = step.apply(state, gradients)
    return info.grad_norm

  if _PROFILE.value:
    print(f'== {variant} {workload}')
    print(f'accumulate {common.median_seconds(accumulate, 2) * 1e3:.1f} ms')
    print(common.show_kernels(common.kernel_times(accumulate)))
    if not _APPLY.value:
      return {}
    print(f'apply {common.median_seconds(apply, 2) * 1e3:.1f} ms')
    print(common.show_kernels(common.kernel_times(apply), 15), flush=True)
    return {}
  spent = common.median_seconds(accumulate)
  applied = common.median_seconds(apply, 3) if _APPLY.value else None
  flops = model_flops(policy.model, rows, length, _SEGMENT.value)
  row = {
      'variant': variant,
      'workload': workload,
      'accumulate_ms': spent * 1e3,
      'tflops': flops / spent / 1e12,
      'peak_gib': common.peak_gib() or 0.0,
  }
  if applied is not None:
    row |= {'apply_ms': applied * 1e3, 'update_ms': (spent + applied) * 1e3}
  return row


def main(argv: list[str]) -> None:
  """Runs every variant on every workload."""
  del argv
  measured = []
  for variant in _VARIANTS.value:
    policy, mesh, make = common.random_policy(
        _SHAPE.value, common.overrides(variant), _LAYERS.value
    )
    for workload in _WORKLOADS.value:
      row = measure(variant, workload, policy, mesh, make)
      print(row, flush=True)
      measured.append(row)
      gc.collect()
  if not _PROFILE.value:
    ratios = {}
    for workload in _WORKLOADS.value:
      mine = [row for row in measured if row['workload'] == workload]
      base = max(row['accumulate_ms'] for row in mine)
      for row in mine:
        name = f'{workload} {row["variant"]} speedup over the slowest'
        ratios[name] = round(base / row['accumulate_ms'], 3)
    shown = common.table(measured, _COLUMNS)
    common.write(_OUTPUT.value, measured, ratios, shown, _COMMIT.value)


if __name__ == '__main__':
  app.run(main)
