"""Attention from one new token per slot to the slot's pages.

The arithmetic and the order of keys are those of `kernels/attention`, so a
token gets the bits that it has in a packed row of training. A page holds a
multiple of the tile. A slot's pages may be anywhere in memory.
"""

from jetrl_jax.core.typing import Array
from jetrl_jax.kernels import attention, dispatch, stands_for
from jetrl_jax.kernels.decode_attention import reference


def decode_attention(
    q_BNH: Array,
    k_PKSH: Array,
    values: Array,
    table_BP: Array,
    last_B: Array,
    tile: int,
    out_scale: Array | None = None,
) -> Array:
  """Attends from one query token per slot to the slot's pages.

  Args:
    q_BNH: queries; the heads of a group are neighbours.
    k_PKSH: pages of keys, S tokens each, a multiple of `tile`.
    values: pages of values, see `kv_storage.values_shape`.
    table_BP: int32, the slot's pages in order.
    last_B: int32, the last key to attend; -1 for none, which gives zeros.
    tile: see `attention.flash_attention`.
    out_scale: float32 scalar, the scale on which the o dot reads its rows; None
      if it does not quantise, or quantises them itself.

  Returns:
    [B, N, H] in q's dtype, or with `out_scale` its E4M3 values.
  """
  operands = q_BNH, k_PKSH, values, table_BP, last_B

  def plain(q_BNH, k_PKSH, values, table_BP, last_B, out_scale):
    operands = q_BNH, k_PKSH, values, table_BP, last_B
    return reference.decode(*operands, tile, out_scale)

  _, heads, head_dim = q_BNH.shape
  group = heads // k_PKSH.shape[1]
  fits = attention.fits(q_BNH.dtype, head_dim, group, tile)
  if not (fits and dispatch.has_kernel('decode_attention')):
    return plain(*operands, out_scale)
  from jetrl_jax.kernels.decode_attention import mosaic_sm90

  name = dispatch.implementation('decode_attention')
  functions = mosaic_sm90.decode, plain
  return stands_for.kernel(
      'decode_attention', name, *functions, *operands, out_scale
  )
