"""Bfloat16 masters, rounded up or down at random instead of to the nearest.

A bfloat16 has 8 significant bits. An update below half of its last one, 2^-9 of
the value, is lost when the sum is rounded to the nearest, and it is lost again
at every step: with a small learning rate most masters never move. Rounded at
random, up with the probability of the part that is cut off,

    x between neighbours a < b:   b with probability (x - a) / (b - a), else a,

the mean of what is stored is x, so small updates add up over the steps as in
float32, with the noise of a random walk on top.

Worked example: a master of 1.0 in bfloat16, whose neighbour above is 1 + 2^-7,
and an update of 2^-10. The nearest is 1.0, forever. At random the master moves
by 2^-7 once in eight steps, 2^-10 a step.

The random bits have an address and no state. One threefry key per optimiser
step and parameter is the key of a permutation of 32-bit words, and an element's
bits are the upper half of what its index in the whole parameter is sent to.
They are the same after a resume, on any mesh and however parameters are grouped
into programs; and they are about ten integer instructions in the kernel that
moves the masters anyway (`rng.hashed`).
"""

import itertools
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from jetrl_jax.core import rng
from jetrl_jax.core.sharding import Axes
from jetrl_jax.core.typing import Array, PRNGKey, PyTree
from jetrl_jax.kernels.adamw.random_bits import bits_of, stochastic_bfloat16


def check(masters: PyTree) -> None:
  """Refuses masters that are not to be rounded.

  Raises:
    ValueError: a master is not bfloat16.
  """
  found = {leaf.dtype.name for leaf in jax.tree.leaves(masters)}
  if found - {'bfloat16'}:
    raise ValueError(
        "master_rounding is 'stochastic' and masters are"
        f' {", ".join(sorted(found))}; allowed: bfloat16'
    )


def rounding_keys(
    root: PRNGKey, opt_step: Array, masters: PyTree
) -> dict[str, Array]:
  """Returns the key of each master at an optimiser step.

  Args:
    root: `rng.key(seed, rng.ROUNDING)`.
    opt_step: int32, counted from 0.
    masters: nested dict.

  Returns:
    By key of the outermost dict: uint32 [its leaves, 2].
  """
  paths = {
      part: [
          '/'.join([part, *(entry.key for entry in path)])
          for path, _ in jax.tree.leaves_with_path(tree)
      ]
      for part, tree in masters.items()
  }
  # One program of a few kernels for all masters, not a few in each part.
  addresses = [zlib.crc32(p.encode()) for p in itertools.chain(*paths.values())]
  step_key = rng.fold(root, opt_step)
  keys = jax.vmap(lambda address: rng.fold(step_key, address))(
      jnp.asarray(addresses, jnp.uint32)
  )
  ends = np.cumsum([len(names) for names in paths.values()])[:-1]
  split = jnp.split(jax.random.key_data(keys), ends)
  return dict(zip(paths, split, strict=True))


def stored(
    moved: PyTree,
    like: PyTree,
    is_split: PyTree,
    part: Array | dict,
    axes: Axes,
) -> PyTree:
  """Returns moved masters in the dtype in which they are stored.

  Args:
    moved: float32, what one part of the tree moved to.
    like: the masters it moved from.
    is_split: tree of whether each device holds rows of its own.
    part: the part's `rounding_keys`, by which it is rounded at random; {}
      rounds to the nearest.
    axes: of the mesh.
  """
  if isinstance(part, dict):
    return jax.tree.map(lambda leaf, old: leaf.astype(old.dtype), moved, like)
  leaves, tree = jax.tree.flatten(moved)
  rounded = []
  for leaf, split, key in zip(
      leaves, jax.tree.leaves(is_split), part, strict=True
  ):
    first = axes.first_row(leaf.shape[0]) if split else 0
    rounded.append(
        stochastic_bfloat16(leaf, element_bits(key, leaf.shape, first))
    )
  return tree.unflatten(rounded)


def element_bits(
    key: Array, shape: tuple[int, ...], first_row: int | Array = 0
) -> Array:
  """Returns random bits for the elements of a parameter, or of some rows.

      bits_i = rng.hashed(i, key[0], key[1]) >> 16

  where i is the element's index in the whole parameter, in row-major order.

  Args:
    key: uint32 [2], see `rounding_keys`.
    shape: of the rows at hand; its first axis is the one that is split.
    first_row: index of the first of them in the whole parameter.

  Returns:
    uint32 in [0, 2^16), of `shape`.
  """
  index = rng.element_index(shape, first_row)
  return bits_of(index, key[0], key[1])
