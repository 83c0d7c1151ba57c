"""gate_up and SwiGLU of few rows, on a Hopper GPU as one kernel (Triton).

A decode step reads gate_up's weights at the speed of memory, so any other
kernel only adds time. Here each multiprocessor reads equal shares of gate's
rows and up's rows, and writes h in 8 bits: gate|up never goes to memory. The
tensor core adds a row's products in order, four of its instructions per 128
bytes of a row, as cuBLAS does for every number of rows. So the bits are those
of the dot and of `swiglu.swiglu_of`, which together are faster for more rows
(docs/performance_log.md).

A program has up to 144 columns of h for all 64 or 128 rows, and eight warps. It
goes along the rows 128 bytes at a time: x's [M, 128] and two of [144, 128] of
the weights pass through shared memory, up to six such steps at a time. The sums
of gate and up, float32, are in registers, and so is SwiGLU.

Lower bound of the time: reading the weights once, 31.6 us for a 7B at 4.3 TB/s,
then the start and the end of the programs, with which nothing overlaps.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jetrl_jax.core.typing import Array
from jetrl_jax.fp8 import formats
from jetrl_jax.fp8.quantization import QTensor
from jetrl_jax.kernels.calls import lowered_once
from jetrl_jax.kernels.hopper_dot import hopper_dot
from jetrl_jax.kernels.swiglu import triton as swiglu
from jetrl_jax.kernels.triton_tools import kernel_options

ROWS = 64, 128
# Bytes of a row that are loaded at once.
_CHUNK = 128
# Columns of h that a program makes: whole units, as many as its registers hold.
_UNIT, _MOST = 16, 144
_MULTIPROCESSORS = 132  # of an H200; used if no GPU is at hand
_WARPS = 8
# Bytes of shared memory for loads in flight.
_BYTES, _MOST_STAGES = 216 * 1024, 6


def width_of(columns: int) -> int:
  """Returns the columns of h that one program makes.

  Multiprocessors finish together if each has one program, or each as many; but
  a third part (see `_parts`) costs more than some that have none.
  """
  units, count = -(-columns // _UNIT), _core_count()
  programs = -(-units // (_MOST // _UNIT * count)) * count
  each = -(-units // programs)
  while each.bit_count() > 2:
    each += 1
  return each * _UNIT


def _core_count() -> int:
  return getattr(jax.devices()[0], 'core_count', _MULTIPROCESSORS)


def _parts(width: int) -> list[tuple[int, int]]:
  """Splits a width into powers of two: (start, size), large ones first."""
  sizes = [2**i for i in reversed(range(width.bit_length())) if width >> i & 1]
  return [(sum(sizes[:i]), size) for i, size in enumerate(sizes)]


def _kernel(x_ref, w_ref, *refs, width: int, interpret: bool):
  """Some columns of h, for all rows."""
  *numbers, out_scale_ref, out_ref = refs
  rows, columns = out_ref.shape
  parts = _parts(width)
  # The last program repeats some columns of the one before it.
  first = jnp.minimum(pl.program_id(0) * width, columns - width)
  first = pl.multiple_of(first, _UNIT)

  def body(k, sums):
    inner = pl.ds(k * _CHUNK, _CHUNK)
    x = x_ref[:, inner]

    def added(half: int, start: int, size: int, total):
      w = w_ref[half, pl.ds(first + start, size), inner]
      return hopper_dot(x, w, total, interpret=interpret)

    return [
        tuple(added(half, *part, total) for half, total in enumerate(pair))
        for part, pair in zip(parts, sums, strict=True)
    ]

  zeros = [(jnp.zeros((rows, size), jnp.float32),) * 2 for _, size in parts]
  sums = lax.fori_loop(0, x_ref.shape[1] // _CHUNK, body, zeros)
  scales, out_scale = [ref[0] for ref in numbers], out_scale_ref[0]
  for (start, size), pair in zip(parts, sums, strict=True):
    # Rounded as the dot's product is.
    gate, up = (total.astype(jnp.bfloat16) for total in pair)
    h = swiglu.hidden(gate, up, scales, out_scale, interpret)
    out_ref[:, pl.ds(first + start, size)] = h


def fits(rows: int, dims: tuple[int, ...]) -> bool:
  """Whether the kernel can be used and is faster, see the package.

  It is not faster if some multiprocessors get a second program, because all
  wait for it (docs/performance_log.md).
  """
  dim, columns = dims
  whole = dim % _CHUNK == 0 and columns % _UNIT == 0
  width = width_of(columns)
  one_round = width <= columns <= width * _core_count()
  return whole and rows in ROWS and one_round


@lowered_once('interpret')
def hidden(
    x8: QTensor, weight: QTensor, out_scale: Array, *, interpret: bool = False
) -> QTensor:
  """Returns h, see the package's `gate_up`; gate|up is rounded to bfloat16.

  `interpret` runs on a CPU, for tests.
  """
  (rows, dim), columns = x8.values.shape, weight.values.shape[0] // 2
  width = width_of(columns)
  stage = (rows + 2 * width) * _CHUNK
  numbers = x8.scale, weight.scale, out_scale
  values = pl.pallas_call(
      functools.partial(_kernel, width=width, interpret=interpret),
      grid=(-(-columns // width),),
      in_specs=[
          pl.BlockSpec((rows, dim), lambda i: (0, 0)),
          pl.BlockSpec((2, columns, dim), lambda i: (0, 0, 0)),
          *[pl.BlockSpec((1,), lambda i: (0,))] * len(numbers),
      ],
      out_specs=pl.BlockSpec((rows, columns), lambda i: (0, 0)),
      out_shape=jax.ShapeDtypeStruct((rows, columns), formats.E4M3),
      name='gate_up',
      **kernel_options(interpret, _WARPS, min(_BYTES // stage, _MOST_STAGES)),
  )(
      x8.values,
      weight.values.reshape(2, columns, dim),
      *(number.reshape(1) for number in numbers),
  )
  return QTensor(values=values, scale=out_scale)
