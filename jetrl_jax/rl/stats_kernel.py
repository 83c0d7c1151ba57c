"""Log-sum-exp and mean of rows of logits for NVIDIA GPUs (Pallas, Triton).

A row is cut into chunks, a program each, so that a few rows of a large
vocabulary keep the whole device reading. The logits are tempered where they
are read. What a row gives depends on the row alone: chunks start at multiples
of `CHUNK`, and one program joins them. In decode the kernel that draws a token
computes this beside it (`sampling_kernel.py`), by the same functions.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jetrl_jax.compilation import kernel_options, multiply_add, power_of_2
from jetrl_jax.typing import Array

# Logits of a program: a lane takes four of them, a quarter apart.
CHUNK = 4096
LANES = CHUNK // 4
_LOG2_E = math.log2(math.e)
LOWEST = float(jnp.finfo(jnp.float32).min)


def read_chunk(logits_ref, inverse_ref, chunk, vocab: int) -> list:
  """Returns the tokens and the tempered logits of a chunk, by quarters.

  Args:
    logits_ref: a row of float32.
    inverse_ref: [1], what they are multiplied by.
    chunk: its number.
    vocab: tokens; those behind have the lowest logit.
  """
  found = []
  for quarter in range(4):
    start = chunk * CHUNK + quarter * LANES
    token = start + jnp.arange(LANES)
    here = logits_ref.at[pl.ds(start, LANES)]
    logits = triton.load(here, mask=token < vocab, other=-jnp.inf)
    found.append((token, jnp.maximum(logits * inverse_ref[0], LOWEST)))
  return found


def chunk_stats(quarters: list, interpret: bool) -> tuple:
  """Returns a chunk's largest logit z, sums of exp(z - top) and of that z.

  Args:
    quarters: see `read_chunk`.
    interpret: run on a CPU, for tests.
  """
  top = jnp.max(functools.reduce(jnp.maximum, [z for _, z in quarters]))
  total = weighted = jnp.zeros((LANES,), jnp.float32)
  for _, z in quarters:
    # Behind the vocabulary z is the lowest number, and this is 0.
    p = power_of_2((z - top) * _LOG2_E, interpret)
    total += p
    weighted = multiply_add(p, z, weighted, interpret)
  return top, jnp.sum(total), jnp.sum(weighted)


def join_stats(parts: list, chunks: int) -> tuple:
  """Returns a row's log-sum-exp and mean.

  Args:
    parts: refs of what `chunk_stats` gave, a power of two of them.
    chunks: how many have been written.
  """
  at = jnp.arange(parts[0].shape[0])

  def load(ref, other):
    return triton.load(ref.at[:], mask=at < chunks, other=other)

  top, total, weighted = map(load, parts, (LOWEST, 0.0, 0.0))
  row_top = jnp.max(top)
  scale = jnp.exp(top - row_top)
  row_total = jnp.sum(total * scale)
  # A chunk that counts for nothing may have an infinite sum.
  weighted = jnp.where(scale > 0.0, weighted * scale, 0.0)
  return row_top + jnp.log(row_total), jnp.sum(weighted) / row_total


def _chunk_kernel(logits_ref, inverse_ref, *out_refs, vocab, interpret):
  """The part of a chunk."""
  quarters = read_chunk(logits_ref, inverse_ref, pl.program_id(1), vocab)
  parts = chunk_stats(quarters, interpret)
  for ref, part in zip(out_refs, parts, strict=True):
    ref[...] = part


def _join_kernel(*refs, chunks: int):
  """Joins the chunks of a row."""
  *parts, lse_ref, mean_ref = refs
  lse_ref[...], mean_ref[...] = join_stats(parts, chunks)


def chunks_of(logits_MV: Array, interpret: bool) -> tuple[Array, int]:
  """Returns logits as kernels take them, and the number of their chunks."""
  vocab = logits_MV.shape[1]
  chunks = pl.cdiv(vocab, CHUNK)
  if interpret:  # Which reads what is masked.
    logits_MV = jnp.pad(logits_MV, ((0, 0), (0, chunks * CHUNK - vocab)))
  return logits_MV, chunks


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
  logits_MV, chunks = chunks_of(logits_MV, interpret)
  # Joined as a power of two of them, of which the last are not read.
  padded = pl.next_power_of_2(chunks)
  parts = pl.pallas_call(
      functools.partial(_chunk_kernel, vocab=vocab, interpret=interpret),
      grid=(rows, chunks),
      in_specs=[
          pl.BlockSpec((None, logits_MV.shape[1]), lambda m, c: (m, 0)),
          pl.BlockSpec((1,), lambda m, c: (m,)),
      ],
      out_specs=[pl.BlockSpec((None, None), lambda m, c: (m, c))] * 3,
      out_shape=[jax.ShapeDtypeStruct((rows, padded), jnp.float32)] * 3,
      name='row_stats',
      **kernel_options(interpret, num_warps=4),
  )(logits_MV, inverse_M)
  return tuple(
      pl.pallas_call(
          functools.partial(_join_kernel, chunks=chunks),
          grid=(rows,),
          in_specs=[pl.BlockSpec((None, padded), lambda m: (m, 0))] * 3,
          out_specs=[pl.BlockSpec((None,), lambda m: (m,))] * 2,
          out_shape=[jax.ShapeDtypeStruct((rows,), jnp.float32)] * 2,
          name='join_row_stats',
          **kernel_options(interpret, num_warps=1),
      )(*parts)
  )
