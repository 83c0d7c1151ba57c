"""Addition, RMSNorm and quantiser in plain JAX."""

import jax.numpy as jnp
from jax import lax

from jetrl_jax.core.typing import Array
from jetrl_jax.fp8 import formats
from jetrl_jax.fp8.products import DeferredScale, times
from jetrl_jax.fp8.quantization import quantize
from jetrl_jax.kernels.row_sum import row_sum


def rms_norm(x_MD: Array, gain_D: Array, eps: float) -> Array:
  """Returns x / sqrt(mean(x^2) + eps) * gain, see the package."""
  x32 = x_MD.astype(jnp.float32)
  mean_square_M1 = row_sum(x32 * x32) / x_MD.shape[1]
  normed = x32 * lax.rsqrt(mean_square_M1 + eps)
  return normed.astype(x_MD.dtype) * gain_D[None, :]


def forward(
    x_MD: Array,
    gain_D: Array,
    eps: float,
    out_scale: Array | None = None,
    delta: DeferredScale | None = None,
    *,
    copies: int = 1,
) -> tuple[Array, Array | None, Array | None]:
  """See the package's `forward`."""
  if delta is not None:
    assert delta.bias_O is None
    product = times(delta.values.astype(jnp.float32), delta.scales)
    x_MD = (x_MD.astype(jnp.float32) + product).astype(x_MD.dtype)
  normed_MD = rms_norm(x_MD, gain_D, eps)
  if out_scale is None:
    return x_MD, normed_MD, None
  q_MD = quantize(normed_MD, out_scale, formats.E4M3)
  if copies > 1:
    q_MD = jnp.broadcast_to(q_MD, (copies, *q_MD.shape))
  return x_MD, normed_MD if delta is None else None, q_MD
