"""The dot of every linear layer, and its gradient.

    FProp  Y_MO  = X_MI W_OI^T       E4M3 x E4M3
    DGrad  dX_MI = dY_MO W_OI        grad_format x E4M3 (the same FP8 weights)
    WGrad  dW_OI = dY_MO^T X_MI      grad_format x E4M3, written in float32

The FP8 weight enters as an argument without a derivative; the derivative goes
to the master, whose values the forward never reads, so dW never has an FP8
dtype. What the backward pass observes (amax, health) leaves as the
cotangent of the slot: this is the only file that may do so, and each slot
serves one dot. Micro-batches must be differentiated one by one: within one
`jax.grad` the cotangents of two uses would be added, and an amax is not a sum.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from jetrl_jax.fp8 import formats, health
from jetrl_jax.fp8.quantization import QTensor, dequantize, quantize
from jetrl_jax.fp8.recipes import Recipe
from jetrl_jax.typing import Array, PyTree

# Contract the last dim of both: FP8 GEMMs on Hopper want both operands
# contraction-minor, which is why kernels are stored [out, in].
_NT = (((1,), (1,)), ((), ()))
_NN = (((1,), (0,)), ((), ()))
_TN = (((0,), (0,)), ((), ()))


@dataclasses.dataclass(frozen=True)
class _Spec:
  grad_dtype: str  # name in formats.FORMATS
  out_dtype: str
  power_of_two: bool
  calibrating: bool


def _scaled_dot(a, b, dims, scale, out_dtype, power_of_two):
  """(a . b) * scale, rounded once to `out_dtype`."""
  if power_of_two:
    # A power of two commutes with the rounding, so the GEMM may write the
    # narrow type: an F32 output costs up to a quarter of its speed.
    product = lax.dot_general(a, b, dims, preferred_element_type=out_dtype)
    return product * scale.astype(out_dtype)
  product = lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)
  return (product * scale).astype(out_dtype)


def _forward(spec, x_MI, weight, slot):
  x8_MI = quantize(x_MI, slot['input']['scale'], formats.E4M3)
  if spec.calibrating:
    kernel_OI = dequantize(weight, x_MI.dtype)
    y_MO = lax.dot_general(
        x_MI, kernel_OI, _NT, preferred_element_type=spec.out_dtype
    )
    return y_MO, x8_MI
  y_MO = _scaled_dot(
      x8_MI,
      weight.values,
      _NT,
      slot['input']['scale'] * weight.scale,
      spec.out_dtype,
      spec.power_of_two,
  )
  return y_MO, x8_MI


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fp8_dot(spec, x_MI, master_OI, weight, slot, row_mask_M):
  del master_OI, row_mask_M
  return _forward(spec, x_MI, weight, slot)[0]


def _fp8_dot_fwd(spec, x_MI, master_OI, weight, slot, row_mask_M):
  y_MO, x8_MI = _forward(spec, x_MI, weight, slot)
  seen = health.measure(x_MI, x8_MI, slot['input']['scale'], row_mask_M)
  high = x_MI if spec.calibrating else None
  # An empty array carries the dtypes that the cotangents must have.
  like = (jnp.zeros((0,), x_MI.dtype), jnp.zeros((0,), master_OI.dtype))
  return y_MO, (x8_MI, weight, slot, row_mask_M, seen, high, like)


def _slot_cotangent(slot: PyTree, seen: dict) -> PyTree:
  """Zeros shaped like the slot, with the observations in their places."""
  zeros = jax.tree.map(jnp.zeros_like, slot)
  for operand, (amax, sums) in seen.items():
    history = zeros[operand]['amax_history'].at[0].set(amax)
    zeros[operand] = zeros[operand] | {
        'amax_history': history,
        'health': sums,
    }
  return zeros


def _fp8_dot_bwd(spec, residuals, dy_MO):
  x8_MI, weight, slot, row_mask_M, seen_input, high_x, like = residuals
  x_like, master_like = like
  scale_g = slot['output_grad']['scale']
  grad_dtype = formats.format_named(spec.grad_dtype)
  dy8_MO = quantize(dy_MO, scale_g, grad_dtype)
  seen_grad = health.measure(dy_MO, dy8_MO, scale_g, row_mask_M)
  if spec.calibrating:
    kernel_OI = dequantize(weight, dy_MO.dtype)
    dx_MI = lax.dot_general(
        dy_MO, kernel_OI, _NN, preferred_element_type=x_like.dtype
    )
    dw_OI = lax.dot_general(
        dy_MO, high_x, _TN, preferred_element_type=jnp.float32
    )
  else:
    dx_MI = _scaled_dot(
        dy8_MO,
        weight.values,
        _NN,
        scale_g * weight.scale,
        x_like.dtype,
        spec.power_of_two,
    )
    dw_OI = _scaled_dot(
        dy8_MO,
        x8_MI,
        _TN,
        scale_g * slot['input']['scale'],
        jnp.float32,
        spec.power_of_two,
    )
  slot_ct = _slot_cotangent(
      slot, {'input': seen_input, 'output_grad': seen_grad}
  )
  return dx_MI, dw_OI.astype(master_like.dtype), None, slot_ct, None


_fp8_dot.defvjp(_fp8_dot_fwd, _fp8_dot_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _high_dot(out_dtype, x_MI, master_OI, kernel_OI):
  del master_OI
  return lax.dot_general(x_MI, kernel_OI, _NT, preferred_element_type=out_dtype)


def _high_dot_fwd(out_dtype, x_MI, master_OI, kernel_OI):
  like = jnp.zeros((0,), master_OI.dtype)
  return _high_dot(out_dtype, x_MI, master_OI, kernel_OI), (
      x_MI,
      kernel_OI,
      like,
  )


def _high_dot_bwd(out_dtype, residuals, dy_MO):
  del out_dtype
  x_MI, kernel_OI, like = residuals
  # Without this cast the logits' float32 cotangent would turn both backward
  # GEMMs of the head into float32 ones.
  dy_MO = dy_MO.astype(x_MI.dtype)
  dx_MI = lax.dot_general(
      dy_MO, kernel_OI, _NN, preferred_element_type=x_MI.dtype
  )
  dw_OI = lax.dot_general(dy_MO, x_MI, _TN, preferred_element_type=jnp.float32)
  return dx_MI, dw_OI.astype(like.dtype), None


_high_dot.defvjp(_high_dot_fwd, _high_dot_bwd)


def dot(
    recipe: Recipe,
    x_MI: Array,
    master_OI: Array | None,
    weight: QTensor | Array,
    slot: PyTree | None,
    row_mask_M: Array,
    *,
    out_dtype=None,
) -> Array:
  """Multiplies rows by a kernel, in FP8 when the weight is quantised.

  Args:
    recipe: formats of the backward dots.
    x_MI: rows in the compute dtype; M must be a multiple of 16 (row results
      would depend on M otherwise).
    master_OI: receives dW in its dtype; its values are not read. None where no
      derivative is wanted (rollout).
    weight: `QTensor` or an array in the compute dtype, [out, in].
    slot: the dot's scales, for a `QTensor`.
    row_mask_M: float32, 0 on padding rows, which the amax must not see.
    out_dtype: dtype of the result, by default that of x.

  Returns:
    y_MO.
  """
  if x_MI.shape[0] % 16:
    raise ValueError(f'a dot has {x_MI.shape[0]} rows; pad to a multiple of 16')
  out_dtype = jnp.dtype(out_dtype or x_MI.dtype).name
  if not isinstance(weight, QTensor):
    if master_OI is None:
      return lax.dot_general(
          x_MI, weight, _NT, preferred_element_type=out_dtype
      )
    return _high_dot(out_dtype, x_MI, master_OI, weight)
  spec = _Spec(
      recipe.grad_format,
      out_dtype,
      recipe.power_of_two_scales,
      recipe.calibrating,
  )
  if master_OI is None:
    return _forward(spec, x_MI, weight, slot)[0]
  return _fp8_dot(spec, x_MI, master_OI, weight, slot, row_mask_M)
