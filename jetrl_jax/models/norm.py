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

from jetrl_jax.compilation import on_gpu
from jetrl_jax.typing import Array, Float

_MAX_CHUNK = 512


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


def _reference(x_MD, scale_D, eps, mean_square_M1):
  x32 = x_MD.astype(jnp.float32)
  normed = x32 * lax.rsqrt(mean_square_M1 + eps)
  return normed.astype(x_MD.dtype) * scale_D[None, :]


def _kernel(x_ref, scale_ref, out_ref, *, eps: float, chunk: int):
  dim = x_ref.shape[0]
  total = jnp.zeros((chunk,), jnp.float32)
  for i in range(dim // chunk):
    part = x_ref[pl.ds(i * chunk, chunk)].astype(jnp.float32)
    total += part * part
  inverse = lax.rsqrt(jnp.sum(total) / dim + eps)
  for i in range(dim // chunk):
    at = pl.ds(i * chunk, chunk)
    normed = x_ref[at].astype(jnp.float32) * inverse
    out_ref[at] = normed.astype(out_ref.dtype) * scale_ref[at]


def _chunk(dim: int) -> int:
  """Largest power of two that divides `dim`, at most `_MAX_CHUNK`."""
  return min(dim & -dim, _MAX_CHUNK)


def rms_norm_kernel(x_MD, scale_D, eps: float, *, interpret: bool = False):
  """The GPU form: one program per row, the sum in chunks of fixed size."""
  dim = x_MD.shape[1]
  return pl.pallas_call(
      functools.partial(_kernel, eps=eps, chunk=_chunk(dim)),
      grid=(x_MD.shape[0],),
      in_specs=[
          pl.BlockSpec((None, dim), lambda i: (i, 0)),
          pl.BlockSpec((dim,), lambda i: (0,)),
      ],
      out_specs=pl.BlockSpec((None, dim), lambda i: (i, 0)),
      out_shape=jax.ShapeDtypeStruct(x_MD.shape, x_MD.dtype),
      interpret=interpret,
      name='rms_norm',
  )(x_MD, scale_D)


def rms_norm(
    x_MD: Float[Array, 'M D'],
    scale_D: Float[Array, ' D'],
    eps: float,
    master_D: Float[Array, ' D'] | None = None,
) -> Float[Array, 'M D']:
  """Normalises rows: y = x / sqrt(mean(x^2) + eps) * scale.

  Statistics in float32; the normalised value is rounded to x's dtype before
  the gain, as Hugging Face does.

  Args:
    x_MD: rows, M a multiple of 16.
    scale_D: gain, in x's dtype.
    eps: added to the mean square.
    master_D: receives the gain's derivative in its dtype; its values are not
      read. None where no derivative is wanted.
  """
  if master_D is None:
    return _forward(x_MD, scale_D, eps)
  return _differentiable(x_MD, scale_D, master_D, eps)


def _forward(x_MD, scale_D, eps):
  if on_gpu():
    return rms_norm_kernel(x_MD, scale_D, eps)
  x32 = x_MD.astype(jnp.float32)
  return _reference(x_MD, scale_D, eps, row_sum(x32 * x32) / x_MD.shape[1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _differentiable(x_MD, scale_D, master_D, eps):
  del master_D
  return _forward(x_MD, scale_D, eps)


def _fwd(x_MD, scale_D, master_D, eps):
  like = jnp.zeros((0,), master_D.dtype)
  return _forward(x_MD, scale_D, eps), (x_MD, scale_D, like)


def _bwd(eps, residuals, dy_MD):
  # The order of the backward's sums is free: no log-prob depends on it.
  x_MD, scale_D, like = residuals
  x32, dy32 = x_MD.astype(jnp.float32), dy_MD.astype(jnp.float32)
  mean_square = jnp.mean(x32 * x32, axis=1, keepdims=True)
  inverse = lax.rsqrt(mean_square + eps)
  normed = x32 * inverse
  rounded = normed.astype(x_MD.dtype).astype(jnp.float32)
  dscale_D = jnp.sum(dy32 * rounded, axis=0)
  dnormed = dy32 * scale_D.astype(jnp.float32)[None, :]
  projection = jnp.mean(dnormed * normed, axis=1, keepdims=True)
  dx_MD = inverse * (dnormed - normed * projection)
  return dx_MD.astype(x_MD.dtype), None, dscale_D.astype(like.dtype)


_differentiable.defvjp(_fwd, _bwd)
