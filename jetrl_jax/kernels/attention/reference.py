"""Attention in plain JAX: the arithmetic of the kernels, tile by tile."""

import math

import jax.numpy as jnp
from jax import lax

NO_SCORE = -1e30


def softmax_scale(head_dim: int) -> float:
  """Returns the softmax scale in base 2: exp2(x * log2 e) = exp(x)."""
  return head_dim**-0.5 * math.log2(math.e)


def operand_dtype(query, keys):
  """Returns the dtype in which queries, keys and values are multiplied.

  FP8 keys and values become float16: it holds them exactly, and Hopper
  converts them in one instruction, while bfloat16 takes a detour.
  """
  return jnp.dtype(jnp.float16 if jnp.dtype(keys).itemsize == 1 else query)


def _dot(a, b, contract):
  batch = ((0, 1), (0, 1))
  return lax.dot_general(
      a,
      b,
      (contract, batch),
      precision=lax.Precision.HIGHEST,
      preferred_element_type=jnp.float32,
  )


def _weighted(p, v_tile):
  """Returns p v, of a row the same bits in any number of rows."""
  if v_tile.dtype == jnp.bfloat16:
    return _dot(p, v_tile, ((3,), (2,)))
  # With 32 channels, for example, XLA adds in another order for fewer than 64
  # rows, unless both operands are contraction-minor or in bfloat16.
  v_transposed = lax.optimization_barrier(jnp.swapaxes(v_tile, 2, 3))
  return _dot(p, v_transposed, ((3,), (3,)))


def forward(q_BKRH, k_BKSH, v_BKSH, first_BR, last_BR, tile):
  """Returns (output, base-2 log-sum-exp), see the package."""
  batch, kv_heads, rows, head_dim = q_BKRH.shape
  out_dtype = q_BKRH.dtype
  dtype = operand_dtype(out_dtype, k_BKSH.dtype)
  q_BKRH = q_BKRH.astype(dtype)
  ones = jnp.ones((batch, kv_heads, 16, tile), dtype)

  def body(i, carry):
    acc, top, total = carry
    k_tile = lax.dynamic_slice_in_dim(k_BKSH, i * tile, tile, axis=2)
    v_tile = lax.dynamic_slice_in_dim(v_BKSH, i * tile, tile, axis=2)
    k_tile, v_tile = k_tile.astype(dtype), v_tile.astype(dtype)
    scores = _dot(q_BKRH, k_tile, ((3,), (3,))) * softmax_scale(head_dim)
    # The maximum changes no finite value. Without it the product and the
    # subtraction below become one multiply-add where the keys are a single
    # tile, and only there (see `kernels/log_sum_exp/reference.py: temper`).
    scores = jnp.maximum(scores, jnp.finfo(jnp.float32).min)
    key = i * tile + jnp.arange(tile, dtype=jnp.int32)[None, None, :]
    allowed = (key >= first_BR[:, :, None]) & (key <= last_BR[:, :, None])
    allowed = allowed[:, None]
    seen = jnp.where(allowed, scores, NO_SCORE)
    new_top = jnp.maximum(top, jnp.max(seen, axis=-1))
    decay = jnp.exp2(top - new_top)
    p = jnp.where(allowed, jnp.exp2(scores - new_top[..., None]), 0.0)
    # Sums through a dot: its order does not depend on the number of rows, as
    # long as it has 16 columns (8 of them change it from 96 rows on).
    p = p.astype(dtype)
    total = total * decay + _dot(p, ones, ((3,), (3,)))[..., 0]
    return acc * decay[..., None] + _weighted(p, v_tile), new_top, total

  start = (
      jnp.zeros(q_BKRH.shape, jnp.float32),
      jnp.full((batch, kv_heads, rows), NO_SCORE, jnp.float32),
      jnp.zeros((batch, kv_heads, rows), jnp.float32),
  )
  num_tiles = jnp.max(last_BR) // tile + 1
  acc, top, total = lax.fori_loop(0, num_tiles, body, start)
  safe = jnp.where(total > 0, total, 1.0)
  out = (acc / safe[..., None]).astype(out_dtype)
  return out, top + jnp.log2(safe)


def backward(q_BKRH, k_BKSH, v_BKSH, first_BR, last_BR, out, lse, dout):
  """Returns (dq, dk, dv), with the whole score matrix in memory."""
  head_dim = q_BKRH.shape[-1]
  key = jnp.arange(k_BKSH.shape[2], dtype=jnp.int32)[None, None, :]
  allowed = (key >= first_BR[:, :, None]) & (key <= last_BR[:, :, None])
  scores = _dot(q_BKRH, k_BKSH, ((3,), (3,))) * softmax_scale(head_dim)
  p = jnp.where(allowed[:, None], jnp.exp2(scores - lse[..., None]), 0.0)
  delta = jnp.sum(
      out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1, keepdims=True
  )
  dp = _dot(dout, v_BKSH, ((3,), (3,)))
  ds = (p * (dp - delta) * head_dim**-0.5).astype(q_BKRH.dtype)
  dq = _dot(ds, k_BKSH, ((3,), (2,)))
  dk = _dot(ds, q_BKRH, ((2,), (2,)))
  dv = _dot(p.astype(dout.dtype), dout, ((2,), (2,)))
  return tuple(
      d.astype(x.dtype) for d, x in ((dq, q_BKRH), (dk, k_BKSH), (dv, v_BKSH))
  )
