r"""What FP8 keys and values cost a checkpoint, with and without `smooth_k`.

    python -m benchmarks.fp8_keys --checkpoint=FOLDER \
        --data=data/gsm8k_test.jsonl --output=benchmarks/results/NAME

Problems with their written answers are read in BF16: once with keys and values
in BF16, and in each variant. Of every token of an answer the whole vocabulary
is compared: the exact Kullback-Leibler divergence from BF16, in nats, and
whether another token is the likeliest. A table by layer shows the keys' largest
bias, in all channels and in those that rotary embedding hardly turns, which
`smooth_k` subtracts. `--length` joins problems to sequences of so many tokens.
"""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from benchmarks import common
from jetrl_jax.config import saved_policy
from jetrl_jax.config.saved_policy import SavedPolicy
from jetrl_jax.data import (
    ChatFormat,
    PlainFormat,
    PromptDataset,
    load_examples,
)
from jetrl_jax.evaluate.settings import INSTRUCTION
from jetrl_jax.models import rope
from jetrl_jax.models.policy import Policy, PolicyParams
from jetrl_jax.rl import packing
from jetrl_jax.rl.run.calibration import likelihood_sequences
from jetrl_jax.rl.types import TrainBatch

_CHECKPOINT = flags.DEFINE_string('checkpoint', None, 'Hugging Face folder.')
_DATA = flags.DEFINE_string('data', None, 'Lines of question and answer.')
_PROBLEMS = flags.DEFINE_integer('problems', 16, 'So many, the first ones.')
_LENGTH = flags.DEFINE_integer('length', 0, 'Tokens of joined problems.')
_FP8 = {'kv_cache_dtype': 'float8_e4m3fn'}
# Variant to the policy's changes.
_VARIANTS = {'FP8 keys': _FP8, 'FP8 keys, smooth_k': _FP8 | {'smooth_k': True}}
_COLUMNS = (
    ('variant', 'variant', ''),
    ('tokens', 'tokens', 'd'),
    ('kl', 'KL from BF16, nats a token', '.2g'),
    ('kl_p99', 'of one token in a hundred', '.2g'),
    ('other', 'another likeliest token', '.2%'),
)
_BIASES = (
    ('layer', 'layer', 'd'),
    ('bias', 'largest key bias', '.1f'),
    ('slow', 'in slow channels', '.1f'),
    ('rest', 'in the others', '.1f'),
)


def sequences(found: SavedPolicy) -> list[tuple[np.ndarray, int]]:
  """Returns tokens and the number of the first that counts."""
  examples = load_examples(
      (_DATA.value,), prompt_key='question', answer_key='answer'
  )
  prompts = PromptDataset(
      examples[: _PROBLEMS.value],
      found.tokenizer,
      prompt_format=(
          ChatFormat(instruction=INSTRUCTION)
          if found.tokenizer.chat_template
          else PlainFormat(template='{prompt}')
      ),
      max_prompt_length=found.max_prompt_length,
  )
  texts = []
  for prompt in prompts:
    answer = found.tokenizer.encode(
        str(prompt.extra['answer']), add_special_tokens=False
    )
    tokens = np.concatenate([prompt.tokens, answer])
    texts.append((tokens.astype(np.int32), len(prompt.tokens)))
  if not _LENGTH.value:
    return texts
  lines = common.joined([tokens for tokens, _ in texts], _LENGTH.value)
  return [(line, 1) for line in lines]


def batches(
    policy: Policy, texts: list[tuple[np.ndarray, int]]
) -> Iterator[TrainBatch]:
  """Yields one text a batch."""
  longest = max(len(tokens) for tokens, _ in texts)
  length = -(-longest // policy.tile) * policy.tile
  for tokens, first in texts:
    yield from packing.pack(
        likelihood_sequences([tokens], [first]),
        row_length=length,
        rows_per_micro_batch=1,
        tile=policy.tile,
    ).batches


def log_softmax(
    policy: Policy, params: PolicyParams, batch: TrainBatch
) -> jax.Array:
  """Returns log-probs [T, V] of the token after each."""
  _, _, logits_TV, lse_T = policy.target_logprobs(
      params, batch, jnp.float32(1.0), None, show=True
  )
  return logits_TV - lse_T[:, None]


def divergence(
    wide: Policy, other: Policy, params: PolicyParams, batch: TrainBatch
) -> tuple[jax.Array, jax.Array]:
  """Returns each token's KL from `wide`, and whether its argmax differs."""
  one_TV, other_TV = (log_softmax(p, params, batch) for p in (wide, other))
  kl_T = jnp.sum(jnp.exp(one_TV) * (one_TV - other_TV), axis=-1)
  differs_T = jnp.argmax(one_TV, axis=-1) != jnp.argmax(other_TV, axis=-1)
  # Row t predicts token t + 1.
  return jnp.roll(kl_T, 1), jnp.roll(differs_T, 1)


def biases(found: SavedPolicy) -> list[dict]:
  """Returns a row per layer; none if keys have no bias."""
  model = found.policy.model
  if not model.qkv_bias:
    return []
  is_slow, rows = rope.is_slow(model), []
  heads, size = model.num_heads, model.head_dim
  for layer in range(model.num_layers):
    bias = found.params.weights[f'layers_{layer}']['attn']['qkv']['bias']
    bias_OH = np.abs(np.asarray(bias, np.float32)).reshape(-1, size)
    bias_KH = bias_OH[heads : heads + model.num_kv_heads]
    row = {'layer': layer, 'bias': float(bias_KH.max())}
    row['slow'] = float(bias_KH[:, is_slow].max(initial=0.0))
    row['rest'] = float(bias_KH[:, ~is_slow].max(initial=0.0))
    rows.append(row)
  return rows


def main(argv: list[str]) -> None:
  """Compares the variants and writes the record."""
  del argv
  found = saved_policy.load(_CHECKPOINT.value)
  wide, rows = found.policy.with_wide_keys(), []
  data = list(batches(wide, sequences(found)))
  for name, changes in _VARIANTS.items():
    if changes.get('smooth_k') and not wide.model.qkv_bias:
      continue
    other = dataclasses.replace(wide, **changes)
    compared = wide.jit(functools.partial(divergence, wide, other))
    kl, differs = [], []
    for batch in data:
      kl_T, differs_T = compared(found.params, batch)
      counts = np.asarray(batch.loss_mask).ravel() > 0
      kl.append(np.asarray(kl_T)[counts])
      differs.append(np.asarray(differs_T)[counts])
    kl, differs = np.concatenate(kl), np.concatenate(differs)
    row = {'variant': name, 'tokens': len(kl), 'kl': float(kl.mean())}
    row['kl_p99'] = float(np.quantile(kl, 0.99))
    rows.append(row | {'other': float(differs.mean())})
    print(row, flush=True)
  of_layers = biases(found)
  shown = [common.table(rows, _COLUMNS)]
  if of_layers:
    shown.append(common.table(of_layers, _BIASES))
  common.write(rows + of_layers, {}, '\n\n'.join(shown))


if __name__ == '__main__':
  flags.mark_flags_as_required(['checkpoint', 'data'])
  common.run(main)
