"""Between decode's qkv dot and its attention: rotate, and append to the pages.

    y = qkv * scales + bias
    q, k = (a cos - b sin, b cos + a sin)
    pages[table[p // S], :, p % S] = k, v

y is rounded to qkv's dtype after each operation. (a, b) are the halves of each
head, which are rotated in float32 and rounded once. p is the slot's position,
and S the number of tokens in a page. In training XLA does each of these steps,
with the same roundings.
"""

import jax

from jetrl_jax.core.typing import Array
from jetrl_jax.fp8.products import DeferredScale
from jetrl_jax.kernels import dispatch, stands_for
from jetrl_jax.kernels.rope_append import reference
from jetrl_jax.kernels.rope_append.reference import append, rotate

__all__ = ['append', 'has_kernel', 'rope_append', 'rotate']


def rope_append(
    qkv: DeferredScale,
    rotation: tuple[Array, Array],
    position_B: Array,
    table_BP: Array,
    cache: tuple[Array, Array],
) -> tuple[Array, tuple[Array, Array]]:
  """Makes queries, and puts keys and values into their pages.

  Args:
    qkv: one token per slot, [B, (N + 2K) H]: queries, keys, values; its scales
      are powers of two.
    rotation: (cosines, sines) float32 [B, H / 2], see `models/rope.py`.
    position_B: int32, where the new key and value go; below 0 for an idle slot,
      which writes nothing.
    table_BP: int32, the pages of each slot in order.
    cache: pages of keys [P, K, S, H], and of values, see
      `kv_storage.values_shape`.

  Returns:
    (queries [B, N, H], the cache with the new token)
  """
  operands = qkv, *rotation, position_B, table_BP, *cache
  if not has_kernel(cache[0].shape[-1]):
    q_BNH, keys, values = reference.rope_append(*operands)
    return q_BNH, (keys, values)
  from jetrl_jax.kernels.rope_append import mosaic_sm90

  def run(*operands):
    with jax.named_scope('attention'):
      return mosaic_sm90.rotate_and_append(*operands)

  name = dispatch.implementation('rope_append')
  q_BNH, keys, values = stands_for.kernel(
      'rope_append', name, run, _of_finished, *operands
  )
  return q_BNH, (keys, values)


def has_kernel(head_dim: int) -> bool:
  """Whether a kernel runs for heads of so many channels."""
  if not dispatch.has_kernel('rope_append'):
    return False
  from jetrl_jax.kernels.rope_append import mosaic_sm90

  return mosaic_sm90.fits(head_dim)


def _of_finished(qkv: DeferredScale, *operands):
  """The reference, of a product that is scaled and has its bias."""
  return reference.rope_append(DeferredScale(values=qkv.values), *operands)
