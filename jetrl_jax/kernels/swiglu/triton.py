"""SwiGLU, h = silu(gate) * up, on a GPU as a kernel (Pallas, Triton).

XLA spends 44 instructions on a value that it scales, gates and quantises. That
takes longer than moving the bytes, in a decode step and in training. This
kernel spends 15: it uses the device's own exp2 and reciprocal, scales gate|up
by a power of two without another rounding, and lets the cast to 8 bits
saturate. Rollout and training both call it, so they agree. `triton_backward.py`
computes h with the same operations.

A program has up to 2048 values, at most 512 columns of them, and eight warps;
everything is in registers. There is no sum.

Lower bound of the time: the bytes, 5 a value of h with bfloat16 gate|up and
8-bit h. 128 rows of a 7B take 4.3 us in a decode step on an H200, where the
bytes take 3 (docs/performance_log.md).
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jetrl_jax.core.typing import Array
from jetrl_jax.fp8 import formats
from jetrl_jax.fp8.products import DeferredScale
from jetrl_jax.kernels.calls import lowered_once
from jetrl_jax.kernels.swiglu import formula
from jetrl_jax.kernels.triton_tools import (
    instruction,
    kernel_options,
    row_slices,
)


def fits(columns: int) -> bool:
  """Whether the kernel makes h of so many columns; for all numbers of rows."""
  return columns % 16 == 0


# Columns of a program at most, and its values.
_COLUMNS, _VALUES = 512, 2048
_WARPS = 8


def sigmoid(gate: Array, interpret: bool) -> Array:
  """Returns 1 / (1 + exp(-gate)) of float32 values inside a kernel."""
  if interpret:
    return formula.sigmoid(gate, jnp.exp2, lambda x: 1.0 / x)
  power_of_2, reciprocal = map(
      instruction, ('ex2.approx.ftz.f32', 'rcp.approx.ftz.f32')
  )
  return formula.sigmoid(gate, power_of_2, reciprocal)


def hidden(
    gate: Array,
    up: Array,
    scales: Sequence[Array],
    out_scale: Array | None,
    interpret: bool,
) -> Array:
  """Returns silu(gate) * up inside a kernel, see `formula.hidden`."""
  of_gate = functools.partial(sigmoid, interpret=interpret)
  return formula.hidden(
      gate, up, scales, out_scale, of_gate, saturates=not interpret
  )


def _kernel(gate_ref, up_ref, *refs, quantizes: bool, interpret: bool):
  """A tile of gate and of up."""
  *numbers, out_ref = refs
  numbers = [ref[0] for ref in numbers]
  out_scale = numbers.pop() if quantizes else None
  out_ref[...] = hidden(
      gate_ref[...], up_ref[...], numbers, out_scale, interpret
  )


@lowered_once('interpret')
def swiglu_of(
    product: DeferredScale,
    out_scale: Array | None = None,
    *,
    interpret: bool = False,
) -> Array:
  """See the package's `swiglu_of`; `interpret` runs on a CPU, for tests."""
  rows = product.values.shape[-2]
  parts = [
      _rows_of(product.values[..., at, :], product.scales, out_scale, interpret)
      for at in row_slices(rows, product.values.size // 2 // rows)
  ]
  return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def _rows_of(values: Array, scales, out_scale, interpret: bool) -> Array:
  is_split = values.ndim == 3
  if not is_split:
    values = values.reshape(values.shape[0], 2, -1)
  rows, columns = values.shape[1 if is_split else 0], values.shape[2]
  width = min(columns & -columns, _COLUMNS)
  height = min(rows & -rows, _VALUES // width)

  def half(k: int):
    if is_split:
      return pl.BlockSpec((None, height, width), lambda i, j: (k, i, j))
    return pl.BlockSpec((height, None, width), lambda i, j: (i, k, j))

  numbers = [*scales, *([] if out_scale is None else [out_scale])]
  return pl.pallas_call(
      functools.partial(
          _kernel,
          quantizes=out_scale is not None,
          interpret=interpret,
      ),
      grid=(rows // height, columns // width),
      in_specs=[
          half(0),
          half(1),
          *[pl.BlockSpec((1,), lambda i, j: (0,))] * len(numbers),
      ],
      out_specs=pl.BlockSpec((height, width), lambda i, j: (i, j)),
      out_shape=jax.ShapeDtypeStruct(
          (rows, columns), values.dtype if out_scale is None else formats.E4M3
      ),
      name='swiglu',
      **kernel_options(interpret, _WARPS),
  )(values, values, *(number.reshape(1) for number in numbers))
