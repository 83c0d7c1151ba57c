"""Compares values of `mesh.tensor`: bits, and the time of a decode step.

    python -m benchmarks.tensor --output=benchmarks/results/NAME \
      --shape=qwen2.5-7b --tensors=1,2 --slots=32,256

For every recipe and every number of devices, in one process: a rollout of
random prompts, whose tokens and log-probs are hashed; the training forward of
the first mesh's sequences, alone and inside `accumulate`, hashed as well; and
the time of a decode step by number of slots, with --profile also its longest
kernels on the first GPU (in the .json). One hash a column means equal bits.
With --checkpoint the weights are those of a Hugging Face folder, else random.
On a CPU, to try it: JAX_PLATFORMS=cpu with
XLA_FLAGS=--xla_force_host_platform_device_count=2, and --tiny --slots=16
--prompts=4 --tokens=8 --prompt_length=16 --steps=8.
"""

import functools
import gc
import hashlib
import pathlib
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags

from benchmarks import common
from jetrl_jax.core import rng
from jetrl_jax.models.policy import PolicyParams
from jetrl_jax.optim.adamw import OptimizerConfig
from jetrl_jax.rl import mismatch, packing
from jetrl_jax.rl.objective import LossConfig, policy_loss
from jetrl_jax.rl.rollout.buckets import round_up
from jetrl_jax.rl.rollout.engine import Engine, EngineConfig
from jetrl_jax.rl.rollout.scheduler import rollout
from jetrl_jax.rl.run import train_state
from jetrl_jax.rl.run.gradients import UpdatePrograms

_SHAPE = flags.DEFINE_string('shape', 'qwen2.5-7b', 'See model.shape.')
_CHECKPOINT = flags.DEFINE_string(
    'checkpoint', '', 'Hugging Face folder of the weights; random without.'
)
_LAYERS = flags.DEFINE_integer('layers', 0, 'Of the model; 0 for all.')
_VARIANTS = flags.DEFINE_list('variants', ['fp8_delayed'], 'See rollout.py.')
_TENSORS = flags.DEFINE_list('tensors', ['1', '2'], 'Values of mesh.tensor.')
_SLOTS = flags.DEFINE_list('slots', ['32', '256'], 'Slots that are timed.')
_PROMPTS = flags.DEFINE_integer('prompts', 16, 'Sequences that are hashed.')
_TOKENS = flags.DEFINE_integer('tokens', 64, 'Response tokens of each.')
_PROMPT_LENGTH = flags.DEFINE_integer('prompt_length', 256, 'Tokens.')
_STEPS = flags.DEFINE_integer('steps', 64, 'Decode steps that are timed.')
_PROFILE = flags.DEFINE_bool('profile', False, 'See above.')
_TRAINS = flags.DEFINE_bool('accumulate', True, 'Hash its log-probs as well.')
_COLUMNS = (
    ('variant', 'variant', ''),
    ('tensor', 'mesh.tensor', 'd'),
    ('check', 'what', ''),
    ('hash', 'hash', ''),
    ('unequal', 'unequal to the first rollout', '.3%'),
    ('slots', 'slots', 'd'),
    ('ms_per_step', 'ms/step', '.2f'),
    ('tokens_per_s', 'tokens/s', '.0f'),
    ('seconds', 'seconds with compiling', '.0f'),
)


def _settings(variant: str, tensor: int) -> dict:
  found = common.overrides(variant) | {'mesh.tensor': tensor}
  if _CHECKPOINT.value:
    found |= {'model.path': _CHECKPOINT.value, 'model.init': 'checkpoint'}
  return found


def _engine(policy, mesh, slots: int) -> Engine:
  longest = max(_TOKENS.value, 2 * _STEPS.value)
  config = EngineConfig(
      num_slots=slots,
      max_prompt_length=_PROMPT_LENGTH.value,
      max_response_length=longest,
      stop_ids=(),
      decode_block=_STEPS.value,
  )
  return Engine(policy, config, mesh)


def _hash(completions, values) -> str:
  joined = [np.concatenate(values).astype(np.float32)]
  joined += [c.tokens for c in completions]
  return hashlib.sha256(b''.join(x.tobytes() for x in joined)).hexdigest()[:12]


def _sampled(engine: Engine, params: PolicyParams):
  """Returns the completions of random prompts of several lengths."""
  length, vocab = _PROMPT_LENGTH.value, engine.policy.model.vocab_size
  prompts = common.random_prompts(_PROMPTS.value, length, vocab)
  prompts = [
      common.shortened(prompt, 1 + (i * 37 + length - 1) % length)
      for i, prompt in enumerate(prompts)
  ]
  limits = np.full((len(prompts), 1), _TOKENS.value)
  return rollout(
      engine,
      params,
      prompts,
      num_generations=1,
      temperature=1.0,
      base_key=rng.key(0, rng.ROLLOUT, 0),
      weight_version=0,
      limits=limits,
  )


def _decode(engine: Engine, params: PolicyParams) -> dict:
  """Returns the time of a decode step of all slots, host visits included."""
  key, steps = rng.key(0, rng.ROLLOUT, 0), _STEPS.value
  tokens = np.arange(engine.config.max_prompt_length, dtype=np.int32)
  tokens %= engine.policy.model.vocab_size
  state = engine.init_decode_state()
  prefix = engine.prefill_batch(params, [tokens])
  state = engine.bulk_insert(prefix, state, list(range(engine.num_slots)))
  # Once to compile.
  state = jax.block_until_ready(
      engine.generate_block(params, state, key, steps)
  )
  start = time.perf_counter()
  state = engine.generate_block(params, state, key, steps)
  jax.block_until_ready(state.tokens)
  spent = (time.perf_counter() - start) / steps
  found: dict = {
      'ms_per_step': spent * 1e3,
      'tokens_per_s': engine.num_slots / spent,
  }
  if _PROFILE.value:
    with tempfile.TemporaryDirectory() as folder:
      with jax.profiler.trace(folder):
        state = engine.generate_block(params, state, key, steps)
        jax.block_until_ready(state.tokens)
      gpus = common.gpu_seconds(pathlib.Path(folder))
    if gpus:  # Of all steps, see `common.gpu_seconds`.
      found['kernels'] = gpus[min(gpus)] | {'steps': steps}
  return found


def _trained(policy, mesh, state, completions):
  """Yields (what, log-probs of each response) of the training forwards."""
  step = UpdatePrograms(
      policy,
      functools.partial(policy_loss, LossConfig()),
      optax.identity(),
      OptimizerConfig(),
      mesh,
      state,
  )
  longest = _PROMPT_LENGTH.value + _TOKENS.value
  packed = packing.pack(
      common.sequences_of(completions),
      row_length=round_up(2 * longest, policy.tile),
      rows_per_micro_batch=4,
      tile=policy.tile,
  )
  one = jnp.float32(1.0)

  def responses(values):
    values = packing.unpack(jax.device_get(values), packed)
    pairs = zip(values, completions, strict=True)
    return [v[len(c.prompt_tokens) :] for v, c in pairs]

  params = PolicyParams(state.weights, state.fp8_state)
  scored = [step.logprobs(params, b, one)[0] for b in packed.batches]
  yield 'score', responses(scored)
  if not _TRAINS.value:
    return
  gradients, found = step.zero_gradients(state), []
  for batch in packed.batches:
    gradients, logprobs, _ = step.accumulate(state, gradients, batch, one)
    found.append(logprobs)
  yield 'accumulate', responses(found)


def _measured(variant: str, tensor: int, first: list):
  """Yields the rows of one mesh; `first` gets the first mesh's completions."""
  policy, mesh, make = common.random_policy(
      _SHAPE.value, _settings(variant, tensor), _LAYERS.value
  )
  state = train_state.create(policy, make(), optax.identity(), mesh)
  of = {'variant': variant, 'tensor': tensor}
  params, clock = PolicyParams(state.weights, state.fp8_state), time.time()

  def timed() -> dict:
    nonlocal clock
    before, clock = clock, time.time()
    return of | {'seconds': clock - before}

  # What `rollout` does once for all steps.
  engine = _engine(policy, mesh, int(_SLOTS.value[0]))
  ready = engine.replicate(params)
  completions = _sampled(engine, ready)
  first += [] if first else completions
  logprobs = [c.logprobs for c in completions]
  ours = np.concatenate([c.logprobs for c in first])

  def compared(check: str, values, of_tokens) -> dict:
    unequal = mismatch.mismatch_token_frac(ours, np.concatenate(values))
    found = {'check': check, 'hash': _hash(of_tokens, values)}
    return timed() | found | {'unequal': float(unequal)}

  yield compared('rollout', logprobs, completions)
  for slots in map(int, _SLOTS.value):
    if slots != engine.config.num_slots:
      engine = _engine(policy, mesh, slots)
    row = {'check': 'decode', 'slots': engine.num_slots}
    row |= _decode(engine, ready)
    yield timed() | row
  del engine, ready
  gc.collect()
  for check, values in _trained(policy, mesh, state, first):
    yield compared(check, values, first)


def _summary(rows: list[dict]) -> dict:
  """Says whether bits are equal, and how much faster decode is."""
  found = {}
  for variant in dict.fromkeys(row['variant'] for row in rows):
    mine = [row for row in rows if row['variant'] == variant]
    hashes = {row['hash'] for row in mine if 'hash' in row}
    found[f'{variant}: all log-probs have the same bits'] = len(hashes) == 1
    timed = [row for row in mine if 'slots' in row]
    for row in timed:
      base = next(r for r in timed if r['slots'] == row['slots'])
      name = f'{variant}, {row["slots"]} slots: tensor={row["tensor"]} speedup'
      if row is not base:
        found[name] = round(base['ms_per_step'] / row['ms_per_step'], 3)
  return found


def main(argv: list[str]) -> None:
  """Measures every recipe on every mesh."""
  del argv
  rows = []
  for variant in _VARIANTS.value:
    first = []
    for tensor in map(int, _TENSORS.value):
      for row in _measured(variant, tensor, first):
        rows.append(row)
        print(row, flush=True)
        # After each: a later one may run into a time limit.
        common.write(rows, _summary(rows), common.table(rows, _COLUMNS))
      gc.collect()


if __name__ == '__main__':
  common.run(main)
