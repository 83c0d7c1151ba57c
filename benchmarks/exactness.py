"""Compares rollout and training forward bit for bit, over sizes and layouts.

    python -m benchmarks.exactness --output=benchmarks/results/NAME \
      --slots=16,64,128,256 --tokens=2048

A random model samples `--prompts` prompts with seeded lengths. Each slot
count must give the same tokens and log-probs to the bit (their hash is in the
table); one engine has a KV pool for a third of what it decodes at a time, so
that sequences are parked and computed again. Each packing must give the
rollout's log-probs: the training forward, and the forward inside `accumulate`.
"""

import functools
import gc
import hashlib

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from benchmarks import common
from jetrl_jax.core import rng
from jetrl_jax.models.policy import PolicyParams
from jetrl_jax.optim.adamw import OptimizerConfig
from jetrl_jax.rl import mismatch, packing
from jetrl_jax.rl.objective import LossConfig, policy_loss
from jetrl_jax.rl.rollout import buckets
from jetrl_jax.rl.rollout.engine import Engine, EngineConfig
from jetrl_jax.rl.rollout.scheduler import rollout
from jetrl_jax.rl.run.gradients import UpdatePrograms

_SHAPE = flags.DEFINE_string('shape', 'qwen2.5-7b', 'See model.shape.')
_LAYERS = flags.DEFINE_integer('layers', 0, 'Of the model; 0 for all.')
_VARIANTS = flags.DEFINE_list(
    'variants', ['fp8_delayed', 'bf16'], 'See rollout.py.'
)
_PROMPTS = flags.DEFINE_integer('prompts', 32, 'Sequences that are sampled.')
_TOKENS = flags.DEFINE_integer('tokens', 512, 'Most response tokens.')
_SLOTS = flags.DEFINE_list('slots', ['16', '64'], 'Slot counts.')
_PACKINGS = flags.DEFINE_list(
    'packings',
    ['1x1', '8x2', '4x4'],
    'Rows x multiple of the longest; fewer where that is over 65536 tokens.',
)
_SEED = flags.DEFINE_integer('seed', 0, 'Of lengths and samples.')
_LONGEST_PROMPT = 256
_MOST_TOKENS = 65536  # Of a micro-batch: a 7B's backward pass on 141 GB.
_COLUMNS = (
    ('variant', 'variant', ''),
    ('check', 'check', ''),
    ('tokens', 'tokens', 'd'),
    ('unequal', 'unequal', '.3%'),
    ('max_diff', 'max difference (nats)', '.2g'),
    ('parked', 'times parked', 'd'),
    ('hash', 'hash', ''),
)


def _prompts(vocab: int):
  random = np.random.default_rng(_SEED.value)
  prompts = common.random_prompts(_PROMPTS.value, _LONGEST_PROMPT, vocab)
  lengths = random.integers(1, _LONGEST_PROMPT + 1, len(prompts))
  return [
      common.shortened(prompt, int(length))
      for prompt, length in zip(prompts, lengths, strict=True)
  ]


def _longest() -> int:
  """Returns the tokens of the longest prompt and response."""
  return _LONGEST_PROMPT + _TOKENS.value


def _joined(completions, name: str) -> np.ndarray:
  return np.concatenate([getattr(c, name) for c in completions])


def sample(policy, mesh, params, slots: int, share: int = 1):
  """Returns (completions, times a sequence was parked).

  The KV pool has room for one in `share` of the sequences decoded at a time,
  and for one at least.
  """
  at_once = min(buckets.round_up(slots, 16), _PROMPTS.value)
  whole_pages = buckets.round_up(_longest(), 2 * policy.tile)
  engine = Engine(
      policy,
      EngineConfig(
          num_slots=slots,
          max_prompt_length=_LONGEST_PROMPT,
          max_response_length=_TOKENS.value,
          stop_ids=(),
          kv_cache_tokens=max(1, at_once // share) * whole_pages,
      ),
      mesh,
  )
  prompts = _prompts(policy.model.vocab_size)
  random = np.random.default_rng(_SEED.value + 1)
  limits = random.integers(1, _TOKENS.value + 1, (len(prompts), 1))
  limits[0] = _TOKENS.value
  completions = rollout(
      engine,
      params,
      prompts,
      num_generations=1,
      temperature=1.0,
      base_key=rng.key(_SEED.value, rng.ROLLOUT, 0),
      weight_version=0,
      limits=limits,
  )
  return completions, engine.pages.times_preempted


def layouts(asked: list[str], longest: int) -> list[tuple[int, int]]:
  """Returns (rows, multiple) of each packing, within `_MOST_TOKENS`.

  Args:
    asked: rows x multiple of the longest, each as '4x2'.
    longest: tokens of the longest sequence.
  """
  found = []
  for layout in asked:
    rows, multiple = map(int, layout.split('x'))
    multiple = max(1, min(multiple, _MOST_TOKENS // longest))
    rows = max(1, min(rows, _MOST_TOKENS // (longest * multiple)))
    found.append((rows, multiple))
  return list(dict.fromkeys(found))


def packed(completions, rows: int, multiple: int, tile: int):
  """Returns the sequences, packed in rows of a multiple of the longest."""
  return packing.pack(
      common.sequences_of(completions),
      row_length=buckets.round_up(_longest() * multiple, tile),
      rows_per_micro_batch=rows,
      tile=tile,
  )


def compared(
    variant: str, check: str, completions, values, preempted=0
) -> dict:
  """Returns a row: rollout's log-probs against other ones."""
  ours = _joined(completions, 'logprobs')
  digest = hashlib.sha256(
      values.tobytes() + _joined(completions, 'tokens').tobytes()
  )
  return {
      'variant': variant,
      'check': check,
      'tokens': int(ours.size),
      'unequal': float(mismatch.mismatch_token_frac(ours, values)),
      'max_diff': float(np.abs(ours - values).max()),
      'parked': preempted,
      'hash': digest.hexdigest()[:8],
  }


def with_biases(masters):
  """Returns masters with random biases, which a new model has at 0."""

  def change(path, leaf):
    if not jax.tree_util.keystr(path).endswith("['bias']"):
      return leaf
    key = jax.random.key(_SEED.value)
    return leaf + jax.random.normal(key, leaf.shape, leaf.dtype)

  return jax.tree_util.tree_map_with_path(change, masters)


def check(variant: str) -> list[dict]:
  """Returns all rows of one variant."""
  policy, mesh, make = common.random_policy(
      _SHAPE.value, common.overrides(variant), _LAYERS.value
  )
  config = OptimizerConfig(lr=1e-5, moments='fp8')
  # Without biases smooth keys would have nothing to subtract.
  make_all = (lambda: with_biases(make())) if policy.smooth_k else make
  state = common.random_state(policy, mesh, make_all(), config)
  params = PolicyParams(state.weights, state.fp8_state)
  slot_counts = list(map(int, _SLOTS.value))
  first, _ = sample(policy, mesh, params, slot_counts[0])
  rows = []
  for slots in slot_counts[1:]:
    other, _ = sample(policy, mesh, params, slots)
    values = _joined(other, 'logprobs')
    rows.append(compared(variant, f'{slots} slots', first, values))
    print(rows[-1], flush=True)
  other, preempted = sample(policy, mesh, params, slot_counts[0], share=3)
  values = _joined(other, 'logprobs')
  rows.append(compared(variant, 'few pages', first, values, preempted))
  print(rows[-1], flush=True)
  del other
  gc.collect()
  step = UpdatePrograms(
      policy,
      functools.partial(policy_loss, LossConfig()),
      config.build(),
      config,
      mesh,
      state,
  )
  gradients = step.zero_gradients(state)
  for rows_of_batch, multiple in layouts(_PACKINGS.value, _longest()):
    layout = f'{rows_of_batch}x{multiple}'
    batches = packed(first, rows_of_batch, multiple, policy.tile)
    one = jnp.float32(1.0)
    scored, accumulated = [], []
    for batch in batches.batches:
      scored.append(step.logprobs(params, batch, one)[0])
      gradients, logprobs, _ = step.accumulate(state, gradients, batch, one)
      accumulated.append(logprobs)
    for name, values in (('score', scored), ('accumulate', accumulated)):
      values = packing.unpack(jax.device_get(values), batches)
      responses = [
          v[len(c.prompt_tokens) :] for v, c in zip(values, first, strict=True)
      ]
      rows.append(
          compared(
              variant, f'{name} {layout}', first, np.concatenate(responses)
          )
      )
      print(rows[-1], flush=True)
  return rows


def main(argv: list[str]) -> None:
  """Checks every variant and writes the table."""
  del argv
  rows = []
  for variant in _VARIANTS.value:
    rows += check(variant)
    gc.collect()
    worst = {
        f'{name}: most unequal': max(
            row['unequal'] for row in rows if row['variant'] == name
        )
        for name in dict.fromkeys(row['variant'] for row in rows)
    }
    # After each variant: a later one may run into a time limit.
    common.write(rows, worst, common.table(rows, _COLUMNS))


if __name__ == '__main__':
  common.run(main)
