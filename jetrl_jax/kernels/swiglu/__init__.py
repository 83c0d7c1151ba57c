"""SwiGLU of gate|up, quantised for the next dot if its scale is known.

    h_MF = silu(gate_MF * s) * (up_MF * s),    silu(z) = z / (1 + exp(-z))
    q_MF = E4M3(clip(h / out_scale))

h is computed in float32 and rounded once to the dtype of gate|up. s is the
product of the dot's scales, which are powers of two. Implementations differ in
their exp, so rollout and training must run the same one: both ask `has_kernel`.
The derivative is that of the reference, because no gradient needs the kernel's
exp.
"""

import jax

from jetrl_jax.core.typing import Array
from jetrl_jax.fp8.products import DeferredScale
from jetrl_jax.kernels import dispatch, stands_for
from jetrl_jax.kernels.swiglu import reference


def has_kernel(columns: int) -> bool:
  """Whether the kernel computes h of so many columns, for all row counts."""
  return _kernel(columns) is not None


def _kernel(columns: int):
  """Returns the module of the kernel that makes h; None for the reference."""
  if not dispatch.has_kernel('swiglu'):
    return None
  from jetrl_jax.kernels.swiglu import mosaic_sm90

  return mosaic_sm90 if mosaic_sm90.fits(columns) else None


def swiglu_of(product: DeferredScale, out_scale: Array | None = None) -> Array:
  """Returns h [M, F] of an unscaled product; has no derivative.

  Args:
    product: [M, 2 F], or in two parts [2, M, F]; its scales are powers of two.
    out_scale: scale on which h is quantised; None leaves h in the product's
      dtype.
  """
  values = product.values
  kernel = _kernel(values.size // values.shape[-2] // 2)
  name = dispatch.implementation('swiglu') if kernel else dispatch.REFERENCE
  run = (kernel or reference).swiglu_of
  return stands_for.kernel(
      'swiglu', name, run, _of_finished, product, out_scale
  )


def _of_finished(product: DeferredScale, out_scale: Array | None) -> Array:
  """Returns the reference's result for a product that is already scaled."""
  return reference.swiglu_of(DeferredScale(values=product.values), out_scale)


@jax.custom_vjp
def _by_kernel(y_MG: Array) -> Array:
  return swiglu_of(DeferredScale(values=y_MG))


def _by_kernel_fwd(y_MG):
  return _by_kernel(y_MG), y_MG


def _by_kernel_bwd(y_MG, dh_MF):
  return jax.vjp(reference.swiglu, y_MG)[1](dh_MF)


_by_kernel.defvjp(_by_kernel_fwd, _by_kernel_bwd)


def swiglu(y_MG: Array | DeferredScale) -> Array:
  """Returns silu(gate) * up, [M, F], rounded once to the dtype of gate|up.

  Args:
    y_MG: gate|up [M, 2 F], or in a decode step the unscaled product.
  """
  if isinstance(y_MG, DeferredScale):
    return swiglu_of(y_MG)
  by_kernel = has_kernel(y_MG.shape[1] // 2)
  return _by_kernel(y_MG) if by_kernel else reference.swiglu(y_MG)
