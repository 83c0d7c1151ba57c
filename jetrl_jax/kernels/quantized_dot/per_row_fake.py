"""`fake_*`: a coarser grid, and the ordinary dot over its values.

    Y_mo = (sum_i x_mi w_oi) * sx_m * sw_o,    x, w on the grid

There is a scale per row of X and per output channel of W, as in `fp8_token` and
`int8`. The values are on the grid of a format with few bits. They are
multiplied in the compute dtype, which holds each of them exactly, with float32
sums. So any number of bits can be tried, also formats that no tensor core
multiplies, to see how a flow's accuracy depends on the bits. Nothing gets
faster.

The backward runs in the compute dtype, from the dequantised operands, as in
`int8`. The recipes differ only in their forward.
"""

import jax.numpy as jnp
from jax import lax

from jetrl_jax.core.typing import Array
from jetrl_jax.fp8.formats import FAKE
from jetrl_jax.fp8.products import NT, fence, times
from jetrl_jax.fp8.quantization import QTensor, quantize_groups
from jetrl_jax.fp8.recipes import Recipe


def quantize_rows(recipe: Recipe, x_MI: Array) -> QTensor:
  """Returns the rows on the recipe's grid, each on a scale of its own.

  Args:
    recipe: one of `recipes.FAKE_RECIPES`.
    x_MI: rows of the input, or the output channels of a kernel.
  """
  grid = FAKE[recipe.name.removeprefix('fake_')]
  return quantize_groups(
      x_MI,
      grid.dtype,
      (1, x_MI.shape[1]),
      limit=grid.limit,
      **recipe.scaling,
  )


def forward(recipe: Recipe, x8: QTensor, weight: QTensor, out_dtype) -> Array:
  """FProp in the compute dtype."""
  # The barrier makes the operands ordinary arrays. Otherwise XLA would turn a
  # dot of converted FP8 values into an FP8 dot, which INT6 does not have.
  x_MI, w_OI = lax.optimization_barrier(
      (x8.values.astype(recipe.dtype), weight.values.astype(recipe.dtype))
  )
  product = lax.dot_general(x_MI, w_OI, NT, preferred_element_type=jnp.float32)
  product = times(product, (x8.scale, weight.scale.reshape(1, -1)))
  return fence(product).astype(out_dtype)
