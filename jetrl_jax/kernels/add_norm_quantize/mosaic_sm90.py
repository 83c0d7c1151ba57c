"""The kernel for Hopper GPUs (Mosaic): a warpgroup, or a warp, has a row.

A program is one warpgroup and has one row, or four rows of a width that is no
multiple of 256, a warp each. It reads a row once, straight from memory and
coalesced, and keeps it in registers: up to 64 channels a thread. All its loads
come before the first number is used. Shared memory holds only the four warps'
parts of the sum. No barrier is left but those two around that exchange, and
none where a warp has a row.

Order of the sum of squares: chunk by chunk of up to 512 channels in ascending
order, channel i of each chunk with channel i of the others in float32. Then
those up to 512 sums: the two or four neighbours of a thread in ascending order,
the lanes of a warp at distances of 1, 2, 4, 8 and 16, and the warps by pairs.
So a row's bits depend on its width alone, and training and decode share the
kernel.

Lower bound of the time: reading and writing once. 128 rows of a 7B's decode
step are 4 MB, a microsecond at 4.3 TB/s, and with a launch and one round trip
to memory rather two (an H100 takes 2.4); 32768 rows of training are 587 MB, 137
us. With 3584 channels a thread has 91 registers in a decode step and 56 in
training, so a multiprocessor has 5 or 9 programs and as many rows on their way,
of which it needs about 32 KB.
"""

# jax 0.10, which the types are checked with, lacks some of it.
# pyright: reportAttributeAccessIssue=false

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jetrl_jax.core.typing import Array
from jetrl_jax.fp8 import formats
from jetrl_jax.fp8.products import DeferredScale, fence, times
from jetrl_jax.kernels import mosaic_tools as tools
from jetrl_jax.kernels.calls import lowered_once

_MAX_CHUNK = 512
# Most channels of a row in a thread: its registers have no room for more.
_MOST = 64


def _chunk(dim: int) -> int:
  """Largest power of two that divides `dim`, at most `_MAX_CHUNK`."""
  return min(dim & -dim, _MAX_CHUNK)


def rows_of_program(dim: int) -> int:
  """1 if all threads have two channels of a chunk, else a row for each warp."""
  return 1 if _chunk(dim) >= 2 * tools.THREADS else tools.WARPS


def fits(dim: int) -> bool:
  """Whether the kernel takes rows of so many channels."""
  threads = tools.THREADS // rows_of_program(dim)
  return _chunk(dim) >= 2 * threads and dim <= _MOST * threads


def kernel(
    *refs,
    eps: float,
    num_scales: int,
    adds: bool,
    quantizes: bool,
    interpret: bool,
):
  """Computes one row, or four.

  Args:
    *refs: x, gain, then with `adds` the product and its `num_scales` scales,
      with `quantizes` the output's scale; then the results: with `adds` the
      sum, then the normed rows unless only their FP8 values are wanted, and
      with `quantizes` the FP8 values.
    eps: added to the mean square.
    num_scales: scales of the product.
    adds: whether a product is added first.
    quantizes: whether FP8 values are written.
    interpret: run on a CPU.
  """
  x_ref, gain_ref, *refs = refs
  product_ref, out_scale_ref, sum_ref, fp8_ref = (None,) * 4
  if adds:
    product_ref, *refs = refs
  scale_refs, refs = refs[:num_scales], refs[num_scales:]
  if quantizes:
    out_scale_ref, *refs, fp8_ref = refs
  if adds:
    sum_ref, *refs = refs
  out_ref = refs[0] if refs else None
  dim = x_ref.shape[1]
  chunk, count = _chunk(dim), rows_of_program(dim)
  mine = lax.axis_index('program')
  if count == 1:
    shape = (chunk,)
    vector = chunk // tools.THREADS
    layout = of_gain = plgpu.Layout.WG_STRIDED(shape, vec_size=vector)
  else:
    mine, shape = pl.ds(mine * count, count), (count, chunk)
    layout = tools.rows_in_warps(chunk // tools.LANES)
    of_gain = layout.reduce(0)

  def across(x, axis: int):
    """Returns a channel's or a row's number for all rows or channels."""
    if x.shape == shape or not x.shape:
      return x
    return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, [axis]), layout)

  chunks = [pl.ds(i * chunk, chunk) for i in range(dim // chunk)]
  # All loads come before the first store, because the compiler cannot know that
  # the two never touch the same memory.
  rows = [tools.read(x_ref.at[mine, at], layout) for at in chunks]
  gains = [across(tools.read(gain_ref.at[at], of_gain), 1) for at in chunks]
  out_scale = None if out_scale_ref is None else out_scale_ref[0]
  if product_ref is not None:
    products = [tools.read(product_ref.at[mine, at], layout) for at in chunks]
    scales = [scale[0] for scale in scale_refs]
    # As a GEMM adds a residual: scaled and added in float32, rounded once.
    # Scales are powers of two, so the product may join the addition.
    products = [times(x.astype(jnp.float32), scales) for x in products]
    rows = [
        (row.astype(jnp.float32) + product).astype(row.dtype)
        for row, product in zip(rows, products, strict=True)
    ]
  parts = [row.astype(jnp.float32) for row in rows]
  squares = [part * part for part in parts]
  if x_ref.dtype == jnp.float32:  # Squares of shorter numbers are exact.
    squares = [fence(square) for square in squares]
  total = squares[0]
  for square in squares[1:]:
    total += square
  inverse = across(lax.rsqrt(jnp.sum(total, axis=-1) / dim + eps), 0)
  for at, row, part, gain in zip(chunks, rows, parts, gains, strict=True):
    if sum_ref is not None:
      tools.write(sum_ref.at[mine, at], row)
    out = (part * inverse).astype(row.dtype) * gain
    if out_ref is not None:
      tools.write(out_ref.at[mine, at], out)
    if fp8_ref is not None:
      fp8 = tools.quantized(out, out_scale, interpret)
      for copy in range(fp8_ref.shape[0]):
        tools.write(fp8_ref.at[copy, mine, at], fp8)


@lowered_once('eps', 'copies', 'interpret')
def forward(
    x_MD: Array,
    gain_D: Array,
    eps: float,
    out_scale: Array | None = None,
    delta: DeferredScale | None = None,
    *,
    copies: int = 1,
    interpret: bool = False,
) -> tuple[Array, Array | None, Array | None]:
  """See the package's `forward`; `interpret` runs on a CPU, for tests."""
  rows, dim = x_MD.shape
  like = jax.ShapeDtypeStruct(x_MD.shape, x_MD.dtype)
  operands, results = [x_MD, gain_D], []
  num_scales = 0
  if delta is not None:
    assert delta.bias_O is None
    num_scales = len(delta.scales)
    operands += [delta.values, *(s.reshape(1) for s in delta.scales)]
    results.append(like)
  # A decode step, which adds, reads only the FP8 values if there are any.
  writes = delta is None or out_scale is None
  if writes:
    results.append(like)
  if out_scale is not None:
    operands.append(out_scale.reshape(1))
    results.append(jax.ShapeDtypeStruct((copies, rows, dim), formats.E4M3))
  out = plgpu.kernel(
      tools.named(
          'rms_norm',
          kernel,
          eps=eps,
          num_scales=num_scales,
          adds=delta is not None,
          quantizes=out_scale is not None,
          interpret=interpret,
      ),
      out_type=results,
      grid=(rows // rows_of_program(dim),),
      grid_names=('program',),
      **tools.kernel_options(interpret, barriers=False),
  )(*operands)
  found = iter(out)
  sum_MD = x_MD if delta is None else next(found)
  normed_MD = next(found) if writes else None
  if out_scale is None:
    return sum_MD, normed_MD, None
  fp8 = next(found)
  return sum_MD, normed_MD, fp8 if copies > 1 else jnp.squeeze(fp8, 0)
