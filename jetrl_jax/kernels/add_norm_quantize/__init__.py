"""Adds to the residual stream, normalises, and quantises for the next dot.

    r_MD = x_MD + product_MD * scales
    y_MD = r / sqrt(mean_D(r^2) + eps) * gain
    q_MD = E4M3(clip(y / step))

r is added in float32 and rounded once to x's dtype. Statistics are float32; the
normalised value is rounded to x's dtype before the gain, as Hugging Face does.
q is for a dot whose scale is known.

The sum of squares has one order for every number of rows. XLA's own row
reduction changes its order with whatever it is fused with: on an H200 that was
0.0002% of a norm's outputs, and 21% of the log-probs after 28 layers.

Training and prefill call `rms_norm`, which has a derivative; a decode step
calls `add_norm_quantize`, which has the same bits.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jetrl_jax.core.typing import Array, Float
from jetrl_jax.fp8.products import DeferredScale
from jetrl_jax.kernels import dispatch
from jetrl_jax.kernels.add_norm_quantize import reference


def add_norm_quantize(
    x_MD: Array,
    gain_D: Array,
    eps: float,
    step: Array | None = None,
    added: DeferredScale | None = None,
    *,
    copies: int = 1,
) -> tuple[Array, Array | None, Array | None]:
  """Returns (r, y, q) of the module docstring; without a derivative.

  Args:
    x_MD: rows in the compute dtype, M a multiple of 16.
    gain_D: in x's dtype.
    eps: added to the mean square.
    step: float32 scalar, the scale on which y is quantised; None leaves it.
    added: what the rows get first, [M, D]; None for nothing.
    copies: of q, [copies, M, D]; of one [M, D].

  Returns:
    r: x itself where nothing is added.
    y: None where it is quantised and something was added: a decode step reads
      only q.
    q: None without `step`.
  """
  match dispatch.implementation('add_norm_quantize'):
    case 'triton':
      from jetrl_jax.kernels.add_norm_quantize import triton

      run = triton.rms_norm_kernel
    case _:
      run = reference.add_norm_quantize
  return run(x_MD, gain_D, eps, step, added, copies=copies)


def rms_norm(
    x_MD: Float[Array, 'M D'],
    scale_D: Float[Array, ' D'],
    eps: float,
    master_D: Float[Array, ' D'] | None = None,
    step: Float[Array, ''] | None = None,
) -> tuple[Float[Array, 'M D'], Array | None]:
  """Normalises rows: y = x / sqrt(mean(x^2) + eps) * scale.

  Args:
    x_MD: rows, M a multiple of 16.
    scale_D: gain, in x's dtype.
    eps: added to the mean square.
    master_D: receives the gain's derivative in its dtype; its values are not
      read. None where no derivative is wanted.
    step: scale on which an FP8 dot will quantise y, where that is known.

  Returns:
    (y, its E4M3 values q; None without `step`, and where the reference runs:
    the dot quantises then)
  """
  if master_D is None:
    return _forward(x_MD, scale_D, step, eps)
  return _differentiable(x_MD, scale_D, master_D, step, eps)


def _forward(x_MD, scale_D, step, eps):
  if dispatch.has_kernel('add_norm_quantize'):
    _, y_MD, low_MD = add_norm_quantize(x_MD, scale_D, eps, step)
    assert y_MD is not None  # As nothing was added.
    return y_MD, low_MD
  return reference.rms_norm(x_MD, scale_D, eps), None


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


# The name that `models/layers.py` calls it by.
rms_norm_kernel = add_norm_quantize
