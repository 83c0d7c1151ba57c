"""Attention of packed rows over the keys of their own sequences.

    score_rs = q_r . k_s / sqrt(H) * log2(e)       float32
    out_r = sum_s 2^(score_rs - lse_r) v_s         over first_r <= s <= last_r
    lse_r = log2 sum_s 2^(score_rs)

Training and prefill share one tiled routine with one order of keys. Decode runs
it over pages (`kernels/decode_attention`). A query row goes through its keys
tile by tile with an online softmax. Weights are rounded to the dtype of the
products, sums are float32, and the output is rounded once. A fully masked tile
changes neither the running maximum nor the sum nor the output. So a row's
result depends only on where its keys are relative to the tiles: a packed
segment that starts at a multiple of the tile gets the bits of a cache that
starts at 0. The backward may add in any order.

Layouts: q [B, K, R, H] with R = T * (N / K), keys and values [B, K, S, H]. Rows
are query tokens times the heads of a group.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jetrl_jax.core.typing import Array
from jetrl_jax.kernels import dispatch, stands_for
from jetrl_jax.kernels.attention import reference
from jetrl_jax.kernels.attention.layout import HEAD_DIMS, MOST_HEADS, TILE
from jetrl_jax.kernels.kv_storage import store
from jetrl_jax.kernels.residuals import keep


def fits(dtype: Any, head_dim: int, group: int, tile: int) -> bool:
  """Whether the kernels of training and of decode take such queries.

  Args:
    dtype: of the queries.
    head_dim: channels of a head.
    group: query heads of a KV head.
    tile: see `flash_attention`.
  """
  is_short = jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16)
  takes_heads = head_dim in HEAD_DIMS and group <= MOST_HEADS
  return is_short and takes_heads and tile == TILE


def has_kernel(dtype: Any, head_dim: int, group: int, tile: int) -> bool:
  """Whether kernels run, or the reference in training and in decode."""
  return dispatch.has_kernel('attention') and fits(dtype, head_dim, group, tile)


def _forward(q_BKRH, k_BKSH, v_BKSH, first_BR, last_BR, group, tile):
  """Returns (output, base-2 log-sum-exp [B, K, R])."""
  operands = q_BKRH, k_BKSH, v_BKSH, first_BR, last_BR
  plain = functools.partial(reference.forward, tile=tile)
  if not has_kernel(q_BKRH.dtype, q_BKRH.shape[-1], group, tile):
    return plain(*operands)
  from jetrl_jax.kernels.attention import mosaic_sm90

  name = dispatch.implementation('attention')
  functions = mosaic_sm90.forward, plain
  return stands_for.kernel('attention', name, *functions, *operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def flash_attention(
    q_BKRH: Array,
    k_BKSH: Array,
    v_BKSH: Array,
    first_BR: Array,
    last_BR: Array,
    group: int,
    tile: int,
    kv_dtype: str | None,
) -> Array:
  """Softmax attention of every row over its own range of keys.

  Args:
    q_BKRH: query rows, R a multiple of 16.
    k_BKSH: keys, S a multiple of `tile`.
    v_BKSH: values.
    first_BR: int32, first key a row may see.
    last_BR: int32, last key it may see; below `first` for no key at all, which
      gives exact zeros.
    group: query heads of a KV head. Kernels do not take every number, and
      training has one only where decode has.
    tile: keys per step of the online softmax; part of the arithmetic.
    kv_dtype: what keys and values are rounded to first; the gradient passes
      straight through. None leaves them.

  Returns:
    [B, K, R, H] in q's dtype.
  """
  k_BKSH, v_BKSH = store(k_BKSH, kv_dtype), store(v_BKSH, kv_dtype)
  return _forward(q_BKRH, k_BKSH, v_BKSH, first_BR, last_BR, group, tile)[0]


def _fwd(q_BKRH, k_BKSH, v_BKSH, first_BR, last_BR, group, tile, kv_dtype):
  k_BKSH, v_BKSH = store(k_BKSH, kv_dtype), store(v_BKSH, kv_dtype)
  out, lse = _forward(q_BKRH, k_BKSH, v_BKSH, first_BR, last_BR, group, tile)
  q_BKRH, k_BKSH, v_BKSH, out, lse = keep((q_BKRH, k_BKSH, v_BKSH, out, lse))
  return out, (q_BKRH, k_BKSH, v_BKSH, first_BR, last_BR, out, lse)


def _bwd(group, tile, kv_dtype, residuals, dout):
  del kv_dtype
  q_BKRH, k_BKSH, v_BKSH, first_BR, last_BR, out, lse = residuals
  dtype = q_BKRH.dtype
  k_BKSH, v_BKSH = k_BKSH.astype(dtype), v_BKSH.astype(dtype)
  operands = q_BKRH, k_BKSH, v_BKSH, first_BR, last_BR, out, lse, dout
  if has_kernel(dtype, q_BKRH.shape[-1], group, tile):
    from jetrl_jax.kernels.attention import mosaic_backward_sm90

    grads = mosaic_backward_sm90.backward(*operands)
  else:
    grads = reference.backward(*operands)
  return (*grads, None, None)


flash_attention.defvjp(_fwd, _bwd)
