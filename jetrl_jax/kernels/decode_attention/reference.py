"""Decode's attention in plain JAX: pages gathered, then training's routine."""

import jax.numpy as jnp

from jetrl_jax.core.typing import Array
from jetrl_jax.fp8 import formats
from jetrl_jax.fp8.quantization import quantize
from jetrl_jax.kernels.attention import reference
from jetrl_jax.kernels.kv_storage import unpair

# A CPU's dots have the order of many rows for multiples of so many.
_ROWS = 16


def decode(
    q_BNH: Array,
    k_PKSH: Array,
    values: Array,
    table_BP: Array,
    last_B: Array,
    tile: int,
    out_scale: Array | None = None,
) -> Array:
  """See the package's `decode_attention`."""
  slots, pages = table_BP.shape
  _, kv_heads, size, head_dim = k_PKSH.shape
  if values.ndim == 5:
    values = unpair(values)

  def gather(pool_PKSH):
    x = pool_PKSH[table_BP].transpose(0, 2, 1, 3, 4)
    return x.reshape(slots, kv_heads, pages * size, head_dim)

  heads = q_BNH.shape[1]
  group = heads // kv_heads
  q = q_BNH.reshape(slots, kv_heads, group, head_dim)
  q = jnp.pad(q, ((0, 0), (0, 0), (0, -group % _ROWS), (0, 0)))
  last_BR = jnp.broadcast_to(last_B[:, None], (slots, q.shape[2]))
  out, _ = reference.forward(
      q,
      gather(k_PKSH),
      gather(values),
      jnp.zeros_like(last_BR),
      last_BR,
      tile,
  )
  out = out[:, :, :group].reshape(slots, heads, head_dim)
  return out if out_scale is None else quantize(out, out_scale, formats.E4M3)
