"""Draws a token per row of logits on Hopper GPUs (Mosaic).

    chunk = argmax_c (log sum_{v in c} exp(z_v) + g_c)
    token = argmax_{v in chunk} (z_v + g_v),    g ~ Gumbel(0, 1), independent

This is a draw from softmax(z) with the noise of `noise.py`. The chunks' sums
are those of the log-sum-exp (`kernels/log_sum_exp/mosaic_sm90.py`), and only
one chunk of a row gets noise on its logits. A row's token depends only on its
logits and its key.

A program is one warpgroup and has one row. It joins the row's chunks, a number
each in a thread's registers, and draws one. A bulk copy brings this chunk, 16
KiB, to shared memory while the noise of its 4096 logits is made, in registers,
32 of each thread.

Order of the sum: that of the log-sum-exp, with the same function. Draws are
maxima; of equal values the lowest token wins.

Lower bound of the time: the log-sum-exp's bytes.
"""

# jax 0.10, which the types are checked with, lacks some of it.
# pyright: reportAttributeAccessIssue=false

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jetrl_jax.core.typing import Array
from jetrl_jax.kernels import mosaic_tools as tools
from jetrl_jax.kernels.calls import lowered_once
from jetrl_jax.kernels.log_sum_exp import mosaic_sm90 as log_sum_exp_kernel
from jetrl_jax.kernels.sample_token.noise import (
    first_largest,
    log2_exponential,
    philox,
)


def _log2(x, layout, interpret: bool):
  """Base-2 logarithm, on a GPU to 2^-22."""
  if interpret:
    return jnp.log2(x)
  return tools.instruction('lg2.approx.ftz.f32', x, layout=layout)


def _multiply_add(x, y, z):
  """Returns x * y + z, which the device's assembler rounds once."""
  return x * y + z


def _draw_kernel(*refs, vocab: int, interpret: bool):
  """Joins the chunks of a row, and draws a token."""
  part_refs, refs = refs[:2], refs[2:]
  logits_ref, inverse_ref, key_ref, greedy_ref, *refs = refs
  token_ref, lse_ref, tile_ref, there_ref = refs
  row = lax.axis_index('row')
  chunks, top, total = log_sum_exp_kernel.load_parts(part_refs, row, vocab)
  lse_ref[row], *_ = log_sum_exp_kernel.join(top, total, interpret=interpret)
  # Greedy rows get no noise and take the chunk with the largest logit.
  factor = (1.0 - greedy_ref[row]) * -math.log(2.0)

  def noise(at, stream: int, log2) -> list:
    at = at.astype(jnp.uint32)
    zeros = jnp.zeros_like(at)
    counter = at, zeros + jnp.uint32(stream), zeros, zeros
    words = philox(counter, (key_ref[row, 0], key_ref[row, 1]))
    return [log2_exponential(bits, log2, _multiply_add) for bits in words]

  log2 = functools.partial(
      _log2, layout=log_sum_exp_kernel.joined(top.shape), interpret=interpret
  )
  # Before the first chunk the total is 0 and the top is the lowest number.
  log2_total = log2(jnp.maximum(total, 1.0))
  log2_e = noise(chunks, 0, log2)[0]
  noisy = _multiply_add(log2_e - log2_total, factor, top)
  last = pl.cdiv(vocab, log_sum_exp_kernel.CHUNK) - 1
  chunk = first_largest(chunks, noisy, last)
  log_sum_exp_kernel.ask_chunk(logits_ref, row, chunk, tile_ref, there_ref)
  lanes = log_sum_exp_kernel.lanes()
  log2 = functools.partial(
      _log2, layout=log_sum_exp_kernel.QUARTER, interpret=interpret
  )
  noises = noise(lanes, 1, log2)
  plgpu.barrier_wait(there_ref)
  quarters = log_sum_exp_kernel.read_chunk(
      tile_ref, inverse_ref[row], chunk, vocab
  )
  best = jnp.full(lanes.shape, -jnp.inf, jnp.float32)
  first = jnp.full(lanes.shape, vocab - 1, jnp.int32)
  start = chunk * log_sum_exp_kernel.CHUNK
  for i, (log2_e, z) in enumerate(zip(noises, quarters, strict=True)):
    noisy = _multiply_add(log2_e, factor, z)
    token = start + i * log_sum_exp_kernel.LANES + lanes
    # Among equal values the lowest token wins, because it comes first.
    first = jnp.where(noisy > best, token, first)
    best = jnp.maximum(best, noisy)
  token_ref[row] = first_largest(first, best, vocab - 1)


@lowered_once('interpret')
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
  top, total, _ = log_sum_exp_kernel.chunk_stats(
      logits_BV, inverse_B, interpret=interpret
  )
  logits_BV = log_sum_exp_kernel.as_copied(logits_BV, interpret)
  token, lse = plgpu.kernel(
      tools.named('draw', _draw_kernel, vocab=vocab, interpret=interpret),
      out_type=[
          jax.ShapeDtypeStruct((rows,), jnp.int32),
          jax.ShapeDtypeStruct((rows,), jnp.float32),
      ],
      scratch_types=[
          plgpu.SMEM((log_sum_exp_kernel.CHUNK,), jnp.float32),
          plgpu.Barrier(),
      ],
      grid=(rows,),
      grid_names=('row',),
      **tools.kernel_options(interpret, approximate=False),
  )(top, total, logits_BV, inverse_B, keys_B2, greedy_B.astype(jnp.float32))
  return token, lse
