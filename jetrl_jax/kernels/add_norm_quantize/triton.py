"""The GPU's form, as a kernel (Pallas, Triton backend).

A program has one row, in registers from its first reading on.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jetrl_jax.fp8 import formats
from jetrl_jax.fp8.products import DeferredScale, times
from jetrl_jax.fp8.quantization import quantize
from jetrl_jax.kernels.calls import lowered_once
from jetrl_jax.kernels.triton_tools import kernel_options

_MAX_CHUNK = 512
_WARPS = 8


def _kernel(*refs, eps: float, chunk: int, num_scales: int, sums, quantizes):
  """One row, in registers from its first reading on."""
  x_ref, gain_ref, *refs = refs
  product_ref, step_ref, sum_ref, low_ref = (None,) * 4
  if sums:
    product_ref, *refs = refs
  scale_refs, refs = refs[:num_scales], refs[num_scales:]
  if quantizes:
    step_ref, *refs, low_ref = refs
  if sums:
    sum_ref, *refs = refs
  out_ref = refs[0] if refs else None
  dim = x_ref.shape[0]
  chunks = [pl.ds(i * chunk, chunk) for i in range(dim // chunk)]
  # All that is read is on its way before the first write: a compiler does not
  # know that they are not the same place.
  step = None if step_ref is None else step_ref[0]
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
    if step is not None and low_ref is not None:
      low = quantize(out, step, formats.E4M3)
      for copy in range(low_ref.shape[0]):
        low_ref[copy, at] = low


def _chunk(dim: int) -> int:
  """Largest power of two that divides `dim`, at most `_MAX_CHUNK`."""
  return min(dim & -dim, _MAX_CHUNK)


@lowered_once('eps', 'copies', 'interpret')
def rms_norm_kernel(
    x_MD,
    scale_D,
    eps: float,
    step=None,
    added: DeferredScale | None = None,
    *,
    copies: int = 1,
    interpret: bool = False,
):
  """Returns `joined`: a program a row, the sum in fixed chunks.

  Args:
    x_MD: rows.
    scale_D: gain.
    eps: added to the mean square.
    step: see the package, as all others.
    added: its values are float32.
    copies: of what is quantised.
    interpret: run on a CPU, for tests.
  """
  dim = x_MD.shape[1]
  row = pl.BlockSpec((None, dim), lambda i: (i, 0))
  whole = pl.BlockSpec((dim,), lambda i: (0,))
  one = pl.BlockSpec((1,), lambda i: (0,))
  operands, specs = [x_MD, scale_D], [row, whole]
  rows = jax.ShapeDtypeStruct(x_MD.shape, x_MD.dtype), row
  results = []
  num_scales = 0
  if added is not None:
    assert added.bias_O is None
    num_scales = len(added.scales)
    operands += [added.values, *(s.reshape(1) for s in added.scales)]
    specs += [row, *[one] * num_scales]
    results.append(rows)
  # A decode step, which adds, has no use for both forms of the result.
  writes = added is None or step is None
  if writes:
    results.append(rows)
  if step is not None:
    operands, specs = [*operands, step.reshape(1)], [*specs, one]
    shape = jax.ShapeDtypeStruct((copies, *x_MD.shape), formats.E4M3)
    spec = pl.BlockSpec((copies, None, dim), lambda i: (0, i, 0))
    results.append((shape, spec))
  out = pl.pallas_call(
      functools.partial(
          _kernel,
          eps=eps,
          chunk=_chunk(dim),
          num_scales=num_scales,
          sums=added is not None,
          quantizes=step is not None,
      ),
      grid=(x_MD.shape[0],),
      in_specs=specs,
      out_specs=[spec for _, spec in results],
      out_shape=[shape for shape, _ in results],
      name='rms_norm',
      **kernel_options(interpret, _WARPS),
  )(*operands)
  found = iter(out)
  sum_MD = x_MD if added is None else next(found)
  normed_MD = next(found) if writes else None
  if step is None:
    return sum_MD, normed_MD, None
  low = next(found)
  return sum_MD, normed_MD, low if copies > 1 else jnp.squeeze(low, 0)
