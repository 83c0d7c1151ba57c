"""SwiGLU, h = silu(gate) * up, on a Hopper GPU as a kernel (Mosaic).

Its operations are those of gate_up's kernel, instruction by instruction.

A program is one warpgroup and has 8 rows of up to 256 columns, two rows a warp:
16 values of gate and of up a thread. Eight neighbours of a row are one load of
16 bytes, so a program has 8 KB on their way. Everything is in registers, read
straight from memory and written straight to it; there is no shared memory, and
no barrier. There is no sum, so the tiles decide no bit.

Lower bound of the time: the bytes, 5 a value of h with bfloat16 gate|up and
8-bit h. 128 rows of a 7B take 2.8 us at 4.3 TB/s, 32768 rows 722 us; an H100,
whose memory is a quarter slower, takes 992 for these.
"""

# jax 0.10, which the types are checked with, lacks some of it.
# pyright: reportAttributeAccessIssue=false

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jetrl_jax.core.typing import Array
from jetrl_jax.fp8 import formats
from jetrl_jax.fp8.products import DeferredScale
from jetrl_jax.kernels import mosaic_tools as tools
from jetrl_jax.kernels.calls import lowered_once
from jetrl_jax.kernels.swiglu import formula

# Rows of a program, and its columns at most: 16 bytes of each lane.
_ROWS, _COLUMNS = 8, 8 * tools.LANES


def _width(columns: int) -> int:
  """Largest power of two that divides `columns`, at most `_COLUMNS`."""
  return min(columns & -columns, _COLUMNS)


def fits(columns: int) -> bool:
  """Whether the kernel makes h of so many columns; for all numbers of rows."""
  return _width(columns) >= 2 * tools.LANES


def _kernel(
    values_ref, *refs, is_split: bool, quantizes: bool, interpret: bool
):
  """A tile of h."""
  *numbers, out_ref = refs
  numbers = [ref[0] for ref in numbers]
  out_scale = numbers.pop() if quantizes else None
  width = _width(out_ref.shape[1])
  columns = pl.ds(lax.axis_index('columns') * width, width)
  layout = tools.rows_in_warps(width // tools.LANES)
  reciprocal = functools.partial(
      tools.reciprocal, interpret=interpret, layout=layout
  )

  def of_gate(gate):
    return formula.sigmoid(gate, tools.power_of_2, reciprocal)

  tiles = []
  for i in range(_ROWS // tools.WARPS):
    first = lax.axis_index('rows') * _ROWS + i * tools.WARPS
    rows = pl.ds(first, tools.WARPS)
    gate, up = (
        tools.read(
            values_ref.at[
                (k, rows, columns) if is_split else (rows, k, columns)
            ],
            layout,
        )
        for k in (0, 1)
    )
    tiles.append((rows, gate, up))
  for rows, gate, up in tiles:
    hidden = formula.hidden(
        gate, up, numbers, out_scale, of_gate, saturates=not interpret
    )
    tools.write(out_ref.at[rows, columns], hidden)


@lowered_once('interpret')
def swiglu_of(
    product: DeferredScale,
    out_scale: Array | None = None,
    *,
    interpret: bool = False,
) -> Array:
  """See the package's `swiglu_of`; `interpret` runs on a CPU, for tests."""
  values = product.values
  is_split = values.ndim == 3
  rows = values.shape[-2]
  if not is_split:
    values = values.reshape(rows, 2, -1)
  columns, missing = values.shape[2], -rows % _ROWS
  if missing:
    widths = [(0, 0)] * 3
    widths[1 if is_split else 0] = (0, missing)
    values = jnp.pad(values, widths)
  numbers = [*product.scales, *([] if out_scale is None else [out_scale])]
  h_MF = plgpu.kernel(
      tools.named(
          'swiglu',
          _kernel,
          is_split=is_split,
          quantizes=out_scale is not None,
          interpret=interpret,
      ),
      out_type=jax.ShapeDtypeStruct(
          (rows + missing, columns),
          values.dtype if out_scale is None else formats.E4M3,
      ),
      grid=((rows + missing) // _ROWS, columns // _width(columns)),
      grid_names=('rows', 'columns'),
      **tools.kernel_options(interpret, barriers=False),
  )(values, *(number.reshape(1) for number in numbers))
  return h_MF[:rows]
