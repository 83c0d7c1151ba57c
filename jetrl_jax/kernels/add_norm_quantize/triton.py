"""The GPU kernel (Pallas, Triton backend): one program per row.

A program reads its row once and keeps it in registers.

A program has eight warps. It reads its row in chunks of up to 512 channels and
keeps all of them in registers; shared memory holds only the warps' parts of the
sum.

Order of the sum of squares: chunk by chunk in ascending order, channel i of
each chunk with channel i of the others in float32, and then these up to 512
sums over threads and warps in a tree. So a row's bits depend on its width and
not on the other rows. Training and decode share the kernel.

Lower bound of the time: reading and writing once. 128 rows of a 7B's decode
step are 4 MB, a microsecond; on an H100 they take 2.4
(benchmarks/results/kernels_qwen7b_h100_2026-11-25.md).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jetrl_jax.core.typing import Array
from jetrl_jax.fp8 import formats
from jetrl_jax.fp8.products import DeferredScale, times
from jetrl_jax.fp8.quantization import quantize
from jetrl_jax.kernels.calls import lowered_once
from jetrl_jax.kernels.triton_tools import kernel_options

_MAX_CHUNK = 512
_WARPS = 8


def _kernel(
    *refs,
    eps: float,
    chunk: int,
    num_scales: int,
    adds: bool,
    quantizes: bool,
):
  """Computes one row.

  Args:
    *refs: x, gain, then with `adds` the product and its `num_scales` scales,
      with `quantizes` the output's scale; then the results: with `adds` the
      sum, then the normed row unless only its FP8 values are wanted, and with
      `quantizes` the FP8 values.
    eps: added to the mean square.
    chunk: channels that are read at once.
    num_scales: scales of the product.
    adds: whether a product is added first.
    quantizes: whether FP8 values are written.
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
  dim = x_ref.shape[0]
  chunks = [pl.ds(i * chunk, chunk) for i in range(dim // chunk)]
  # All loads come before the first store, because the compiler cannot know that
  # the two never touch the same memory.
  out_scale = None if out_scale_ref is None else out_scale_ref[0]
  rows, gains = [x_ref[at] for at in chunks], [gain_ref[at] for at in chunks]
  if product_ref is not None and sum_ref is not None:
    products = [product_ref[at] for at in chunks]
    scales = [scale[0] for scale in scale_refs]
    # As a GEMM adds a residual: scaled and added in float32, rounded once.
    rows = [
        (row.astype(jnp.float32) + times(product, scales)).astype(row.dtype)
        for row, product in zip(rows, products, strict=True)
    ]
  parts = [row.astype(jnp.float32) for row in rows]
  total = jnp.zeros((chunk,), jnp.float32)
  for part in parts:
    total += part * part
  inverse = lax.rsqrt(jnp.sum(total) / dim + eps)
  for at, row, part, gain in zip(chunks, rows, parts, gains, strict=True):
    if sum_ref is not None:
      sum_ref[at] = row
    out = (part * inverse).astype(row.dtype) * gain
    if out_ref is not None:
      out_ref[at] = out
    if out_scale is not None and fp8_ref is not None:
      fp8 = quantize(out, out_scale, formats.E4M3)
      for copy in range(fp8_ref.shape[0]):
        fp8_ref[copy, at] = fp8


def _chunk(dim: int) -> int:
  """Largest power of two that divides `dim`, at most `_MAX_CHUNK`."""
  return min(dim & -dim, _MAX_CHUNK)


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
  dim = x_MD.shape[1]
  row = pl.BlockSpec((None, dim), lambda i: (i, 0))
  whole = pl.BlockSpec((dim,), lambda i: (0,))
  one = pl.BlockSpec((1,), lambda i: (0,))
  operands, specs = [x_MD, gain_D], [row, whole]
  rows = jax.ShapeDtypeStruct(x_MD.shape, x_MD.dtype), row
  results = []
  num_scales = 0
  if delta is not None:
    assert delta.bias_O is None
    num_scales = len(delta.scales)
    operands += [delta.values, *(s.reshape(1) for s in delta.scales)]
    specs += [row, *[one] * num_scales]
    results.append(rows)
  # A decode step, which adds, reads only the FP8 values if there are any.
  writes = delta is None or out_scale is None
  if writes:
    results.append(rows)
  if out_scale is not None:
    operands, specs = [*operands, out_scale.reshape(1)], [*specs, one]
    shape = jax.ShapeDtypeStruct((copies, *x_MD.shape), formats.E4M3)
    spec = pl.BlockSpec((copies, None, dim), lambda i: (0, i, 0))
    results.append((shape, spec))
  out = pl.pallas_call(
      functools.partial(
          _kernel,
          eps=eps,
          chunk=_chunk(dim),
          num_scales=num_scales,
          adds=delta is not None,
          quantizes=out_scale is not None,
      ),
      grid=(x_MD.shape[0],),
      in_specs=specs,
      out_specs=[spec for _, spec in results],
      out_shape=[shape for shape, _ in results],
      name='rms_norm',
      **kernel_options(interpret, _WARPS),
  )(*operands)
  found = iter(out)
  sum_MD = x_MD if delta is None else next(found)
  normed_MD = next(found) if writes else None
  if out_scale is None:
    return sum_MD, normed_MD, None
  fp8 = next(found)
  return sum_MD, normed_MD, fp8 if copies > 1 else jnp.squeeze(fp8, 0)
