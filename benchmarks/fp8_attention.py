"""Measures what a real checkpoint would lose if attention multiplied in FP8.

python -m benchmarks.fp8_attention --checkpoint=FOLDER \
    --data=data/gsm8k_train.jsonl \
    --output=benchmarks/results/fp8_attention_NAME_HARDWARE_DATE

Attention is replaced by one that rounds queries, keys, values and weights to
any grid, in float32. The grids are arguments of the program, so one program
serves all arms of a recipe. Each arm reads written answers, and is compared
with BF16's policy after the same tokens. Weights of a key tile are rounded
beside the running maximum, as a kernel would have them. What is not emulated:
Hopper adds FP8 products with fewer bits than float32 has.
"""

import dataclasses
import functools
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags

from benchmarks import common
from configs import base
from jetrl_jax.config import model as config_model
from jetrl_jax.data import ChatFormat, PromptDataset, Tokenizer, load_examples
from jetrl_jax.evaluate.settings import INSTRUCTION
from jetrl_jax.fp8 import Recipe
from jetrl_jax.kernels.attention import reference
from jetrl_jax.models import attention
from jetrl_jax.models.policy import PolicyParams
from jetrl_jax.rl import packing
from jetrl_jax.rl.run import train_state
from jetrl_jax.rl.run.calibration import Calibration, likelihood_sequences

# Bits of the mantissa, least exponent of a normal number, largest number.
F32, BF16, F16, E4M3, E5M2 = (
    (23, -100, 3.4e38),
    (7, -100, 3.38e38),
    (10, -14, 65504),
    (3, -6, 448),
    (2, -14, 57344),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arm:
  """Grids of attention's operands; `p_scale` multiplies the weights first.

  `rounded_sums` are sums of rounded weights, as the package has them.
  """

  recipe: str = 'fp8_delayed'
  q: tuple = F16
  kv: tuple = E4M3
  p: tuple = F16
  p_scale: float = 1
  rounded_sums: bool = True


_BF16 = {'recipe': 'bf16', 'q': BF16, 'p': BF16}
ARMS = {
    'BF16': Arm(**_BF16, kv=BF16),
    'BF16 dots: kv8': Arm(**_BF16 | {'q': F16, 'p': F16}),
    'BF16 dots: kv8 q8': Arm(recipe='bf16', q=E4M3),
    'BF16 dots: kv8 q8 p8 x256': Arm(
        recipe='bf16', q=E4M3, p=E4M3, p_scale=256
    ),
    'kv16': Arm(q=BF16, kv=BF16, p=BF16),
    'kv8 (today)': Arm(),
    'kv8 q8': Arm(q=E4M3),
    'kv8 p8 x256': Arm(p=E4M3, p_scale=256),
    'kv8 q8 p8': Arm(q=E4M3, p=E4M3),
    'kv8 q8 p8 with exact sums': Arm(q=E4M3, p=E4M3, rounded_sums=False),
    'kv8 q8 p8 x256': Arm(q=E4M3, p=E4M3, p_scale=256),
    'kv8 q8 p8 x448': Arm(q=E4M3, p=E4M3, p_scale=448),
    'kv8 q8 p E5M2': Arm(q=E4M3, p=E5M2),
}

_CHECKPOINT = flags.DEFINE_string('checkpoint', None, 'Folder.')
_DATA = flags.DEFINE_string('data', None, 'JSONL with question and answer.')
_PROBLEMS = flags.DEFINE_integer('problems', 128, 'Most problems of a draw.')
_MINUTES = flags.DEFINE_float('minutes', 10, 'No batch starts later.')
_TOKENS = flags.DEFINE_integer('tokens', 512, 'Of a row; longer are left out.')
_ARMS = flags.DEFINE_list('arms', list(ARMS), 'Which, after BF16.')
_DRAWS = 2  # of problems: how far they differ is the noise
_CALIBRATION = 8  # problems


def grid(x, form):
  """Returns float32 rounded to the nearest of a grid, ties to even."""
  mantissa, least, largest = form
  bits = jax.lax.bitcast_convert_type(x, jnp.int32)
  exponent = jnp.maximum((bits >> 23 & 255) - 127, least.astype(jnp.int32))
  step = jax.lax.bitcast_convert_type(
      (exponent - mantissa.astype(jnp.int32) + 127) << 23, jnp.float32
  )
  return jnp.clip(jnp.round(x / step) * step, -largest, largest)


def attend(q, k, v, first_BR, last_BR, tile, arm):
  """Returns attention's output [B, K, R, H] in float32 on an arm's grids."""
  q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
  q = grid(q / arm['q_scale'], arm['q']) * arm['q_scale']
  k, v = grid(k, arm['kv']), grid(v, arm['kv'])
  scores = reference._dot(q, k, ((3,), (3,)))
  scores *= reference.softmax_scale(q.shape[-1])
  key = jnp.arange(k.shape[2])
  allowed = (key >= first_BR[..., None]) & (key <= last_BR[..., None])
  scores = jnp.where(allowed[:, None], scores, reference.NO_SCORE)
  tiles = scores.reshape(*scores.shape[:3], -1, tile)
  top = jax.lax.cummax(tiles.max(-1), axis=3)[..., None]
  exact = jnp.where(tiles > reference.NO_SCORE, jnp.exp2(tiles - top), 0.0)
  p = grid(exact * arm['p_scale'], arm['p']) / arm['p_scale']
  decay = jnp.exp2(top - top[..., -1:, :])
  exact, p = ((x * decay).reshape(scores.shape) for x in (exact, p))
  total = jnp.where(arm['rounded_sums'], p, exact).sum(-1, keepdims=True)
  return reference._dot(p, v, ((3,), (2,))) / jnp.where(total > 0, total, 1)


def _arrays(arm: Arm, q_scale_L):
  """Returns the arm as arguments of a program."""
  made = {n: tuple(map(jnp.float32, getattr(arm, n))) for n in ('q', 'kv', 'p')}
  scales = q_scale_L if arm.q == E4M3 else np.ones_like(q_scale_L)
  return made | {
      'p_scale': jnp.float32(arm.p_scale),
      'rounded_sums': jnp.bool_(arm.rounded_sums),
      'q_scale': jnp.asarray(scales, jnp.float32),
  }


def _forward(policy, params, batch, arm):
  """Returns logits, log-sum-exp, targets' log-probs, and a row per layer."""
  layers = []

  def replaced(q, k, v, first_BR, last_BR, tile, kv_dtype):
    del kv_dtype
    mine = arm | {'q_scale': arm['q_scale'][len(layers)]}
    out = attend(q, k, v, first_BR, last_BR, tile, mine)
    plain = _arrays(Arm(q=F32, kv=F32, p=F32), np.ones(()))
    want = attend(q, k, v, first_BR, last_BR, tile, plain)
    valid = (last_BR >= 0)[:, None, :, None]
    layers.append(
        jnp.stack(
            [
                jnp.sum(jnp.where(valid, want, 0) ** 2),
                jnp.sum(jnp.where(valid, out - want, 0) ** 2),
                *(jnp.max(jnp.where(valid, jnp.abs(q), 0)), jnp.abs(k).max()),
            ]
        ).astype(jnp.float32)
    )
    return out.astype(q.dtype)

  own, attention.flash_attention = attention.flash_attention, replaced
  try:
    logprobs_BT, _, logits, lse = policy.target_logprobs(
        params, batch, jnp.float32(1), None, show=True
    )
  finally:
    attention.flash_attention = own
  return logits, lse, logprobs_BT, jnp.stack(layers)


@jax.jit
def _compare(want, got):
  """Returns KL(want || got) and whether the likeliest token is the same."""
  a, b = (x[0] - x[1][:, None] for x in (want, got))
  return jnp.sum(jnp.exp(a) * (a - b), -1), a.argmax(-1) == b.argmax(-1)


def _problems(folder: str) -> tuple[list[np.ndarray], list[int]]:
  """Returns tokens of problems with their written answers, and the starts."""
  tokenizer = Tokenizer(folder)
  prompts = PromptDataset(
      load_examples(
          (_DATA.value,), prompt_key='question', answer_key='answer'
      )[: 8 * _PROBLEMS.value],
      tokenizer,
      prompt_format=ChatFormat(instruction=INSTRUCTION),
      max_prompt_length=_TOKENS.value,
  )
  tokens, starts = [], []
  for prompt in prompts:
    answer = str(prompt.extra['answer'])
    ids = tokenizer.encode(answer, add_special_tokens=False)
    whole = np.concatenate([prompt.tokens, np.asarray(ids, np.int32)])
    if len(whole) <= _TOKENS.value:
      tokens.append(whole)
      starts.append(len(prompt.tokens))
  return tokens, starts


def main(argv: list[str]) -> None:
  """Measures all arms and writes the record."""
  del argv
  start = time.monotonic()
  arms = {'BF16': ARMS['BF16']} | {n: ARMS[n] for n in _ARMS.value}
  config = base.get_config()
  config.model.path = _CHECKPOINT.value
  whole, mesh, folder = config_model.build_policy(config)
  whole = dataclasses.replace(whole, remat='none')
  params = config_model.parameters(config, whole, mesh, folder)[0]()
  tokens, starts = _problems(folder)

  def pack(chosen):
    sequences = likelihood_sequences(
        [tokens[i] for i in chosen], [starts[i] for i in chosen]
    )
    return packing.pack(
        sequences,
        row_length=_TOKENS.value,
        rows_per_micro_batch=2,
        tile=whole.tile,
    ).batches

  calibration = pack(range(_CALIBRATION))
  draws = []
  for draw in range(_DRAWS):
    random = np.random.default_rng(draw)
    order = random.permutation(np.arange(_CALIBRATION, len(tokens)))
    draws.append(pack(order[: _PROBLEMS.value]))
  run, inputs = {}, {}
  for name in ('bf16', 'fp8_delayed'):
    policy = dataclasses.replace(whole, recipe=Recipe(name=name))
    state = train_state.create(policy, params, optax.identity(), mesh)
    if name == 'fp8_delayed':
      state = Calibration(policy, mesh, state).fill(state, calibration, 1.0)
    run[name] = policy.jit(functools.partial(_forward, policy))
    inputs[name] = PolicyParams(state.weights, state.fp8_state)
  ones_L = np.ones(whole.model.num_layers, np.float32)
  plain = _arrays(ARMS['BF16'], ones_L)
  seen = [np.asarray(run['bf16'](inputs['bf16'], b, plain)[3]) for b in calibration]
  q_amax_L, k_amax_L = np.max(seen, axis=0)[:, 2:].T
  q_scale_L = 2.0 ** np.ceil(np.log2(q_amax_L / 448))
  # The package's own attention beside the same grids emulated.
  batch, apart = calibration[0], {}
  mask = np.asarray(batch.loss_mask) > 0
  for recipe, kv, name in (
      ('bf16', 'compute', 'BF16'),
      ('fp8_delayed', 'float8_e4m3fn', 'kv8 (today)'),
  ):
    own = dataclasses.replace(
        whole, recipe=Recipe(name=recipe), kv_cache_dtype=kv
    )
    package = own.jit(own.logprobs)(inputs[recipe], batch, jnp.float32(1))[0]
    emulated = run[recipe](inputs[recipe], batch, _arrays(ARMS[name], ones_L))
    apart[name] = float(np.abs(np.asarray(package - emulated[2]))[mask].mean())
  print(f'calibrated, {time.monotonic() - start:.0f} s', flush=True)

  found = {(name, d): [] for name in arms for d in range(_DRAWS)}
  sums = {name: 0 for name in arms}
  counts = [0] * _DRAWS
  jobs = [(d, b) for of in zip(*map(enumerate, draws)) for d, (_, b) in enumerate(of)]
  for i, (draw, batch) in enumerate(jobs):
    if draw == 0 and time.monotonic() - start > 60 * _MINUTES.value:
      break
    mask = np.asarray(batch.loss_mask).ravel() > 0
    for name, arm in arms.items():
      got = run[arm.recipe](inputs[arm.recipe], batch, _arrays(arm, q_scale_L))
      if name == 'BF16':
        want = got
      kl, same = _compare(want[:2], got[:2])
      # Row t of the logits predicts token t + 1.
      kl, same = (np.roll(np.asarray(x), 1)[mask] for x in (kl, same))
      of = [np.asarray(x[2], np.float64).ravel()[mask] for x in (want, got)]
      found[name, draw].append(np.stack([kl, same, *of]))
      sums[name] = sums[name] + np.asarray(got[3], np.float64)
    counts[draw] += int(np.asarray(batch.segment_ids).max(1).sum())
    print(f'batch {i}, {time.monotonic() - start:.0f} s', flush=True)
  rows = []
  for name in arms:
    signal_L, noise_L = sums[name][:, :2].T
    db_L = 10 * np.log10(signal_L / np.maximum(noise_L, 1e-30))
    for draw in range(_DRAWS):
      kl, same, before, after = np.concatenate(found[name, draw], axis=1)
      x = after - before
      rows.append(
          {
              'arm': name,
              'draw': draw,
              'kl': float(kl.mean()),
              'k3': float((np.expm1(x) - x).mean()),
              'dlogp': float(np.abs(x).mean()),
              'top1': float(same.mean()),
              'loss': float(-after.mean()),
              'worse': float(-x.mean()),
              'worse_error': float(x.std() / math.sqrt(len(x))),
              'sqnr_db_median': float(np.median(db_L)),
              'sqnr_db_worst': float(db_L.min()),
              'worst_layer': int(db_L.argmin()),
          }
      )
  columns = (
      ('arm', 'arm', ''),
      ('draw', 'draw', ''),
      ('dlogp', '|dlogp|', '.4f'),
      ('k3', 'k3', '.5f'),
      ('kl', 'KL', '.5f'),
      ('top1', 'same top-1', '.2%'),
      ('loss', 'loss', '.4f'),
      ('worse', 'loss - BF16', '+.4f'),
      ('worse_error', '+-', '.4f'),
      ('sqnr_db_median', 'SQNR dB', '.1f'),
      ('sqnr_db_worst', 'worst', '.1f'),
      ('worst_layer', 'layer', ''),
  )
  summary = {
      "|dlogp| from the package's own attention": apart,
      'problems a draw': counts,
      'answer tokens a draw': [
          sum(x.shape[1] for x in found['BF16', d]) for d in range(_DRAWS)
      ],
      'amax of queries, least and most of a layer': [
          float(q_amax_L.min()),
          float(q_amax_L.max()),
      ],
      'amax of keys': [float(k_amax_L.min()), float(k_amax_L.max())],
  }
  common.write(rows, summary, common.table(rows, columns))


if __name__ == '__main__':
  flags.mark_flags_as_required(['checkpoint', 'data'])
  common.run(main)
