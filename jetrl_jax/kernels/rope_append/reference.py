"""The work between decode's qkv dot and its attention, in plain JAX."""

import jax
import jax.numpy as jnp

from jetrl_jax.core.compilation import on_gpu
from jetrl_jax.core.typing import Array, Float
from jetrl_jax.fp8.products import DeferredScale, fence, scale_late
from jetrl_jax.kernels.kv_storage import store


def rotate_halves(
    first: Array, second: Array, cos: Array, sin: Array
) -> tuple[Array, Array]:
  """Returns both halves rotated; cosines and sines broadcast against them."""
  dtype = first.dtype
  first, second = first.astype(jnp.float32), second.astype(jnp.float32)

  def product(x, y):
    # Otherwise the compiler would fuse one of the two products with the
    # addition, and in decode's kernel another one than in training.
    return fence(x * y) if on_gpu() else x * y

  return (
      (product(first, cos) - product(second, sin)).astype(dtype),
      (product(second, cos) + product(first, sin)).astype(dtype),
  )


def rotate(
    x_MNH: Float[Array, 'M N H'],
    cos_MF: Float[Array, 'M F'],
    sin_MF: Float[Array, 'M F'],
) -> Float[Array, 'M N H']:
  """Rotates (first half, second half) pairs of each head by position.

  Computed in float32 and rounded once.
  """
  first, second = jnp.split(x_MNH, 2, axis=-1)
  rotated = rotate_halves(first, second, cos_MF[:, None], sin_MF[:, None])
  return jnp.concatenate(rotated, axis=-1)


def append(
    pool: Array, new_BKH: Array, position_B: Array, table_BP: Array, size: int
) -> Array:
  """Writes each slot's new keys or values into a page of its own.

  Args:
    pool: pages of keys or values, see `kv_storage.values_shape`.
    new_BKH: new keys or values, one token per slot.
    position_B: where it goes; below 0 for a slot that writes nothing.
    table_BP: the slots' pages in order.
    size: tokens of a page.
  """
  pages, kv_heads = pool.shape[:2]
  last = jnp.maximum(position_B, 0)
  page_B = jnp.take_along_axis(table_BP, (last // size)[:, None], 1)[:, 0]
  at = (
      jnp.where(position_B >= 0, page_B, pages)[:, None],
      jnp.arange(kv_heads)[None, :],
  )
  token = (last % size)[:, None]
  if pool.ndim == 5:
    at += (token // 2, slice(None), token % 2)
  else:
    at += (token,)
  return pool.at[at].set(
      store(new_BKH, pool.dtype), mode='drop', unique_indices=True
  )


def rope_append(
    qkv: DeferredScale,
    cos_BF: Array,
    sin_BF: Array,
    position_B: Array,
    table_BP: Array,
    k_PKSH: Array,
    values: Array,
) -> tuple[Array, Array, Array]:
  """See the package's `rope_append`."""
  x = qkv.values
  if qkv.scales:
    x = scale_late(x, qkv.scales)
  if qkv.bias_O is not None:
    x = x + qkv.bias_O[None, :]
  (batch, half), kv_heads, size = cos_BF.shape, *k_PKSH.shape[1:3]
  x = x.reshape(batch, -1, 2 * half)
  heads = x.shape[1] - 2 * kv_heads
  q_BNH, k_BKH, v_BKH = jnp.split(x, [heads, heads + kv_heads], axis=1)
  q_BNH, k_BKH = (rotate(y, cos_BF, sin_BF) for y in (q_BNH, k_BKH))
  where = position_B, table_BP, size
  with jax.named_scope('attention'):
    k_PKSH = append(k_PKSH, k_BKH, *where)
    values = append(values, v_BKH, *where)
  return q_BNH, k_PKSH, values
