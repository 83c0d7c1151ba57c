"""SwiGLU's arithmetic inside a kernel, for every backend.

Every kernel that computes h must give the same bits, so all of them call this:
the same float32 operations, with the device's own exp2 and reciprocal.
"""

import math
from collections.abc import Callable, Sequence

import jax.numpy as jnp

from jetrl_jax.core.typing import Array
from jetrl_jax.fp8 import formats

# A function of float32 values.
Function = Callable[[Array], Array]


def sigmoid(gate: Array, power_of_2: Function, reciprocal: Function) -> Array:
  """Returns 1 / (1 + exp(-gate)) of float32 values."""
  return reciprocal(1.0 + power_of_2(gate * -math.log2(math.e)))


def hidden(
    gate: Array,
    up: Array,
    scales: Sequence[Array],
    out_scale: Array | None,
    of_gate: Function,
    *,
    saturates: bool,
) -> Array:
  """Returns silu(gate) * up.

  Args:
    gate: before it is scaled, in the dtype to which the result is rounded.
    up: as gate.
    scales: powers of two, whose product scales both.
    out_scale: scale on which the result is quantised; None leaves it in gate's
      dtype.
    of_gate: `sigmoid`.
    saturates: whether a cast to 8 bits does, as it does on a GPU.
  """
  dtype = gate.dtype
  gate, up = gate.astype(jnp.float32), up.astype(jnp.float32)
  if scales:
    scale = math.prod(scales)
    gate, up = gate * scale, up * scale
  h = (gate * of_gate(gate) * up).astype(dtype)
  if out_scale is None:
    return h
  h = h.astype(jnp.float32) * (1.0 / out_scale)
  if not saturates:
    limit = formats.format_max(formats.E4M3)
    h = jnp.clip(h, -limit, limit)
  return h.astype(formats.E4M3)
