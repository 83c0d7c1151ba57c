"""Gumbel-max over whole rows of logits for NVIDIA GPUs (Pallas, Triton).

The logits are read once, for the token and for their log-sum-exp.

XLA writes the random numbers of all rows to memory and reads them back, and
its generator takes 73 integer operations a number. Here the noise is made
where it is added, by Philox4x32-10, which gives four numbers for as many. A
token's noise is a function of its row's key and its id alone.

References:
  Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jetrl_jax.compilation import (
    instruction,
    kernel_options,
    multiply_add,
)
from jetrl_jax.rl import stats_kernel
from jetrl_jax.typing import Array

_ROUNDS = 10
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_LOW = 2.0**-6


def _half(a, b: int, halves: str):
  """Returns a half of a * b; ptxas makes one instruction of both halves."""
  (half,) = triton.elementwise_inline_asm(
      '{ .reg .b64 ab; .reg .b32 rest;'
      f' mul.wide.u32 ab, $1, {b}; mov.b64 {halves}, ab; }}',
      args=[a],
      constraints='=r,r',
      pack=1,
      result_shape_dtypes=[jax.ShapeDtypeStruct(a.shape, jnp.int32)],
  )
  return half.astype(jnp.uint32)


def _product(a, b: int, interpret: bool) -> tuple:
  """Returns the upper and the lower 32 bits of a * b, of uint32."""
  if not interpret:
    return tuple(_half(a, b, halves) for halves in ('{rest, $0}', '{$0, rest}'))
  a_low, a_high = a & 0xFFFF, a >> 16
  b_low, b_high = jnp.uint32(b & 0xFFFF), jnp.uint32(b >> 16)
  middle = a_high * b_low + ((a_low * b_low) >> 16)
  high = (
      a_high * b_high
      + (middle >> 16)
      + (((middle & 0xFFFF) + a_low * b_high) >> 16)
  )
  return high, a * jnp.uint32(b)


def philox(counter, key, interpret: bool):
  """Returns four words of Philox4x32-10.

  Args:
    counter: four uint32 arrays of one shape.
    key: two uint32 numbers.
    interpret: run on a CPU, for tests.
  """
  a, b, c, d = counter
  one, two = key
  for _ in range(_ROUNDS):
    high_a, low_a = _product(a, _MULTIPLIERS[0], interpret)
    high_c, low_c = _product(c, _MULTIPLIERS[1], interpret)
    a, b, c, d = high_c ^ b ^ one, low_c, high_a ^ d ^ two, low_a
    one, two = one + jnp.uint32(_WEYL[0]), two + jnp.uint32(_WEYL[1])
  return a, b, c, d


def _log2(x, interpret: bool):
  """Base-2 logarithm, on a GPU to 2^-22."""
  return jnp.log2(x) if interpret else instruction('lg2.approx.ftz.f32')(x)


def log2_exponential(bits, interpret: bool):
  """Returns log2(e) of Exponential(1) numbers e, of uint32 bits.

      e = -log(1 - u),    u = (floor(bits / 2) + 1/2) / 2^31

  So -log(2) times it is Gumbel(0, 1) noise. Small e, which make the large ones,
  have all of float32's relative precision: noise reaches 22.2, where a u of 23
  bits ends at 16.
  """
  # 31 bits, as a signed number: GPUs convert these in one instruction.
  number = (bits >> 1).astype(jnp.int32).astype(jnp.float32)
  u = multiply_add(number, 2.0**-31, 2.0**-32, interpret)
  series = jnp.full(u.shape, 0.25, jnp.float32)
  for factor in (1.0 / 3.0, 0.5, 1.0):
    series = multiply_add(series, u, factor, interpret)
  # The largest u rounds to 1.
  large = _log2(jnp.maximum(1.0 - u, 2.0**-25), interpret) * -math.log(2.0)
  return _log2(jnp.where(u < _LOW, u * series, large), interpret)


def _draw_kernel(
    logits_ref,
    inverse_ref,
    key_ref,
    greedy_ref,
    *out_refs,
    vocab: int,
    interpret: bool,
):
  """A chunk's part of the stats, its largest noisy logit, and whose that is."""
  *part_refs, best_ref, token_ref = out_refs
  chunk = pl.program_id(1)
  quarters = stats_kernel.read_chunk(logits_ref, inverse_ref, chunk, vocab)
  parts = stats_kernel.chunk_stats(quarters, interpret)
  for ref, part in zip(part_refs, parts, strict=True):
    ref[...] = part
  lanes = jnp.arange(stats_kernel.LANES).astype(jnp.uint32)
  zeros = jnp.zeros_like(lanes)
  counter = lanes, zeros + chunk.astype(jnp.uint32), zeros, zeros
  words = philox(counter, (key_ref[0], key_ref[1]), interpret)
  factor = (1.0 - greedy_ref[0]) * -math.log(2.0)
  best = jnp.full(lanes.shape, -jnp.inf, jnp.float32)
  first = jnp.full(lanes.shape, vocab, jnp.int32)
  for (token, z), bits in zip(quarters, words, strict=True):
    noise = log2_exponential(bits, interpret)
    noisy = multiply_add(noise, factor, z, interpret)
    # Of equal values the lowest token: it comes first.
    first = jnp.where(noisy > best, token, first)
    best = jnp.maximum(best, noisy)
  highest = jnp.max(best)
  best_ref[...] = highest
  token_ref[...] = jnp.min(jnp.where(best == highest, first, vocab))


def _join_kernel(*refs, chunks: int, vocab: int):
  """Joins the chunks of a row."""
  *part_refs, best_ref, first_ref, token_ref, lse_ref = refs
  lse_ref[...], _ = stats_kernel.join_stats(part_refs, chunks)
  written = jnp.arange(best_ref.shape[0]) < chunks
  best = triton.load(best_ref.at[:], mask=written, other=-jnp.inf)
  first = triton.load(first_ref.at[:], mask=written, other=vocab)
  # Of NaN none is the largest.
  first = jnp.where(best == jnp.max(best), first, vocab - 1)
  token_ref[...] = jnp.min(jnp.minimum(first, vocab - 1))


def draw(
    logits_BV: Array,
    inverse_B: Array,
    keys_B2: Array,
    greedy_B: Array,
    *,
    interpret: bool = False,
) -> tuple[Array, Array]:
  """Draws a token from the softmax of every row, see `sampling.draw`.

  Args:
    logits_BV: float32.
    inverse_B: float32, what a row's logits are multiplied by.
    keys_B2: uint32, a key per row.
    greedy_B: True for the most probable token.
    interpret: run on a CPU, for tests.

  Returns:
    int32 [B], of equal noisy logits the lowest token; and the log-sum-exp [B],
    with the bits of `stats_kernel.row_stats`
  """
  rows, vocab = logits_BV.shape
  logits_BV, chunks = stats_kernel.chunks_of(logits_BV, interpret)
  padded = pl.next_power_of_2(chunks)
  dtypes = [jnp.float32] * 4 + [jnp.int32]
  parts = pl.pallas_call(
      functools.partial(_draw_kernel, vocab=vocab, interpret=interpret),
      grid=(rows, chunks),
      in_specs=[
          pl.BlockSpec((None, logits_BV.shape[1]), lambda b, c: (b, 0)),
          pl.BlockSpec((1,), lambda b, c: (b,)),
          pl.BlockSpec((None, 2), lambda b, c: (b, 0)),
          pl.BlockSpec((1,), lambda b, c: (b,)),
      ],
      out_specs=[pl.BlockSpec((None, None), lambda b, c: (b, c))] * 5,
      out_shape=[jax.ShapeDtypeStruct((rows, padded), d) for d in dtypes],
      name='draw',
      **kernel_options(interpret, num_warps=4),
  )(logits_BV, inverse_B, keys_B2, greedy_B.astype(jnp.float32))
  return tuple(
      pl.pallas_call(
          functools.partial(_join_kernel, chunks=chunks, vocab=vocab),
          grid=(rows,),
          in_specs=[pl.BlockSpec((None, padded), lambda b: (b, 0))] * 5,
          out_specs=[pl.BlockSpec((None,), lambda b: (b,))] * 2,
          out_shape=[
              jax.ShapeDtypeStruct((rows,), jnp.int32),
              jax.ShapeDtypeStruct((rows,), jnp.float32),
          ],
          name='join_draw',
          **kernel_options(interpret, num_warps=1),
      )(*parts)
  )
