"""gate_up, SwiGLU and down fused, for `fp8_delayed` on a GPU.

    y_MG = x W1^T,  h_MF = silu(gate) * up,  z_MD = h W2^T

h exists only in 8 bits (`kernels/swiglu`). The gradient of y reaches gate_up's
dot in 8 bits, as it is and transposed. The cotangent of a bfloat16 array cannot
carry that, so both dots share one derivative. It computes what
`kernels/quantized_dot/linear.py` and XLA's derivative of SwiGLU compute, with
the same functions. Only the work between the dots differs: it is one kernel
(`kernels/swiglu/mosaic_backward_sm90.py`) instead of four.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import TypeAlias, cast

import jax
import jax.numpy as jnp

from jetrl_jax.core.collectives import Axes
from jetrl_jax.core.typing import Array
from jetrl_jax.fp8.products import DeferredScale
from jetrl_jax.fp8.quantization import QTensor
from jetrl_jax.fp8.recipes import Recipe
from jetrl_jax.kernels import gate_up as gate_up_op
from jetrl_jax.kernels.gate_up import reference as dot_and_swiglu
from jetrl_jax.kernels.mlp.reference import Operands
from jetrl_jax.kernels.quantize_transpose import grid
from jetrl_jax.kernels.quantized_dot import linear, per_tensor

# What makes h whole, of this device's columns.
_Gather: TypeAlias = Callable[[Array], Array]


def fits(recipe: Recipe, dims: tuple[int, ...]) -> bool:
  """Whether the fused form takes these dots, see the package's `is_fused`."""
  # The kernel scales the first dot's product as late as the forward does, and
  # counts by the distance between bfloat16 values.
  computes = recipe.may_scale_late and recipe.compute_dtype == 'bfloat16'
  return computes and grid.fits(dims)


def hidden(
    x_MD: Array, low_MD: Array | None, gate_up: Operands, down: Operands
) -> tuple[QTensor, DeferredScale]:
  """Returns (h as down reads it, gate|up before it is scaled).

  Args:
    x_MD: rows in the compute dtype.
    low_MD: x quantised already, as in `linear.dot`; of two copies [2, M, D]
      the product is in two parts.
    gate_up: operands of the first dot; gate's rows come before up's.
    down: operands of the second dot.
  """
  (_, weight, dot_state), (_, _, down_state) = gate_up, down
  # The scope that the module would give.
  with jax.named_scope('gate_up'):
    x8 = per_tensor.quantize_input(x_MD, low_MD, dot_state)
  h_scale = down_state['input']['scale']
  return dot_and_swiglu.hidden(x8, weight, h_scale, x_MD.dtype)


def _gathered(gather: _Gather, h8: QTensor) -> QTensor:
  """Returns the whole of h, in 8 bits; each device computed some columns."""
  return dataclasses.replace(h8, values=gather(h8.values))


def _forward(recipe, axes, x_MD, low_MD, gate_up, down, gather):
  h8, product = hidden(x_MD, low_MD, gate_up, down)
  h8 = _gathered(gather, h8)
  dtype = linear.added_dtype(recipe, down[1], axes.tensor) or x_MD.dtype
  with jax.named_scope('down'):
    z_MD = per_tensor.forward(recipe, h8, down[1], dtype, late_scale=False)
  return z_MD, product.values


def mlp(
    recipe: Recipe,
    x_MD: Array,
    low_MD: Array | None,
    gate_up: Operands,
    down: Operands,
    row_mask_M: Array,
    axes: Axes,
    gather: _Gather,
) -> Array:
  """Returns down(silu(gate) * up), see the package; `low_MD` is x in 8 bits."""
  if gate_up[0] is None:
    return _forward(recipe, axes, x_MD, low_MD, gate_up, down, gather)[0]
  rows = x_MD.shape[0]
  # Kernels of the backward have whole tiles; these rows count as padding.
  x_MD, row_mask_M = _whole_tiles(x_MD), _whole_tiles(row_mask_M)
  if low_MD is not None:
    low_MD = _whole_tiles(low_MD)
  z_MD = _differentiable(recipe, axes, x_MD, low_MD, gate_up, down, row_mask_M)
  return cast(Array, z_MD)[:rows]


def _whole_tiles(x: Array) -> Array:
  """Adds rows of zeros up to whole tiles."""
  missing = -x.shape[0] % grid.TILE
  if not missing:
    return x
  return jnp.concatenate([x, jnp.zeros((missing, *x.shape[1:]), x.dtype)])


def unscaled_mlp(
    x_MD: Array,
    low_MD: Array | None,
    gate_up: Operands,
    down: Operands,
    gather: _Gather,
) -> DeferredScale:
  """The same before its last scales, in float32; without a derivative."""
  (_, weight, dot_state), (_, down_weight, down_state) = gate_up, down
  with jax.named_scope('gate_up'):
    x8 = per_tensor.quantize_input(x_MD, low_MD, dot_state)
  h_scale = down_state['input']['scale']
  h8 = gate_up_op.gate_up(x8, weight, h_scale, x_MD.dtype)
  h8 = _gathered(gather, h8)
  with jax.named_scope('down'):
    return per_tensor.unscaled(h8, down_weight, x_MD.dtype, late_scale=False)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _differentiable(
    recipe, axes, x_MD, low_MD, gate_up, down, row_mask_M
) -> Array:
  del row_mask_M
  operands = x_MD, low_MD, gate_up, down
  return _forward(recipe, axes, *operands, axes.gather_inputs)[0]


def _mlp_fwd(recipe, axes, x_MD, low_MD, gate_up, down, row_mask_M):
  operands = x_MD, low_MD, gate_up, down
  z_MD, product_MG = _forward(recipe, axes, *operands, axes.gather_inputs)
  scale = gate_up[2]['input']['scale']
  with jax.named_scope('gate_up'):
    kept, seen = per_tensor.transpose_input(x_MD, scale, row_mask_M)
  # Empty arrays carry the dtypes that the cotangents must have.
  likes = [jnp.zeros((0,), a.dtype) for a in (x_MD, gate_up[0], down[0])]
  dots = gate_up[1:], down[1:]
  return z_MD, (kept, seen, product_MG, dots, row_mask_M, likes)


def _swiglu_backward():
  """Returns the kernel between the dots."""
  from jetrl_jax.kernels.swiglu import mosaic_backward_sm90

  return mosaic_backward_sm90.backward


def _dgrad(recipe, axes, dz8, weight, dtype) -> Array:
  """Returns the gradient of the columns of h that this device has.

  From all columns of dz, in 8 bits, and the kernel of these columns: the bits
  of one device, and far less to send than the products of own columns of dz
  would be.
  """
  if axes.tensor > 1:
    dz_MD = axes.whole_columns(dz8.row_major.values)
    dz8 = dataclasses.replace(
        dz8, row_major=dataclasses.replace(dz8.row_major, values=dz_MD)
    )
    w_DF = axes.own_inputs(weight.values)
    weight = dataclasses.replace(weight, values=w_DF)
  return per_tensor.dgrad(recipe, dz8, weight, dtype)


def _mlp_bwd(recipe, axes, residuals, dz_MD):
  kept_x, seen_x, product_MG, dots, row_mask_M, likes = residuals
  (weight, dot_state), (down_weight, down_state) = dots
  x_like, master_like, down_like = likes
  dz_MD = dz_MD.astype(x_like.dtype)
  with jax.named_scope('down'):
    dz8, seen_dz = per_tensor.quantize_grad(
        recipe, dz_MD, down_weight, down_state, row_mask_M
    )
    dh_MF = _dgrad(recipe, axes, dz8, down_weight, x_like.dtype)
  h_scale, dy_scale = (
      down_state['input']['scale'],
      dot_state['output_grad']['scale'],
  )
  h_transposed, dy_transposed = _swiglu_backward()(
      product_MG,
      dh_MF,
      jnp.stack([kept_x.scale * weight.scale, h_scale, dy_scale]),
      row_mask_M,
      recipe.grad_dtype,
  )
  h8, (amax_h, sums_h) = per_tensor.as_input(h_transposed, h_scale, row_mask_M)
  h8 = dataclasses.replace(h8, values=axes.gather_transposed(h8.values))
  seen_h = amax_h, axes.psum_shared(sums_h)
  dy8, seen_dy = per_tensor.as_grad(dy_transposed, dy_scale, row_mask_M)
  with jax.named_scope('down'):
    dw_down = per_tensor.wgrad(recipe, dz8, h8, down_like.dtype)
  with jax.named_scope('gate_up'):
    dx_MD, dw = per_tensor.backward(
        recipe, dy8, kept_x, weight, x_like.dtype, master_like.dtype
    )
  dot_state_ct = linear.dot_state_cotangent(
      dot_state, {'input': seen_x, 'output_grad': seen_dy}
  )
  down_state_ct = linear.dot_state_cotangent(
      down_state, {'input': seen_h, 'output_grad': seen_dz}
  )
  return (
      dx_MD,
      None,
      (dw, None, dot_state_ct),
      (dw_down, None, down_state_ct),
      None,
  )


_differentiable.defvjp(_mlp_fwd, _mlp_bwd)
