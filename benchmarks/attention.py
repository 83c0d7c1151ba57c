"""Times attention, and compares decode with the training forward bit for bit.

    python -m benchmarks.attention --output=benchmarks/results/NAME

Decode: one query token in every slot over its keys in pages, with keys and
values in BF16 and in FP8, for several numbers of warps and stages of a program,
and split over programs. Each variant's rows are compared with those of the
training kernel. Training: the forward of packed rows for several programs, each
compared with the first one, and both passes. On a CPU, to try it: --tiny.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from benchmarks import common
from jetrl_jax.compilation import exact_jit, on_gpu
from jetrl_jax.models import attention, attention_decode, attention_kernel
from jetrl_jax.models.attention_split import Split

_DECODE = flags.DEFINE_list(
    'decode', ['128x1152', '64x1152', '16x8192'], 'SLOTSxKEYS, whole pages.'
)
_TRAINING = flags.DEFINE_bool('training', True, 'Measure training too.')
_KINDS = flags.DEFINE_list(
    'kinds', ['bfloat16', 'float8_e4m3fn'], 'Of keys and values.'
)
_PAGE, _TILE = 128, 64
_KV_HEADS, _GROUP, _HEAD_DIM = 4, 7, 128
# Rows x tokens x segment of packed training rows.
_TRAIN = (8, 4096, 2048)
# Warps and stages of decode, and splits: chunks of keys, channels of a
# program, stages. Rows, warps and stages of the training forward.
_DECODE_PROGRAMS = ((1, 2), (1, 3), (2, 3))
_SPLITS = (
    Split(16, 16, 6),
    Split(16, 16, 4),
    Split(16, 32, 6),
    Split(16, 64, 4),
    Split(8, 16, 6),
)
_FORWARD_PROGRAMS = (
    (64, 4, 2),
    (64, 4, 3),
    (64, 4, 4),
    (128, 8, 2),
    (128, 8, 3),
    (128, 4, 2),
)
_KV_DTYPE = {'bfloat16': None, 'float8_e4m3fn': 'float8_e4m3fn'}
_COLUMNS = (
    ('what', 'what', ''),
    ('kv', 'keys and values', ''),
    ('variant', 'variant', ''),
    ('us', 'us', '.1f'),
    ('of_floor', 'of the byte floor', '.0%'),
    ('tflops', 'TFLOP/s', '.0f'),
    ('unequal', 'values unlike training', '.4%'),
)


def _normal(seed: int, *shape: int):
  key = jax.random.key(seed)
  return jax.random.normal(key, shape, jnp.float32).astype(jnp.bfloat16)


def _in_pages(x_BKSH, paired: bool):
  """[B, K, S, H] to pages, those of a slot one after the other."""
  slots, kv_heads, keys, head_dim = x_BKSH.shape
  pages = x_BKSH.reshape(slots, kv_heads, keys // _PAGE, _PAGE, head_dim)
  pages = jnp.swapaxes(pages, 1, 2).reshape(-1, kv_heads, _PAGE, head_dim)
  return attention_kernel.pair(pages) if paired else pages


def _named(program) -> str:
  if isinstance(program, Split):
    return 'split: ' + ', '.join(
        f'{n} {x}' for n, x in program._asdict().items()
    )
  return '{} warps, {} stages'.format(*program)


def decode_rows(kind: str, workload: str) -> list[dict]:
  """Returns a row per program of the decode kernel."""
  slots, keys = (
      (4, 2 * _PAGE) if common.TINY.value else map(int, workload.split('x'))
  )
  interpret = {} if on_gpu() else {'interpret': True}
  q = _normal(0, slots, _KV_HEADS, _GROUP, _HEAD_DIM)
  k, v = (
      attention.store(
          _normal(i, slots, _KV_HEADS, keys, _HEAD_DIM), _KV_DTYPE[kind]
      )
      for i in (1, 2)
  )
  last_B = jnp.full((slots,), keys - 1, jnp.int32)
  ends = jnp.broadcast_to(last_B[:, None], (slots, _GROUP))
  train = exact_jit(
      lambda *args: attention_kernel.forward(*args, _TILE, **interpret)[0]
  )
  wanted = np.asarray(train(q, k, v, jnp.zeros_like(ends), ends))
  paired = k.dtype.itemsize == 1
  operands = (
      q.reshape(slots, _KV_HEADS * _GROUP, _HEAD_DIM),
      _in_pages(k, False),
      _in_pages(v, paired),
      jnp.arange(slots * keys // _PAGE, dtype=jnp.int32).reshape(slots, -1),
      last_B,
  )
  floor, rows = (k.nbytes + v.nbytes) / common.BYTES_PER_S, []
  programs = (*_DECODE_PROGRAMS, *_SPLITS) if on_gpu() else ((1, 2), _SPLITS[0])
  for program in programs:
    run = exact_jit(
        functools.partial(_many, tile=_TILE, program=program, **interpret)
    )
    found = np.asarray(run(*operands)[0]).reshape(wanted.shape)
    spent = common.median_seconds(functools.partial(run, *operands)) / _REPEATS
    rows.append(
        {
            'what': f'decode, {slots} x {keys} keys',
            'kv': kind,
            'variant': _named(program),
            'us': spent * 1e6,
            'of_floor': floor / spent,
            'unequal': float(np.mean(found != wanted)),
        }
    )
    print(rows[-1], flush=True)
  return rows


_REPEATS = 28  # as many as a 7B has layers, so that launching does not count


def _many(q, k, v, table, last, **options):
  """Attends again and again, each time with what came out as queries."""
  out = first = attention_decode.decode(q, k, v, table, last, **options)[0]
  for _ in range(_REPEATS - 1):
    out = attention_decode.decode(out, k, v, table, last, **options)[0]
  return first, out


def train_rows(kind: str) -> list[dict]:
  """Returns a row for the forward and one for both passes."""
  batch, tokens, segment = (1, 256, 128) if common.TINY.value else _TRAIN
  rows = tokens * _GROUP
  q = _normal(0, batch, _KV_HEADS, rows, _HEAD_DIM)
  k, v = (_normal(i, batch, _KV_HEADS, tokens, _HEAD_DIM) for i in (1, 2))
  index = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), (batch, tokens))
  last = jnp.repeat(index, _GROUP, axis=1)
  first = last // segment * segment

  def forward(q, k, v):
    return attention.flash_attention(
        q, k, v, first, last, _TILE, _KV_DTYPE[kind]
    )

  def both(q, k, v):
    out, back = jax.vjp(forward, q, k, v)
    return back(out)

  # Two products of a causal triangle; the backward pass has five.
  flops = 2 * 2 * batch * _KV_HEADS * rows * _HEAD_DIM * segment / 2
  interpret = {} if on_gpu() else {'interpret': True}
  found, wanted = [], None

  def add(name, run, factor, **more):
    spent = common.median_seconds(run)
    found.append(
        {
            'what': f'training, {batch} x {tokens}, segments of {segment}',
            'kv': kind,
            'variant': name,
            'us': spent * 1e6,
            'tflops': factor * flops / spent / 1e12,
        }
        | more
    )
    print(found[-1], flush=True)

  stored = [attention.store(x, _KV_DTYPE[kind]) for x in (k, v)]
  for shape in _FORWARD_PROGRAMS if on_gpu() else ((64, 4, 2),):
    program = functools.partial(
        attention_kernel.forward, tile=_TILE, program=shape, **interpret
    )
    run = functools.partial(exact_jit(program), q, *stored, first, last)
    out = np.asarray(run()[0])
    wanted = out if wanted is None else wanted
    add(
        'forward, {} rows, {} warps, {} stages'.format(*shape),
        *(run, 1),
        unequal=float(np.mean(out != wanted)),
    )
  add('forward and backward', functools.partial(exact_jit(both), q, k, v), 3.5)
  return found


def main(argv: list[str]) -> None:
  """Measures everything."""
  del argv
  workloads = _DECODE.value[:1] if common.TINY.value else _DECODE.value
  rows = [
      row
      for kind in _KINDS.value
      for workload in workloads
      for row in decode_rows(kind, workload)
  ]
  if _TRAINING.value:
    rows += [row for kind in _KINDS.value for row in train_rows(kind)]
  summary = {}
  for kind in _KINDS.value:
    for what in dict.fromkeys(row['what'] for row in rows):
      exact = [
          row
          for row in rows
          if (row['kv'], row['what']) == (kind, what)
          and row.get('unequal') == 0
      ]
      best = min(exact, key=lambda row: row['us'], default={'variant': 'none'})
      summary[f'fastest exact {what}, {kind}'] = best['variant']
  shown = common.table(rows, _COLUMNS)
  common.write(rows, summary, shown)


if __name__ == '__main__':
  common.run(main)
