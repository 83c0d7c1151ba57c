"""Draws a token per row of logits on NVIDIA GPUs (Pallas, Triton).

    chunk = argmax_c (log sum_{v in c} exp(z_v) + g_c)
    token = argmax_{v in chunk} (z_v + g_v),    g ~ Gumbel(0, 1), independent

This is a draw from softmax(z): first a chunk with its probability, then a token
with its probability within the chunk. The log-sum-exp
(`kernels/log_sum_exp/triton.py`) has each chunk's sum already, so only one
chunk of a row gets noise on its logits. It is made where it is added
(`noise.py`). A row's token depends only on its logits and its key.

A program has one row and eight warps. It joins the row's chunks, a number each,
and reads one chunk of 4096 logits again. All is in registers; shared memory
holds only the warps' parts of a sum or of a maximum.

Order of the sum: that of `log_sum_exp/triton.py`, with the same function. Draws
are maxima; of equal values the lowest token wins.

Lower bound of the time: the log-sum-exp's bytes. Drawing takes 5 of 31 us for
128 rows (docs/performance_log.md).
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jetrl_jax.core.typing import Array
from jetrl_jax.kernels.log_sum_exp import triton as log_sum_exp_kernel
from jetrl_jax.kernels.sample_token.noise import (
    first_largest,
    log2_exponential,
    philox,
)
from jetrl_jax.kernels.triton_tools import (
    instruction,
    kernel_options,
    multiply_add,
)


def _log2(x, interpret: bool):
  """Base-2 logarithm, on a GPU to 2^-22."""
  return jnp.log2(x) if interpret else instruction('lg2.approx.ftz.f32')(x)


def _draw_kernel(*refs, vocab: int, interpret: bool):
  """Joins the chunks of a row, and draws a token."""
  part_refs, refs = refs[:3], refs[3:]
  logits_ref, inverse_ref, key_ref, greedy_ref, token_ref, lse_ref = refs
  top, total, weighted = log_sum_exp_kernel.load_parts(part_refs, vocab)
  lse_ref[...], _ = log_sum_exp_kernel.join_stats(top, total, weighted)
  # Greedy rows get no noise and take the chunk with the largest logit.
  factor = (1.0 - greedy_ref[0]) * -math.log(2.0)
  log2 = functools.partial(_log2, interpret=interpret)
  fused = functools.partial(multiply_add, interpret=interpret)

  def noise(at, stream):
    at = at.astype(jnp.uint32)
    zeros = jnp.zeros_like(at)
    counter = at, zeros + jnp.uint32(stream), zeros, zeros
    words = philox(counter, (key_ref[0], key_ref[1]))
    return [log2_exponential(bits, log2, fused) for bits in words]

  chunks = jnp.arange(top.shape[0])
  # Before the first chunk the total is 0 and the top is the lowest number.
  log2_total = log2(jnp.maximum(total, 1.0))
  noisy = fused(noise(chunks, 0)[0] - log2_total, factor, top)
  chunk = first_largest(
      chunks, noisy, pl.cdiv(vocab, log_sum_exp_kernel.CHUNK) - 1
  )
  quarters = log_sum_exp_kernel.read_chunk(
      logits_ref, inverse_ref, chunk, vocab
  )
  lanes = jnp.arange(log_sum_exp_kernel.LANES)
  best = jnp.full(lanes.shape, -jnp.inf, jnp.float32)
  first = jnp.full(lanes.shape, vocab - 1, jnp.int32)
  for (token, z), log2_e in zip(quarters, noise(lanes, 1), strict=True):
    noisy = fused(log2_e, factor, z)
    # Among equal values the lowest token wins, because it comes first.
    first = jnp.where(noisy > best, token, first)
    best = jnp.maximum(best, noisy)
  token_ref[...] = first_largest(first, best, vocab - 1)


def draw(
    logits_BV: Array,
    inverse_B: Array,
    keys_B2: Array,
    greedy_B: Array,
    *,
    interpret: bool = False,
) -> tuple[Array, Array]:
  """Draws a token from the softmax of every row, see the package.

  Args:
    logits_BV: float32.
    inverse_B: float32, what a row's logits are multiplied by.
    keys_B2: uint32, a key per row.
    greedy_B: True for the most probable token.
    interpret: run on a CPU, for tests.

  Returns:
    int32 [B], of equal noisy logits the lowest token; and the log-sum-exp [B],
    with the bits of `log_sum_exp.row_stats`
  """
  rows, vocab = logits_BV.shape
  parts = log_sum_exp_kernel.chunk_stats(
      logits_BV, inverse_B, interpret=interpret
  )
  logits_BV = log_sum_exp_kernel.whole_chunks(logits_BV, interpret)
  wide = [*parts, logits_BV]
  specs = [pl.BlockSpec((None, x.shape[1]), lambda b: (b, 0)) for x in wide]
  return tuple(
      pl.pallas_call(
          functools.partial(_draw_kernel, vocab=vocab, interpret=interpret),
          grid=(rows,),
          in_specs=[
              *specs,
              pl.BlockSpec((1,), lambda b: (b,)),
              pl.BlockSpec((None, 2), lambda b: (b, 0)),
              pl.BlockSpec((1,), lambda b: (b,)),
          ],
          out_specs=[pl.BlockSpec((None,), lambda b: (b,))] * 2,
          out_shape=[
              jax.ShapeDtypeStruct((rows,), jnp.int32),
              jax.ShapeDtypeStruct((rows,), jnp.float32),
          ],
          name='draw',
          **kernel_options(interpret, log_sum_exp_kernel.JOIN_WARPS),
      )(*wide, inverse_B, keys_B2, greedy_B.astype(jnp.float32))
  )
