"""Times what turns FP8 matrices round, beside what XLA makes of the same.

    python -m benchmarks.turning --output=benchmarks/results/NAME

An FP8 GEMM on Hopper wants both operands contraction-minor, so the backward
pass needs W, x and dY turned round (`jetrl_jax/fp8/turning.py`). `turn` takes
8-bit values; `input` and `gradient` quantise bfloat16 on the way and see what
was lost, the second keeps the values as they came, too. `swiglu` is all that
lies between down's DGrad and gate_up's (`swiglu_backward.py`; the shape is that
of gate|up), beside XLA alone and XLA with the kernels of `gradient` and
`input`. Each variant is compared with XLA's bytes before it is timed.
"""

import functools

import jax
import jax.numpy as jnp
from absl import flags
from jax import lax

from benchmarks import common
from jetrl_jax.compilation import exact_jit, on_gpu
from jetrl_jax.fp8 import formats, health, swiglu, swiglu_backward, turning
from jetrl_jax.fp8.products import scale_late
from jetrl_jax.fp8.quantization import QTensor, quantize

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
_BYTES = {'turn': 2, 'input': 3, 'gradient': 4, 'swiglu': 5.5}
_PROGRAMS = ((128, 4), (128, 8), (128, 16), (64, 4), (64, 8))
_SWIGLU_PROGRAMS = ((32, 4), (32, 8), (64, 8), (64, 16))
# Bytes that may be a neighbour: exp is the device's own, and h and the
# gradients are rounded twice.
_OTHERS = 1e-3


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


def _swiglu(quantised, product, dh, scales, mask_M):
  """By XLA: what `swiglu_backward.backward` gives; `quantised` makes the parts.

  Args:
    quantised: of (x, scale, mask, whether straight as well), see `_by_xla`.
    product: gate|up before it is scaled.
    dh: gradient of h.
    scales: of gate|up, h and the gradient.
    mask_M: float32.
  """
  y = scale_late(product, (scales[0],))
  h, pull = jax.vjp(swiglu.plain, y)
  # Arrays in memory, as what made and what reads them are kernels.
  h, dy = lax.optimization_barrier((h, pull(dh)[0]))
  return (
      *quantised('input', h, scales[1], mask_M),
      *quantised('gradient', dy, scales[2], mask_M),
  )


def _swiglu_by_kernel(product, dh, scales, mask_M, **options):
  """As `_swiglu`."""
  h, dy = swiglu_backward.backward(
      product, dh, scales, mask_M, formats.E4M3, **options
  )
  return (
      *(h.turned_NM, h.amax, h.lost),
      *(dy.straight_MN, dy.turned_NM, dy.amax, dy.lost),
  )


def _runs(what: str) -> dict:
  """Returns what is compared and timed, XLA's first."""
  if what == 'swiglu':
    first = {
        'XLA': functools.partial(_swiglu, _by_xla),
        "XLA, then the others' kernels": functools.partial(
            _swiglu,
            functools.partial(
                _by_kernel, **({} if on_gpu() else {'interpret': True})
            ),
        ),
    }
    run = _swiglu_by_kernel
  else:
    first = {'XLA': functools.partial(_by_xla, what)}
    run = functools.partial(_by_kernel, what)
  return first | {
      name: functools.partial(run, **options)
      for name, options in _variants(what).items()
  }


def _variants(what: str) -> dict:
  if not on_gpu():
    return {'kernel': {'interpret': True}}
  if what == 'turn':
    return {f'{n} warps': {'num_warps': n} for n in (2, 4, 8)}
  return {
      f'{width} columns, {n} warps': {'width': width, 'num_warps': n}
      for width, n in (_SWIGLU_PROGRAMS if what == 'swiglu' else _PROGRAMS)
  }


def _compare(name: str, found, wanted, others: float) -> None:
  """Refuses other bytes, beyond a share of them, and other sums."""
  for ours, theirs in zip(found, wanted, strict=True):
    if ours.dtype.itemsize == 1:
      as_bytes = functools.partial(
          lax.bitcast_convert_type, new_dtype=jnp.uint8
      )
      is_equal = jnp.mean(as_bytes(ours) != as_bytes(theirs)) <= others
    else:
      is_equal = jnp.allclose(ours, theirs, rtol=max(1e-4, others))
    if not is_equal:
      raise AssertionError(f'{name}: {ours} is not {theirs}')


def _arguments(what: str, dims: tuple[int, ...]) -> tuple:
  first, second = jax.random.split(jax.random.key(0))

  def spread(dims):
    values = jax.random.normal(first, dims)
    values *= jnp.exp(2 * jax.random.normal(second, dims))
    return values.astype('bfloat16')

  scale, mask_M = jnp.float32(2.0**-4), jnp.ones((dims[0],), jnp.float32)
  if what == 'swiglu':
    scales = jnp.array([2.0**-3, 2.0**-4, 2.0**-4], jnp.float32)
    half = spread((dims[0], dims[1] // 2))
    return spread(dims), half, scales, mask_M
  x = spread(dims)
  return (
      quantize(x, scale, formats.E4M3) if what == 'turn' else x,
      scale,
      mask_M,
  )


def _measure(what: str, shape: str) -> list[dict]:
  """Checks and times every variant on one shape."""
  dims = tuple(int(size) for size in shape.split('x'))
  arguments, others = _arguments(what, dims), _OTHERS * (what == 'swiglu')
  variants = {name: exact_jit(run) for name, run in _runs(what).items()}
  wanted = variants['XLA'](*arguments)
  floor = _BYTES[what] * dims[0] * dims[1] / common.BYTES_PER_S
  rows = []
  for name, run in variants.items():
    _compare(f'{what} {shape} {name}', run(*arguments), wanted, others)
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
  common.write(rows, summary, shown)


if __name__ == '__main__':
  common.run(main)
