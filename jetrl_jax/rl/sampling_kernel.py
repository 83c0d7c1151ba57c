"""Gumbel-max over whole rows of logits for NVIDIA GPUs (Pallas, Triton).

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

from jetrl_jax.compilation import instruction, kernel_options
from jetrl_jax.typing import Array

# Tokens of a program: a lane draws for four of them, a quarter apart.
CHUNK = 4096
_LANES = CHUNK // 4
_ROUNDS = 10
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_LOW = 2.0**-6


def _high_half(a, b: int, interpret: bool):
  """Returns the upper 32 bits of a * b, of uint32."""
  if not interpret:
    (high,) = triton.elementwise_inline_asm(
        f'mul.hi.u32 $0, $1, {b};',
        args=[a],
        constraints='=r,r',
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(a.shape, jnp.int32)],
    )
    return high.astype(jnp.uint32)
  a_low, a_high = a & 0xFFFF, a >> 16
  b_low, b_high = jnp.uint32(b & 0xFFFF), jnp.uint32(b >> 16)
  middle = a_high * b_low + ((a_low * b_low) >> 16)
  return (
      a_high * b_high
      + (middle >> 16)
      + (((middle & 0xFFFF) + a_low * b_high) >> 16)
  )


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
    high_a = _high_half(a, _MULTIPLIERS[0], interpret)
    high_c = _high_half(c, _MULTIPLIERS[1], interpret)
    a, b, c, d = (
        high_c ^ b ^ one,
        c * jnp.uint32(_MULTIPLIERS[1]),
        high_a ^ d ^ two,
        a * jnp.uint32(_MULTIPLIERS[0]),
    )
    one, two = one + jnp.uint32(_WEYL[0]), two + jnp.uint32(_WEYL[1])
  return a, b, c, d


def _log(x, interpret: bool):
  """Natural logarithm, on a GPU to 2^-22."""
  if interpret:
    return jnp.log(x)
  return instruction('lg2.approx.ftz.f32')(x) * math.log(2.0)


def gumbel(bits, interpret: bool):
  """Returns Gumbel(0, 1) noise of uint32 bits.

      g = -log(-log(1 - u)),    u = (floor(bits / 2) + 1/2) / 2^31

  Small u, which make the large g, have all of float32's relative precision:
  g reaches 22.2, where a u of 23 bits ends at 16.
  """
  # 31 bits, as a signed number: GPUs convert these in one instruction.
  number = (bits >> 1).astype(jnp.int32).astype(jnp.float32)
  u = (number + 0.5) * 2.0**-31
  small = u * (1.0 + u * (0.5 + u * (1.0 / 3.0 + u * 0.25)))
  # The largest u rounds to 1.
  large = -_log(jnp.maximum(1.0 - u, 2.0**-25), interpret)
  return -_log(jnp.where(u < _LOW, small, large), interpret)


def _draw_kernel(
    logits_ref,
    inverse_ref,
    key_ref,
    greedy_ref,
    best_ref,
    token_ref,
    *,
    vocab: int,
    interpret: bool,
):
  """The largest noisy logit of a row's chunk, and whose it is."""
  chunk = pl.program_id(1)
  lanes = jnp.arange(_LANES)
  zeros = jnp.zeros((_LANES,), jnp.uint32)
  counter = lanes.astype(jnp.uint32), zeros + chunk.astype(jnp.uint32)
  words = philox((*counter, zeros, zeros), (key_ref[0], key_ref[1]), interpret)
  amplitude = 1.0 - greedy_ref[0]
  best = jnp.full((_LANES,), -jnp.inf, jnp.float32)
  token = jnp.full((_LANES,), vocab, jnp.int32)
  for quarter, bits in enumerate(words):
    at = chunk * CHUNK + quarter * _LANES + lanes
    logits = triton.load(
        logits_ref.at[pl.ds(chunk * CHUNK + quarter * _LANES, _LANES)],
        mask=at < vocab,
        other=-jnp.inf,
    )
    noisy = logits * inverse_ref[0] + amplitude * gumbel(bits, interpret)
    # Of equal values the lowest token: it comes first.
    token = jnp.where(noisy > best, at, token)
    best = jnp.maximum(best, noisy)
  highest = jnp.max(best)
  best_ref[...] = highest
  token_ref[...] = jnp.min(jnp.where(best == highest, token, vocab))


def draw(
    logits_BV: Array,
    inverse_B: Array,
    keys_B2: Array,
    greedy_B: Array,
    *,
    interpret: bool = False,
) -> Array:
  """Draws a token from the softmax of every row, see `sampling.draw`.

  Args:
    logits_BV: float32.
    inverse_B: float32, what a row's logits are multiplied by.
    keys_B2: uint32, a key per row.
    greedy_B: True for the most probable token.
    interpret: run on a CPU, for tests.

  Returns:
    int32 [B]; of equal noisy logits the lowest token.
  """
  rows, vocab = logits_BV.shape
  chunks = pl.cdiv(vocab, CHUNK)
  if interpret:
    tail = ((0, 0), (0, chunks * CHUNK - vocab))
    logits_BV = jnp.pad(logits_BV, tail, constant_values=-jnp.inf)
  number = pl.BlockSpec((None, None), lambda b, c: (b, c))
  best_BC, token_BC = pl.pallas_call(
      functools.partial(_draw_kernel, vocab=vocab, interpret=interpret),
      grid=(rows, chunks),
      in_specs=[
          pl.BlockSpec((None, logits_BV.shape[1]), lambda b, c: (b, 0)),
          pl.BlockSpec((1,), lambda b, c: (b,)),
          pl.BlockSpec((None, 2), lambda b, c: (b, 0)),
          pl.BlockSpec((1,), lambda b, c: (b,)),
      ],
      out_specs=[number, number],
      out_shape=[
          jax.ShapeDtypeStruct((rows, chunks), jnp.float32),
          jax.ShapeDtypeStruct((rows, chunks), jnp.int32),
      ],
      name='draw',
      **kernel_options(interpret, num_warps=4),
  )(logits_BV, inverse_B, keys_B2, greedy_B.astype(jnp.float32))
  first_B1 = jnp.argmax(best_BC, axis=1)[:, None]
  token_B = jnp.take_along_axis(token_BC, first_B1, axis=1)[:, 0]
  # Of NaN none is the largest.
  return jnp.minimum(token_B, vocab - 1)
