"""Times forward, backward and optimiser of a random model, FP8 beside BF16.

    python -m benchmarks.train_step --output=benchmarks/results/NAME \
      --workloads=8x4096,2x16384

A workload is ROWS x TOKENS of one micro-batch; a row holds packed segments
of --segment tokens. With --workloads= (none) the optimiser alone is timed,
beside the time that its bytes take and the number of its kernels:

    python -m benchmarks.train_step --workloads= --output=...

On a CPU, to try it: --tiny --workloads=2x128 --segment=64.
"""

import functools
import gc
import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from benchmarks import common
from jetrl_jax.optim.adamw import OptimizerConfig
from jetrl_jax.rl.objective import LossConfig, policy_loss
from jetrl_jax.rl.run.gradients import UpdatePrograms
from jetrl_jax.rl.types import TrainBatch

_SHAPE = flags.DEFINE_string('shape', 'qwen2.5-7b', 'See model.shape.')
_LAYERS = flags.DEFINE_integer('layers', 0, 'Of the model; 0 for all.')
_WORKLOADS = flags.DEFINE_list('workloads', ['8x4096'], 'See above.')
_SEGMENT = flags.DEFINE_integer('segment', 2048, 'Tokens per segment.')
_VARIANTS = flags.DEFINE_list(
    'variants', ['fp8_delayed', 'bf16'], 'Recipes, see precision.recipe.'
)
_REMAT = flags.DEFINE_list(
    'remat', ['full'], 'See model.remat; several are timed side by side.'
)
_CHUNK = flags.DEFINE_integer(
    'logit_chunk_rows', 1024, 'See model.logit_chunk_rows.'
)
_APPLY = flags.DEFINE_bool('apply', True, 'Time the optimiser too.')
_MASTERS = flags.DEFINE_string(
    'master_dtype', 'bfloat16', 'See model.master_dtype.'
)
_ROUNDING = flags.DEFINE_string(
    'master_rounding', 'nearest', 'See optim.master_rounding.'
)
_PROFILE = flags.DEFINE_bool('profile', False, 'Print kernels too.')
_COLUMNS = (
    ('variant', 'variant', ''),
    ('workload', 'workload', ''),
    ('remat', 'remat', ''),
    ('accumulate_ms', 'forward + backward ms', '.0f'),
    ('apply_ms', 'optimiser ms', '.1f'),
    ('apply_floor_ms', 'its byte floor ms', '.1f'),
    ('apply_kernels', 'its kernels', 'd'),
    ('apply_compile_s', 'its compile s', '.0f'),
    ('parameters', 'parameters', '.3g'),
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


def optimizer_bytes(state, gradients) -> int:
  """Returns the bytes that an optimiser step cannot do without.

  Gradients are emptied, read for the norm, and read again to move; masters and
  moments are read and written; compute weights are written, and read for the
  share that changed.
  """

  def size(tree) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))

  moved = size((state.trainable, state.opt_state, state.weights))
  return 3 * size(gradients.trainable) + 2 * moved


def time_optimizer(step, state) -> dict:
  """Returns what one row says of the optimiser; takes the state over."""
  gradients = step.gradient_shapes(state)
  floor = optimizer_bytes(state, gradients) / common.BYTES_PER_S
  start, kernels = time.perf_counter(), 0
  for _, calls, lowered in step.apply.lowered(state, gradients):
    kernels += calls * common.count_kernels(lowered.compile())
  compiled = time.perf_counter() - start

  def apply():
    nonlocal state
    state, info = step.apply(state, step.zero_gradients(state))
    # All of it: the programs of the last part end after the norm's.
    return info, state

  if _PROFILE.value:
    print(f'apply {common.median_seconds(apply, 2) * 1e3:.1f} ms')
    print(common.show_kernels(common.kernel_times(apply), 15), flush=True)
  return {
      'apply_ms': common.median_seconds(apply, 3) * 1e3,
      'apply_floor_ms': floor * 1e3,
      'apply_kernels': kernels,
      'apply_compile_s': compiled,
      'parameters': sum(p.size for p in jax.tree.leaves(state.trainable)),
  }


def time_accumulate(step, state, policy, workload: str) -> dict:
  """Returns what one row says of forward and backward."""
  gradients = step.zero_gradients(state)
  rows, length = map(int, workload.split('x'))
  vocab = policy.model.vocab_size
  batch = jax.device_put(random_batch(rows, length, _SEGMENT.value, vocab))
  temperature = jnp.float32(1.0)

  def accumulate():
    nonlocal gradients
    gradients, logprobs, _ = step.accumulate(
        state, gradients, batch, temperature
    )
    return logprobs

  if _PROFILE.value:
    print(f'accumulate {common.median_seconds(accumulate, 2) * 1e3:.1f} ms')
    print(common.show_kernels(common.kernel_times(accumulate)))
  spent = common.median_seconds(accumulate)
  flops = model_flops(policy.model, rows, length, _SEGMENT.value)
  return {'accumulate_ms': spent * 1e3, 'tflops': flops / spent / 1e12}


def measure(variant, workload, policy, mesh, make) -> dict:
  """Returns one row; with --profile also prints the kernels."""
  config = OptimizerConfig(
      lr=1e-5, moments='fp8', master_rounding=_ROUNDING.value
  )
  state = common.random_state(policy, mesh, make(), config)
  step = UpdatePrograms(
      policy,
      functools.partial(policy_loss, LossConfig()),
      config.build(),
      config,
      mesh,
      state,
  )
  row = {
      'variant': variant,
      'workload': workload or 'optimiser alone',
      'remat': policy.remat,
  }
  if _PROFILE.value:
    print(f'== {variant} {workload} {policy.remat}')
  if workload:
    row |= time_accumulate(step, state, policy, workload)
  if _APPLY.value:
    row |= time_optimizer(step, state)
    if workload:
      row['update_ms'] = row['accumulate_ms'] + row['apply_ms']
  return row | {'peak_gib': common.peak_gib() or 0.0}


def ratios(measured: list[dict]) -> dict:
  """Returns each variant's speed over the slowest's, per workload."""
  found = {}
  for key in ('accumulate_ms', 'apply_ms', 'update_ms'):
    for row in (r for r in measured if key in r):
      same = [r[key] for r in measured if r['workload'] == row['workload']]
      name = f'{row["workload"]} {row["variant"]} {row["remat"]} {key[:-3]}'
      found[f'{name} speedup over the slowest'] = round(max(same) / row[key], 3)
  return found


def main(argv: list[str]) -> None:
  """Runs every variant on every workload."""
  del argv
  measured = []
  for variant, remat in itertools.product(_VARIANTS.value, _REMAT.value):
    settings = common.overrides(variant)
    settings['model.master_dtype'] = _MASTERS.value
    settings['model.remat'] = remat
    settings['model.logit_chunk_rows'] = _CHUNK.value
    policy, mesh, make = common.random_policy(
        _SHAPE.value, settings, _LAYERS.value
    )
    for workload in _WORKLOADS.value or ['']:
      row = measure(variant, workload, policy, mesh, make)
      measured.append(row)
      shown = common.table(measured, _COLUMNS)
      # After each: a later one may run into a time limit.
      common.write(measured, ratios(measured), shown)
      gc.collect()


if __name__ == '__main__':
  common.run(main)
