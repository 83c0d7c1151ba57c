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
calls `joined`, which has the same bits.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from jetrl_jax.core.typing import Array, Float
from jetrl_jax.fp8.products import AS_ARRAY, DeferredScale, Reads, Rows
from jetrl_jax.kernels import dispatch, stands_for
from jetrl_jax.kernels.add_norm_quantize import reference


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Unadded:
  """The residual stream, and a product that the next norm adds to it.

  Attributes:
    x_MD: the stream so far.
    delta: [M, D] in float32.
  """

  x_MD: Array
  delta: DeferredScale


def add(x_MD: Array, delta: Array | DeferredScale) -> Array | Unadded:
  """Returns x + delta, [M, D], or both where the next norm's kernel adds."""
  if not isinstance(delta, DeferredScale):
    return x_MD + delta
  x_MD = stands_for.postponed(
      lambda x_MD, delta: x_MD,
      lambda x_MD, delta: x_MD + delta.values,
      x_MD,
      delta,
      finished=(
          stands_for.shape(x_MD),
          stands_for.finished(delta, x_MD.dtype),
      ),
  )
  return Unadded(x_MD, delta)


def add_norm_quantize(
    residual: Array | Unadded,
    gain_D: Array,
    eps: float,
    master_D: Array | None = None,
    reads: Reads = AS_ARRAY,
) -> tuple[Array, Rows]:
  """Returns (r [M, D], the rows y and q for the dot that follows).

  Args:
    residual: r [M, D], or what `add` left to be added.
    gain_D: in r's dtype.
    eps: added to the mean square.
    master_D: receives the gain's derivative in its dtype; its values are not
      read. None where no derivative is wanted.
    reads: what the dot that follows wants.
  """
  if not isinstance(residual, Unadded):
    y_MD, q_MD = rms_norm(residual, gain_D, eps, master_D, reads.scale)
    return residual, Rows(y_MD, q_MD)
  r_MD, y_MD, q_MD = joined(
      residual.x_MD,
      gain_D,
      eps,
      reads.scale,
      residual.delta,
      copies=reads.parts,
  )
  shape = jax.ShapeDtypeStruct(r_MD.shape, r_MD.dtype)
  return r_MD, Rows(shape if y_MD is None else y_MD, q_MD)


def joined(
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
  match name := dispatch.implementation('add_norm_quantize'):
    case 'triton':
      from jetrl_jax.kernels.add_norm_quantize import triton

      function = triton.rms_norm_kernel
    case _:
      function = reference.joined

  def run(x_MD, gain_D, step, added):
    return function(x_MD, gain_D, eps, step, added, copies=copies)

  def norm(x_MD, gain_D, step, added):
    # `add` stands for the sum.
    r_MD, y_MD, q_MD = reference.joined(x_MD, gain_D, eps, step)
    return r_MD, None if added and step is not None else y_MD, q_MD

  operands = x_MD, gain_D, step, added
  return stands_for.kernel('add_norm_quantize', name, run, norm, *operands)


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


def _forward(x_MD, scale_D, step, eps) -> tuple[Array, Array | None]:
  if dispatch.has_kernel('add_norm_quantize'):
    _, y_MD, q_MD = joined(x_MD, scale_D, eps, step)
    assert y_MD is not None  # As nothing was added.
    return y_MD, q_MD
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
