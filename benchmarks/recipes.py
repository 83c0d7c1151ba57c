"""Times the dots of every recipe and measures their error.

    python -m benchmarks.recipes --output=benchmarks/results/NAME
    python -m benchmarks.recipes --tiny --output=/tmp/NAME     (CPU, seconds)

The dots are those of a Qwen2.5-7B block through `kernels.dot`, compiled as in
runs: the forward with the rows of a decode step, the forward with those of a
micro-batch, and forward plus backward, with all that a slot observes. Errors
are relative Frobenius norms against float32 products of the same BF16 operands.
Written are NAME.json (every measurement) and NAME.md (the table).
"""

import functools
import re
import time
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags
from jax import lax

from benchmarks import common
from jetrl_jax import fp8
from jetrl_jax.core.collectives import Axes
from jetrl_jax.core.compilation import exact_jit
from jetrl_jax.fp8 import Recipe, scaling_state
from jetrl_jax.fp8.recipes import RECIPES
from jetrl_jax.kernels.quantized_dot.linear import dot
from jetrl_jax.kernels.quantized_dot.weights import prepare_weights

_RECIPES = flags.DEFINE_list('recipes', list(RECIPES), 'Recipes to measure.')
_REPEATS = flags.DEFINE_integer('repeats', 20, 'Dots per timing.')

# name -> (in, out)
_SHAPES_7B = {
    'qkv': (3584, 4608),
    'o': (3584, 3584),
    'gate_up': (3584, 37888),
    'down': (18944, 3584),
}
_SHAPES_TINY = {'qkv': (256, 384), 'down': (384, 256)}
_ROWS_7B, _ROWS_TINY = (128, 8192), (16, 64)


def operands(rows: int, in_dim: int, out_dim: int):
  """Returns BF16 (x, kernel, dy) with outliers as language models have them.

  One channel of x in a hundred is 20 times as large; tokens' gradients spread
  over two powers of ten.
  """

  @jax.jit
  def make(key):
    keys = jax.random.split(key, 5)
    x = jax.random.normal(keys[0], (rows, in_dim))
    outlier = jax.random.uniform(keys[1], (1, in_dim)) < 0.01
    kernel = 0.02 * jax.random.normal(keys[2], (out_dim, in_dim))
    dy = jax.random.normal(keys[3], (rows, out_dim))
    sizes = 10.0 ** jax.random.uniform(keys[4], (rows, 1), minval=-5, maxval=-3)
    made = (jnp.where(outlier, 20 * x, x), kernel, dy * sizes)
    return tuple(a.astype(jnp.bfloat16) for a in made)

  return make(jax.random.key(0))


def prepared(recipe: Recipe, x, kernel, dy):
  """Returns (weight, slot) of one dot, delayed scales filled from the data."""

  @exact_jit
  def prepare(x, kernel, dy):
    params = {'dot': {'kernel': kernel}}
    state = scaling_state.init_state(params, recipe)
    if recipe.is_delayed:
      amaxes = {'input': x, 'output_grad': dy}
      cotangent = jax.tree.map(jnp.zeros_like, state)
      for operand, array in amaxes.items():
        entry = cotangent['dot'][operand]
        amax = jnp.max(jnp.abs(array.astype(jnp.float32)))
        entry['amax_history'] = entry['amax_history'].at[0].set(amax)
      state = scaling_state.observe(state, cotangent)
      state = scaling_state.roll(state, recipe, operands=tuple(amaxes))
    state = scaling_state.observe_kernels(state, params, recipe, Axes())
    weight = prepare_weights(params, state, recipe)['dot']['kernel']
    return weight, state.get('dot')

  return prepare(x, kernel, dy)


def forward(recipe: Recipe, x, weight, slot):
  """The rollout's call."""
  return dot(recipe, x, None, weight, slot, jnp.ones(x.shape[0]))


def forward_backward(recipe: Recipe, x, weight, slot, dy):
  """The training step's call: (y, dx, dw, what the slot saw)."""
  values = weight.values if isinstance(weight, fp8.QTensor) else weight
  master = jnp.zeros(values.shape, jnp.bfloat16)
  mask = jnp.ones(x.shape[0])

  def run(x, master, slot):
    return dot(recipe, x, master, weight, slot, mask)

  y, pull = jax.vjp(run, x, master, slot)
  return y, *pull(dy)


def repeated(function, repeats: int):
  """Compiles `repeats` calls in one program, one after the other.

  Each call's x has a number of the last result in it, and each result is
  carried whole: nothing can be left out or taken out of the loop.
  """

  def run(x, *rest):
    def body(_, carry):
      x, out = carry
      first = jax.tree.leaves(out)[0]
      x = x.at[0, 0].set(first[0, 0].astype(x.dtype))
      return x, function(x, *rest)

    return lax.fori_loop(1, repeats, body, (x, function(x, *rest)))[1]

  return exact_jit(run)


def milliseconds(function, args, repeats: int) -> float:
  """Wall time of one call, best of three timings."""
  many = repeated(function, repeats)
  jax.block_until_ready(many(*args))
  times = []
  for _ in range(3):
    start = time.perf_counter()
    jax.block_until_ready(many(*args))
    times.append((time.perf_counter() - start) / repeats)
  return 1e3 * min(times)


def kernels(function, args) -> list[str]:
  """Names of the library calls in the compiled program."""
  text = exact_jit(function).lower(*args).compile().as_text()
  return sorted(set(re.findall(r'custom_call_target="(__[^"]+)"', text)))


def _error(found, expected) -> float:
  # On the device: these arrays are large.
  found, expected = found.astype(jnp.float32), expected.astype(jnp.float32)
  norm = jnp.linalg.norm
  return float(norm(found - expected) / norm(expected))


@jax.jit
def _expected(x, kernel, dy):
  dot = functools.partial(
      lax.dot_general,
      precision=lax.Precision.HIGHEST,
      preferred_element_type=jnp.float32,
  )
  x, kernel, dy = (a.astype(jnp.float32) for a in (x, kernel, dy))
  return (
      dot(x, kernel, (((1,), (1,)), ((), ()))),
      dot(dy, kernel, (((1,), (0,)), ((), ()))),
      dot(dy, x, (((0,), (0,)), ((), ()))),
  )


def measure(name: str, layer: str, in_dim: int, out_dim: int, rows, repeats):
  """Returns one row of the table."""
  recipe = Recipe(name=name)
  few, many = rows
  x, kernel, dy = operands(many, in_dim, out_dim)
  weight, slot = prepared(recipe, x, kernel, dy)
  ahead = functools.partial(forward, recipe)
  both = functools.partial(forward_backward, recipe)
  found = exact_jit(both)(x, weight, slot, dy)
  wanted = _expected(x, kernel, dy)
  errors = [_error(a, b) for a, b in zip(found[:3], wanted, strict=True)]
  del found, wanted
  row = {
      'recipe': name,
      'dot': layer,
      'in': in_dim,
      'out': out_dim,
      'rows': [few, many],
      **dict(zip(('error_y', 'error_dx', 'error_dw'), errors, strict=True)),
      'kernels': kernels(ahead, (x, weight, slot)),
  }
  flops = 2 * in_dim * out_dim
  for label, function, args, count in (
      ('decode', ahead, (x[:few], weight, slot), flops * few),
      ('forward', ahead, (x, weight, slot), flops * many),
      ('train', both, (x, weight, slot, dy), 3 * flops * many),
  ):
    ms = milliseconds(function, args, repeats)
    row[f'{label}_ms'], row[f'{label}_tflops'] = ms, count / ms / 1e9
  return row


def table(rows: list[dict[str, Any]]) -> str:
  """Returns the measurements as Markdown."""
  few, many = rows[0]['rows']
  columns = {
      'recipe': lambda r: r['recipe'],
      'dot': lambda r: f'{r["dot"]} {r["in"]} to {r["out"]}',
      'error y / dX / dW %': lambda r: ' / '.join(
          f'{100 * r[f"error_{k}"]:.2f}' for k in ('y', 'dx', 'dw')
      ),
      f'{few} rows, us': lambda r: f'{1e3 * r["decode_ms"]:.0f}',
      f'{many} rows, us': lambda r: f'{1e3 * r["forward_ms"]:.0f}',
      'TFLOP/s': lambda r: f'{r["forward_tflops"]:.0f}',
      'forward + backward, us': lambda r: f'{1e3 * r["train_ms"]:.0f}',
      'TFLOP/s ': lambda r: f'{r["train_tflops"]:.0f}',
      'library calls': lambda r: ' '.join(r['kernels']) or '-',
  }
  lines = ['| ' + ' | '.join(columns) + ' |', '|' + '---|' * len(columns)]
  for row in rows:
    if 'failed' in row:
      lines.append(f'| {row["recipe"]} | {row["dot"]} | {row["failed"]} |')
      continue
    cells = [show(row) for show in columns.values()]
    lines.append('| ' + ' | '.join(cells) + ' |')
  return '\n'.join(lines)


def main(argv: list[str]) -> None:
  """Measures every recipe at every dot and writes the record."""
  del argv
  shapes = _SHAPES_TINY if common.TINY.value else _SHAPES_7B
  sizes = _ROWS_TINY if common.TINY.value else _ROWS_7B
  rows = []
  for layer, (in_dim, out_dim) in shapes.items():
    for name in _RECIPES.value:
      at = {'recipe': name, 'dot': layer, 'rows': list(sizes)}
      try:
        row = measure(name, layer, in_dim, out_dim, sizes, _REPEATS.value)
      except jax.errors.JaxRuntimeError as error:
        # One recipe that a backend cannot run must not cost the others.
        row = at | {'failed': str(error).splitlines()[0][:200]}
      rows.append(row)
      print(table([row]).splitlines()[-1], flush=True)
  common.write(rows, {}, table(rows))


if __name__ == '__main__':
  common.run(main)
