"""Times every operation's kernels beside its reference, which XLA compiles.

    python -m benchmarks.kernels --output=benchmarks/results/NAME

At the shapes of a 7B: a decode step's rows, and a micro-batch of 8 x 4096
tokens. The times are those of the kernels that a program launches, added up,
from one profile of all; what lies between two kernels is not in them. The
column "bits" has a hash of the results, equal where two implementations agree
to the bit. An operation whose reference is within 3% needs no kernel of ours.
XLA alone may join a reference with what is before and after it, which is not
seen here. Takes half a minute on an H100.
"""

import collections
import concurrent.futures
import dataclasses
import functools
import hashlib
import json
import math
import re
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from benchmarks import common
from jetrl_jax import fp8, kernels
from jetrl_jax.config.model import SHAPES
from jetrl_jax.core.collectives import Axes
from jetrl_jax.core.compilation import exact_jit
from jetrl_jax.fp8 import DeferredScale, QTensor, Recipe, formats
from jetrl_jax.fp8.products import Rows
from jetrl_jax.kernels import (
    adamw,
    dispatch,
    kv_storage,
    log_sum_exp,
    quantize_transpose,
    rope_append,
    sample_token,
    swiglu,
)
from jetrl_jax.kernels.adamw.reference import fp8_codec
from jetrl_jax.kernels.add_norm_quantize import forward as add_norm_quantize
from jetrl_jax.kernels.attention import flash_attention
from jetrl_jax.kernels.block_scaled_dot import block_dot
from jetrl_jax.kernels.decode_attention import decode_attention
from jetrl_jax.kernels.gate_up import gate_up
from jetrl_jax.kernels.mlp import mlp
from jetrl_jax.kernels.requantize import requantize

_SHAPE = flags.DEFINE_enum(
    'shape', 'qwen2.5-7b', sorted(SHAPES), 'See model.shape.'
)
_ROWS = flags.DEFINE_list('rows', ['16', '128', '256'], 'Of a decode step.')
_TOKENS = flags.DEFINE_integer('tokens', 8 * 4096, 'Of a micro-batch.')
_SEGMENT = flags.DEFINE_integer('segment', 2048, 'Tokens of a sequence.')
_ONLY = flags.DEFINE_list('only', [], 'Operations; none for all.')
_KEYS = flags.DEFINE_integer('keys', 1152, 'Of each slot in a decode step.')
_REPEATS = 5
# That compile at the same time.
_THREADS = 12
_TILE = 64
_COLUMNS = (
    ('operation', 'operation', ''),
    ('case', 'case', ''),
    ('implementation', 'implementation', ''),
    ('us', 'us', '.1f'),
    ('kernels', 'kernels', '.0f'),
    ('share', 'of the reference', '.3f'),
    ('bits', 'bits', ''),
    ('error', 'error', ''),
)


@dataclasses.dataclass(frozen=True)
class Case:
  """An operation at a shape.

  Attributes:
    operation: of `dispatch.TABLE`.
    name: of the shape.
    make: its arguments.
    run: calls it.
    beside: operations inside that run their first kernel on all sides.
    donates: numbers of arguments that it writes over.
    writes: arguments and results to the next call's arguments, if it donates.
    reference: whether it is timed; attention's takes whole score matrices.
  """

  operation: str
  name: str
  make: Callable[[], tuple]
  run: Callable[..., Any]
  beside: tuple[str, ...] = ()
  donates: tuple[int, ...] = ()
  writes: Callable[[tuple, Any], tuple] = lambda args, result: args
  reference: bool = True


def _noise(*shape: int, dtype=jnp.bfloat16, seed: int = 0):
  """Returns numbers between -2 and 2, cheaply made."""

  def make():
    index = jax.lax.iota(jnp.uint32, math.prod(shape)) + np.uint32(seed)
    index = (index ^ (index >> 15)) * np.uint32(0x2C1B3C6D)
    index = (index ^ (index >> 12)) * np.uint32(0x297A2D39)
    unit = (index >> 8).astype(jnp.float32) * 2.0**-22 - 2.0
    return unit.reshape(shape).astype(dtype)

  return jax.jit(make)()


def _scalar(power: int):
  return jnp.float32(2.0**power)


def _decode(model, rows: int) -> list[Case]:
  """What a decode step of so many slots runs."""
  dim, ffn, vocab = model.model_dim, model.ffn_dim, model.vocab_size
  heads, kv_heads, head_dim = (
      model.num_heads,
      model.num_kv_heads,
      model.head_dim,
  )

  def product():
    values = _noise(rows, dim, dtype=jnp.float32, seed=1)
    return DeferredScale(values=values, scales=(_scalar(-1), _scalar(-2)))

  def norm():
    return _noise(rows, dim), _noise(dim, seed=2), product()

  def halves():
    return DeferredScale(
        values=_noise(2, rows, ffn), scales=(_scalar(-1), _scalar(-2))
    )

  page = 128
  pages = -(-_KEYS.value // page)

  def cache(kind):
    pool = rows * pages, kv_heads, page, head_dim
    return (
        kv_storage.store(_noise(*pool, seed=3), kind),
        kv_storage.store_values(_noise(*pool, seed=4), kind),
    )

  def tables():
    order = np.random.default_rng(0).permutation(rows * pages)
    table = jnp.asarray(order.reshape(rows, pages), jnp.int32)
    return table, jnp.full((rows,), _KEYS.value - 1, jnp.int32)

  def appended(kind):
    width = (heads + 2 * kv_heads) * head_dim
    qkv = DeferredScale(
        values=_noise(rows, width, dtype=jnp.float32),
        scales=(_scalar(-1), _scalar(-2)),
        bias_O=_noise(width, seed=1),
    )
    angle = _noise(rows, head_dim // 2, dtype=jnp.float32)
    table, position = tables()
    return qkv, (jnp.cos(angle), jnp.sin(angle)), position, table, cache(kind)

  def attended(kind):
    table, last = tables()
    return _noise(rows, heads, head_dim), *cache(kind), table, last

  def eight_bits(*shape: int, seed: int = 0):
    return _noise(*shape, seed=seed).astype(formats.E4M3)

  def gated():
    x8 = QTensor(values=eight_bits(rows, dim), scale=_scalar(-3))
    weight = QTensor(values=eight_bits(2 * ffn, dim, seed=5), scale=_scalar(-4))
    return x8, weight, _scalar(-5)

  def logits():
    return _noise(rows, vocab, dtype=jnp.float32), jnp.full((rows,), 0.9)

  def drawn(logits, inverse):
    keys = jax.random.split(jax.random.key(0), rows)
    greedy = jnp.zeros((rows,), bool)
    tokens, lse = sample_token.draw(
        logits, inverse, None, keys, greedy_B=greedy
    )
    # A decode step wants both.
    if lse is None:
      lse, _ = log_sum_exp.row_stats(logits, inverse)
    return tokens, lse

  name = f'decode, {rows} rows'
  kind = 'float8_e4m3fn'
  found = [
      Case(
          'add_norm_quantize',
          name,
          norm,
          lambda x, gain, added: add_norm_quantize(
              x, gain, 1e-6, _scalar(-6), added
          ),
      ),
      Case(
          'swiglu',
          name,
          lambda: (halves(),),
          lambda product: swiglu.swiglu_of(product, _scalar(-6)),
      ),
      Case(
          'rope_append',
          name + ', FP8 keys',
          lambda: appended(kind),
          rope_append.rope_append,
          donates=(4,),
          writes=lambda args, result: (*args[:4], result[1]),
      ),
      Case(
          'decode_attention',
          name + ', FP8 keys',
          lambda: attended(kind),
          lambda *args: decode_attention(*args, _TILE, _scalar(-6)),
          reference=rows <= 16,
      ),
      Case('log_sum_exp', name, logits, log_sum_exp.row_stats),
      Case('sample_token', name, logits, drawn),
  ]
  if rows in (64, 128):
    run = functools.partial(gate_up, dtype=jnp.bfloat16)
    found.append(Case('gate_up', name, gated, run, beside=('swiglu',)))
  return found + _block_dots(model, rows, name)


def _block_dots(model, rows: int, name: str) -> list[Case]:
  dim, width = model.model_dim, 2 * model.ffn_dim

  def make():
    a, b = (
        _noise(size, dim, seed=i).astype(formats.E4M3)
        for i, size in enumerate((rows, width))
    )
    scale_a = jnp.full((rows, dim // 128), 0.5, jnp.float32)
    scale_b = jnp.full((width // 128, dim // 128), 0.25, jnp.float32)
    return a, scale_a, b, scale_b

  run = functools.partial(block_dot, out_dtype='bfloat16', power_of_two=True)
  return [Case('block_scaled_dot', name, make, run, reference=rows <= 512)]


def _training(model, tokens: int) -> list[Case]:
  """What a micro-batch of so many tokens runs."""
  dim, ffn, vocab = model.model_dim, model.ffn_dim, model.vocab_size
  kv_heads, head_dim = model.num_kv_heads, model.head_dim
  group = model.num_heads // kv_heads
  mask = functools.partial(jnp.ones, (tokens,), jnp.float32)
  name = f'training, {tokens} tokens'

  def halves():
    return DeferredScale(
        values=_noise(tokens, 2 * ffn), scales=(_scalar(-1), _scalar(-2))
    )

  def attended():
    batch = max(tokens // 4096, 1)
    length = tokens // batch
    q = _noise(batch, kv_heads, length * group, head_dim)
    k, v = (_noise(batch, kv_heads, length, head_dim, seed=i) for i in (1, 2))
    last = np.arange(length, dtype=np.int32)
    first = last // _SEGMENT.value * _SEGMENT.value
    spans = (
        jnp.asarray(np.tile(np.repeat(x, group), (batch, 1)), jnp.int32)
        for x in (first, last)
    )
    return q, k, v, *spans

  def backward(q, k, v, first, last, kind):
    def attend(q, k, v):
      return flash_attention(q, k, v, first, last, group, _TILE, kind)

    out, pull = jax.vjp(attend, q, k, v)
    return pull(out)

  def leaf():
    master = _noise(ffn, dim)
    codec = fp8_codec()
    mu, nu = (
        jnp.abs(_noise(ffn, dim, dtype='float32', seed=i)) for i in (2, 3)
    )
    numbers = jnp.asarray([1, 0.5, 1e-2, 2.0, 4.0, 0, 0, 0], jnp.float32)
    gradient = _noise(ffn, dim, seed=1)
    return master, gradient, codec.encode(mu), codec.encode(nu), numbers

  def moved(*args):
    return adamw.update(*args, None, b1=0.9, b2=0.99, eps=1e-8, decay=0.1)

  recipe = Recipe()

  def masters():
    params = {'out': {'kernel': _noise(ffn, dim)}}
    state = fp8.init_state(params, recipe)
    state = fp8.observe_kernels(state, params, recipe, Axes())
    return params, state, kernels.prepare_weights(params, state, recipe)

  def block():
    params = {
        'gate_up': {'kernel': _noise(2 * ffn, dim)},
        'down': {'kernel': _noise(dim, ffn, seed=1)},
    }
    state = fp8.init_state(params, recipe)
    state = fp8.observe_kernels(state, params, recipe, Axes())
    weights = kernels.prepare_weights(params, state, recipe)
    rows = [_noise(tokens, dim, seed=seed) for seed in (2, 3)]
    return *rows, params, weights, state, mask()

  def both_ways(x, dz, params, weights, state, mask):
    def forward(x, params):
      dots = (
          (params[name]['kernel'], weights[name]['kernel'], state[name])
          for name in ('gate_up', 'down')
      )
      return mlp(recipe, Rows(x), *dots, mask)

    return jax.vjp(forward, x, params)[1](dz)

  def turned(width: int, row_major: bool):
    def run(x, mask):
      return quantize_transpose.quantize_and_transpose(
          x, _scalar(-6), mask, formats.E4M3, row_major=row_major
      )

    return Case(
        'quantize_transpose',
        f'{name} x {width}' + ', both ways' * row_major,
        lambda: (_noise(tokens, width), mask()),
        run,
    )

  rows = min(tokens, 4096)
  return [
      Case(
          'add_norm_quantize',
          name,
          lambda: (_noise(tokens, dim), _noise(dim, seed=2)),
          lambda x, gain: add_norm_quantize(x, gain, 1e-6, _scalar(-6)),
      ),
      Case(
          'swiglu',
          name,
          lambda: (halves(),),
          lambda product: swiglu.swiglu_of(product, _scalar(-6)),
      ),
      Case(
          'mlp',
          f'{name}, forward and backward',
          block,
          both_ways,
          beside=('quantize_transpose', 'swiglu'),
      ),
      turned(dim, True),
      turned(ffn, False),
      Case(
          'quantize_transpose',
          f'bytes of {2 * ffn} x {dim}',
          lambda: (_noise(2 * ffn, dim).astype(formats.E4M3),),
          quantize_transpose.transpose,
      ),
      Case(
          'log_sum_exp',
          f'training, {rows} rows',
          lambda: (
              _noise(rows, vocab, dtype=jnp.float32),
              jnp.full((rows,), 0.9),
          ),
          log_sum_exp.row_stats,
      ),
      Case(
          'adamw',
          f'{ffn} x {dim}',
          leaf,
          moved,
          donates=(0, 2, 3),
          writes=lambda args, new: (new[0], args[1], *new[1:3], args[4]),
      ),
      Case(
          'requantize',
          f'{ffn} x {dim}',
          masters,
          lambda *trees: requantize(*trees, recipe, Axes()),
          donates=(2,),
          writes=lambda args, new: (*args[:2], new[0]),
      ),
      *(
          Case(
              'attention',
              f'{name}, {kind or "bfloat16"} keys, {what}',
              attended,
              run,
              reference=tokens <= 1024,
          )
          for kind in (None, 'float8_e4m3fn')
          for what, run in (
              (
                  'forward',
                  lambda *args, kind=kind: flash_attention(
                      *args, group, _TILE, kind
                  ),
              ),
              (
                  'forward and backward',
                  functools.partial(backward, kind=kind),
              ),
          )
      ),
      *_block_dots(model, min(tokens, 8192), 'training, 8192 rows'),
  ]


def _tables(case: Case) -> dict[str, dispatch.Kernels]:
  """Returns the implementations to time, and what runs with each."""
  automatic = dict(dispatch.select().chosen)
  base = dispatch.select('reference').replace(
      **{name: automatic[name] for name in case.beside}
  )
  found = {}
  for name in dispatch.TABLE[case.operation]:
    if name == dispatch.REFERENCE and not case.reference:
      continue
    try:
      dispatch.select(f'{case.operation}={name}')
    except ValueError:
      continue  # Not on this hardware.
    found[name] = base.replace(**{case.operation: name})
  return found


def _hash(results) -> str:
  """Returns a hash of all bits of some arrays."""
  found = hashlib.sha256()
  for array in jax.tree.leaves(jax.device_get(results)):
    found.update(np.ascontiguousarray(array).tobytes())
  return found.hexdigest()[:8]


def _compiled(case: Case, table: dispatch.Kernels, module: str):
  """Returns (what runs the operation, a hash of its results).

  The profile knows it by `module`.
  """

  def run(*args):
    with dispatch.using(table):
      return case.run(*args)

  run.__name__ = module
  args = case.make()
  program = exact_jit(run, donate_argnums=case.donates).lower(*args).compile()

  def again():
    nonlocal args
    result = program(*args)
    args = case.writes(args, result)
    return result

  return again, _hash(again())


def _times(folder: str) -> dict[str, tuple[float, int]]:
  """Returns module -> (microseconds, kernels), of a profile."""
  times = collections.defaultdict(lambda: (0.0, 0))
  for event in common.device_events(folder):
    found = re.match(r'jit_(\w+)', event.get('args', {}).get('hlo_module', ''))
    us, count = times[found.group(1) if found else '']
    times[found.group(1) if found else ''] = us + event['dur'], count + 1
  return dict(times)


def _prepare(case: Case, index: int) -> list[tuple[dict, Callable]]:
  """Compiles and runs a case: (row, what runs it again) by implementation."""
  found = []
  for name, table in _tables(case).items():
    row = {
        'operation': case.operation,
        'case': case.name,
        'implementation': name,
        'module': f'case{index}_{name}',
    }
    run = _nothing
    try:
      run, row['bits'] = _compiled(case, table, row['module'])
    except Exception as error:  # One that fails must not end the others.
      row['error'] = f'{type(error).__name__}: {str(error)[:300]}'
      traceback.print_exc()
    found.append((row, run))
  return found


def _nothing() -> None:
  """Runs where a program failed."""


def _profile(prepared: list[tuple[dict, Callable]]) -> None:
  """Puts times into rows, of one profile of all programs."""
  with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder):
      for _, run in prepared:
        for _ in range(_REPEATS):
          jax.block_until_ready(run())
    times = _times(folder)
  for row, run in prepared:
    us, count = times.get(row.pop('module'), (0.0, 0))
    if not count and 'error' not in row:
      # A profile that does not say whose kernels they are: one of its own.
      for ms, launches in common.kernel_times(run).values():
        us, count = us + ms * 1e3 * _REPEATS, count + launches * _REPEATS
    if count:
      row |= {'us': us / _REPEATS, 'kernels': count / _REPEATS}


def _add_shares(rows: list[dict]) -> None:
  """Divides times by that of the reference, where that was timed."""
  references = {
      (row['operation'], row['case']): row['us']
      for row in rows
      if row['implementation'] == dispatch.REFERENCE and 'us' in row
  }
  for row in rows:
    reference = references.get((row['operation'], row['case']))
    if reference and 'us' in row:
      row['share'] = row['us'] / reference


def main(argv: list[str]) -> None:
  """Times all cases."""
  del argv
  model = SHAPES[_SHAPE.value]
  tokens, decode = _TOKENS.value, map(int, _ROWS.value)
  if common.TINY.value:
    model = dataclasses.replace(
        model,
        vocab_size=512,
        model_dim=256,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        ffn_dim=256,
    )
    tokens, decode = 256, [16]
  cases = [c for rows in decode for c in _decode(model, rows)]
  cases += _training(model, tokens)
  if _ONLY.value:
    cases = [case for case in cases if case.operation in _ONLY.value]
  with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
    jobs = [pool.submit(_prepare, *pair[::-1]) for pair in enumerate(cases)]
    prepared = [one for job in jobs for one in job.result()]
  _profile(prepared)
  rows = [row for row, _ in prepared]
  _add_shares(rows)
  for row in rows:
    print(json.dumps(row), flush=True)
  slower = [row for row in rows if row.get('share', 0.0) > 0.97]
  names = sorted({f'{r["operation"]}={r["implementation"]}' for r in slower})
  names = [name for name in names if not name.endswith(dispatch.REFERENCE)]
  summary = {'within 3% of XLA alone somewhere': ', '.join(names) or 'none'}
  common.write(rows, summary, common.table(rows, _COLUMNS))


if __name__ == '__main__':
  common.run(main)
