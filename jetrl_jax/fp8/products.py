"""The dot products of all recipes: which dims, and when scales are applied."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jetrl_jax.core.typing import Array

# Contract the last dim of both: FP8 GEMMs on Hopper want both operands
# contraction-minor, which is why kernels are stored [out, in].
NT = (((1,), (1,)), ((), ()))
NN = (((1,), (0,)), ((), ()))
TN = (((0,), (0,)), ((), ()))
BATCHED_NT = (((2,), (2,)), ((0,), (0,)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DeferredScale:
  """A dot's product, for a kernel that scales it as it reads it.

  Attributes:
    values: the product [M, O], or in n parts [n, M, O / n].
    scales: float32 scalars, powers of two; their product is still to be
      multiplied. Apart, as XLA would start a kernel to multiply them.
    bias_O: still to be added to the scaled values.
  """

  values: Array
  scales: tuple[Array, ...] = ()
  bias_O: Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
  """Rows that a dot reads.

  Attributes:
    values: [M, I] in the compute dtype. Where a decode step knows the FP8
      values, only their shape and dtype mean something.
    fp8: their E4M3 values on the dot's input scale, [M, I], or n equal copies
      [n, M, I] for a dot in n parts; None where the dot quantises the rows.
  """

  values: Array
  fp8: Array | None = None

  @property
  def parts(self) -> int:
    """In how many parts the dot is computed."""
    return 1 if self.fp8 is None or self.fp8.ndim == 2 else self.fp8.shape[0]


@dataclasses.dataclass(frozen=True)
class Reads:
  """What a dot wants of the operation that makes its rows.

  Attributes:
    scale: float32 scalar on which the rows are quantised; None where the dot
      finds the scale itself, or is not quantised.
    parts: in how many parts the dot is computed, see `Rows`.
  """

  scale: Array | None = None
  parts: int = 1


# What any other reader than such a dot wants.
AS_ARRAY = Reads()


def scaled_dot(
    a, b, dims, scales, out_dtype, *, power_of_two: bool, late: bool = False
) -> Array:
  """Returns (a . b) * scales, rounded once to `out_dtype`.

  Scales come after the dot, left to right, in rollout and training alike. With
  powers of two each of those products is exact, so neither their order, nor
  where in a fusion they are taken, nor a fused multiply-add can change a bit.

  Args:
    a: 8-bit float, two dims.
    b: 8-bit float, two dims.
    dims: `NT`, `NN` or `TN`.
    scales: float32 scalars, or arrays that broadcast against the result.
    out_dtype: of the result.
    power_of_two: the scales are powers of two.
    late: leave powers of two to the operation that follows. XLA takes a scale
      into the GEMM, and for that starts a kernel that multiplies the scales;
      but only from there the GEMM adds a residual as well.
  """
  if power_of_two:
    # A power of two commutes with the rounding, so the GEMM may write the
    # narrow type: an F32 output costs up to a quarter of its speed.
    product = lax.dot_general(a, b, dims, preferred_element_type=out_dtype)
    if late:
      return scale_late(product, scales)
    for scale in scales:
      product = product * scale.astype(out_dtype)
    return product
  product = lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)
  return fence(times(product, scales)).astype(out_dtype)


def scale_late(product: Array, scales) -> Array:
  """Returns a dot's product times powers of two, in its dtype."""
  return times(product.astype(jnp.float32), scales).astype(product.dtype)


def times(product: Array, scales) -> Array:
  """Returns the product times each scale, from left to right."""
  for scale in scales:
    product = product * scale
  return product


def fence(x: Array) -> Array:
  """Keeps what follows from being fused with the multiplication in x.

  As one multiply-add, an addition would skip the product's rounding, in some
  programs and not in others. Changes no finite value.
  """
  return jnp.maximum(x, jnp.finfo(jnp.float32).min)


def high_backward(dy_MO: Array, x_MI: Array, kernel_OI: Array, x_dtype):
  """Returns (dX in `x_dtype`, dW in float32) of operands in one dtype."""
  dx_MI = lax.dot_general(dy_MO, kernel_OI, NN, preferred_element_type=x_dtype)
  dw_OI = lax.dot_general(dy_MO, x_MI, TN, preferred_element_type=jnp.float32)
  return dx_MI, dw_OI
