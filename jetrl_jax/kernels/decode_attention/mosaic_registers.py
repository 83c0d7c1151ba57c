"""How decode's Mosaic kernel brings operands to the tensor core's order.

Hopper's tensor core takes an operand from registers, where a thread holds two
neighbours along the contraction. So FP8 keys and values are widened on the way
from shared memory, and no thread asks another one: which channel or token is
whose neighbour is a matter of naming. The names are those of training (see
`kernels/attention/layout.py`): of every 32 channels of keys the first two of
each four come first, and of a tile's values the even tokens.
"""

# jax 0.10, which the types are checked with, lacks some of it.
# pyright: reportAttributeAccessIssue=false

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from jetrl_jax.fp8 import formats
from jetrl_jax.kernels import mosaic_tools as tools
from jetrl_jax.kernels.attention.layout import channels_as_decoded

_WGMMA = plgpu.Layout.WGMMA
# Four values of a word, the first two and the last two.
_FOUR = """{
.reg .b16 first, last;
mov.b32 {first, last}, $2;
cvt.rn.f16x2.e4m3x2 $0, first;
cvt.rn.f16x2.e4m3x2 $1, last;
}"""
# Two pairs of tokens, the even ones and the odd ones.
_PAIRS = """{
.reg .b32 even, odd;
.reg .b16 wanted, rest;
prmt.b32 even, $2, 0, 0x0020;
prmt.b32 odd, $2, 0, 0x0031;
mov.b32 {wanted, rest}, even;
cvt.rn.f16x2.e4m3x2 $0, wanted;
mov.b32 {wanted, rest}, odd;
cvt.rn.f16x2.e4m3x2 $1, wanted;
}"""


def _tiled(columns: int, vector: int):
  """16 rows in warps of 4; a row's lanes hold so many neighbours each."""
  return plgpu.Layout.TILED(
      plgpu.Tiling(((16, columns), (4, columns), (vector,))),
      warp_dims=(-5,),
      lane_dims=(-3, -2),
      vector_dim=-1,
  )


def _widened(register, ptx: str) -> list:
  """Two registers of two float16 each, of the four bytes of one."""
  word = ir.IntegerType.get_signless(32)
  pair = ir.VectorType.get((2,), ir.F16Type.get())
  both = utils.inline_ptx(
      ptx, utils.bitcast(register, word), result_types=(word, word)
  )
  return [utils.bitcast(half, pair) for half in both]


def _halves(register) -> list:
  return [utils.vector_slice(register, slice(n, n + 2)) for n in (0, 2)]


def _renamed(x, layouts, shape, two_of, column_of):
  """Makes two registers of each one, and gives them their columns.

  Args:
    x: an array in registers.
    layouts: its layout, and that of the result.
    shape: of the result.
    two_of: function of a register.
    column_of: function of (a register's column, 0 or 1) to that of a result.
  """
  before, after = layouts
  result = plgpu.ShapeDtypeStruct(shape, jnp.float16, layout=after)

  @plgpu.inline_mgpu(arg_types=(before,), return_type=result)
  def inlined(context, array):
    del context
    layout = after.to_mgpu()
    registers = np.empty(layout.registers_shape(shape), dtype=object)
    for (row, column, *rest), register in np.ndenumerate(array.registers):
      for n, half in enumerate(two_of(register)):
        registers[row, column_of(column, n), *rest] = half
    return mgpu.FragmentedArray(
        _registers=registers, _layout=layout, _is_signed=None
    )

  return inlined(x)  # pyright: ignore[reportCallIssue]


def query(staged_ref, dtype, turns: bool, interpret: bool):
  """Returns the query rows [16, H] as the tensor core takes them.

  Args:
    staged_ref: the rows, in shared memory.
    dtype: the dtype of the products.
    turns: channels are brought to the order of FP8 keys.
    interpret: run on a CPU.
  """
  if interpret:
    q = staged_ref[...].astype(dtype)
    return channels_as_decoded(q, dtype) if turns else q
  layout = _tiled(32, 4)
  q = tools.load(staged_ref, layout)
  if not turns:
    return q.astype(dtype)
  q = q.astype(jnp.float32).astype(dtype)
  layouts = layout, _tiled(16, 2)
  return _renamed(q, layouts, q.shape, _halves, lambda i, n: 2 * i + n)


def keys(tile_ref, interpret: bool):
  """Returns FP8 keys [64, H] in float16, in decode's order of channels."""
  if interpret:
    return channels_as_decoded(tile_ref[...], jnp.float16)
  layout = plgpu.Layout.WGMMA_8BIT
  words = tools.load(tile_ref, layout)
  return _renamed(
      words,
      (layout, _WGMMA),
      words.shape,
      lambda register: _widened(register, _FOUR),
      lambda i, n: i // 2 * 4 + 2 * n + i % 2,
  )


def values(tile_ref, interpret: bool):
  """Returns [H, 64] in float16 of FP8 values in pairs [32, H], even first."""
  if interpret:
    words = tile_ref[...].T
    parts = [(words >> (8 * n)).astype(jnp.uint8) for n in (0, 1)]
    parts = [lax.bitcast_convert_type(x, formats.E4M3) for x in parts]
    return jnp.concatenate(parts, axis=1).astype(jnp.float16)
  words = tools.load(tile_ref.transpose((1, 0)), _WGMMA)
  channels, pairs = words.shape
  return _renamed(
      words,
      (_WGMMA, _WGMMA),
      (channels, 2 * pairs),
      lambda register: _widened(register, _PAIRS),
      lambda i, n: i + n * pairs // 8,
  )
