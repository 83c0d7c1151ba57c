"""The MLP as its three operations: dot, SwiGLU, dot."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax

from jetrl_jax.core.collectives import Axes
from jetrl_jax.core.typing import Array, PyTree
from jetrl_jax.fp8.recipes import Recipe
from jetrl_jax.kernels.quantized_dot.linear import added_dtype, dot
from jetrl_jax.kernels.swiglu import swiglu

# (master [O, I] or None, weight, dot_state) as `linear.dot` takes them.
Operands: TypeAlias = tuple[Array | None, Any, PyTree]


def mlp(
    recipe: Recipe,
    x_MD: Array,
    fp8_MD: Array | None,
    gate_up: Operands,
    down: Operands,
    row_mask_M: Array,
    axes: Axes,
    gather: Callable[[Array], Array],
) -> Array:
  """See the package's `mlp`."""
  # The scopes that the modules would give.
  with jax.named_scope('gate_up'):
    y_MG = dot(
        recipe, x_MD, *gate_up, row_mask_M, fp8_MI=fp8_MD, late_scale=True
    )
  h_MF = gather(swiglu(y_MG))
  with jax.named_scope('down'):
    return dot(
        recipe,
        h_MF,
        *down,
        row_mask_M,
        out_dtype=added_dtype(recipe, down[1], axes.tensor),
    )
