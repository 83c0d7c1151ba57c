"""Stochastic rounding of bfloat16 masters.

A bfloat16 has 8 significant bits. If an update is below half of the last bit,
2^-9 of the value, rounding to the nearest loses it, and loses it again at every
step. With a small learning rate most masters would never move. Stochastic
rounding rounds up with the probability of the part that is cut off:

    x between neighbours a < b:   b with probability (x - a) / (b - a), else a

The mean of the stored value is x. Small updates therefore add up over the steps
as in float32, with the noise of a random walk on top.

Worked example: a bfloat16 master is 1.0, its upper neighbour is 1 + 2^-7, and
the update is 2^-10. Rounding to the nearest gives 1.0 at every step. Stochastic
rounding moves the master by 2^-7 once in eight steps, 2^-10 per step.

The random bits have an address and no state. Each optimiser step and parameter
has a threefry key, which selects a permutation of 32-bit words. An element's
bits are the upper half of the word to which its index in the whole parameter is
mapped. They are the same after a resume, on any mesh, and for any grouping of
parameters into programs. In the kernel that updates the masters they cost about
ten integer instructions (`rng.hashed`).
"""

import itertools
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from jetrl_jax.core import rng
from jetrl_jax.core.collectives import Axes
from jetrl_jax.core.typing import Array, PRNGKey, PyTree
from jetrl_jax.kernels.adamw.random_bits import bits_of, stochastic_bfloat16


def check(masters: PyTree) -> None:
  """Raises an error if a master cannot be rounded stochastically.

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
    Key of the outermost dict -> uint32 [number of its leaves, 2].
  """
  paths = {
      part: [
          '/'.join([part, *(entry.key for entry in path)])
          for path, _ in jax.tree.leaves_with_path(tree)
      ]
      for part, tree in masters.items()
  }
  # One program computes the keys of all masters, with only a few kernels.
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
  """Returns updated masters in the dtype in which they are stored.

  Args:
    moved: float32, the updated masters of one group.
    like: the masters before the update.
    is_split: tree of bools: whether each device holds its own rows.
    part: the group's `rounding_keys` for stochastic rounding; {} rounds to the
      nearest.
    axes: the mesh's axes.
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
    shape: shape of this device's rows; the first axis is the split one.
    first_row: index of the first of these rows in the whole parameter.

  Returns:
    uint32 in [0, 2^16), of `shape`.
  """
  index = rng.element_index(shape, first_row)
  return bits_of(index, key[0], key[1])
