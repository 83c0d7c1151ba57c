"""The dot of every linear layer, and its gradient.

    FProp  Y_MO  = X_MI W_OI^T
    DGrad  dX_MI = dY_MO W_OI
    WGrad  dW_OI = dY_MO^T X_MI

How each is computed is the recipe's: `per_tensor.py` (fp8_delayed),
`per_token.py` (fp8_token, int8), `per_block.py` (fp8_block), `per_row_fake.py`
(fake_*), or one dot in the compute dtype.

The 8-bit weight enters as an argument without a derivative; the derivative goes
to the master, whose values the forward never reads, so dW never has an 8-bit
dtype. What the backward pass observes (amax, health) leaves as the cotangent of
the dot state, which only `dot_state_cotangent` makes, and each dot state serves
one dot. Micro-batches must be differentiated one by one: within one `jax.grad`
the cotangents of two uses would be added, and an amax is not a sum (the head,
which is taken in chunks, has `scaling_state.spread` for it).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from jetrl_jax.core.compilation import on_gpu
from jetrl_jax.core.typing import Array, PyTree
from jetrl_jax.fp8 import health
from jetrl_jax.fp8.products import NT, DeferredScale, high_backward
from jetrl_jax.fp8.quantization import QTensor, dequantize
from jetrl_jax.fp8.recipes import FAKE_RECIPES, Recipe
from jetrl_jax.kernels import stands_for
from jetrl_jax.kernels.quantized_dot import (
    per_block,
    per_row_fake,
    per_tensor,
    per_token,
)


def added_dtype(recipe: Recipe, weight, tensor: int):
  """Returns the dtype of a product of which devices have some columns each.

  It is added to the residual stream. On one device a GPU's GEMM does so, and
  rounds the sum alone. Devices that share the columns add parts of the stream,
  over which XLA lets the GEMM write, and then cuBLASLt rounds the product as
  well. So they take it in float32, and `Axes.add` rounds the sum.

  Args:
    recipe: how the dot computes.
    weight: its kernel, quantised or not.
    tensor: number of devices that share it.

  Returns:
    float32, or None for the recipe's.
  """
  if tensor == 1 or not on_gpu():
    return None
  is_rounded = isinstance(weight, QTensor) and not (
      recipe.is_delayed and recipe.power_of_two_scales
  )
  return None if is_rounded else jnp.float32


def _quantize_input(recipe: Recipe, x_MI, fp8_MI, dot_state: PyTree) -> QTensor:
  match recipe.name:
    case 'fp8_delayed':
      return per_tensor.quantize_input(x_MI, fp8_MI, dot_state)
    case 'fp8_token' | 'int8':
      return per_token.quantize_rows(recipe, x_MI)
    case 'fp8_block':
      return per_block.quantize_input(recipe, x_MI)
    case name if name in FAKE_RECIPES:
      return per_row_fake.quantize_rows(recipe, x_MI)
  raise AssertionError(recipe.name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _StaticArgs:
  """The arguments of a dot that are no arrays.

  Attributes:
    recipe: how it computes.
    out_dtype: name of the result's dtype.
    late_scale: see `scaled_dot`.
  """

  recipe: Recipe
  out_dtype: str
  late_scale: bool


def _not_before(x_MI: Array, weight: QTensor) -> QTensor:
  """Returns the weight, for which the rows must be there.

  XLA would otherwise widen the weights of all layers before the first one is
  read, since they wait for nothing, and keep them: 13 GiB of a 14B. A barrier
  is gone when it orders them.
  """
  first = x_MI[0, 0].astype(jnp.float32)
  # The value is always the scale, but XLA cannot know that.
  scale = jnp.where(jnp.isnan(first), first, weight.scale)
  return dataclasses.replace(weight, scale=scale)


def _forward(static, x_MI, fp8_MI, weight, dot_state) -> tuple[Array, QTensor]:
  """Returns the result, and the rows as they were quantised."""
  recipe, out_dtype = static.recipe, static.out_dtype
  x8 = _quantize_input(recipe, x_MI, fp8_MI, dot_state)
  if recipe.calibrating:
    kernel_OI = dequantize(_not_before(x_MI, weight), x_MI.dtype)
    y_MO = lax.dot_general(
        x_MI, kernel_OI, NT, preferred_element_type=out_dtype
    )
    return y_MO, x8
  match recipe.name:
    case 'fp8_delayed':
      y_MO = per_tensor.forward(
          recipe, x8, weight, out_dtype, late_scale=static.late_scale
      )
    case 'fp8_token':
      y_MO = per_token.forward(recipe, x8, weight, out_dtype)
    case 'int8':
      y_MO = per_token.forward_int8(x8, weight, out_dtype)
    case 'fp8_block':
      y_MO = per_block.forward(recipe, x8, weight, out_dtype)
    case name if name in FAKE_RECIPES:
      y_MO = per_row_fake.forward(recipe, x8, weight, out_dtype)
    case name:
      raise AssertionError(name)
  return y_MO, x8


def _keep_input(
    recipe, x_MI, x8, weight, row_mask_M
) -> tuple[QTensor, health.OperandStats]:
  """Returns (the rows as the backward reads them, what they show)."""
  if recipe.is_delayed:
    return per_tensor.keep_input(x_MI, x8, weight, row_mask_M)
  return x8, health.measure(x_MI, x8, row_mask_M)


def _quantize_grad(recipe: Recipe, dy_MO, weight, dot_state, row_mask_M):
  """Returns (dY as the backward reads it, what it shows).

  The first is None for a recipe whose backward does not quantise.
  """
  match recipe.name:
    case 'fp8_delayed':
      return per_tensor.quantize_grad(
          recipe, dy_MO, weight, dot_state, row_mask_M
      )
    case 'fp8_token':
      return per_token.quantize_grad(recipe, dy_MO, weight, row_mask_M)
    case 'fp8_block':
      return per_block.quantize_grad(recipe, dy_MO, row_mask_M)
    case name if name == 'int8' or name in FAKE_RECIPES:
      nothing = jnp.zeros((len(health.SUMS),), jnp.float32)
      return None, (health.amax_of_rows(dy_MO, row_mask_M), nothing)
  raise AssertionError(recipe.name)


def _backward(
    recipe, dy_MO, dy8, kept_x, weight, x_dtype, w_dtype
) -> tuple[Array, Array]:
  match recipe.name:
    case 'fp8_delayed':
      return per_tensor.backward(recipe, dy8, kept_x, weight, x_dtype, w_dtype)
    case 'fp8_token':
      return per_token.backward(recipe, dy_MO, dy8, kept_x, weight, x_dtype)
    case 'fp8_block':
      return per_block.backward(recipe, dy8, kept_x, weight, x_dtype)
    case name if name == 'int8' or name in FAKE_RECIPES:
      return per_token.backward_dequantized(dy_MO, kept_x, weight, x_dtype)
  raise AssertionError(recipe.name)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fp8_dot(static, x_MI, fp8_MI, master_OI, weight, dot_state, row_mask_M):
  del master_OI, row_mask_M
  return _forward(static, x_MI, fp8_MI, weight, dot_state)[0]


def _fp8_dot_fwd(
    static, x_MI, fp8_MI, master_OI, weight, dot_state, row_mask_M
):
  recipe = static.recipe
  y_MO, x8 = _forward(static, x_MI, fp8_MI, weight, dot_state)
  kept, seen = _keep_input(recipe, x_MI, x8, weight, row_mask_M)
  high = x_MI if recipe.calibrating else None
  # An empty array carries the dtypes that the cotangents must have.
  like = (jnp.zeros((0,), x_MI.dtype), jnp.zeros((0,), master_OI.dtype))
  return y_MO, (kept, weight, dot_state, row_mask_M, seen, high, like)


def dot_state_cotangent(dot_state: PyTree, seen: dict) -> PyTree:
  """Zeros shaped like the dot state, with the observations in their places."""
  zeros = jax.tree.map(jnp.zeros_like, dot_state)
  for operand, (amax, sums) in seen.items():
    entry = zeros[operand]
    if 'amax' in entry:
      observed = {'amax': amax}
    else:
      observed = {'amax_history': entry['amax_history'].at[0].set(amax)}
    zeros[operand] = entry | observed | {'health': sums}
  return zeros


def _fp8_dot_bwd(static, residuals, dy_MO):
  recipe = static.recipe
  kept_x, weight, dot_state, row_mask_M, seen_input, high_x, like = residuals
  x_like, master_like = like
  # The logits' cotangent is float32, twice what its operands need.
  dy_MO = dy_MO.astype(x_like.dtype)
  dy8, seen_grad = _quantize_grad(recipe, dy_MO, weight, dot_state, row_mask_M)
  if recipe.calibrating:
    kernel_OI = dequantize(weight, dy_MO.dtype)
    dx_MI, dw_OI = high_backward(dy_MO, high_x, kernel_OI, x_like.dtype)
  else:
    dx_MI, dw_OI = _backward(
        recipe, dy_MO, dy8, kept_x, weight, x_like.dtype, master_like.dtype
    )
  dot_state_ct = dot_state_cotangent(
      dot_state, {'input': seen_input, 'output_grad': seen_grad}
  )
  return dx_MI, None, dw_OI.astype(master_like.dtype), None, dot_state_ct, None


_fp8_dot.defvjp(_fp8_dot_fwd, _fp8_dot_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _high_dot(out_dtype, x_MI, master_OI, kernel_OI):
  del master_OI
  return lax.dot_general(x_MI, kernel_OI, NT, preferred_element_type=out_dtype)


def _high_dot_fwd(out_dtype, x_MI, master_OI, kernel_OI):
  residuals = x_MI, kernel_OI, jnp.zeros((0,), master_OI.dtype)
  return _high_dot(out_dtype, x_MI, master_OI, kernel_OI), residuals


def _high_dot_bwd(out_dtype, residuals, dy_MO):
  del out_dtype
  x_MI, kernel_OI, like = residuals
  # Without this cast the logits' float32 cotangent would turn both backward
  # GEMMs of the head into float32 ones.
  dy_MO = dy_MO.astype(x_MI.dtype)
  dx_MI, dw_OI = high_backward(dy_MO, x_MI, kernel_OI, x_MI.dtype)
  return dx_MI, dw_OI.astype(like.dtype), None


_high_dot.defvjp(_high_dot_fwd, _high_dot_bwd)


def dot(
    recipe: Recipe,
    x_MI: Array,
    master_OI: Array | None,
    weight: QTensor | Array,
    dot_state: PyTree | None,
    row_mask_M: Array,
    *,
    out_dtype=None,
    fp8_MI: Array | None = None,
    late_scale: bool = False,
) -> Array:
  """Multiplies rows by a kernel, in 8 bits when the weight is quantised.

  Args:
    recipe: how a quantised dot computes, forward and backward.
    x_MI: rows in the compute dtype; M must be a multiple of 16 (row results
      would depend on M otherwise).
    master_OI: receives dW in its dtype; its values are not read. None where no
      derivative is wanted (rollout).
    weight: `QTensor` or an array in the compute dtype, [out, in].
    dot_state: the dot's scales and what is observed, for a `QTensor`; a dynamic
      recipe reads none of it.
    row_mask_M: float32, 0 on padding rows, which the amax must not see.
    out_dtype: dtype of the result, by default that of x.
    fp8_MI: x quantised already, on the dot's scale, by what made x; for
      delayed scales alone.
    late_scale: the result is not only added to a residual, see
      `products.scaled_dot`.

  Returns:
    y_MO.
  """
  if x_MI.shape[0] % 16:
    raise ValueError(f'a dot has {x_MI.shape[0]} rows; pad to a multiple of 16')
  out_dtype = jnp.dtype(out_dtype or x_MI.dtype).name
  if not isinstance(weight, QTensor):
    if master_OI is None:
      return lax.dot_general(x_MI, weight, NT, preferred_element_type=out_dtype)
    return _high_dot(out_dtype, x_MI, master_OI, weight)
  static = _StaticArgs(
      recipe=recipe, out_dtype=out_dtype, late_scale=late_scale
  )
  if master_OI is None:
    return _forward(static, x_MI, fp8_MI, weight, dot_state)[0]
  return _fp8_dot(
      static, x_MI, fp8_MI, master_OI, weight, dot_state, row_mask_M
  )


def unscaled_dot(
    recipe: Recipe,
    x_MI: Array,
    weight: QTensor | Array,
    dot_state: PyTree | None,
    *,
    late_scale: bool,
    fp8_MI: Array | None = None,
) -> DeferredScale | None:
  """Multiplies rows by a kernel and leaves the scales to the next operation.

  It has no derivative. The values are those that `dot` scales.

  Returns None if the recipe does not allow it. For the arguments see `dot`, for
  `late_scale` see `per_tensor.unscaled`.
  """
  if not (isinstance(weight, QTensor) and recipe.may_scale_late):
    return None
  assert dot_state is not None
  x8 = per_tensor.quantize_input(x_MI, fp8_MI, dot_state)
  return per_tensor.unscaled(x8, weight, x_MI.dtype, late_scale=late_scale)


def defer_bias(product: DeferredScale, bias_O: Array) -> DeferredScale:
  """Returns the product with a bias that the next operation adds."""
  values = stands_for.deferred(
      lambda product, bias_O: product.values,
      lambda product, bias_O: product.values + bias_O[None, :],
      product,
      bias_O,
  )
  return dataclasses.replace(product, values=values, bias_O=bias_O)
