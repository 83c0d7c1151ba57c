"""SwiGLU in plain JAX."""

import jax
import jax.numpy as jnp

from jetrl_jax.core.typing import Array
from jetrl_jax.fp8 import formats
from jetrl_jax.fp8.products import DeferredScale, times
from jetrl_jax.fp8.quantization import quantize


def swiglu(y_MG: Array) -> Array:
  """Returns silu(gate) * up of gate|up, rounded once to its dtype."""
  gate, up = jnp.split(y_MG.astype(jnp.float32), 2, axis=1)
  return (jax.nn.silu(gate) * up).astype(y_MG.dtype)


def swiglu_of(product: DeferredScale, out_scale: Array | None = None) -> Array:
  """See the package's `swiglu_of`."""
  y = times(product.values.astype(jnp.float32), product.scales)
  # In two parts they come before the rows.
  gate, up = y if y.ndim == 3 else jnp.split(y, 2, axis=1)
  h_MF = (jax.nn.silu(gate) * up).astype(product.values.dtype)
  return h_MF if out_scale is None else quantize(h_MF, out_scale, formats.E4M3)
