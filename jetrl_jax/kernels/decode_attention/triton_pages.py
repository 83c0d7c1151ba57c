"""How decode's kernels read tiles of keys and values from pages.

FP8 values are stored in pairs (`kv_storage.pair`): two neighbouring tokens are
one 16-bit word per channel. The tensor core wants values with the tokens as
rows of its operand, and shared memory can deliver 16-bit words in this layout
but not bytes. So a tile's even tokens come first, then its odd ones. For keys,
a thread widens four neighbouring channels at once, so of every 32 channels the
first two of each four come first.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jetrl_jax.core.typing import Array
from jetrl_jax.fp8 import formats
from jetrl_jax.kernels.decode_attention.reference import DECODE_ROWS


def group_of(q_BNH: Array, k_PKSH: Array) -> int:
  """Returns how many query heads share a KV head.

  Raises:
    ValueError: more than a tile has rows.
  """
  group = q_BNH.shape[1] // k_PKSH.shape[1]
  if group > DECODE_ROWS:
    raise ValueError(
        f'{group} query heads share a KV head; allowed: at most {DECODE_ROWS}'
    )
  return group


def pools(k_PKSH: Array, values: Array) -> tuple[Array, Array]:
  """Returns keys and values as the kernels take them; FP8 in pairs of tokens.

  Args:
    k_PKSH: pages of keys.
    values: pages of values, see `kv_storage.values_shape`.

  Returns:
    the same, or of FP8 keys [P, K, S/2, 2, H] and values as uint16
    [P, K, S/2, H], the earlier token in the low byte
  """
  if k_PKSH.dtype.itemsize > 1:
    return k_PKSH, values
  *lead, length, head_dim = k_PKSH.shape
  pairs = lax.bitcast_convert_type(values, jnp.uint8)
  return (
      k_PKSH.reshape(*lead, length // 2, 2, head_dim),
      lax.bitcast_convert_type(pairs, jnp.uint16),
  )


def whole(pool: Array) -> pl.BlockSpec:
  """Returns the spec of all pages: a slot's pages may be anywhere."""
  return pl.BlockSpec(pool.shape, lambda *_, dims=pool.ndim: (0,) * dims)


def load_query(q_ref, head, group: int, dtype):
  """Returns the rows of a KV head's group, zeros after them, and their mask.

  Args:
    q_ref: [N, H].
    head: number of the KV head.
    group: see `group_of`.
    dtype: the dtype of the products.
  """
  mask = jnp.arange(DECODE_ROWS) < group
  mine = pl.ds(head * group, DECODE_ROWS)
  q = triton.load(q_ref.at[mine, :], mask=mask[:, None], other=0.0)
  return q.astype(dtype), mask


def page_of(table_ref, i, last, sizes: tuple[int, int]):
  """Returns the page of a slot's tile; tiles after the last get the last one's.

  A loop over tiles asks a tile ahead: the loads of keys that are on their way
  need it.

  Args:
    table_ref: the slot's pages in order.
    i: tile.
    last: the slot's last key.
    sizes: (tile, page), in tokens.
  """
  tile, page_size = sizes
  i = jnp.minimum(i, lax.div(last, jnp.int32(tile)))
  return table_ref[lax.div(i, jnp.int32(page_size // tile))]


# Bytes 0 and 2 of two neighbouring words, or 1 and 3, widened. Left to the
# compiler it is six instructions more for every four values.
_WIDEN = """{
.reg .b32 bytes;
.reg .b16 wanted, rest;
prmt.b32 bytes, $1, 0, %s;
mov.b32 {wanted, rest}, bytes;
cvt.rn.f16x2.e4m3x2 $0, wanted;
}"""


def _token_of_pair(words, n: int, interpret: bool):
  """Returns the first (0) or second (1) token's values as float16."""
  if interpret:
    byte = (words >> (8 * n)).astype(jnp.uint8)
    return lax.bitcast_convert_type(byte, formats.E4M3).astype(jnp.float16)
  (values,) = triton.elementwise_inline_asm(
      _WIDEN % ('0x0020', '0x0031')[n],
      args=[words],
      constraints='=r,r',
      pack=2,
      result_shape_dtypes=[jax.ShapeDtypeStruct(words.shape, jnp.float16)],
  )
  return values


def load_keys(k_ref, lead, i, tile: int, dtype) -> list:
  """Returns a tile's keys whole, or those of even and those of odd tokens.

  Args:
    k_ref: see `pools`.
    lead: (page, KV head).
    i: tile of the page.
    tile: tokens.
    dtype: the dtype of the products.
  """
  if len(k_ref.shape) == 4:
    return [k_ref[(*lead, pl.ds(i * tile, tile), slice(None))]]
  at = (*lead, pl.ds(i * (tile // 2), tile // 2))
  return [k_ref[(*at, n, slice(None))].astype(dtype) for n in (0, 1)]


def load_values(v_ref, lead, i, tile: int, channels, interpret: bool) -> list:
  """Returns a tile's values in the parts that keys have.

  Args:
    v_ref: see `pools`.
    lead: (page, KV head).
    i: tile of the page.
    tile: tokens.
    channels: a slice of them.
    interpret: see `triton_tools.power_of_2`.
  """
  if v_ref.dtype != jnp.uint16:
    return [v_ref[(*lead, pl.ds(i * tile, tile), channels)]]
  words = v_ref[(*lead, pl.ds(i * (tile // 2), tile // 2), channels)]
  return [_token_of_pair(words, n, interpret) for n in (0, 1)]


def key_numbers(parts: int, first_key) -> list:
  """Returns what `allowed_keys` of attention asks, of each part of a tile.

  Args:
    parts: 1, or 2 for even and odd tokens.
    first_key: number of the tile's first key.
  """
  return [lambda row, n=n: first_key + n + parts * row for n in range(parts)]
