"""Log-sum-exp and mean of rows of logits for NVIDIA GPUs (Pallas, Triton).

A row is cut into chunks with a program for each, so that a few rows of a large
vocabulary keep the whole device reading. The logits are tempered as they are
read. A row's result depends on the row alone: chunks start at multiples of
`CHUNK`, and one program joins them. In decode the program that joins them also
draws a token (`kernels/sample_token/triton.py`).

A chunk has 4096 logits, and a program with four warps: each thread has them in
four quarters of 1024. The joining program has eight warps and a number a chunk.
All is in registers, shared memory holds only the warps' parts of a sum.

Order of a sum: quarter by quarter at each of 1024 places, then over the places
in a tree, then the chunks of a row in a tree, always float32.

Lower bound of the time: reading the logits once, 18 us for 128 rows of 152064
at 4.3 TB/s. On an H200 they are read at 3.0 TB/s (docs/performance_log.md).
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jetrl_jax.core.typing import Array
from jetrl_jax.kernels.log_sum_exp.reference import LOWEST
from jetrl_jax.kernels.triton_tools import (
    kernel_options,
    multiply_add,
    power_of_2,
)

# Logits of a program: a lane takes four of them, a quarter apart.
CHUNK = 4096
LANES = CHUNK // 4
_WARPS = 4
# Warps of a program that joins chunks; the order of its sums depends on them.
JOIN_WARPS = 8
_LOG2_E = math.log2(math.e)


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


def _chunk_kernel(logits_ref, inverse_ref, *out_refs, vocab, interpret):
  """A chunk's largest logit z, its sums of exp(z - top) and of that z."""
  quarters = read_chunk(logits_ref, inverse_ref, pl.program_id(1), vocab)
  top = jnp.max(functools.reduce(jnp.maximum, [z for _, z in quarters]))
  total = weighted = jnp.zeros((LANES,), jnp.float32)
  for _, z in quarters:
    # After the vocabulary's end z is the lowest number, and this is 0.
    p = power_of_2((z - top) * _LOG2_E, interpret)
    total += p
    weighted = multiply_add(p, z, weighted, interpret)
  parts = top, jnp.sum(total), jnp.sum(weighted)
  for ref, part in zip(out_refs, parts, strict=True):
    ref[...] = part


def chunk_stats(
    logits_MV: Array, inverse_M: Array, *, interpret: bool
) -> list[Array]:
  """Returns the chunks' largest logit z, sums of exp(z - top) and of that z.

  Args:
    logits_MV: float32; interpreted, see `whole_chunks`.
    inverse_M: float32, what each row's logits are multiplied by.
    interpret: run on a CPU, for tests.

  Returns:
    three [M, C], C a power of two, of which the last are not written
  """
  rows, vocab = logits_MV.shape
  logits_MV = whole_chunks(logits_MV, interpret)
  chunks = pl.cdiv(vocab, CHUNK)
  shape = rows, pl.next_power_of_2(chunks)
  return pl.pallas_call(
      functools.partial(_chunk_kernel, vocab=vocab, interpret=interpret),
      grid=(rows, chunks),
      in_specs=[
          pl.BlockSpec((None, logits_MV.shape[1]), lambda m, c: (m, 0)),
          pl.BlockSpec((1,), lambda m, c: (m,)),
      ],
      out_specs=[pl.BlockSpec((None, None), lambda m, c: (m, c))] * 3,
      out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32)] * 3,
      name='row_stats',
      **kernel_options(interpret, _WARPS),
  )(logits_MV, inverse_M)


def whole_chunks(logits_MV: Array, interpret: bool) -> Array:
  """Returns logits as kernels take them; interpreted, these read all of it."""
  pad = -logits_MV.shape[1] % CHUNK if interpret else 0
  return jnp.pad(logits_MV, ((0, 0), (0, pad))) if pad else logits_MV


def load_parts(refs: Sequence, vocab: int) -> tuple:
  """Returns a row's parts, see `chunk_stats`, padded with what adds nothing."""
  at = jnp.arange(refs[0].shape[0])

  def load(ref, other):
    return triton.load(ref.at[:], mask=at < pl.cdiv(vocab, CHUNK), other=other)

  return tuple(map(load, refs, (LOWEST, 0.0, 0.0)))


def join_stats(top, total, weighted) -> tuple:
  """Returns a row's log-sum-exp and mean, of its parts."""
  row_top = jnp.max(top)
  scale = jnp.exp(top - row_top)
  row_total = jnp.sum(total * scale)
  # A chunk whose weight is 0 may have an infinite sum.
  weighted = jnp.where(scale > 0.0, weighted * scale, 0.0)
  return row_top + jnp.log(row_total), jnp.sum(weighted) / row_total


def _join_kernel(*refs, vocab: int):
  """Joins the chunks of a row."""
  *part_refs, lse_ref, mean_ref = refs
  lse_ref[...], mean_ref[...] = join_stats(*load_parts(part_refs, vocab))


def row_stats(
    logits_MV: Array, inverse_M: Array, *, interpret: bool = False
) -> tuple[Array, Array]:
  """See the package's `row_stats`; `interpret` runs on a CPU, for tests."""
  rows, vocab = logits_MV.shape
  parts = chunk_stats(logits_MV, inverse_M, interpret=interpret)
  padded = parts[0].shape[1]
  return tuple(
      pl.pallas_call(
          functools.partial(_join_kernel, vocab=vocab),
          grid=(rows,),
          in_specs=[pl.BlockSpec((None, padded), lambda m: (m, 0))] * 3,
          out_specs=[pl.BlockSpec((None,), lambda m: (m,))] * 2,
          out_shape=[jax.ShapeDtypeStruct((rows,), jnp.float32)] * 2,
          name='join_row_stats',
          **kernel_options(interpret, JOIN_WARPS),
      )(*parts)
  )
