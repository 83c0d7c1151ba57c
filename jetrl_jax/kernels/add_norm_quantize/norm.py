"""RMSNorm with one order of summation.

XLA's own row reduction changes its order with whatever it is fused with: on
an H200 that was 0.0002% of a norm's outputs, and 21% of the log-probs after
28 layers. So the sum of squares has a routine of its own: a Pallas kernel on
GPU, and on CPU a product with a matrix of ones (the order of a CPU dot does
not depend on the number of rows when that is a multiple of 16).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jetrl_jax.core.typing import Array, Float
from jetrl_jax.fp8 import formats
from jetrl_jax.fp8.products import DeferredScale, times
from jetrl_jax.fp8.quantization import quantize
from jetrl_jax.kernels import dispatch
from jetrl_jax.kernels.pallas import kernel_options, lowered_once

_MAX_CHUNK = 512
_WARPS = 8


def row_sum(x_MD: Float[Array, 'M D']) -> Float[Array, 'M 1']:
  """Sums float32 rows in an order that does not depend on M (CPU form)."""
  ones = jnp.ones((16, x_MD.shape[1]), jnp.float32)
  return lax.dot_general(
      x_MD,
      ones,
      (((1,), (1,)), ((), ())),
      precision=lax.Precision.HIGHEST,
      preferred_element_type=jnp.float32,
  )[:, :1]


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
  """The GPU form: one program per row, the sum in chunks of fixed size.

  Args:
    x_MD: rows.
    scale_D: gain.
    eps: added to the mean square.
    step: scale on which the result is quantised as well.
    added: a float32 product that is added to the rows first.
    copies: of what is quantised, [copies, M, D]; of one [M, D].
    interpret: run on a CPU, for tests.

  Returns:
    (the rows, with what is added; normed, None where it is quantised and
    something was added; the same quantised, None without a step)
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


def rms_norm(
    x_MD: Float[Array, 'M D'],
    scale_D: Float[Array, ' D'],
    eps: float,
    master_D: Float[Array, ' D'] | None = None,
    step: Float[Array, ''] | None = None,
) -> tuple[Float[Array, 'M D'], Array | None]:
  """Normalises rows: y = x / sqrt(mean(x^2) + eps) * scale.

  Statistics in float32; the normalised value is rounded to x's dtype before
  the gain, as Hugging Face does.

  Args:
    x_MD: rows, M a multiple of 16.
    scale_D: gain, in x's dtype.
    eps: added to the mean square.
    master_D: receives the gain's derivative in its dtype; its values are not
      read. None where no derivative is wanted.
    step: scale on which an FP8 dot will quantise y, where that is known.

  Returns:
    (y, its E4M3 values on the scale `step`; None without it, and on a CPU,
    where the dot quantises as well)
  """
  if master_D is None:
    return _forward(x_MD, scale_D, step, eps)
  return _differentiable(x_MD, scale_D, master_D, step, eps)


def _forward(x_MD, scale_D, step, eps):
  if dispatch.has_kernel('add_norm_quantize'):
    return rms_norm_kernel(x_MD, scale_D, eps, step)[1:]
  x32 = x_MD.astype(jnp.float32)
  mean_square_M1 = row_sum(x32 * x32) / x_MD.shape[1]
  normed = x32 * lax.rsqrt(mean_square_M1 + eps)
  return normed.astype(x_MD.dtype) * scale_D[None, :], None


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _differentiable(x_MD, scale_D, master_D, step, eps):
  del master_D
  return _forward(x_MD, scale_D, step, eps)


def _fwd(x_MD, scale_D, master_D, step, eps):
  like = jnp.zeros((0,), master_D.dtype)
  return _forward(x_MD, scale_D, step, eps), (x_MD, scale_D, like)


def _bwd(eps, residuals, cotangents):
  # The order of the backward's sums is free: no log-prob depends on it.
  x_MD, scale_D, like = residuals
  dy_MD, _ = cotangents
  x32, dy32 = x_MD.astype(jnp.float32), dy_MD.astype(jnp.float32)
  mean_square = jnp.mean(x32 * x32, axis=1, keepdims=True)
  inverse = lax.rsqrt(mean_square + eps)
  normed = x32 * inverse
  rounded = normed.astype(x_MD.dtype).astype(jnp.float32)
  dscale_D = jnp.sum(dy32 * rounded, axis=0)
  dnormed = dy32 * scale_D.astype(jnp.float32)[None, :]
  projection = jnp.mean(dnormed * normed, axis=1, keepdims=True)
  dx_MD = inverse * (dnormed - normed * projection)
  return dx_MD.astype(x_MD.dtype), None, dscale_D.astype(like.dtype), None


_differentiable.defvjp(_fwd, _bwd)
