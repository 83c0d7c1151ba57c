"""Kernels that turn 8-bit matrices round (Pallas, Triton backend).

An FP8 GEMM on Hopper reads both operands contraction-minor, so DGrad wants the
kernel turned round, and WGrad both of its operands. XLA's own transposes of
bytes reach a fifth of the memory's speed, and what is quantised it reads again
to turn it, to find its amax and to see what was lost. `quantize_and_turn` does
all of it in one pass over the bfloat16 values.

A word of the turned matrix holds one column's bytes of four rows that follow
each other; four loads of rows make it in registers, and what passes through
shared memory are words. The forward does without these kernels: no log-prob
depends on them.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jetrl_jax.compilation import kernel_options
from jetrl_jax.fp8 import formats
from jetrl_jax.typing import Array

TILE = 128  # what both dims are multiples of; rows of a program
_WORDS = TILE // 4
# A tile's two counts share one number.
_COUNT = 1 << 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turned:
  """What one pass over a matrix gives.

  Attributes:
    straight_MN: 8-bit values, None where they were not asked for.
    turned_NM: the same, turned round.
    amax: float32 [], of the values before they were quantised.
    lost: float32 [4], see `health.SUMS` from the second on.
  """

  straight_MN: Array | None
  turned_NM: Array
  amax: Array
  lost: Array


def fits(shape: tuple[int, ...]) -> bool:
  """Whether a matrix has whole tiles only."""
  return all(size % TILE == 0 for size in shape)


def _byte(values):
  """8-bit values as words with the byte at the bottom."""
  return lax.bitcast_convert_type(values, jnp.uint8).astype(jnp.uint32)


def _as_bytes(words_NR: Array, dtype) -> Array:
  """[N, M/4] words to [N, M] values."""
  columns, words = words_NR.shape
  values = lax.bitcast_convert_type(words_NR, jnp.uint8)
  return lax.bitcast_convert_type(values.reshape(columns, 4 * words), dtype)


def _turn_kernel(x_ref, out_ref):
  rows = [x_ref[:, k, :] for k in range(4)]
  for c in range(4):
    # Byte c of four rows that follow each other, as one word.
    word = (rows[0] >> (8 * c)) & 0xFF
    for k in range(1, 4):
      word |= ((rows[k] >> (8 * c)) & 0xFF) << (8 * k)
    out_ref[:, c, :] = word.T


def turn(x_MN: Array, *, num_warps: int = 2, interpret: bool = False) -> Array:
  """Returns the transpose of an 8-bit matrix whose shape `fits`."""
  rows, columns = x_MN.shape
  bytes_MN = lax.bitcast_convert_type(x_MN, jnp.uint8)
  words = lax.bitcast_convert_type(
      bytes_MN.reshape(rows // 4, 4, columns // 4, 4), jnp.uint32
  )
  out = pl.pallas_call(
      _turn_kernel,
      grid=(columns // TILE, rows // TILE),
      in_specs=[pl.BlockSpec((_WORDS, 4, _WORDS), lambda j, i: (i, 0, j))],
      out_specs=pl.BlockSpec((_WORDS, 4, _WORDS), lambda j, i: (j, 0, i)),
      out_shape=jax.ShapeDtypeStruct((columns // 4, 4, rows // 4), jnp.uint32),
      name='turn',
      **kernel_options(interpret, num_warps),
  )(words)
  return _as_bytes(out.reshape(columns, rows // 4), x_MN.dtype)


def _quantize_kernel(
    x_ref, mask_ref, scale_ref, *outs, dtype, limit: float, straight: bool
):
  """A tile: its 8-bit values both ways round, and four sums of it."""
  straight_ref, *outs = outs if straight else (None, *outs)
  turned_ref, amax_ref, counts_ref, signal_ref, noise_ref = outs
  scale = scale_ref[0]
  inverse, largest = 1.0 / scale, limit * scale
  shape = (_WORDS, x_ref.shape[2])
  word = jnp.zeros(shape, jnp.uint32)
  amax, signal, noise = (jnp.zeros(shape, jnp.float32) for _ in range(3))
  counts = jnp.zeros(shape, jnp.int32)
  for k in range(4):
    x = x_ref[:, k, :].astype(jnp.float32)
    x = jnp.where(mask_ref[:, k][:, None] > 0, x, 0.0)
    low = jnp.clip(x * inverse, -limit, limit).astype(dtype)
    if straight_ref is not None:
      straight_ref[:, k, :] = low
    word |= _byte(low) << (8 * k)
    stored = low.astype(jnp.float32)
    error = x - stored * scale
    amax = jnp.maximum(amax, jnp.abs(x))
    signal += x * x
    noise += error * error
    counts += (jnp.abs(x) > largest).astype(jnp.int32)
    counts += ((x != 0) & (stored == 0)).astype(jnp.int32) * _COUNT
  turned_ref[...] = word.T
  amax_ref[...] = jnp.max(amax)
  counts_ref[...] = jnp.sum(counts)
  signal_ref[...] = jnp.sum(signal)
  noise_ref[...] = jnp.sum(noise)


def quantize_and_turn(
    x_MN: Array,
    scale: Array,
    row_mask_M: Array,
    dtype,
    *,
    straight: bool,
    width: int = 64,
    num_warps: int = 4,
    interpret: bool = False,
) -> Turned:
  """Quantises a matrix, turns it round and sees what was lost, in one pass.

  Rows that do not count are quantised as zeros: padding, whose gradients are
  zeros as well.

  Args:
    x_MN: bfloat16 or float32; its shape `fits`.
    scale: float32 scalar.
    row_mask_M: float32, 0 on rows that do not count.
    dtype: the 8-bit format, a float.
    straight: also return the values as they came.
    width: columns of a program.
    num_warps: of a program.
    interpret: run on a CPU, for tests.
  """
  rows, columns = x_MN.shape
  grid = columns // width, rows // TILE
  rows_spec = pl.BlockSpec((_WORDS, 4, width), lambda j, i: (i, 0, j))
  number = pl.BlockSpec((None, None), lambda j, i: (i, j))
  numbers = [
      jax.ShapeDtypeStruct(grid[::-1], kind)
      for kind in (jnp.float32, jnp.int32, jnp.float32, jnp.float32)
  ]
  quarters = rows // 4, 4, columns
  out = pl.pallas_call(
      functools.partial(
          _quantize_kernel,
          dtype=dtype,
          limit=formats.format_max(dtype),
          straight=straight,
      ),
      grid=grid,
      in_specs=[
          rows_spec,
          pl.BlockSpec((_WORDS, 4), lambda j, i: (i, 0)),
          pl.BlockSpec((1,), lambda j, i: (0,)),
      ],
      out_specs=[
          *[rows_spec] * straight,
          pl.BlockSpec((width, _WORDS), lambda j, i: (j, i)),
          *[number] * 4,
      ],
      out_shape=[
          *[jax.ShapeDtypeStruct(quarters, dtype)] * straight,
          jax.ShapeDtypeStruct((columns, rows // 4), jnp.uint32),
          *numbers,
      ],
      name='quantize_and_turn',
      **kernel_options(interpret, num_warps),
  )(
      x_MN.reshape(quarters),
      row_mask_M.reshape(rows // 4, 4),
      scale.reshape(1),
  )
  values = out[0].reshape(rows, columns) if straight else None
  turned_NR, amax, counts, signal, noise = out[straight:]
  saturated, flushed = counts % _COUNT, counts // _COUNT
  lost = (saturated, flushed, signal, noise)
  return Turned(
      straight_MN=values,
      turned_NM=_as_bytes(turned_NR, dtype),
      amax=jnp.max(amax),
      lost=jnp.stack([jnp.sum(part.astype(jnp.float32)) for part in lost]),
  )
