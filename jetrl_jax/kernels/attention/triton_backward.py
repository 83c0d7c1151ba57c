"""Gradients of attention for NVIDIA GPUs (Pallas, Triton backend).

Two kernels without atomics, so gradients repeat to the bit: dq over key tiles,
dk and dv over row tiles. The order of these sums is free: no log-prob depends
on it.

A program has 64 query rows (dq) or a tile of 64 keys (dk and dv), and four
warps. What it owns and its sums stay in registers. The tiles of 64 that it goes
through pass through shared memory, two at a time.

Order of a sum: the tensor core adds 16 numbers at a time, in float32, and tiles
follow in ascending order.

Lower bound of the time: the tensor core. The first kernel makes three products
of a pair of tiles and the second four, since both need the scores and dout v^T.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jetrl_jax.core.typing import Array
from jetrl_jax.kernels.attention.layout import pad_rows, row_tiles_of
from jetrl_jax.kernels.attention.triton import (
    ROW_TILE,
    for_tiles,
    head_row_vector_spec,
    row_vector_spec,
    rows_spec,
    tile_scores,
    weights_of,
    whole_spec,
)
from jetrl_jax.kernels.calls import lowered_once
from jetrl_jax.kernels.triton_tools import kernel_options


def _dq_kernel(
    q_ref,
    k_ref,
    v_ref,
    first_ref,
    last_ref,
    lse_ref,
    delta_ref,
    dout_ref,
    dq_ref,
    *,
    tile,
    interpret,
):
  q, first, last = q_ref[...], first_ref[...], last_ref[...]
  lse, delta, dout = lse_ref[...], delta_ref[...], dout_ref[...]

  def body(i, dq, masked):
    k = k_ref[pl.ds(i * tile, tile), :]
    v = v_ref[pl.ds(i * tile, tile), :]
    span = (first, last) if masked else None
    scores, seen = tile_scores(q, k, span, lambda row: i * tile + row)
    p = weights_of(scores, lse, seen, jnp.float32, interpret)
    dp = jnp.dot(dout, v.T, preferred_element_type=jnp.float32)
    ds = (p * (dp - delta[:, None])).astype(k.dtype)
    return dq + jnp.dot(ds, k, preferred_element_type=jnp.float32)

  dq = for_tiles(first, last, tile, body, jnp.zeros(q.shape, jnp.float32))
  dq_ref[...] = (dq * q.shape[1] ** -0.5).astype(dq_ref.dtype)


def _dkv_kernel(
    q_ref,
    k_ref,
    v_ref,
    first_ref,
    last_ref,
    lse_ref,
    delta_ref,
    dout_ref,
    bounds_ref,
    dk_ref,
    dv_ref,
    *,
    tile,
    interpret,
):
  i = pl.program_id(0)
  k, v = k_ref[...], v_ref[...]

  def body(j, carry, masked):
    dk, dv = carry
    at = pl.ds(j * ROW_TILE, ROW_TILE)
    q, dout = q_ref[at, :], dout_ref[at, :]
    span = (first_ref[at], last_ref[at]) if masked else None
    scores, seen = tile_scores(q, k, span, lambda row: i * tile + row)
    p = weights_of(scores, lse_ref[at], seen, jnp.float32, interpret)
    dv += jnp.dot(
        p.astype(dout.dtype).T, dout, preferred_element_type=jnp.float32
    )
    dp = jnp.dot(dout, v.T, preferred_element_type=jnp.float32)
    ds = (p * (dp - delta_ref[at][:, None])).astype(q.dtype)
    dk += jnp.dot(ds.T, q, preferred_element_type=jnp.float32)
    return dk, dv

  carry = (jnp.zeros(k.shape, jnp.float32),) * 2
  for n, masked in enumerate((True, False, True)):
    step = functools.partial(body, masked=masked)
    carry = lax.fori_loop(bounds_ref[n], bounds_ref[n + 1], step, carry)
  dk, dv = carry
  dk_ref[...] = (dk * k.shape[1] ** -0.5).astype(dk_ref.dtype)
  dv_ref[...] = dv.astype(dv_ref.dtype)


@lowered_once('tile', 'interpret')
def backward(
    q_BKRH: Array,
    k_BKSH: Array,
    v_BKSH: Array,
    first_BR: Array,
    last_BR: Array,
    out_BKRH: Array,
    lse_BKR: Array,
    dout_BKRH: Array,
    tile: int,
    *,
    interpret: bool = False,
) -> tuple[Array, Array, Array]:
  """Returns (dq, dk, dv) in the dtypes of (q, k, v).

  Arguments are those of `triton.forward`, its two results and the
  cotangent of the first.
  """
  wanted = q_BKRH.shape[2]
  q_BKRH, out_BKRH, dout_BKRH, lse_BKR = (
      pad_rows(x, 2, ROW_TILE) for x in (q_BKRH, out_BKRH, dout_BKRH, lse_BKR)
  )
  first_BR = pad_rows(first_BR, 1, ROW_TILE)
  last_BR = pad_rows(last_BR, 1, ROW_TILE, fill=-1)
  batch, kv_heads, rows, head_dim = q_BKRH.shape
  length = k_BKSH.shape[2]
  delta = jnp.sum(
      out_BKRH.astype(jnp.float32) * dout_BKRH.astype(jnp.float32), axis=-1
  )
  operands = (q_BKRH, k_BKSH, v_BKSH, first_BR, last_BR)
  operands += (lse_BKR, delta, dout_BKRH)

  row, whole = rows_spec(head_dim, ROW_TILE), whole_spec(length, head_dim)
  dq = pl.pallas_call(
      functools.partial(_dq_kernel, tile=tile, interpret=interpret),
      grid=(rows // ROW_TILE, kv_heads, batch),
      in_specs=[
          *(row, whole, whole),
          *[row_vector_spec(ROW_TILE)] * 2,
          *[head_row_vector_spec(ROW_TILE)] * 2,
          row,
      ],
      out_specs=row,
      out_shape=jax.ShapeDtypeStruct(q_BKRH.shape, q_BKRH.dtype),
      name='flash_attention_dq',
      **kernel_options(interpret, num_warps=4, num_stages=2),
  )(*operands)

  num_tiles = length // tile
  bounds = row_tiles_of(first_BR, last_BR, num_tiles, tile, ROW_TILE)
  all_rows = whole_spec(rows, head_dim)
  vector = pl.BlockSpec((None, rows), lambda s, h, b: (b, 0))
  head_vector = pl.BlockSpec((None, None, rows), lambda s, h, b: (b, h, 0))
  keys = pl.BlockSpec(
      (None, None, tile, head_dim), lambda s, h, b: (b, h, s, 0)
  )
  dk, dv = pl.pallas_call(
      functools.partial(_dkv_kernel, tile=tile, interpret=interpret),
      grid=(num_tiles, kv_heads, batch),
      in_specs=[
          *(all_rows, keys, keys),
          *[vector] * 2,
          *[head_vector] * 2,
          all_rows,
          pl.BlockSpec((None, None, 4), lambda s, h, b: (b, s, 0)),
      ],
      out_specs=[keys, keys],
      out_shape=[
          jax.ShapeDtypeStruct(k_BKSH.shape, k_BKSH.dtype),
          jax.ShapeDtypeStruct(v_BKSH.shape, v_BKSH.dtype),
      ],
      name='flash_attention_dkv',
      **kernel_options(interpret, num_warps=4, num_stages=2),
  )(*operands, bounds)
  return dq[:, :, :wanted], dk, dv
