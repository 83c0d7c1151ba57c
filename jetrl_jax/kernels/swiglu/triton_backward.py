"""SwiGLU's backward and the quantisers around it, in one pass (Pallas, Triton).

    h = silu(gate) * up          what down's WGrad reads
    dgate = dh * up * silu'(gate), dup = dh * silu(gate)
                                 what gate_up's DGrad and WGrad read

The kernel reads gate|up and dh once in the compute dtype: 6 bytes per value of
h. It writes h transposed, and dgate|dup with their transposes, all in 8 bits: 5
bytes. XLA and the kernels of `kernels/quantize_transpose/triton.py` together
move 26 bytes for this. Everything is rounded as there: h, dgate and dup to the
compute dtype, then to 8 bits. h is made by the operations of the forward
(`triton.py`), and so has its bits.

A program has 128 rows of 32 columns of gate, of up and of dh, and four warps.
The values are in registers, 128 a thread; words of four bytes are transposed
through shared memory.

Order of the sums of what was lost: over eight of a row in one thread, then over
the tile in a tree, in float32, then XLA's over the tiles. No gradient depends
on them.

Lower bound of the time: instructions, 3064 of a warp for a tile, not the 11
bytes a value (docs/performance_log.md).
"""

import functools
import operator

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jetrl_jax.core.typing import Array
from jetrl_jax.fp8 import formats
from jetrl_jax.kernels.calls import lowered_once
from jetrl_jax.kernels.quantize_transpose import QuantizedPair
from jetrl_jax.kernels.quantize_transpose import triton as transpose
from jetrl_jax.kernels.quantize_transpose.grid import (
    NUMBERS,
    TILE,
    join_tiles,
)
from jetrl_jax.kernels.quantize_transpose.triton import WORDS
from jetrl_jax.kernels.swiglu import triton as swiglu
from jetrl_jax.kernels.swiglu.backward_formula import Grid, Maths, derivatives
from jetrl_jax.kernels.triton_tools import (
    instruction,
    kernel_options,
    row_slices,
)

_FAST = Maths(
    sigmoid=functools.partial(swiglu.sigmoid, interpret=False),
    product=operator.mul,
    multiply_add=instruction('fma.rn.f32'),
    share=instruction('fma.rn.sat.f32'),
    saturates=True,
)
_PLAIN = Maths(
    sigmoid=functools.partial(swiglu.sigmoid, interpret=True),
    product=operator.mul,
    multiply_add=lambda x, y, z: x * y + z,
    share=lambda x, y, z: jnp.clip(x * y + z, 0.0, 1.0),
    saturates=False,
)
# Columns of a program, of each half (64 at most, as counts share a number), and
# its warps.
_WIDTH = 32
_WARPS = 4
# Counts are float32, see `Grid`.
_KINDS = (jnp.float32,) * 4


def _kernel(
    product_ref, dh_ref, mask_ref, scales_ref, *outs, maths, dtype, run
):
  """A tile of gate, of up and of dh."""
  row_major_ref, h_transposed_ref, dy_transposed_ref, *sums_refs = outs
  shape = (WORDS, dh_ref.shape[2])
  words = [jnp.zeros(shape, jnp.uint32) for _ in range(3)]
  few = (WORDS, shape[1] // run)
  h_sums, dy_sums = transpose.no_sums(few, _KINDS), transpose.no_sums(
      few, _KINDS
  )
  y_scale = scales_ref[0]
  h_grid = Grid.of(scales_ref[1], formats.E4M3, maths=maths)
  dy_grid = Grid.of(scales_ref[2], dtype, maths=maths)
  for k in range(4):
    is_valid = mask_ref[:, k][:, None] > 0
    gate, up = (
        product_ref[:, k, half, :].astype(jnp.float32) * y_scale
        for half in range(2)
    )
    dh = dh_ref[:, k, :].astype(jnp.float32)
    made = derivatives(gate, up, dh, maths)
    # The rounding that the compute dtype would have been.
    h, dgate, dup = (
        jnp.where(is_valid, x.astype(dh_ref.dtype).astype(jnp.float32), 0.0)
        for x in made
    )
    h_low, seen = h_grid.look(h)
    h_sums = transpose.gather(h_sums, seen)
    words[0] |= transpose.byte(h_low) << (8 * k)
    for half, x in enumerate((dgate, dup)):
      low, seen = dy_grid.look(x)
      dy_sums = transpose.gather(dy_sums, seen)
      row_major_ref[:, k, half, :] = low
      words[1 + half] |= transpose.byte(low) << (8 * k)
  h_transposed_ref[...] = words[0].T
  for half in range(2):
    dy_transposed_ref[half] = words[1 + half].T
  transpose.write_sums(sums_refs[:4], h_sums)
  transpose.write_sums(sums_refs[4:], dy_sums)


@lowered_once('dtype', 'interpret')
def backward(
    product_MG: Array,
    dh_MF: Array,
    scales: Array,
    row_mask_M: Array,
    dtype,
    *,
    interpret: bool = False,
) -> tuple[QuantizedPair, QuantizedPair]:
  """Returns (h transposed, the gradient of gate|up with its transpose).

  Rows that do not count are quantised as zeros, as `quantize_and_transpose`
  does.

  Args:
    product_MG: gate|up before it is scaled, bfloat16, G = 2 F.
    dh_MF: the gradient of h, of the same dtype; its shape `fits`.
    scales: float32 [3], powers of two: of gate|up, of h's 8-bit values (E4M3 as
      in the forward) and of those of the gradient.
    row_mask_M: float32, 0 on rows that do not count.
    dtype: 8-bit format of the gradient, a float.
    interpret: run on a CPU, for tests.
  """
  run = functools.partial(_of_rows, dtype=dtype, interpret=interpret)
  parts = [
      run(product_MG[at], dh_MF[at], scales, row_mask_M[at])
      for at in row_slices(*product_MG.shape, multiple=TILE)
  ]
  h, dy = zip(*parts, strict=True)
  return transpose.join(h), transpose.join(dy)


def _of_rows(
    product_MG,
    dh_MF,
    scales,
    row_mask_M,
    *,
    dtype,
    interpret: bool,
) -> tuple[QuantizedPair, QuantizedPair]:
  rows, columns = dh_MF.shape
  quarters, grid = (rows // 4, 4), (columns // _WIDTH, rows // TILE)
  both = pl.BlockSpec((WORDS, 4, 2, _WIDTH), lambda j, i: (i, 0, 0, j))
  number = pl.BlockSpec((None, None), lambda j, i: (i, j))
  numbers = [jax.ShapeDtypeStruct(grid[::-1], kind) for kind in NUMBERS]
  words = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.uint32)
  row_major, h_transposed, dy_transposed, *sums = pl.pallas_call(
      functools.partial(
          _kernel,
          maths=_PLAIN if interpret else _FAST,
          dtype=dtype,
          # What a thread holds of a row is added up before it joins the sums,
          # which then take an eighth of the registers.
          run=min(8, _WIDTH // _WARPS),
      ),
      grid=grid,
      in_specs=[
          both,
          pl.BlockSpec((WORDS, 4, _WIDTH), lambda j, i: (i, 0, j)),
          pl.BlockSpec((WORDS, 4), lambda j, i: (i, 0)),
          pl.BlockSpec((3,), lambda j, i: (0,)),
      ],
      out_specs=[
          both,
          pl.BlockSpec((_WIDTH, WORDS), lambda j, i: (j, i)),
          pl.BlockSpec((2, _WIDTH, WORDS), lambda j, i: (0, j, i)),
          *[number] * 8,
      ],
      out_shape=[
          jax.ShapeDtypeStruct((*quarters, 2, columns), dtype),
          words((columns, rows // 4)),
          words((2, columns, rows // 4)),
          *numbers * 2,
      ],
      name='swiglu_backward',
      **kernel_options(interpret, _WARPS),
  )(
      product_MG.reshape(*quarters, 2, columns),
      dh_MF.reshape(*quarters, columns),
      row_mask_M.reshape(quarters),
      scales,
  )
  h_amax, h_error = join_tiles(*sums[:4])
  dy_amax, dy_error = join_tiles(*sums[4:])
  h = QuantizedPair(
      row_major_MN=None,
      transposed_NM=transpose.as_values(h_transposed, formats.E4M3),
      amax=h_amax,
      quantization_error=h_error,
  )
  dy = QuantizedPair(
      row_major_MN=row_major.reshape(rows, 2 * columns),
      transposed_NM=transpose.as_values(
          dy_transposed.reshape(2 * columns, -1), dtype
      ),
      amax=dy_amax,
      quantization_error=dy_error,
  )
  return h, dy
