"""Adds to the residual stream, normalises, and quantises for the next dot.

    r_MD = x_MD + product_MD * scales
    y_MD = r / sqrt(mean_D(r^2) + eps) * gain
    q_MD = E4M3(clip(y / out_scale))

r is added in float32 and rounded once to x's dtype. Statistics are float32; the
normalised value is rounded to x's dtype before the gain, as Hugging Face does.
q is made for a dot whose input scale is known.

The sum of squares has one order for every number of rows. XLA's own row
reduction changes its order with whatever it is fused with: on an H200 that was
0.0002% of a norm's outputs, and 21% of the log-probs after 28 layers.

Three functions, one arithmetic:

    add_norm_quantize  what the model calls
    rms_norm           without an addition; has a derivative (training, prefill)
    forward            all three steps; has no derivative (a decode step)
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from jetrl_jax.core.typing import Array, Float
from jetrl_jax.fp8.products import UNQUANTIZED, DeferredScale, RowFormat, Rows
from jetrl_jax.kernels import dispatch, stands_for
from jetrl_jax.kernels.add_norm_quantize import reference


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PendingAdd:
  """The residual stream, and a product that the next norm will add to it.

  Attributes:
    x_MD: the stream before the addition.
    delta: what is to be added, [M, D] in float32.
  """

  x_MD: Array
  delta: DeferredScale


def add(x_MD: Array, delta: Array | DeferredScale) -> Array | PendingAdd:
  """Returns x + delta, [M, D], or both if the next norm's kernel adds them."""
  if not isinstance(delta, DeferredScale):
    return x_MD + delta
  x_MD = stands_for.deferred(
      lambda x_MD, delta: x_MD,
      lambda x_MD, delta: x_MD + delta.values,
      x_MD,
      delta,
      finished=(
          stands_for.shape(x_MD),
          stands_for.finished(delta, x_MD.dtype),
      ),
  )
  return PendingAdd(x_MD, delta)


def add_norm_quantize(
    residual: Array | PendingAdd,
    gain_D: Array,
    eps: float,
    master_D: Array | None = None,
    row_format: RowFormat = UNQUANTIZED,
) -> tuple[Array, Rows]:
  """Returns (r [M, D], the rows y and q for the dot that follows).

  Args:
    residual: r [M, D], or what `add` left to be added.
    gain_D: in r's dtype.
    eps: added to the mean square.
    master_D: receives the gain's derivative in its dtype; its values are not
      read. None if no derivative is wanted.
    row_format: the form in which the dot that follows wants its rows.
  """
  if not isinstance(residual, PendingAdd):
    y_MD, q_MD = rms_norm(residual, gain_D, eps, master_D, row_format.scale)
    return residual, Rows(y_MD, q_MD)
  r_MD, y_MD, q_MD = forward(
      residual.x_MD,
      gain_D,
      eps,
      row_format.scale,
      residual.delta,
      copies=row_format.copies,
  )
  shape = jax.ShapeDtypeStruct(r_MD.shape, r_MD.dtype)
  return r_MD, Rows(shape if y_MD is None else y_MD, q_MD)


def forward(
    x_MD: Array,
    gain_D: Array,
    eps: float,
    out_scale: Array | None = None,
    delta: DeferredScale | None = None,
    *,
    copies: int = 1,
) -> tuple[Array, Array | None, Array | None]:
  """Returns (r, y, q) of the module docstring; without a derivative.

  Args:
    x_MD: rows in the compute dtype, M a multiple of 16.
    gain_D: in x's dtype.
    eps: added to the mean square.
    out_scale: float32 scalar, the scale on which y is quantised; None makes no
      q.
    delta: what is added to the rows first, [M, D]; None adds nothing.
    copies: number of equal copies of q: [copies, M, D], or [M, D] for one.

  Returns:
    r: x itself if nothing is added.
    y: None if something was added and y is quantised: a decode step reads only
      q.
    q: None without `out_scale`.
  """
  name, function = _implementation(x_MD.shape[1]), reference.forward
  if name != dispatch.REFERENCE:
    from jetrl_jax.kernels.add_norm_quantize import mosaic_sm90

    function = mosaic_sm90.forward

  def run(x_MD, gain_D, out_scale, delta):
    return function(x_MD, gain_D, eps, out_scale, delta, copies=copies)

  def norm_and_quantize(x_MD, gain_D, out_scale, delta):
    # Without the sum, because `add` already stands for it.
    r_MD, y_MD, q_MD = reference.forward(x_MD, gain_D, eps, out_scale)
    return r_MD, None if delta and out_scale is not None else y_MD, q_MD

  operands = x_MD, gain_D, out_scale, delta
  return stands_for.kernel(
      'add_norm_quantize', name, run, norm_and_quantize, *operands
  )


def _implementation(dim: int) -> str:
  """Returns the implementation for rows of `dim` channels, any number."""
  name = dispatch.implementation('add_norm_quantize')
  if name == 'mosaic_sm90':
    from jetrl_jax.kernels.add_norm_quantize import mosaic_sm90

    if not mosaic_sm90.fits(dim):
      return dispatch.REFERENCE
  return name


def rms_norm(
    x_MD: Float[Array, 'M D'],
    gain_D: Float[Array, ' D'],
    eps: float,
    master_D: Float[Array, ' D'] | None = None,
    out_scale: Float[Array, ''] | None = None,
) -> tuple[Float[Array, 'M D'], Array | None]:
  """Normalises rows: y = x / sqrt(mean(x^2) + eps) * gain.

  Args:
    x_MD: rows, M a multiple of 16.
    gain_D: in x's dtype.
    eps: added to the mean square.
    master_D: receives the gain's derivative in its dtype; its values are not
      read. None if no derivative is wanted.
    out_scale: scale on which an FP8 dot will quantise y, if that is known.

  Returns:
    (y, its E4M3 values q). q is None without `out_scale`, and also when the
    reference runs, because then the dot quantises.
  """
  if master_D is None:
    return _norm(x_MD, gain_D, out_scale, eps)
  return _differentiable(x_MD, gain_D, master_D, out_scale, eps)


def _norm(
    x_MD: Array, gain_D: Array, out_scale: Array | None, eps: float
) -> tuple[Array, Array | None]:
  if dispatch.has_kernel('add_norm_quantize'):
    _, y_MD, q_MD = forward(x_MD, gain_D, eps, out_scale)
    assert y_MD is not None  # Nothing was added.
    return y_MD, q_MD
  return reference.rms_norm(x_MD, gain_D, eps), None


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _differentiable(x_MD, gain_D, master_D, out_scale, eps):
  del master_D
  return _norm(x_MD, gain_D, out_scale, eps)


def _fwd(x_MD, gain_D, master_D, out_scale, eps):
  like = jnp.zeros((0,), master_D.dtype)
  return _norm(x_MD, gain_D, out_scale, eps), (x_MD, gain_D, like)


def _bwd(eps, residuals, cotangents):
  # The order of the backward's sums is free: no log-prob depends on it.
  x_MD, gain_D, like = residuals
  dy_MD, _ = cotangents
  x32, dy32 = x_MD.astype(jnp.float32), dy_MD.astype(jnp.float32)
  mean_square = jnp.mean(x32 * x32, axis=1, keepdims=True)
  inverse = lax.rsqrt(mean_square + eps)
  normed = x32 * inverse
  rounded = normed.astype(x_MD.dtype).astype(jnp.float32)
  dgain_D = jnp.sum(dy32 * rounded, axis=0)
  dnormed = dy32 * gain_D.astype(jnp.float32)[None, :]
  projection = jnp.mean(dnormed * normed, axis=1, keepdims=True)
  dx_MD = inverse * (dnormed - normed * projection)
  return dx_MD.astype(x_MD.dtype), None, dgain_D.astype(like.dtype), None


_differentiable.defvjp(_fwd, _bwd)
