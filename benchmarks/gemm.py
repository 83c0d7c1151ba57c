"""Times the forward dots of a shape, and compares their rows across M.

    python -m benchmarks.gemm --output=benchmarks/results/NAME

For every projection, precision and row count M: TFLOP/s, and whether the
first 16 rows have the bits that they have at M = 16. Compiled with the pinned
options (`compilation.exact_jit`), as rollout and training are.
"""

import jax
import jax.numpy as jnp
from absl import flags

from benchmarks import common
from jetrl_jax.config.model import SHAPES
from jetrl_jax.core.compilation import exact_jit
from jetrl_jax.fp8 import QTensor, Recipe
from jetrl_jax.kernels.quantized_dot.linear import dot

_SHAPE = flags.DEFINE_enum(
    'shape', 'qwen2.5-7b', sorted(SHAPES), 'See model.shape.'
)
_ROWS = flags.DEFINE_list(
    'rows',
    ['16', '128', '1024', '2048', '4096', '8192', '16384', '32768'],
    'M.',
)
_COLUMNS = (
    ('projection', 'projection', ''),
    ('recipe', 'recipe', ''),
    ('rows', 'M', 'd'),
    ('us', 'us', '.0f'),
    ('tflops', 'TFLOP/s', '.0f'),
    ('equal_to_16_rows', 'rows equal to M = 16', ''),
)


def _operands(name, size, rows):
  in_dim, out_dim = size
  key = jax.random.key(len(name))
  x_MI = jax.random.normal(key, (rows, in_dim), jnp.bfloat16)
  kernel_OI = 0.02 * jax.random.normal(key, (out_dim, in_dim), jnp.bfloat16)
  return x_MI, kernel_OI


def _entry() -> dict:
  return {
      'amax_history': jnp.zeros((16,), jnp.float32),
      'scale': jnp.float32(2.0**-6),
      'health': jnp.zeros((5,), jnp.float32),
  }


def measure(name: str, size: tuple[int, int], recipe: Recipe) -> list[dict]:
  """Returns a row per M."""
  head = name == 'lm_head'
  slot = None
  if recipe.name != 'bf16':
    slot = {key: _entry() for key in ('input', 'kernel', 'output_grad')}

  def run(x_MI, weight):
    return dot(
        recipe,
        x_MI,
        None,
        weight,
        slot,
        jnp.ones((x_MI.shape[0],), jnp.float32),
        out_dtype=jnp.float32 if head else None,
    )

  run, measured, few = exact_jit(run), [], None
  # The rows of the largest M; smaller ones are its first rows.
  most = 2048 if head else max(map(int, _ROWS.value))
  x_MI, weight = _operands(name, size, most)
  if slot is not None:
    scale = jnp.float32(2.0**-12)
    weight = QTensor(
        values=(weight / scale).astype(jnp.float8_e4m3fn), scale=scale
    )
  for rows in map(int, _ROWS.value):
    if rows > most:
      continue
    x = x_MI[:rows]
    first = run(x, weight)[:16]
    few = first if few is None else few
    spent = common.median_seconds(
        lambda x=x: [run(x, weight) for _ in range(4)]
    )
    flops = 2.0 * rows * size[0] * size[1]
    measured.append(
        {
            'projection': name,
            'recipe': recipe.name,
            'rows': rows,
            'us': spent / 4 * 1e6,
            'tflops': flops / (spent / 4) / 1e12,
            'equal_to_16_rows': str(bool(jnp.all(first == few))),
        }
    )
  return measured


def main(argv: list[str]) -> None:
  """Measures every projection in both recipes."""
  del argv
  rows = []
  for name, size in common.projections(SHAPES[_SHAPE.value]).items():
    for recipe in ('fp8_delayed', 'bf16'):
      rows += measure(name, size, Recipe(name=recipe))
  unequal = [
      f'{r["projection"]} {r["recipe"]} M={r["rows"]}'
      for r in rows
      if r['equal_to_16_rows'] != 'True'
  ]
  common.write(
      rows,
      {'rows that differ from M = 16': unequal},
      common.table(rows, _COLUMNS),
  )


if __name__ == '__main__':
  common.run(main)
