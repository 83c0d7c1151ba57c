"""Times ways to turn an FP8 matrix round, which DGrad and WGrad need.

    python -m benchmarks.fp8_transpose --output=benchmarks/results/NAME

An FP8 GEMM on Hopper wants both operands contraction-minor, so the backward
pass needs W, x and dY transposed. XLA's own transposes of bytes take 6.8 of 67
ms per layer of a 7B at 32768 tokens, where their bytes alone would take 1.2.
Each variant is compared byte for byte with NumPy before it is timed.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from benchmarks import common
from jetrl_jax.typing import Array

_OUTPUT = flags.DEFINE_string('output', None, 'Result path without ending.')
_COMMIT = flags.DEFINE_string('commit', '', 'Commit under test.')
_SHAPES = flags.DEFINE_list(
    'shapes',
    ['32768x3584', '32768x18944', '32768x37888', '37888x3584', '3584x18944'],
    'Matrices, ROWSxCOLUMNS; multiples of 128.',
)
_COLUMNS = (
    ('shape', 'shape', ''),
    ('variant', 'variant', ''),
    ('us', 'us', '.0f'),
    ('of_floor', 'of the byte floor', '.0%'),
)
_BYTES_PER_S = 4.3e12  # attainable on an H200
_WORDS = 32  # a tile is 128 x 128 bytes


def _kernel(x_ref, out_ref):
  """Turns 128 x 128 bytes: 4 x 4 in registers, words through shared memory."""
  rows = [x_ref[:, k, :] for k in range(4)]
  for c in range(4):
    # Byte c of four rows that follow each other, as one word.
    bytes_of = [(row >> (8 * c)) & 0xFF for row in rows]
    word = (
        bytes_of[0]
        | (bytes_of[1] << 8)
        | (bytes_of[2] << 16)
        | (bytes_of[3] << 24)
    )
    out_ref[:, c, :] = word.T


def turned(
    x_MN: Array, *, num_warps: int = 4, interpret: bool = False
) -> Array:
  """Returns the transpose of an 8-bit matrix; dims are multiples of 128."""
  rows, columns = x_MN.shape
  bytes_MN = lax.bitcast_convert_type(x_MN, jnp.uint8)
  words = lax.bitcast_convert_type(
      bytes_MN.reshape(rows // 4, 4, columns // 4, 4), jnp.uint32
  )
  out = pl.pallas_call(
      _kernel,
      grid=(columns // 128, rows // 128),
      in_specs=[pl.BlockSpec((_WORDS, 4, _WORDS), lambda j, i: (i, 0, j))],
      out_specs=pl.BlockSpec((_WORDS, 4, _WORDS), lambda j, i: (j, 0, i)),
      out_shape=jax.ShapeDtypeStruct((columns // 4, 4, rows // 4), jnp.uint32),
      interpret=interpret,
      name='turned',
      **(
          {}
          if interpret
          else {'compiler_params': triton.CompilerParams(num_warps=num_warps)}
      ),
  )(words)
  out_NM = lax.bitcast_convert_type(out, jnp.uint8).reshape(columns, rows)
  return lax.bitcast_convert_type(out_NM, x_MN.dtype)


def _variants() -> dict:
  if jax.default_backend() == 'cpu':
    return {'kernel': functools.partial(turned, interpret=True)}
  return {
      'XLA': lambda x: x.T,
      **{
          f'kernel, {warps} warps': functools.partial(turned, num_warps=warps)
          for warps in (2, 4, 8)
      },
  }


def main(argv: list[str]) -> None:
  """Checks and times every variant on every shape."""
  del argv
  rows, summary = [], {}
  for shape in _SHAPES.value:
    dims = tuple(int(size) for size in shape.split('x'))
    host = np.random.default_rng(0).integers(0, 255, dims, np.uint8)
    x = lax.bitcast_convert_type(jnp.asarray(host), jnp.float8_e4m3fn)
    for name, function in _variants().items():
      run = jax.jit(function)
      found = np.asarray(lax.bitcast_convert_type(run(x), jnp.uint8))
      if not np.array_equal(found, host.T):
        raise AssertionError(f'{name} is wrong at {shape}')
      spent = common.median_seconds(functools.partial(run, x))
      floor = 2 * host.size / _BYTES_PER_S
      rows.append(
          {
              'shape': shape,
              'variant': name,
              'us': spent * 1e6,
              'of_floor': floor / spent,
          }
      )
  for name in _variants():
    mine = [row['us'] for row in rows if row['variant'] == name]
    summary[f'{name}: all shapes, us'] = round(sum(mine), 1)
  shown = common.table(rows, _COLUMNS)
  if _OUTPUT.value:
    common.write(_OUTPUT.value, rows, summary, shown, _COMMIT.value)
  else:
    print(shown, summary, sep='\n')


if __name__ == '__main__':
  app.run(main)
