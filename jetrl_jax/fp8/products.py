"""The dot products of all recipes: contracted axes, and where scales apply."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jetrl_jax.core.typing import Array

# NT contracts the last axis of both operands. FP8 GEMMs on Hopper need this
# layout, which is why kernels are stored as [out, in].
NT = (((1,), (1,)), ((), ()))
NN = (((1,), (0,)), ((), ()))
TN = (((0,), (0,)), ((), ()))
BATCHED_NT = (((2,), (2,)), ((0,), (0,)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DeferredScale:
  """The unscaled product of a dot; the kernel that reads it scales it.

      result = values * scales[0] * scales[1] * ... + bias_O

  Attributes:
    values: the product [M, O], or in n parts [n, M, O / n].
    scales: float32 scalars, powers of two. They are kept apart because XLA
      would start a kernel only to multiply them.
    bias_O: the bias, which is not in `values` yet; None without one.
  """

  values: Array
  scales: tuple[Array, ...] = ()
  bias_O: Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
  """The rows that a dot reads, in the `RowFormat` that it asked for.

  Attributes:
    values: [M, I] in the compute dtype. If a decode kernel wrote only the FP8
      values, this is a `ShapeDtypeStruct` and holds no numbers.
    fp8: their E4M3 values on the dot's input scale, [M, I], or n equal copies
      [n, M, I]; None if the dot quantises the rows itself.
  """

  values: Any  # Array or ShapeDtypeStruct; readers that need numbers know.
  fp8: Array | None = None

  @property
  def in_parts(self) -> bool:
    """Whether a dot over these rows computes its outputs in parts."""
    return self.fp8 is not None and self.fp8.ndim > 2

  @property
  def fp8_MI(self) -> Array | None:
    """The FP8 values [M, I], one of equal copies."""
    return self.fp8[0] if self.fp8 is not None and self.in_parts else self.fp8

  def map(self, function: Callable[[Array], Array]) -> 'Rows':
    """Returns the rows with `function` applied to each array."""
    if isinstance(self.values, jax.ShapeDtypeStruct):
      values = jax.eval_shape(function, self.values)
    else:
      values = function(self.values)
    return Rows(values, None if self.fp8 is None else function(self.fp8))


@dataclasses.dataclass(frozen=True)
class RowFormat:
  """The form in which a dot wants its rows; the operation before makes it.

  Attributes:
    scale: float32 scalar on which the rows are to be quantised to E4M3; None
      if the dot takes them in the compute dtype.
    copies: how many equal copies of the FP8 values to write. A dot over n
      copies computes its outputs in n parts, which is faster for few rows.
  """

  scale: Array | None = None
  copies: int = 1


# The format of every reader that does not quantise on a known scale.
UNQUANTIZED = RowFormat()


def scaled_dot(
    a,
    b,
    dims,
    scales,
    out_dtype,
    *,
    power_of_two: bool,
    late_scale: bool = False,
) -> Array:
  """Returns (a . b) * scales, rounded once to `out_dtype`.

  Scales are applied after the dot, left to right, in rollout and training
  alike. With powers of two each of these products is exact. Then neither their
  order, nor the place in a fusion, nor a fused multiply-add can change a bit.

  Args:
    a: 8-bit float, two axes.
    b: 8-bit float, two axes.
    dims: `NT`, `NN` or `TN`.
    scales: float32 scalars, or arrays that broadcast against the result.
    out_dtype: dtype of the result.
    power_of_two: whether the scales are powers of two.
    late_scale: multiply by powers of two after the GEMM, so that the following
      operation does it. Otherwise XLA moves the scale into the GEMM and starts
      a kernel that multiplies the scales; but only then can the GEMM also add a
      residual.
  """
  if power_of_two:
    # A power of two commutes with the rounding, so the GEMM may write the
    # narrow type. A float32 output would cost up to a quarter of its speed.
    product = lax.dot_general(a, b, dims, preferred_element_type=out_dtype)
    if late_scale:
      return scale_late(product, scales)
    for scale in scales:
      product = product * scale.astype(out_dtype)
    return product
  product = lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)
  return fence(times(product, scales)).astype(out_dtype)


def scale_late(product: Array, scales) -> Array:
  """Returns a dot's product times powers of two, in the product's dtype."""
  return times(product.astype(jnp.float32), scales).astype(product.dtype)


def times(product: Array, scales) -> Array:
  """Returns the product times each scale, from left to right."""
  for scale in scales:
    product = product * scale
  return product


def fence(x: Array) -> Array:
  """Keeps a following addition from being fused with the multiplication in x.

  A fused multiply-add skips the product's rounding, and XLA would fuse in some
  programs only. The fence changes no finite value.
  """
  return jnp.maximum(x, jnp.finfo(jnp.float32).min)


def high_backward(dy_MO: Array, x_MI: Array, kernel_OI: Array, x_dtype):
  """Returns (dX in `x_dtype`, dW in float32) for operands of one dtype."""
  dx_MI = lax.dot_general(dy_MO, kernel_OI, NN, preferred_element_type=x_dtype)
  dw_OI = lax.dot_general(dy_MO, x_MI, TN, preferred_element_type=jnp.float32)
  return dx_MI, dw_OI
