"""Times the rollout loop of a random model, FP8 beside BF16, in one run.

    python -m benchmarks.rollout --output=benchmarks/results/NAME \
      --workloads=128x128x1x2048,128x32x8x1024

A workload is PROMPT_LENGTH x PROMPTS x SAMPLES x NEW_TOKENS; nothing stops
early. What is timed is `jetrl_jax.rl.rollout.scheduler`, prefill, host visits
and both log-probs included, second call (the first compiles). A step is one of
the longest answer's: with --lengths=long_tail most are far shorter, and with
--kv_tokens, where they do not all fit at once, some wait. The columns of decode
alone are without the prefill: of such a rollout, less one that ends early.

--memory_caps=24,48,141 asks what a smaller device would do: keys and values get
what a device of so many GB has left beside the weights, and as many slots run
as then have room at full length. On a CPU, to try it: --tiny
--workloads=16x8x2x32 --memory_caps=0.002,141.
"""

import dataclasses
import gc

import jax
import numpy as np
from absl import flags

from benchmarks import common
from jetrl_jax.core import device_memory, rng
from jetrl_jax.models.policy import PolicyParams
from jetrl_jax.rl import synthetic
from jetrl_jax.rl.rollout.engine import Engine, EngineConfig
from jetrl_jax.rl.rollout.scheduler import rollout

_SHAPE = flags.DEFINE_string('shape', 'qwen2.5-7b', 'See model.shape.')
_LAYERS = flags.DEFINE_integer('layers', 0, 'Of the model; 0 for all.')
_WORKLOADS = flags.DEFINE_list('workloads', ['128x128x1x2048'], 'See above.')
_VARIANTS = flags.DEFINE_list(
    'variants',
    ['fp8_delayed', 'fp8_delayed+kv8', 'bf16'],
    'Recipes, see precision.recipe; options: see `common.overrides`.',
)
_PROFILE = flags.DEFINE_bool('profile', False, 'Print kernels, time nothing.')
_CAPS = flags.DEFINE_list(
    'memory_caps', [], 'GB (1e9 bytes) of the device to act as; none for all.'
)
_LENGTHS = flags.DEFINE_enum(
    'lengths',
    'full',
    ['full', *synthetic.LENGTHS],
    'Of the answers; see `trainer.synthetic_lengths`.',
)
_KV_TOKENS = flags.DEFINE_integer(
    'kv_tokens', 0, 'See rollout.kv_cache_tokens; 0 for all slots full.'
)
_PREFILLED = 16  # prompts whose caches lie beside the slots' at a time
_COLUMNS = (
    ('variant', 'variant', ''),
    ('workload', 'workload', ''),
    ('memory_gb', 'as if GB', 'g'),
    ('slots', 'slots', 'd'),
    ('kv_tokens', 'KV tokens', 'd'),
    ('ms_per_step', 'ms/step', '.2f'),
    ('tokens_per_s', 'tokens/s', '.0f'),
    ('floor_ms', 'byte floor ms', '.2f'),
    ('of_floor', 'of the floor', '.0%'),
    ('decode_ms', 'decode alone, ms/step', '.2f'),
    ('decode_of_floor', 'of its floor', '.1%'),
    ('peak_gib', 'peak GiB', '.1f'),
)


def floor_ms(params: PolicyParams, cache_bytes: float) -> float:
  """Returns the time to read all weights and the mean cache once."""
  weights = dict(params.weights)
  if 'lm_head' in weights:
    weights.pop('embed')
  size = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
  return (size + cache_bytes) / common.BYTES_PER_S * 1e3


def token_bytes(policy) -> int:
  """Returns the bytes of one token's keys and values in all layers."""
  # Two tokens' keys take what one token's keys and values do.
  keys, _ = policy.page_shapes(1, 2)
  return policy.model.num_layers * keys.size * keys.dtype.itemsize


def room(engine, params: PolicyParams, cap: float) -> tuple[int, int]:
  """Returns (slots, tokens of keys and values) of a device with `cap` GB.

  Its memory is 95% of that, less the weights, the caches of one prefill, and
  two copies of a decode step's logits. As many slots run as have room at full
  length, in sixteens, so that no sequence waits in the middle.

  Args:
    engine: with the slots and lengths that are asked for.
    params: compute weights and scales.
    cap: 10^9 bytes.
  """
  policy, size = engine.policy, token_bytes(engine.policy)
  free = device_memory.USABLE * cap * 1e9
  free -= sum(leaf.nbytes for leaf in jax.tree.leaves(params))
  free -= _PREFILLED * engine.buckets[0] * size
  free -= 2 * 4 * engine.num_slots * policy.model.vocab_size
  fit = int(max(0, free) / size) // engine.cache_length // 16 * 16
  slots = min(engine.num_slots, fit)
  return slots, slots * engine.cache_length


def measure(engine, params, variant: str, workload: str) -> dict:
  """Returns one row."""
  length, count, samples, new = map(int, workload.split('x'))
  prompts = common.random_prompts(count, length, engine.policy.model.vocab_size)
  if _LENGTHS.value == 'full':
    tokens_PG = np.full((count, samples), new)
    few = engine.config.decode_block
  else:
    tokens_PG = synthetic.response_limits(
        0, 1, prompts, samples, new, _LENGTHS.value
    )
    few = new // 4  # Enough for some to wait, and for a tail in few slots.

  def run(limits):
    return rollout(
        engine,
        params,
        prompts,
        num_generations=samples,
        temperature=1.0,
        base_key=rng.key(0, rng.ROLLOUT, 0),
        weight_version=0,
        limits=limits,
    )

  early_PG = np.minimum(tokens_PG, few)
  run(early_PG)
  first = common.seconds(lambda: len(run(early_PG)))
  spent = common.seconds(lambda: len(run(tokens_PG)))
  longest, total = int(tokens_PG.max()), int(tokens_PG.sum())
  at_once = min(count * samples, engine.num_slots)
  # Fewer slots than sequences: these take turns.
  steps = max(longest, total / at_once)
  cache = (tokens_PG * (length + tokens_PG / 2)).sum()
  cache *= token_bytes(engine.policy)
  floor = floor_ms(params, cache / steps) * steps / longest
  decode, waits = {}, at_once < count * samples or _KV_TOKENS.value
  if _LENGTHS.value == 'full' and not waits and few < new:
    mean = at_once * (length + (few + new) / 2) * token_bytes(engine.policy)
    ms = (spent - first) / (new - few) * 1e3
    share = floor_ms(params, mean) / ms
    decode = {'decode_ms': ms, 'decode_of_floor': share}
  return decode | {
      'variant': variant,
      'workload': workload,
      'slots': engine.num_slots,
      'kv_tokens': engine.config.kv_cache_tokens
      or engine.num_slots * engine.cache_length,
      'ms_per_step': spent / longest * 1e3,
      'tokens_per_s': total / spent,
      'floor_ms': floor,
      'of_floor': floor / (spent / longest * 1e3),
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

  steps()  # Compiles.
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
      for cap in map(float, _CAPS.value or ['inf']):
        rows += _rows(policy, mesh, params, variant, workload, cap)
        gc.collect()
        if rows:
          # After each: a later one may run into a time limit.
          shown = common.table(rows, _COLUMNS)
          common.write(rows, _ratios(rows), shown)
    del params
    gc.collect()


def _rows(policy, mesh, params, variant: str, workload: str, cap: float):
  """Returns no row (profiles), or one."""
  length, count, samples, new = map(int, workload.split('x'))
  if _PROFILE.value:
    length, new = length + new // 2, new // 2
  config = EngineConfig(
      num_slots=count * samples,
      max_prompt_length=length,
      max_response_length=new,
      kv_cache_tokens=_KV_TOKENS.value,
      stop_ids=(),
  )
  engine, more = Engine(policy, config, mesh), {}
  if cap < float('inf'):
    slots, tokens = room(engine, params, cap)
    more = {'memory_gb': cap}
    if not slots:
      print(f'{variant} {workload}: no room for 16 sequences in {cap:g} GB')
      none = {'variant': variant, 'workload': workload}
      return [none | more | {'slots': 0, 'kv_tokens': 0}]
    config = dataclasses.replace(
        config, num_slots=slots, kv_cache_tokens=tokens
    )
    engine = Engine(policy, config, mesh)
  if _PROFILE.value:
    print(f'== {variant} {workload}')
    profile(engine, params)
    return []
  return [measure(engine, params, variant, workload) | more]


def _ratios(rows: list[dict]) -> dict:
  """Speed of every variant over the slowest's, per workload and memory."""
  ratios = {}
  ran = [row for row in rows if 'ms_per_step' in row]
  for row in ran:
    place = row['workload'], row.get('memory_gb')
    same = [r for r in ran if (r['workload'], r.get('memory_gb')) == place]
    base = max(r['ms_per_step'] for r in same)
    cap = f' {row["memory_gb"]:g} GB' if 'memory_gb' in row else ''
    name = f'{row["workload"]}{cap} {row["variant"]} speedup over the slowest'
    ratios[name] = round(base / row['ms_per_step'], 3)
  return ratios


if __name__ == '__main__':
  common.run(main)
