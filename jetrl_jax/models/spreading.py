"""Masters spread within the rounding cells of the 16-bit file they came from.

A bfloat16 has 8 significant bits and an E4M3 value 4. Under a power-of-two
scale a bfloat16 weight therefore lies exactly halfway between two E4M3 values
with probability 1/16. All such ties round to even, until the first optimiser
step pushes each to the side of its own update: half of them change by a whole
E4M3 step, 6 to 12% of the weight, however small the update was. That is about
fifteen times the update that was meant, in its direction, all at once
(docs/numerics.md, "The first update").

A 16-bit file says of a weight only that it was in a cell around the stored
value. Each master is placed in that cell at random, uniformly:

    master = x + offset,   rounded to 16 bits: x again

Then an update changes an E4M3 weight with the probability that its size
deserves, and the mean of all changes is the update that was meant.

The place has an address and no state: it is a hash of the parameter's path and
the element's index. So it is the same at every start, under any seed, on any
mesh and in every process.

Worked example: 1.0 stands for all numbers from 1 - 2^-9 to 1 + 2^-8 in a
bfloat16 file. As a float32 it is the word 0x3F800000, and the cell is the words
up to 2^15 below and above it.
"""

import functools
import hashlib

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jetrl_jax.core import rng
from jetrl_jax.core.typing import Array, NpArray

# Grid of a file's values -> bits of a float32 that it lacks.
_DROPPED_BITS = {'bfloat16': 16, 'float16': 13}
# Words that stay free at the cell's border: a master divided and multiplied by
# an invariant scale (`invariant_scaling`) still rounds to the stored value.
_FREE = 4
# Below it float16 is subnormal: its values are 2^-24 apart.
_SMALLEST_NORMAL_FLOAT16 = 2.0**-14
_SUBNORMAL_CELL = 2.0**-24


def grid_of(values: NpArray) -> str | None:
  """Returns the coarsest 16-bit grid that holds all values, if any does.

  Args:
    values: as they lie in a file. A float32 tensor may hold bfloat16 values.

  Returns:
    'bfloat16', 'float16', or None for values with more bits.
  """
  if values.dtype == jnp.bfloat16:
    return 'bfloat16'
  if values.dtype == np.float16:
    return 'float16'
  if values.dtype != np.float32:
    return None
  used = np.bitwise_or.reduce(values.view(np.uint32), axis=None)
  return None if used & 0xFFFF else 'bfloat16'


def spread(leaf: Array, path: str, grid: str) -> Array:
  """Returns the masters, each at its place in its rounding cell.

  Args:
    leaf: float32, every value on the grid; donated.
    path: the path of the parameter, such as 'layers_0/attn/qkv/kernel'.
    grid: 'bfloat16' or 'float16'.

  Returns:
    float32, sharded like the leaf; rounded to the grid, it is the leaf. Zeros
    stay zeros.

  Raises:
    ValueError: the leaf is not float32 or the grid is unknown.
  """
  if leaf.dtype != jnp.float32 or grid not in _DROPPED_BITS:
    raise ValueError(
        f'{path} is {leaf.dtype} on the grid {grid!r}; allowed: float32 on one'
        f' of {list(_DROPPED_BITS)}'
    )
  digest = hashlib.sha256(path.encode()).digest()
  words = np.frombuffer(digest[:8], '<u4')
  run = _compiled(leaf.sharding)
  return run(leaf, jnp.asarray(words), dropped=_DROPPED_BITS[grid])


@functools.lru_cache
def _compiled(where: jax.sharding.Sharding):
  return jax.jit(
      _spread, static_argnames='dropped', donate_argnums=0, out_shardings=where
  )


def _spread(x: Array, words: Array, *, dropped: int) -> Array:
  """Moves each float32 by a random number of words within its cell."""
  half = 1 << (dropped - 1)
  # Odd multiples of `_FREE`, symmetric about 0: none is the middle or a tie.
  levels = half // _FREE
  random = rng.hashed(rng.element_index(x.shape), *words)
  offset = (random % levels).astype(jnp.int32) * (2 * _FREE) - (half - _FREE)
  word = lax.bitcast_convert_type(x, jnp.int32)
  # Sign and magnitude: the same offset moves both signs towards 0 or away.
  moved = lax.bitcast_convert_type(word + offset, jnp.float32)
  if dropped == _DROPPED_BITS['float16']:
    share = offset.astype(jnp.float32) * (0.5 * _SUBNORMAL_CELL / half)
    moved = jnp.where(jnp.abs(x) < _SMALLEST_NORMAL_FLOAT16, x + share, moved)
  # A zero stays zero: its cell is subnormal in bfloat16, and the weight may
  # have been pruned.
  return jnp.where(x == 0, x, moved)
