"""Log-sum-exp and mean of rows of logits for NVIDIA GPUs (Pallas, Triton).

A row is cut into chunks, a program each, so that a few rows of a large
vocabulary keep the whole device reading. The logits are tempered where they
are read. What a row gives depends on the row alone: chunks start at multiples
of `CHUNK`, and one program joins them.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jetrl_jax.compilation import kernel_options
from jetrl_jax.typing import Array

CHUNK = 4096
LOWEST = float(jnp.finfo(jnp.float32).min)


def _chunk_kernel(
    logits_ref, inverse_ref, top_ref, total_ref, weighted_ref, *, vocab: int
):
  """Largest logit z of a chunk, and the sums of exp(z - top) and of that z."""
  start = pl.program_id(1) * CHUNK
  inside = start + jnp.arange(CHUNK) < vocab
  logits = triton.load(
      logits_ref.at[pl.ds(start, CHUNK)], mask=inside, other=-jnp.inf
  )
  z = jnp.maximum(logits * inverse_ref[0], LOWEST)
  top = jnp.max(z)
  p = jnp.where(inside, jnp.exp(z - top), 0.0)
  top_ref[...] = top
  total_ref[...] = jnp.sum(p)
  weighted_ref[...] = jnp.sum(p * z)


def _join_kernel(
    top_ref, total_ref, weighted_ref, lse_ref, mean_ref, *, chunks: int
):
  """Joins the chunks of a row."""
  at = jnp.arange(pl.next_power_of_2(chunks))

  def load(ref, other):
    here = ref.at[pl.ds(0, at.size)]
    return triton.load(here, mask=at < chunks, other=other)

  top = load(top_ref, LOWEST)
  row_top = jnp.max(top)
  scale = jnp.exp(top - row_top)
  row_total = jnp.sum(load(total_ref, 0.0) * scale)
  # A chunk that counts for nothing may have an infinite sum.
  weighted = jnp.where(scale > 0.0, load(weighted_ref, 0.0) * scale, 0.0)
  lse_ref[...] = row_top + jnp.log(row_total)
  mean_ref[...] = jnp.sum(weighted) / row_total


def row_stats(
    logits_MV: Array, inverse_M: Array, *, interpret: bool = False
) -> tuple[Array, Array]:
  """Returns (log-sum-exp, weighted mean), see `logprobs.row_stats`.

  Args:
    logits_MV: float32.
    inverse_M: float32, what each row's logits are multiplied by.
    interpret: run on a CPU, for tests.
  """
  rows, vocab = logits_MV.shape
  chunks = pl.cdiv(vocab, CHUNK)
  if interpret:
    logits_MV = jnp.pad(logits_MV, ((0, 0), (0, chunks * CHUNK - vocab)))
  number = pl.BlockSpec((None, None), lambda m, c: (m, c))
  # Joined as a power of two of them, of which the last are not read.
  padded = pl.next_power_of_2(chunks)
  parts = pl.pallas_call(
      functools.partial(_chunk_kernel, vocab=vocab),
      grid=(rows, chunks),
      in_specs=[
          pl.BlockSpec((None, logits_MV.shape[1]), lambda m, c: (m, 0)),
          pl.BlockSpec((1,), lambda m, c: (m,)),
      ],
      out_specs=[number] * 3,
      out_shape=[jax.ShapeDtypeStruct((rows, padded), jnp.float32)] * 3,
      name='row_stats',
      **kernel_options(interpret, num_warps=4),
  )(logits_MV, inverse_M)
  one = pl.BlockSpec((None,), lambda m: (m,))
  return tuple(
      pl.pallas_call(
          functools.partial(_join_kernel, chunks=chunks),
          grid=(rows,),
          in_specs=[pl.BlockSpec((None, padded), lambda m: (m, 0))] * 3,
          out_specs=[one, one],
          out_shape=[jax.ShapeDtypeStruct((rows,), jnp.float32)] * 2,
          name='join_row_stats',
          **kernel_options(interpret, num_warps=1),
      )(*parts)
  )
