"""Times what turns FP8 matrices round, beside what XLA makes of the same.

    python -m benchmarks.turning --output=benchmarks/results/NAME

An FP8 GEMM on Hopper wants both operands contraction-minor, so the backward
pass needs W, x and dY turned round (`jetrl_jax/fp8/turning.py`). `turn` takes
8-bit values; `input` and `gradient` quantise bfloat16 on the way and see what
was lost, the second keeps the values as they came, too. Each variant is
compared byte for byte with XLA's before it is timed.
"""

import functools

import jax
import jax.numpy as jnp
from absl import app, flags
from jax import lax

from benchmarks import common
from jetrl_jax.compilation import exact_jit, on_gpu
from jetrl_jax.fp8 import formats, health, turning
from jetrl_jax.fp8.quantization import QTensor, quantize

_OUTPUT = flags.DEFINE_string('output', None, 'Result path without ending.')
_COMMIT = flags.DEFINE_string('commit', '', 'Commit under test.')
_SHAPES = flags.DEFINE_list(
    'shapes',
    ['32768x3584', '32768x18944', '32768x37888'],
    'Matrices, ROWSxCOLUMNS; multiples of 128.',
)
_COLUMNS = (
    ('what', 'what', ''),
    ('shape', 'shape', ''),
    ('variant', 'variant', ''),
    ('us', 'us', '.0f'),
    ('of_floor', 'of the byte floor', '.0%'),
)
# Bytes read and written per value.
_BYTES = {'turn': 2, 'input': 3, 'gradient': 4}
_PROGRAMS = ((128, 4), (128, 8), (128, 16), (64, 4), (64, 8))


def _by_xla(what: str, x, scale, mask_M):
  """Returns ([straight,] turned, sums)."""
  if what == 'turn':
    return (x.T,)
  values = quantize(x, scale, formats.E4M3)
  amax, sums = health.measure(x, QTensor(values=values, scale=scale), mask_M)
  # As a GEMM sees it: an array, and no part of its program.
  return *[values] * (what == 'gradient'), values.T, amax, sums[1:]


def _by_kernel(what: str, x, scale, mask_M, **options):
  """As `_by_xla`."""
  if what == 'turn':
    return (turning.turn(x, **options),)
  straight = what == 'gradient'
  out = turning.quantize_and_turn(
      x, scale, mask_M, formats.E4M3, straight=straight, **options
  )
  return *[out.straight_MN] * straight, out.turned_NM, out.amax, out.lost


def _variants(what: str) -> dict:
  if not on_gpu():
    return {'kernel': {'interpret': True}}
  if what == 'turn':
    return {f'{n} warps': {'num_warps': n} for n in (2, 4, 8)}
  return {
      f'{width} columns, {n} warps': {'width': width, 'num_warps': n}
      for width, n in _PROGRAMS
  }


def _compare(name: str, found, wanted) -> None:
  for ours, theirs in zip(found, wanted, strict=True):
    if ours.dtype.itemsize == 1:
      as_bytes = functools.partial(
          lax.bitcast_convert_type, new_dtype=jnp.uint8
      )
      is_equal = jnp.array_equal(as_bytes(ours), as_bytes(theirs))
    else:
      is_equal = jnp.allclose(ours, theirs, rtol=1e-4)
    if not is_equal:
      raise AssertionError(f'{name}: {ours} is not {theirs}')


def _measure(what: str, shape: str) -> list[dict]:
  """Checks and times every variant on one shape."""
  dims = tuple(int(size) for size in shape.split('x'))
  first, second = jax.random.split(jax.random.key(0))
  x = jax.random.normal(first, dims) * jnp.exp(
      2 * jax.random.normal(second, dims)
  )
  scale = jnp.float32(2.0**-4)
  x = (
      quantize(x, scale, formats.E4M3)
      if what == 'turn'
      else x.astype('bfloat16')
  )
  arguments = x, scale, jnp.ones((dims[0],), jnp.float32)
  by_xla = exact_jit(functools.partial(_by_xla, what))
  wanted = by_xla(*arguments)
  variants = {'XLA': by_xla} | {
      name: exact_jit(functools.partial(_by_kernel, what, **options))
      for name, options in _variants(what).items()
  }
  floor, rows = _BYTES[what] * x.size / common.BYTES_PER_S, []
  for name, run in variants.items():
    _compare(f'{what} {shape} {name}', run(*arguments), wanted)
    spent = common.median_seconds(functools.partial(run, *arguments))
    row = {'what': what, 'shape': shape, 'variant': name}
    rows.append(row | {'us': spent * 1e6, 'of_floor': floor / spent})
  return rows


def main(argv: list[str]) -> None:
  """Checks and times every variant on every shape."""
  del argv
  shapes = ['256x384'] if common.TINY.value else _SHAPES.value
  rows = []
  for what in _BYTES:
    for shape in shapes:
      rows += _measure(what, shape)
  summary = {}
  for what, name in dict.fromkeys(
      (row['what'], row['variant']) for row in rows
  ):
    mine = [r['us'] for r in rows if (r['what'], r['variant']) == (what, name)]
    summary[f'{what}, {name}: all shapes, us'] = round(sum(mine))
  shown = common.table(rows, _COLUMNS)
  common.write(_OUTPUT.value, rows, summary, shown, _COMMIT.value)


if __name__ == '__main__':
  flags.mark_flag_as_required('output')
  app.run(main)
