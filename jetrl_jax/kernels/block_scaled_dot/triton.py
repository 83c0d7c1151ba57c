"""The product of `fp8_block` on a GPU, as a kernel (Pallas, Triton).

A group's 128 products are four of Hopper's FP8 instructions, which the tensor
core adds. Their scaled sum is added in float32 to a total in registers. A row's
bits depend neither on the other rows nor on the tiles, so a decode step and a
training step may use different tiles.

A program computes 64 x 128 of the result, or 64 x 64 of up to 512 rows, with
four warps. The groups' operands, 128 bytes of each row, pass through shared
memory, three or four groups at a time. Scales, product and total are in
registers.

Order of the sum: 32 products an instruction, four instructions a group from
zero, then group by group in float32.

Lower bound of the time: the tensor core for many rows (860 TFLOP/s were
reached on an H200 for 8192 x 37888 x 3584), b's bytes for few.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jetrl_jax.core.typing import Array
from jetrl_jax.fp8.products import fence
from jetrl_jax.fp8.recipes import BLOCK
from jetrl_jax.kernels.calls import lowered_once
from jetrl_jax.kernels.hopper_dot import hopper_dot
from jetrl_jax.kernels.triton_tools import (
    instruction,
    kernel_options,
    row_slices,
)

# Rows of a and b in a program, its warps and the stages of its loads. On an
# H200, 8192 x 37888 x 3584: 860 TFLOP/s, and 490 with 128 rows of a.
_MANY = 64, 128, 4, 3
_FEW = 64, 64, 4, 4
_FEW_ROWS = 512
# Consecutive programs take this many tiles of a for each tile of b.
_NEIGHBOURS = 8


def _rounded_product(x: Array, y: Array, interpret: bool) -> Array:
  """Returns x * y, rounded before a following addition."""
  if interpret:
    return fence(x * y)
  return instruction('mul.rn.f32')(x, jnp.broadcast_to(y, x.shape))


def _kernel(
    a_ref, b_ref, scale_a_ref, scale_b_ref, out_ref, *, exact, interpret
):
  """A tile of the result."""
  groups = scale_a_ref.shape[0]
  zeros = jnp.zeros(out_ref.shape, jnp.float32)

  def scales(g):
    scale_b = scale_b_ref[g, :][None, :]
    return scale_a_ref[g, :][:, None], scale_b

  def body(g, carry):
    total, scale_a, scale_b = carry
    columns = pl.ds(g * BLOCK, BLOCK)
    a, b = a_ref[:, columns], b_ref[:, columns]
    part = hopper_dot(a, b, zeros, interpret=interpret)
    # The next group's scales are loaded meanwhile.
    ahead = scales(jnp.minimum(g + 1, groups - 1))
    if exact:  # Powers of two may be multiplied first, or within the sum.
      return total + part * (scale_a * scale_b), *ahead
    part = _rounded_product(part * scale_a, scale_b, interpret)
    return total + part, *ahead

  total, *_ = lax.fori_loop(0, groups, body, (zeros, *scales(0)))
  out_ref[...] = total.astype(out_ref.dtype)


@lowered_once('out_dtype', 'power_of_two', 'few', 'interpret')
def block_dot(
    a_MK: Array,
    scale_a_MG: Array,
    b_NK: Array,
    scale_b_NG: Array,
    out_dtype,
    *,
    power_of_two: bool,
    few: bool | None = None,
    interpret: bool = False,
) -> Array:
  """See the package's `block_dot`.

  `few` takes the tiles for few rows; None decides by the number of rows.
  `interpret` runs on a CPU, for tests.
  """
  run = functools.partial(
      _dot_of_rows,
      out_dtype=out_dtype,
      power_of_two=power_of_two,
      few=few,
      interpret=interpret,
  )
  of_a, of_b = (row_slices(*x.shape, multiple=BLOCK) for x in (a_MK, b_NK))
  # An array of so many rows is no weight, so it has a scale for each row.
  parts = [
      [run(a_MK[i], scale_a_MG[i], b_NK[j], scale_b_NG[j]) for j in of_b]
      for i in of_a
  ]
  return jnp.concatenate([jnp.concatenate(row, axis=1) for row in parts])


def _dot_of_rows(
    a_MK,
    scale_a_MG,
    b_NK,
    scale_b_NG,
    *,
    out_dtype,
    power_of_two: bool,
    few: bool | None,
    interpret: bool,
) -> Array:
  (rows, inner), columns = a_MK.shape, b_NK.shape[0]
  groups = inner // BLOCK
  few = rows <= _FEW_ROWS if few is None else few
  height, width, num_warps, num_stages = _FEW if few else _MANY
  missing = -rows % height
  if missing:
    a_MK, scale_a_MG = (
        jnp.pad(x, ((0, missing), (0, 0))) for x in (a_MK, scale_a_MG)
    )
  tiles = (rows + missing) // height
  near = math.gcd(tiles, _NEIGHBOURS)
  of_blocks = scale_b_NG.shape[0] < columns

  def row_tile(r, j, q):
    del j
    return q * near + r

  out = pl.pallas_call(
      functools.partial(_kernel, exact=power_of_two, interpret=interpret),
      grid=(near, columns // width, tiles // near),
      in_specs=[
          pl.BlockSpec((height, inner), lambda *at: (row_tile(*at), 0)),
          pl.BlockSpec((width, inner), lambda r, j, q: (j, 0)),
          pl.BlockSpec((groups, height), lambda *at: (0, row_tile(*at))),
          pl.BlockSpec((groups, 1), lambda r, j, q: (0, j * width // BLOCK))
          if of_blocks
          else pl.BlockSpec((groups, width), lambda r, j, q: (0, j)),
      ],
      out_specs=pl.BlockSpec(
          (height, width), lambda *at: (row_tile(*at), at[1])
      ),
      out_shape=jax.ShapeDtypeStruct((rows + missing, columns), out_dtype),
      name='block_dot',
      **kernel_options(interpret, num_warps, num_stages),
  )(a_MK, b_NK, scale_a_MG.T, scale_b_NG.T)
  return out[:rows]
