"""What attention's kernels take: shapes, and the layout of operands."""

import jax.numpy as jnp

from jetrl_jax.core.typing import Array
from jetrl_jax.kernels.calls import lowered_once

# Channels of a head, and keys of a tile.
HEAD_DIMS, TILE = (64, 128), 64
# Query heads of a KV head, at most: columns of decode's products.
MOST_HEADS = 16


def channels_as_decoded(x: Array, dtype) -> Array:
  """Queries or keys [..., H], widened, in decode's order of channels."""
  x = x.astype(dtype)
  fours = x.reshape(*x.shape[:-1], -1, 8, 2, 2)
  return jnp.swapaxes(fours, -3, -2).reshape(x.shape)


def tokens_as_decoded(x: Array, dtype) -> Array:
  """Keys or values [..., S, H], widened, even tokens of a tile first."""
  pairs = x.astype(dtype).reshape(*x.shape[:-2], -1, TILE // 2, 2, x.shape[-1])
  return jnp.swapaxes(pairs, -3, -2).reshape(x.shape)


def one_kernel(*static: str):
  """Joins a kernel and the layout of its operands into one call.

  Under the name that the check of the precision flow knows
  (`fp8/flow/subgraph.py`): it compares what goes into the call, which is the
  same in training and decode.
  """

  def wrap(function):
    function.__name__ = 'flash_attention'
    return lowered_once(*static)(function)

  return wrap


def pad_rows(x: Array, axis: int, row_tile: int, fill=0) -> Array:
  """Pads the row axis to whole tiles: a short prompt has fewer rows."""
  widths = [(0, 0)] * x.ndim
  widths[axis] = (0, -x.shape[axis] % row_tile)
  return jnp.pad(x, widths, constant_values=fill)


def row_tiles_of(
    first_BR: Array, last_BR: Array, num_tiles: int, tile: int, row_tile: int
) -> Array:
  """Returns the row tiles that attend each key tile, int32 [B, key tiles, 4].

  Of [low, inner, inner_end, high), those from `inner` on see the whole key tile
  with all their rows; there may be none.

  Args:
    first_BR: int32, first key that a row may see.
    last_BR: last one.
    num_tiles: the number of tiles of keys.
    tile: keys.
    row_tile: rows.
  """
  start = jnp.arange(num_tiles, dtype=jnp.int32)[None, :, None] * tile
  first, last = first_BR[:, None, :], last_BR[:, None, :]
  attends = (first < start + tile) & (last >= start) & (last >= first)
  sees_all = (first <= start) & (last >= start + tile - 1)

  def by_tile(x, join):
    return join(x.reshape(*x.shape[:2], -1, row_tile), axis=3)

  def ends(found):
    index = jnp.arange(found.shape[2], dtype=jnp.int32)[None, None, :]
    low = jnp.min(jnp.where(found, index, found.shape[2]), axis=2)
    high = jnp.max(jnp.where(found, index + 1, 0), axis=2)
    return jnp.minimum(low, high), high

  low, high = ends(by_tile(attends, jnp.any))
  full = by_tile(sees_all, jnp.all)
  inner, inner_end = ends(full)
  # The full tiles count only if they are one stretch without a gap.
  is_whole = jnp.sum(full, axis=2, dtype=jnp.int32) == inner_end - inner
  is_whole &= inner_end > inner
  inner = jnp.where(is_whole, inner, high)
  inner_end = jnp.where(is_whole, inner_end, high)
  return jnp.stack([low, inner, inner_end, high], axis=2)
