"""Attention of one token per slot over pages, beside packed training."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.core.compilation import exact_jit
from jetrl_jax.kernels import attention, dispatch, kv_storage
from jetrl_jax.kernels.attention import reference
from jetrl_jax.kernels.decode_attention import decode_attention
from jetrl_jax.models.attention import DecodeAttention, PackedAttention
from tests.hurry import fast_compile_jit
from tests.kernels import attention_inputs as inputs
from tests.kernels.attention_inputs import FIRST, LAST, TILE, H, K
from tests.kernels_in_use import HOPPER


def _heads(x_BKRH, group):
  """[B, K, T*G, H] to the rows [B*T, K*G, H] that a decoder hands over."""
  batch, kv_heads, rows, head_dim = x_BKRH.shape
  x = x_BKRH.reshape(batch, kv_heads, rows // group, group, head_dim)
  return x.transpose(0, 2, 1, 3, 4).reshape(-1, kv_heads * group, head_dim)


# float32 shows what rounding to bfloat16 hides.
@pytest.mark.parametrize(
    'group, dtype, kv_dtype',
    [
        (1, jnp.float32, 'float32'),
        pytest.param(2, jnp.float32, 'float32', marks=pytest.mark.slow),
        (7, jnp.float32, 'float32'),
        (7, jnp.bfloat16, 'bfloat16'),
        (7, jnp.bfloat16, 'float8_e4m3fn'),
    ],
)
def test_decode_has_the_bits_of_packed_training_at_every_position(
    group, dtype, kv_dtype
):
  slots, length = 16, 48
  q, k, v, _ = inputs.qkv(group, dtype, batch=slots, length=length)
  q, k, v = _heads(q, group), _heads(k, 1), _heads(v, 1)

  def train(q, k, v, first, last):
    attend = PackedAttention(
        first_BT=first, last_BT=last, tile=TILE, kv_dtype=kv_dtype
    )
    rows, stored = attend(q, (k, v))
    return rows.values, stored

  def decode(q, k, v):
    q, k, v = (x.reshape(slots, length, *x.shape[1:]) for x in (q, k, v))

    def step(cache, t):
      attend = DecodeAttention(
          position_B=jnp.full((slots,), t),
          table_BP=jnp.arange(slots)[:, None],
          tile=TILE,
      )
      cache = attend.append((k[:, t], v[:, t]), cache)
      rows, cache = attend(q[:, t], cache)
      return cache, rows.values

    # One tile more than training has: a cache is as long as the longest.
    empty = jnp.full((slots, K, length + TILE, H), 9.0, kv_dtype)
    pools = empty, kv_storage.store_values(empty, kv_dtype)
    return jax.lax.scan(step, pools, jnp.arange(length))

  first = jnp.zeros((slots, length), jnp.int32)
  last = jnp.broadcast_to(jnp.arange(length), (slots, length))
  out, (keys, values) = exact_jit(train)(q, k, v, first, last)
  cache, steps = exact_jit(decode)(q, k, v)
  np.testing.assert_array_equal(
      np.asarray(steps).transpose(1, 0, 2),
      np.asarray(out).reshape(slots, length, -1),
  )
  # What prefill inserts into a cache is what decode writes.
  for pool, prefix in zip(cache, (keys, values), strict=True):
    pool, prefix = np.asarray(pool, np.float32), np.asarray(prefix, np.float32)
    written = prefix.shape[2]
    np.testing.assert_array_equal(pool[:, :, :written], prefix)
    assert np.all(pool[:, :, written:] == 9)


def test_groups_that_no_kernel_takes_have_the_bits_of_training_in_decode():
  # As on a GPU with kernels: one that was chosen could not run here.
  slots, group, length, head_dim = 16, attention.MOST_HEADS + 1, 64, 64
  rng = np.random.default_rng(0)

  def draw(rows):
    shape = slots, 1, rows, head_dim
    return jnp.asarray(rng.normal(size=shape), jnp.bfloat16)

  q, k, v = 2 * draw(length * group), draw(length), draw(length)
  last = jnp.tile(jnp.repeat(jnp.arange(length), group), (slots, 1))
  table = jnp.arange(slots)[:, None]

  def both(q, k, v):
    training = attention.flash_attention(
        q, k, v, 0 * last, last, group, attention.TILE, None
    )
    newest = q[:, 0, -group:], k, v, table, last[:, -1]
    decoded = decode_attention(*newest, attention.TILE)
    return training[:, 0, -group:], decoded

  with dispatch.using(dispatch.select(hardware=HOPPER)):
    training, decoded = exact_jit(both)(q, k, v)
  np.testing.assert_array_equal(
      np.asarray(training, np.float32), np.asarray(decoded, np.float32)
  )


@functools.cache
def _decode_step():
  """Compiled: one step of (positions, new q, k and v, cache) on numpy."""

  def step(position, new, cache):
    table = jnp.arange(position.shape[0])[:, None]
    attend = DecodeAttention(position_B=position, table_BP=table, tile=TILE)
    q, *keys = new
    rows, cache = attend(q, attend.append(keys, cache))
    return rows.values, cache

  compiled = exact_jit(step)
  return lambda *args: jax.tree.map(np.asarray, compiled(*args))


def test_idle_slots_write_nothing_and_disturb_nobody():
  slots, length = 16, 32
  q, k, v, _ = inputs.qkv(batch=slots, length=length)
  new = [x[:, :, 0] for x in (q, k, v)]
  busy = np.arange(slots, dtype=np.int32)
  others = busy != 3
  full, (all_keys, _) = _decode_step()(busy, new, (k, v))
  for outside in (-1, -7):
    position = inputs.changed(busy, 3, outside)
    out, (keys, values) = _decode_step()(position, new, (k, v))
    np.testing.assert_array_equal(keys[3], k[3])
    np.testing.assert_array_equal(values[3], v[3])
    np.testing.assert_array_equal(out[others], full[others])
    np.testing.assert_array_equal(keys[others], all_keys[others])
    assert np.all(np.isfinite(out))


def test_slots_at_different_positions_attend_their_own_keys():
  slots, length = 16, 32
  q, k, v, _ = inputs.qkv(batch=slots, length=length)
  position = np.random.default_rng(0).integers(0, length, slots, np.int32)
  new = [x[:, :, 0] for x in (q, k, v)]
  out, (keys, values) = _decode_step()(position, new, (k, v))
  for slot, at in enumerate(position):
    np.testing.assert_array_equal(keys[slot, :, at], new[1][slot])
    np.testing.assert_array_equal(values[slot, :, at], new[2][slot])
  last = position[:, None]
  expected = inputs.dense64(new[0][:, :, None], keys, values, 0 * last, last)
  np.testing.assert_allclose(
      out, expected[:, :, 0].reshape(slots, -1), rtol=0, atol=5e-6
  )


def test_tiles_after_the_last_key_are_not_visited():
  # NaN there would survive a masked product: 0 * NaN is NaN.
  q, k, v, _ = inputs.qkv()
  first, last = (np.stack([a, a]) for a in inputs.rows([0], [20]))
  k, v = (inputs.changed(x, np.s_[:, :, 32:], np.nan) for x in (k, v))
  out = inputs.flash()(q, k, v, first, last)
  assert np.all(np.isfinite(out))


def test_keys_of_one_tile_have_the_bits_they_have_in_a_longer_cache():
  # One tile makes the loop's slice a no-op, and other fusions follow.
  tile, rows, head_dim = 16, 32, 32
  rng = np.random.default_rng(0)

  def draw(n):
    return jnp.asarray(rng.normal(size=(16, 2, n, head_dim)), jnp.bfloat16)

  def longer(x):
    return jnp.pad(x, ((0, 0), (0, 0), (0, 2 * tile), (0, 0)))

  q, k, v = 2 * draw(rows), draw(tile), draw(tile)
  last = np.broadcast_to(np.repeat(np.arange(tile), 2), (16, rows))
  last = last.astype(np.int32)
  run = exact_jit(lambda *args: reference.forward(*args, tile))
  short = run(q, k, v, np.zeros_like(last), last)
  long = run(q, longer(k), longer(v), np.zeros_like(last), last)
  for a, b in zip(short, long, strict=True):
    np.testing.assert_array_equal(
        np.asarray(a, np.float32), np.asarray(b, np.float32)
    )


def test_values_in_pairs_are_neighbours_in_time():
  values = jnp.arange(8.0).reshape(4, 2)  # Token t has 2 t and 2 t + 1.
  pairs = kv_storage.pair(values)
  assert pairs.tolist() == [[[0, 2], [1, 3]], [[4, 6], [5, 7]]]
  np.testing.assert_array_equal(kv_storage.unpair(pairs), values)


def test_stored_keys_and_values_are_read_by_training_and_decode_alike():
  # 1.0625 lies between two values of E4M3, and 500 beyond the largest.
  x = jnp.asarray([1.0625, -500.0, 0.3], jnp.bfloat16)
  stored = kv_storage.store(x, 'float8_e4m3fn')
  assert np.asarray(stored, np.float32).tolist() == [1.0, -448.0, 0.3125]
  q, k, v, dout = inputs.qkv(dtype=jnp.bfloat16)

  def run(q, k, v, kv_dtype):
    return attention.flash_attention(q, k, v, FIRST, LAST, 1, TILE, kv_dtype)

  rounded = (
      x.astype(jnp.bfloat16)
      for x in (kv_storage.store(x, 'float8_e4m3fn') for x in (k, v))
  )

  def both(kv_dtype, *args):
    out, pull = jax.vjp(lambda *a: run(*a, kv_dtype), *args)
    return out, pull(dout)

  out, grads = fast_compile_jit(functools.partial(both, 'float8_e4m3fn'))(
      q, k, v
  )
  same, same_grads = fast_compile_jit(functools.partial(both, None))(
      q, *rounded
  )
  # The products are taken in float16 there.
  np.testing.assert_allclose(
      np.asarray(out, np.float32), np.asarray(same, np.float32), atol=2.0**-6
  )
  # Straight through: gradients as if the rounded ones had been given.
  for a, b in zip(grads, same_grads, strict=True):
    assert a.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        np.asarray(a, np.float32), np.asarray(b, np.float32), atol=0.1
    )
