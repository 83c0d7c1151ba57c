"""Inputs of attention, packed and not, and what it gives in float64."""

import functools

import jax.numpy as jnp
import numpy as np

from jetrl_jax.core.compilation import exact_jit
from jetrl_jax.kernels import attention

B, K, S, H, TILE = 2, 2, 64, 16, 16


def rows(starts, lengths, total=S):
  """[T] first and last key of packed segments; last is -1 on padding."""
  first, last = np.zeros(total, np.int32), np.full(total, -1, np.int32)
  for start, length in zip(starts, lengths, strict=True):
    first[start : start + length] = start
    last[start : start + length] = np.arange(start, start + length)
  return first, last


# A full row; segments of 13, 16 and 20 that start at tiles, with padding.
RANGES = [rows([0], [S]), rows([0, 16, 32], [13, 16, 20])]
FIRST, LAST = (np.stack(a) for a in zip(*RANGES, strict=True))


def qkv(group=1, dtype=jnp.float32, batch=B, length=S):
  """Queries, keys, values and a cotangent of the result."""
  rng = np.random.default_rng(0)

  def make(rows):
    return rng.normal(size=(batch, K, rows, H)).astype(dtype)

  q, dout = make(length * group), make(length * group)
  return 2 * q, make(length), make(length), dout


def changed(x, at, value):
  """Returns a copy with other values in one place."""
  x = x.copy()
  x[at] = value
  return x


def dense(q, k, v, first, last, xp=jnp):
  """Softmax over the whole masked score matrix."""
  key = xp.arange(k.shape[2])[None, None, :]
  allowed = (key >= first[:, :, None]) & (key <= last[:, :, None])
  allowed = allowed[:, None]
  scores = xp.einsum('bkrh,bksh->bkrs', q, k) * q.shape[-1] ** -0.5
  scores = xp.where(allowed, scores, -1e30)
  p = xp.exp(scores - scores.max(axis=-1, keepdims=True)) * allowed
  total = p.sum(axis=-1, keepdims=True)
  return xp.einsum('bkrs,bksh->bkrh', p / xp.where(total > 0, total, 1.0), v)


def dense64(q, k, v, first, last):
  """The same of float64 copies, by NumPy."""
  return dense(*(np.asarray(x, np.float64) for x in (q, k, v)), first, last, np)


@functools.cache
def flash(kv_dtype=None):
  """Compiled: `attention.flash_attention` on the CPU."""
  return exact_jit(
      lambda *args: attention.flash_attention(*args, 1, TILE, kv_dtype)
  )
