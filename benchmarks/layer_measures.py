"""What 8 bits lose of one kernel, of one dot's input, of one gradient.

Used by `layer_health.py`. Quantising, scales and the sums of signal and noise
are the package's own functions; what is added here is how the loss spreads
over values and tokens:

    tie        a value halfway between two neighbours of the grid
    row SQNR   10 log10(signal / noise) of one token's row

The SQNR of a whole tensor adds energies, so a single massive value can hide
that every other value is lost; the row SQNR of the median token cannot.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from jetrl_jax.core.compilation import exact_jit
from jetrl_jax.core.typing import Array, PyTree
from jetrl_jax.fp8 import formats, health
from jetrl_jax.fp8.quantization import (
    QTensor,
    dequantize,
    quantize,
    scale_from_amax,
    scale_of_elements,
)
from jetrl_jax.fp8.recipes import BLOCK, Recipe
from jetrl_jax.kernels.quantized_dot import per_block, per_token, weights

# Rows that a median over all values is taken of, at most.
_MEDIAN_ROWS = 1024
_TOP = 3


def fits(recipe: Recipe, shape: tuple[int, int]) -> bool:
  """Returns whether a matrix can be quantised by the recipe."""
  return recipe.name != 'fp8_block' or not any(n % BLOCK for n in shape)


def decibel(signal, noise) -> float:
  """Returns 10 log10(signal / noise); NaN where either is 0."""
  signal, noise = float(signal), float(noise)
  if not (signal > 0 and noise > 0):
    return float('nan')
  return 10 * float(np.log10(signal / noise))


def _kernel_sums(recipe: Recipe, kernel_OI: Array) -> dict[str, Array]:
  """Returns counts and energies of one quantised kernel."""
  kernel_OI = kernel_OI.astype(jnp.float32)
  amax = jnp.max(jnp.abs(kernel_OI))
  scale = scale_from_amax(amax, formats.E4M3, **recipe.scaling)
  slot = {'kernel': {'scale': scale}}
  made = weights.quantize_kernel(kernel_OI, slot, recipe)
  ones = jnp.ones((kernel_OI.shape[0],), jnp.float32)
  _, sums = health.measure(kernel_OI, made, ones)
  dtype = made.values.dtype
  scaled = kernel_OI * (1.0 / scale_of_elements(made))
  stored = made.values.astype(jnp.float32)
  # Mirrored at what was stored, a tie is the neighbour on the other side; no
  # other value that is off the grid is on it then.
  mirrored = 2 * scaled - stored
  on_grid = quantize(mirrored, jnp.float32(1), dtype).astype(jnp.float32)
  tie = (scaled != stored) & (on_grid == mirrored)
  subnormal = jnp.zeros(stored.shape, bool)
  if jnp.issubdtype(dtype, jnp.floating):
    least = float(jnp.finfo(dtype).smallest_normal)
    subnormal = (stored != 0) & (jnp.abs(stored) < least)

  def share(where):
    return jnp.mean(where.astype(jnp.float32))

  return {
      'sums': sums,
      'zeros': share(kernel_OI == 0),
      'subnormal': share(subnormal),
      'ties': share(tie),
      'amax': amax,
      'rms': jnp.sqrt(jnp.mean(kernel_OI**2)),
  }


@functools.partial(exact_jit, static_argnums=(0,))
def _kernels(recipes: tuple[Recipe, ...], kernel_OI: Array):
  return [_kernel_sums(recipe, kernel_OI) for recipe in recipes]


def kernel_rows(
    dot: str, kernel_OI: Array, recipes: dict[str, Recipe]
) -> list[dict[str, Any]]:
  """Returns one record per recipe that the kernel's shape fits.

  Args:
    dot: its path.
    kernel_OI: master.
    recipes: by name.
  """
  fitting = {n: r for n, r in recipes.items() if fits(r, kernel_OI.shape)}
  found = jax.device_get(_kernels(tuple(fitting.values()), kernel_OI))
  rows = []
  for name, entry in zip(fitting, found, strict=True):
    elements, saturated, flushed, signal, noise = entry['sums']
    rows.append(
        {
            'part': 'kernel',
            'dot': dot,
            'arm': name,
            'zeros': float(entry['zeros']),
            'subnormal': float(entry['subnormal']),
            'ties': float(entry['ties']),
            'flushed': float(flushed / elements),
            'saturated': float(saturated / elements),
            'sqnr_db': decibel(signal, noise),
            'amax_over_rms': float(entry['amax'] / entry['rms']),
        }
    )
  return rows


def _quantized_input(recipe: Recipe, x_MI: Array, amax: Array) -> QTensor:
  match recipe.name:
    case 'fp8_delayed':
      scale = scale_from_amax(amax, formats.E4M3, **recipe.scaling)
      values = quantize(x_MI, scale, formats.E4M3)
      return QTensor(values=values, scale=scale)
    case 'fp8_token' | 'int8':
      return per_token.quantize_rows(recipe, x_MI)
    case 'fp8_block':
      return per_block.quantize_input(recipe, x_MI)
  raise AssertionError(recipe.name)


@functools.partial(exact_jit, static_argnums=(0,))
def _inputs(recipes: tuple[Recipe, ...], x_MI, mask_M, first_M):
  """Returns what one matrix of rows shows, and each recipe's loss of it."""
  valid_M = mask_M > 0
  x = jnp.where(valid_M[:, None], x_MI.astype(jnp.float32), 0.0)
  size_M = jnp.max(jnp.abs(x), axis=1)
  channel_I = jnp.max(jnp.abs(x), axis=0)
  top, channels = jax.lax.top_k(channel_I, _TOP)
  some = jnp.where(valid_M[:, None], jnp.abs(x), jnp.nan)
  some = some[:: max(1, -(-x.shape[0] // _MEDIAN_ROWS))]
  facts = {
      'amax': size_M.max(),
      'amax_first_token': jnp.max(size_M * first_M),
      'amax_other_tokens': jnp.max(size_M * (1 - first_M)),
      'median': jnp.nanmedian(some),
      'top': top,
      'channels': channels,
      'row': jnp.argmax(size_M),
      # Where each of the largest channels has its amax.
      'rows': jnp.argmax(jnp.abs(x[:, channels]), axis=0),
  }
  losses = []
  for recipe in recipes:
    made = _quantized_input(recipe, x_MI, size_M.max())
    _, sums = health.measure(x_MI, made, mask_M)
    noise = (x - jnp.where(valid_M[:, None], dequantize(made, x.dtype), 0)) ** 2
    signal_M, noise_M = jnp.sum(x * x, axis=1), jnp.sum(noise, axis=1)
    row_db = 10 * jnp.log10(signal_M / jnp.maximum(noise_M, 1e-30))
    row_db = jnp.where(valid_M & (signal_M > 0), row_db, jnp.nan)
    losses.append(
        {
            'sums': sums,
            'median_token_db': jnp.nanmedian(row_db),
            'worst_token_db': jnp.nanmin(row_db),
        }
    )
  return facts, losses


def input_rows(
    dot: str,
    x_MI: Array,
    recipes: dict[str, Recipe],
    *,
    mask_M: np.ndarray,
    positions_M: np.ndarray,
    tokens_M: np.ndarray,
) -> list[dict[str, Any]]:
  """Returns a record of the rows that a dot reads, and one per recipe.

  Args:
    dot: its path, or the place in the residual stream.
    x_MI: rows.
    recipes: by name; {} for what no dot reads.
    mask_M: float32, 0 on padding.
    positions_M: of the rows in their sequences.
    tokens_M: token ids.
  """
  first_M = ((positions_M == 0) & (mask_M > 0)).astype(np.float32)
  fitting = {n: r for n, r in recipes.items() if fits(r, x_MI.shape)}
  facts, losses = jax.device_get(
      _inputs(tuple(fitting.values()), x_MI, mask_M, first_M)
  )
  row = int(facts['row'])
  rows = [
      {
          'part': 'input' if recipes else 'stream',
          'dot': dot,
          'arm': 'bf16',
          'amax': float(facts['amax']),
          'amax_over_median': float(facts['amax'] / facts['median']),
          'amax_first_token': float(facts['amax_first_token']),
          'amax_other_tokens': float(facts['amax_other_tokens']),
          'position': int(positions_M[row]),
          'token': int(tokens_M[row]),
          'channels': [int(c) for c in facts['channels']],
          'channel_amax': [float(x) for x in facts['top']],
          'channel_positions': [int(positions_M[r]) for r in facts['rows']],
      }
  ]
  for name, loss in zip(fitting, losses, strict=True):
    elements, saturated, flushed, signal, noise = loss['sums']
    rows.append(
        {
            'part': 'input',
            'dot': dot,
            'arm': name,
            'flushed': float(flushed / elements),
            'saturated': float(saturated / elements),
            'sqnr_db': decibel(signal, noise),
            'median_token_db': float(loss['median_token_db']),
            'worst_token_db': float(loss['worst_token_db']),
        }
    )
  return rows


@exact_jit
def _moments(left: PyTree, right: PyTree) -> PyTree:
  def of_leaf(a, b):
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.stack([jnp.sum(a * b), jnp.sum(a * a), jnp.sum(b * b)])

  return jax.tree.map(of_leaf, left, right)


def moments(found: PyTree, wanted: PyTree) -> dict[str, np.ndarray]:
  """Returns path -> (f . w, f . f, w . w) of two gradients' leaves."""
  flat = traverse_util.flatten_dict(_moments(found, wanted), sep='/')
  return {k: np.float64(v) for k, v in jax.device_get(flat).items()}


def cosine(sums: np.ndarray) -> float:
  """Returns the cosine that `moments` hold; NaN where a side is 0."""
  both = np.sqrt(sums[1] * sums[2])
  return float(sums[0] / both) if both > 0 else float('nan')


def norm_ratio(sums: np.ndarray) -> float:
  """Returns the length of the first over that of the second."""
  return float(np.sqrt(sums[1] / sums[2])) if sums[2] > 0 else float('nan')
