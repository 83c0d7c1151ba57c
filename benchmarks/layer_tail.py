"""Times the tail of a decode layer as one kernel beside the kernels in use.

    python -m benchmarks.layer_tail --output=benchmarks/results/NAME

From attention's FP8 result to the rows of the next layer's qkv: o, norm,
gate_up, SwiGLU, down, norm. First all bits are compared, of one layer and of
all layers in turn, a few times over, since a race would not show each time.
Then the layers are timed, each with weights of its own, so that none stay in
the L2 cache. It needs a Hopper GPU. On a CPU, --tiny --variants=one:apart=1
runs the kernels' phases in the interpreter (with NPROC=16 in the environment,
as its threads wait for each other).

A variant is 'today' or 'one' with options: 'one:ahead=0' asks for no weights
before their phase begins, 'one:apart=1' has a kernel for each phase, and others
are the fields of `layer_tail_kernel.Plan`. A program that waits for seconds
traps; then the process has lost its GPU, and what was measured is written.
"""

import dataclasses
import faulthandler
import functools
import json
import time
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax import lax

from benchmarks import common
from jetrl_jax.config.model import SHAPES
from jetrl_jax.core.compilation import exact_jit
from jetrl_jax.fp8 import formats
from jetrl_jax.fp8.quantization import QTensor
from jetrl_jax.kernels.add_norm_quantize import forward as add_norm_quantize
from jetrl_jax.kernels.gate_up import gate_up
from jetrl_jax.kernels.quantized_dot import per_tensor

_SHAPE = flags.DEFINE_enum(
    'shape', 'qwen2.5-7b', sorted(SHAPES), 'See model.shape.'
)
_ROWS = flags.DEFINE_list('rows', ['128', '64'], 'Of a decode step.')
_LAYERS = flags.DEFINE_integer('layers', 8, 'With weights of their own.')
_REPEATS = flags.DEFINE_integer('repeats', 20, 'Of all layers in a program.')
_CHECKS = flags.DEFINE_integer('checks', 20, 'Runs whose bits are compared.')
_VARIANTS = flags.DEFINE_list(
    'variants',
    [
        'today',
        'one',
        'one:pairs=1',
        'one:weight_stages=3:row_stages=12',
        'one:pairs=1:weight_stages=3:row_stages=12',
        'one:prefetch=4',
        'one:pairs=1:weight_stages=3:row_stages=12:prefetch=4',
        'one:ahead=0',
        'one:apart=1',
        'one:marks=1',
        'one:pairs=1:marks=1',
    ],
    "What is timed; 'today' comes first, for the others' bits.",
)
_PROFILE = flags.DEFINE_bool('profile', True, "Times of today's kernels.")
_PATIENCE_S = 240  # For a variant, compiling included.
_COLUMNS = (
    ('rows', 'rows', ''),
    ('variant', 'variant', ''),
    ('us', 'us a layer', '.1f'),
    ('floor', 'of the bytes at 3 TB/s', '.0%'),
    ('differ', 'values that differ', ''),
    ('unlike', 'runs unlike the first', ''),
    ('compile_s', 'compiled in s', '.0f'),
    ('error', 'error', ''),
)
_MARK_COLUMNS = (
    ('mark', 'mark', ''),
    ('programs', 'programs', ''),
    ('first', 'first, us', '.1f'),
    ('median', 'median', '.1f'),
    ('last', 'last', '.1f'),
    ('cycles', 'thousand cycles', '.1f'),
)
_BYTES_PER_S = 3e12  # attainable on an H100
_MADE = 'r', 'q8', 'h8', 'y', 'n8'
_EPS = 1e-6


def _weights(key, model) -> dict[str, jax.Array]:
  """Returns random weights of a layer, of deviation 0.02, times 2^11."""
  dim, ffn = model.model_dim, model.ffn_dim
  inner = model.num_heads * model.head_dim

  def eight_bits(key, *shape):
    x = jax.random.normal(key, shape, jnp.bfloat16) * (0.02 * 2**11)
    return x.astype(formats.E4M3)

  def gain(key):
    return (1 + 0.1 * jax.random.normal(key, (dim,))).astype(jnp.bfloat16)

  keys = jax.random.split(key, 5)
  return {
      'w_o': eight_bits(keys[0], dim, inner),
      'w_gate_up': eight_bits(keys[1], 2, ffn, dim),
      'w_down': eight_bits(keys[2], dim, ffn),
      'gain': gain(keys[3]),
      'next_gain': gain(keys[4]),
  }


def _scales() -> dict[str, float]:
  """Returns the scales of all layers: powers of two."""
  weights = 'o_scale', 'gate_up_scale', 'down_scale'
  rows = 'a_scale', 'q_scale', 'h_scale', 'next_scale'
  scales: dict[str, float] = {name: 2.0**-11 for name in weights}
  return scales | {name: 2.0**-5 for name in rows}


def _today(state: dict, weights: dict, numbers: dict) -> dict:
  """Returns what a layer makes, by the functions of a decode step."""
  bf16 = jnp.bfloat16

  def weight(name):
    return QTensor(values=weights[f'w_{name}'], scale=numbers[f'{name}_scale'])

  a8 = QTensor(values=state['a8'], scale=numbers['a_scale'])
  delta = per_tensor.unscaled(a8, weight('o'), bf16, late_scale=False)
  r, _, q8 = add_norm_quantize(
      state['x'], weights['gain'], _EPS, numbers['q_scale'], delta
  )
  assert q8 is not None
  both = weight('gate_up')
  both = QTensor(
      values=both.values.reshape(-1, both.values.shape[-1]), scale=both.scale
  )
  h8 = gate_up(
      QTensor(values=q8, scale=numbers['q_scale']),
      both,
      numbers['h_scale'],
      bf16,
  )
  delta = per_tensor.unscaled(h8, weight('down'), bf16, late_scale=False)
  y, _, n8 = add_norm_quantize(
      r, weights['next_gain'], _EPS, numbers['next_scale'], delta
  )
  return {'r': r, 'q8': q8, 'h8': h8.values, 'y': y, 'n8': n8}


def _one(options: dict[str, int], model, rows: int) -> Callable[..., dict]:
  """Returns the function like `_today` whose kernel is one."""
  from benchmarks import layer_tail_kernel as kernel

  interpret = common.TINY.value
  options = dict(options)
  apart = bool(options.pop('apart', 0))
  found = kernel.plan(
      rows,
      model.model_dim,
      model.num_heads * model.head_dim,
      model.ffn_dim,
      programs=8 if interpret else jax.devices()[0].core_count,
      eps=_EPS,
      **options,
  )
  print(found, f'tiles of {found.width} and {found.gate_width}', flush=True)

  def run(state, weights, numbers):
    del numbers
    ordered = jnp.asarray([_scales()[name] for name in kernel.NUMBERS])
    return kernel.layer_tail(
        state | weights | {'numbers': ordered},
        plan=found,
        apart=apart,
        interpret=interpret,
    )

  return run


def _function(variant: str, model, rows: int) -> Callable[..., dict]:
  name, *options = variant.split(':')
  if name == 'today':
    return _today
  if name != 'one':
    raise ValueError(
        f"variant {variant!r}; allowed are 'today' and 'one' with options"
    )
  pairs = (option.split('=') for option in options)
  return _one({key: int(value) for key, value in pairs}, model, rows)


def _start(model, rows: int) -> dict:
  """Returns the first layer's rows."""
  inner = model.num_heads * model.head_dim
  keys = jax.random.split(jax.random.key(1))
  a8 = jax.random.normal(keys[0], (rows, inner)) * 2.0**5
  return {
      'a8': a8.astype(formats.E4M3),
      'x': jax.random.normal(keys[1], (rows, model.model_dim), jnp.bfloat16),
      'counters': jnp.zeros((4 * 32,), jnp.int32),
  }


def _in_turn(function, state, layers, numbers, repeats):
  """Runs all layers some times over; returns the last one's state."""

  def once(_, state):
    for weights in layers:
      made = function(state, weights, numbers)
      state = {
          'a8': made['n8'],
          'x': made['y'],
          'counters': made.get('counters', state['counters']),
      }
    return state

  return lax.fori_loop(0, repeats, once, state)


def _bits(array) -> np.ndarray:
  array = np.asarray(array)
  return array.view(f'u{array.dtype.itemsize}')


def _differences(found: dict, wanted: dict) -> dict[str, int]:
  """Returns how many values of each array differ."""
  pairs = ((name, found[name], wanted[name]) for name in wanted)
  return {name: int((_bits(a) != _bits(b)).sum()) for name, a, b in pairs}


def _marked(made: dict) -> list[dict]:
  """Returns when programs reached each mark, in us after the first's start."""
  from benchmarks import layer_tail_kernel as kernel

  marks = np.asarray(made['marks'])[:, :, 0].astype(np.int64) % 2**32
  known = np.asarray(made['marks'])[:, :, 0] != 0
  marks = (marks - marks[:, 0].min()) / 1e3
  clock = np.asarray(made['marks'])[:, :, 1].astype(np.int64)
  since = (clock - clock[:, :1]) % 2**32 / 1e3
  rows = []
  for i, name in enumerate(kernel.MARKS):
    those = known[:, i]
    if those.any():
      us, cycles = marks[those, i], since[those, i]
      rows.append(
          {
              'mark': name,
              'programs': int(those.sum()),
              'first': us.min(),
              'median': float(np.median(us)),
              'last': us.max(),
              'cycles': float(np.median(cycles)),
          }
      )
  return rows


def _say(text: str) -> None:
  print(f'{time.strftime("%H:%M:%S")} {text}', flush=True)


def _measure(variant: str, rows: int, model, layers, first: dict) -> dict:
  """Returns a variant's row; `first` gets today's results, for the others."""
  row: dict[str, Any] = {'rows': rows, 'variant': variant}
  state = _start(model, rows)
  numbers = {name: jnp.float32(x) for name, x in _scales().items()}
  function = _function(variant, model, rows)
  _say(f'{variant}, {rows} rows: one layer')
  start = time.perf_counter()
  made = exact_jit(function)(state, layers[0], numbers)
  made = jax.device_get({name: made[name] for name in _MADE})
  repeats = 1 if common.TINY.value else _REPEATS.value
  program = (
      exact_jit(functools.partial(_in_turn, function))
      .lower(state, layers, numbers, jnp.int32(repeats))
      .compile()
  )
  row['compile_s'] = time.perf_counter() - start
  _say('all layers')

  def run(repeats=repeats):
    last = program(state, layers, numbers, jnp.int32(repeats))
    return {'last y': last['x'], 'last n8': last['a8']}

  made |= jax.device_get(run())
  if variant == 'today':
    first |= made
  if first:
    row['differences'] = _differences(made, first)
    differ = {k: n for k, n in row['differences'].items() if n}
    row['differ'] = ', '.join(f'{k} {n}' for k, n in differ.items()) or 'none'
    _say(f'values that differ: {row["differ"]}')
  names = 'last y', 'last n8'
  again = 0
  for _ in range(_CHECKS.value):
    last = jax.device_get(run())
    again += any(_differences(last, {n: made[n] for n in names}).values())
  row['unlike'] = again
  _say(f'runs unlike the first: {again}')
  if common.TINY.value:
    return row
  # Without what starting a program takes.
  few, many = (
      common.median_seconds(functools.partial(run, repeats * n)) for n in (1, 4)
  )
  row['us'] = (many - few) / (3 * repeats) / len(layers) * 1e6
  _say(f'{row["us"]:.1f} us a layer')
  size = sum(array.nbytes for array in layers[0].values())
  row['floor'] = size / _BYTES_PER_S * 1e6 / row['us']
  if 'marks' in variant:
    one = exact_jit(function)
    for _ in range(2):
      jax.block_until_ready(one(state, layers[-1], numbers))
    marked = jax.device_get(one(state, layers[-1], numbers))
    row['marks'] = _marked(marked)
    print(common.table(row['marks'], _MARK_COLUMNS), flush=True)
  if _PROFILE.value:
    times = common.kernel_times(run)
    calls = repeats * len(layers)
    row['kernels'] = {
        name: (ms * 1e3 / calls, count / calls)
        for name, (ms, count) in times.items()
    }
    print(common.show_kernels(times, 12), flush=True)
  return row


def main(argv: list[str]) -> None:
  """Measures all variants."""
  del argv
  model = SHAPES[_SHAPE.value]
  count = _LAYERS.value
  if common.TINY.value:
    sizes = {'model_dim': 512, 'num_heads': 4, 'head_dim': 128, 'ffn_dim': 1024}
    model = dataclasses.replace(model, **sizes)
    count = 2
  make = jax.jit(functools.partial(_weights, model=model))
  layers = [make(key) for key in jax.random.split(jax.random.key(0), count)]
  jax.block_until_ready(layers)
  rows, failed = [], False
  for size in map(int, _ROWS.value):
    first = {}
    for variant in _VARIANTS.value:
      if failed:
        break  # A kernel that trapped takes the process's GPU with it.
      faulthandler.dump_traceback_later(_PATIENCE_S, exit=True)
      try:
        row = _measure(variant, size, model, layers, first)
      except Exception as error:  # What was measured must be written.
        traceback.print_exc()
        row = {'rows': size, 'variant': variant, 'error': str(error)[:300]}
        failed = 'JaxRuntimeError' in type(error).__name__
      rows.append(row)
      print(json.dumps(row), flush=True)
      faulthandler.cancel_dump_traceback_later()
  size = sum(array.nbytes for array in layers[0].values())
  summary = {
      'MB a layer': round(size / 1e6, 1),
      'us of its bytes at 3 TB/s': round(size / _BYTES_PER_S * 1e6, 1),
  }
  common.write(rows, summary, common.table(rows, _COLUMNS))


if __name__ == '__main__':
  common.run(main)
