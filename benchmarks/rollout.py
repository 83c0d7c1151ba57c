"""Times the rollout loop of a random model, FP8 beside BF16, in one run.

    python -m benchmarks.rollout --output=benchmarks/results/NAME \
      --workloads=128x128x1x2048,128x32x8x1024

A workload is PROMPT_LENGTH x PROMPTS x SAMPLES x NEW_TOKENS; nothing stops
early. What is timed is `jetrl_jax.rl.rollout`, prefill, host visits and both
log-probs included, second call (the first compiles).
"""

import gc

import jax
import numpy as np
from absl import app, flags

from benchmarks import common
from jetrl_jax import rng
from jetrl_jax.rl.engine import Engine, EngineConfig
from jetrl_jax.rl.policy import PolicyParams
from jetrl_jax.rl.rollout import rollout

_OUTPUT = flags.DEFINE_string('output', None, 'Result path without ending.')
_COMMIT = flags.DEFINE_string('commit', '', 'Commit under test.')
_SHAPE = flags.DEFINE_string('shape', 'qwen2.5-7b', 'See model.shape.')
_LAYERS = flags.DEFINE_integer('layers', 0, 'Of the model; 0 for all.')
_WORKLOADS = flags.DEFINE_list('workloads', ['128x128x1x2048'], 'See above.')
_VARIANTS = flags.DEFINE_list(
    'variants',
    ['fp8_delayed', 'fp8_delayed+kv8', 'bf16'],
    'Recipes, see precision.recipe; +kv8 with FP8 keys and values.',
)
_PROFILE = flags.DEFINE_bool('profile', False, 'Print kernels, time nothing.')
_COLUMNS = (
    ('variant', 'variant', ''),
    ('workload', 'workload', ''),
    ('ms_per_step', 'ms/step', '.2f'),
    ('tokens_per_s', 'tokens/s', '.0f'),
    ('floor_ms', 'byte floor ms', '.2f'),
    ('of_floor', 'of the floor', '.0%'),
    ('peak_gib', 'peak GiB', '.1f'),
)
_BYTES_PER_S = 4.3e12  # attainable on an H200


def floor_ms(params: PolicyParams, cache_bytes: float) -> float:
  """Returns the time to read all weights and the mean cache once."""
  weights = dict(params.weights)
  if 'lm_head' in weights:
    weights.pop('embed')
  size = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
  return (size + cache_bytes) / _BYTES_PER_S * 1e3


def measure(engine, params, variant: str, workload: str) -> dict:
  """Returns one row."""
  length, count, samples, new = map(int, workload.split('x'))
  prompts = common.random_prompts(count, length, engine.policy.model.vocab_size)

  def run(tokens):
    return rollout(
        engine,
        params,
        prompts,
        num_generations=samples,
        temperature=1.0,
        base_key=rng.key(0, rng.ROLLOUT, 0),
        weight_version=0,
        limits=np.full((count, samples), tokens),
    )

  run(engine.config.decode_block)
  spent = common.seconds(lambda: len(run(new)))
  slots, (keys, _) = count * samples, engine.policy.page_shapes(1, 2)
  cache = engine.policy.model.num_layers * keys.size * keys.dtype.itemsize
  floor = floor_ms(params, slots * (length + new / 2) * cache)
  return {
      'variant': variant,
      'workload': workload,
      'ms_per_step': spent / new * 1e3,
      'tokens_per_s': slots * new / spent,
      'floor_ms': floor,
      'of_floor': floor / (spent / new * 1e3),
      'peak_gib': common.peak_gib() or 0.0,
  }


def profile(engine, params) -> None:
  """Prints the kernels of 16 steps in the middle of the generation."""
  key, state = rng.key(0, rng.ROLLOUT, 0), engine.init_decode_state()
  # Prompts as long as half the generation: only lengths matter for time.
  tokens = np.arange(engine.config.max_prompt_length, dtype=np.int32)
  prefix = engine.prefill_batch(params, [tokens])
  state = engine.bulk_insert(prefix, state, list(range(engine.num_slots)))

  def steps():
    nonlocal state
    state = engine.generate_block(params, state, key, 16)
    return state.tokens

  spent = common.seconds(steps)
  print(f'{spent / 16 * 1e3:.3f} ms/step at {engine.config.max_prompt_length}')
  print(common.show_kernels(common.kernel_times(steps)), flush=True)


def main(argv: list[str]) -> None:
  """Runs every variant on every workload."""
  del argv
  rows = []
  for variant in _VARIANTS.value:
    policy, mesh, make = common.random_policy(
        _SHAPE.value, common.overrides(variant), _LAYERS.value
    )
    state = common.random_state(policy, mesh, make())
    params = PolicyParams(state.weights, state.fp8_state)
    del state
    for workload in _WORKLOADS.value:
      length, count, samples, new = map(int, workload.split('x'))
      if _PROFILE.value:
        length, new = length + new // 2, new // 2
      engine = Engine(
          policy,
          EngineConfig(
              num_slots=count * samples,
              max_prompt_length=length,
              max_response_length=new,
              stop_ids=(),
          ),
          mesh,
      )
      if _PROFILE.value:
        print(f'== {variant} {workload}')
        profile(engine, params)
      else:
        rows.append(measure(engine, params, variant, workload))
        print(rows[-1], flush=True)
      del engine
      gc.collect()
    del params
    gc.collect()
  if not _PROFILE.value:
    common.write(
        _OUTPUT.value,
        rows,
        _ratios(rows),
        common.table(rows, _COLUMNS),
        _COMMIT.value,
    )


def _ratios(rows: list[dict]) -> dict:
  """Speed of every variant over that of the slowest's, per workload."""
  ratios = {}
  for workload in {row['workload'] for row in rows}:
    mine = [row for row in rows if row['workload'] == workload]
    base = max(row['ms_per_step'] for row in mine)
    for row in mine:
      name = f'{workload} {row["variant"]} speedup over the slowest'
      ratios[name] = round(base / row['ms_per_step'], 3)
  return ratios


if __name__ == '__main__':
  app.run(main)
