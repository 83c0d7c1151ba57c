import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.compilation import exact_jit
from jetrl_jax.fp8 import formats, quantize
from jetrl_jax.models import (
    attention,
    attention_backward,
    attention_decode,
    attention_kernel,
)
from jetrl_jax.models.attention import DecodeAttention, PackedAttention
from tests.hurry import hurried_jit

B, K, S, H, TILE = 2, 2, 64, 16, 16


def _rows(starts, lengths, total=S):
  """[T] first and last key of packed segments; last is -1 on padding."""
  first, last = np.zeros(total, np.int32), np.full(total, -1, np.int32)
  for start, length in zip(starts, lengths, strict=True):
    first[start : start + length] = start
    last[start : start + length] = np.arange(start, start + length)
  return first, last


# A full row; segments of 13, 16 and 20 that start at tiles, with padding.
RANGES = [_rows([0], [S]), _rows([0, 16, 32], [13, 16, 20])]
FIRST, LAST = (np.stack(a) for a in zip(*RANGES, strict=True))


def _qkv(group=1, dtype=jnp.float32, batch=B, length=S):
  """Queries, keys, values and a cotangent of the result."""
  rng = np.random.default_rng(0)

  def make(rows):
    return rng.normal(size=(batch, K, rows, H)).astype(dtype)

  q, dout = make(length * group), make(length * group)
  return 2 * q, make(length), make(length), dout


def _changed(x, at, value):
  x = x.copy()
  x[at] = value
  return x


def _dense(q, k, v, first, last, xp=jnp):
  """Softmax over the whole masked score matrix."""
  key = xp.arange(k.shape[2])[None, None, :]
  allowed = (key >= first[:, :, None]) & (key <= last[:, :, None])
  allowed = allowed[:, None]
  scores = xp.einsum('bkrh,bksh->bkrs', q, k) * q.shape[-1] ** -0.5
  scores = xp.where(allowed, scores, -1e30)
  p = xp.exp(scores - scores.max(axis=-1, keepdims=True)) * allowed
  total = p.sum(axis=-1, keepdims=True)
  return xp.einsum('bkrs,bksh->bkrh', p / xp.where(total > 0, total, 1.0), v)


def _dense64(q, k, v, first, last):
  return _dense(
      *(np.asarray(x, np.float64) for x in (q, k, v)), first, last, np
  )


@functools.cache
def _flash():
  return exact_jit(lambda *args: attention.flash_attention(*args, TILE, None))


@functools.cache
def _kernel_and_plain():
  """Compiled: (out, lse, gradients) of the GPU kernel and of the CPU form."""

  def both(q, k, v, dout, first, last):
    out, lse = attention_kernel.forward(
        q, k, v, first, last, TILE, interpret=True
    )
    grads = attention_backward.backward(
        q, k, v, first, last, out, lse, dout, TILE, interpret=True
    )
    residuals = attention._fwd(q, k, v, first, last, TILE, None)[1]
    plain = *residuals[-2:], *attention._bwd(TILE, None, residuals, dout)[:3]
    return (out, lse, *grads), plain

  return hurried_jit(both)


def test_two_keys_by_hand():
  # Scores (log 3, 0) after the scale H^-1/2 = 1/4: weights 3/4 and 1/4.
  zeros = np.zeros((1, 1, 16, H), np.float32)
  q = _changed(zeros, np.s_[..., 0], 4 * np.log(3.0))
  k = _changed(zeros, (0, 0, 0, 0), 1.0)
  v = _changed(zeros, np.s_[0, 0, :2, 0], [4.0, 8.0])
  first = np.zeros((1, 16), np.int32)
  out = np.asarray(_flash()(q, k, v, first, first + 1))
  np.testing.assert_allclose(out[0, 0, :, 0], 0.75 * 4 + 0.25 * 8, rtol=1e-6)


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_attention_equals_a_dense_float64_softmax(dtype):
  q, k, v, _ = _qkv(dtype=dtype)
  out = np.asarray(_flash()(q, k, v, FIRST, LAST), np.float64)
  expected = _dense64(q, k, v, FIRST, LAST)
  if dtype == jnp.float32:
    np.testing.assert_allclose(out, expected, rtol=0, atol=5e-6)
    return
  # The weights are rounded to bfloat16 (2^-8 at most, of terms that add up to
  # less than max |v|) and so is the result.
  bound = 2.0**-8 * (np.abs(np.asarray(v, np.float64)).max() + np.abs(expected))
  assert np.all(np.abs(out - expected) <= bound)


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_the_gpu_kernels_compute_what_the_cpu_form_does(dtype):
  q, k, v, dout = _qkv(dtype=dtype)
  kernel, plain = _kernel_and_plain()(q, k, v, dout, FIRST, LAST)
  # bfloat16: a value that float32 sums in another order may round to its
  # neighbour, in the weights and in the result.
  tolerance = 1e-5 if dtype == jnp.float32 else 2.0**-6
  for found, expected in zip(kernel, plain, strict=True):
    assert found.dtype == expected.dtype
    found, expected = (np.asarray(x, np.float64) for x in (found, expected))
    scale = np.abs(np.where(expected > -1e29, expected, 0)).max()
    np.testing.assert_allclose(
        found, expected, rtol=1e-6, atol=tolerance * scale
    )


def test_tiles_that_all_rows_see_are_computed_without_a_mask():
  # Three row tiles of 64; the second row's segments start at 0 and 96.
  rows = [_rows([0], [192], 192), _rows([0, 96], [96, 96], 192)]
  first, last = (np.stack(a) for a in zip(*rows, strict=True))
  bounds = np.asarray(attention_backward._row_tiles(first, last, 12, TILE))
  # Key tile 0 is attended by row tiles 0, 1, 2 and seen whole by 1 and 2;
  # tile 7 (keys 112 to 127) by 1, 2 and 2; tile 11 by 2, and by no rows whole.
  assert bounds[0, [0, 7, 11]].tolist() == [
      [0, 1, 3, 3],
      [1, 2, 3, 3],
      [2, 3, 3, 3],
  ]
  # The second segment's first tile is behind row tile 1's first rows.
  assert bounds[1, 6].tolist() == [1, 2, 3, 3]
  q, k, v, dout = _qkv(length=192)
  kernel, plain = _kernel_and_plain()(q, k, v, dout, first, last)
  for found, expected in zip(kernel, plain, strict=True):
    scale = np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-5 * scale)


def test_gradients_are_those_of_dense_attention():
  q, k, v, dout = _qkv()

  def ours(q, k, v):
    out = attention.flash_attention(q, k, v, FIRST, LAST, TILE, None)
    return jnp.sum(dout * out)

  def plain(q, k, v):
    return jnp.sum(dout * _dense(q, k, v, FIRST, LAST))

  found = exact_jit(jax.grad(ours, argnums=(0, 1, 2)))(q, k, v)
  expected = exact_jit(jax.grad(plain, argnums=(0, 1, 2)))(q, k, v)
  for a, b in zip(found, expected, strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=2e-5)


def test_padding_rows_are_exact_zeros_and_have_no_gradient():
  q, k, v, dout = _qkv()
  kernel, plain = _kernel_and_plain()(q, k, v, dout, FIRST, LAST)
  padding = LAST[1] < 0
  assert padding.any()
  for out, _, dq, _, _ in (kernel, plain):
    assert not np.any(np.asarray(out)[1][:, padding])
    assert not np.any(np.asarray(dq)[1][:, padding])
  # What stands in padding rows reaches no other row.
  other = _changed(q, np.s_[1, :, padding], 1e9)
  np.testing.assert_array_equal(
      np.asarray(_flash()(other, k, v, FIRST, LAST))[1][:, ~padding],
      np.asarray(_flash()(q, k, v, FIRST, LAST))[1][:, ~padding],
  )


def test_segments_do_not_see_each_other_nor_the_future():
  q, k, v, dout = _qkv()
  before = np.asarray(_flash()(q, k, v, FIRST, LAST))
  # Row 1 has segments 0..12, 16..31, 32..51: change keys and values of the
  # second from its tenth token on.
  k, v = (_changed(x, np.s_[1, :, 26:32], 7 + x[1, :, 26:32]) for x in (k, v))
  after = np.asarray(_flash()(q, k, v, FIRST, LAST))
  np.testing.assert_array_equal(after[0], before[0])
  np.testing.assert_array_equal(after[1, :, :26], before[1, :, :26])
  np.testing.assert_array_equal(after[1, :, 32:], before[1, :, 32:])
  assert np.all(np.any(after[1, :, 26:32] != before[1, :, 26:32], axis=-1))
  # And no gradient crosses over: only queries 16..31 pull on keys 16..31.
  alone = _changed(dout, np.s_[1, :, 16:32], 0)
  for grads in _kernel_and_plain()(q, k, v, alone, FIRST, LAST):
    assert not np.any(np.asarray(grads[3])[1, :, 16:32])
    assert not np.any(np.asarray(grads[4])[1, :, 16:32])


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_a_segment_packed_at_a_tile_has_the_bits_of_one_alone(dtype):
  q, k, v, _ = _qkv(dtype=dtype)
  packed = np.asarray(_flash()(q, k, v, FIRST, LAST))
  for start, length in ((16, 16), (32, 20)):
    first, last = (np.stack([a, a]) for a in _rows([0], [length]))
    shifted = (np.roll(x, -start, axis=2) for x in (q, k, v))
    alone = _flash()(*shifted, first, last)
    np.testing.assert_array_equal(
        np.asarray(alone)[1, :, :length], packed[1, :, start : start + length]
    )


def test_a_segment_off_the_tiles_has_other_bits():
  # Why segments start at multiples of the tile.
  q, k, v, _ = _qkv(dtype=jnp.bfloat16)
  outs = []
  for start in (0, 8):
    first, last = (np.stack([a, a]) for a in _rows([start], [48]))
    shifted = (np.roll(x, start, axis=2) for x in (q, k, v))
    out = _flash()(*shifted, first, last)
    outs.append(np.asarray(out)[:, :, start : start + 48])
  assert np.any(outs[0] != outs[1])


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
  q, k, v, _ = _qkv(group, dtype, batch=slots, length=length)
  q, k, v = _heads(q, group), _heads(k, 1), _heads(v, 1)

  def train(q, k, v, first, last):
    attend = PackedAttention(
        first_BT=first, last_BT=last, tile=TILE, kv_dtype=kv_dtype
    )
    return attend(q, k, v, None)

  def decode(q, k, v):
    q, k, v = (x.reshape(slots, length, *x.shape[1:]) for x in (q, k, v))

    def step(cache, t):
      attend = DecodeAttention(
          position_B=jnp.full((slots,), t),
          table_BP=jnp.arange(slots)[:, None],
          tile=TILE,
      )
      out, cache = attend(q[:, t], k[:, t], v[:, t], cache)
      return cache, out

    # One tile more than training has: a cache is as long as the longest.
    empty = jnp.full((slots, K, length + TILE, H), 9.0, kv_dtype)
    pools = empty, attention.store_values(empty, kv_dtype)
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


@functools.cache
def _decode_step():
  """Compiled: one step of (positions, new q, k and v, cache) on numpy."""

  def step(position, new, cache):
    table = jnp.arange(position.shape[0])[:, None]
    attend = DecodeAttention(position_B=position, table_BP=table, tile=TILE)
    return attend(*new, cache)

  compiled = exact_jit(step)
  return lambda *args: jax.tree.map(np.asarray, compiled(*args))


def test_idle_slots_write_nothing_and_disturb_nobody():
  slots, length = 16, 32
  q, k, v, _ = _qkv(batch=slots, length=length)
  new = [x[:, :, 0] for x in (q, k, v)]
  busy = np.arange(slots, dtype=np.int32)
  others = busy != 3
  full, (all_keys, _) = _decode_step()(busy, new, (k, v))
  for outside in (-1, -7):
    position = _changed(busy, 3, outside)
    out, (keys, values) = _decode_step()(position, new, (k, v))
    np.testing.assert_array_equal(keys[3], k[3])
    np.testing.assert_array_equal(values[3], v[3])
    np.testing.assert_array_equal(out[others], full[others])
    np.testing.assert_array_equal(keys[others], all_keys[others])
    assert np.all(np.isfinite(out))


def test_slots_at_different_positions_attend_their_own_keys():
  slots, length = 16, 32
  q, k, v, _ = _qkv(batch=slots, length=length)
  position = np.random.default_rng(0).integers(0, length, slots, np.int32)
  new = [x[:, :, 0] for x in (q, k, v)]
  out, (keys, values) = _decode_step()(position, new, (k, v))
  for slot, at in enumerate(position):
    np.testing.assert_array_equal(keys[slot, :, at], new[1][slot])
    np.testing.assert_array_equal(values[slot, :, at], new[2][slot])
  last = position[:, None]
  expected = _dense64(new[0][:, :, None], keys, values, 0 * last, last)
  np.testing.assert_allclose(
      out, expected[:, :, 0].reshape(slots, -1), rtol=0, atol=5e-6
  )


def test_tiles_behind_the_last_key_are_not_visited():
  # NaN there would survive a masked product: 0 * NaN is NaN.
  q, k, v, _ = _qkv()
  first, last = (np.stack([a, a]) for a in _rows([0], [20]))
  k, v = (_changed(x, np.s_[:, :, 32:], np.nan) for x in (k, v))
  out = _flash()(q, k, v, first, last)
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
  run = exact_jit(lambda *args: attention._reference(*args, tile))
  short = run(q, k, v, np.zeros_like(last), last)
  long = run(q, longer(k), longer(v), np.zeros_like(last), last)
  for a, b in zip(short, long, strict=True):
    np.testing.assert_array_equal(
        np.asarray(a, np.float32), np.asarray(b, np.float32)
    )


@pytest.mark.parametrize('kv_dtype', ['bfloat16', 'float8_e4m3fn'])
@pytest.mark.parametrize('group', [1, 3])
def test_the_decode_kernel_computes_what_the_cpu_form_does(kv_dtype, group):
  slots, pages, size = 4, 3, 32
  rng = np.random.default_rng(0)

  def draw(*shape):
    return jnp.asarray(rng.normal(size=shape), jnp.bfloat16)

  q = draw(slots, K * group, H)
  pool_shape = slots * pages, K, size, H
  keys = attention.store(draw(*pool_shape), kv_dtype)
  values = attention.store_values(draw(*pool_shape), kv_dtype)
  table = jnp.asarray(rng.permutation(slots * pages).reshape(slots, pages))
  last = jnp.asarray([0, 40, 95, -1], jnp.int32)

  @hurried_jit
  def both(q, keys, values, table, last):
    out, low = (
        attention_decode.decode(
            q, keys, values, table, last, TILE, on, interpret=True
        )[0]
        for on in (None, step)
    )
    attend = DecodeAttention(position_B=last, table_BP=table, tile=TILE)
    return out, low, attend._on_cpu(q, keys, values)

  step = jnp.float32(2.0**-9)  # 448 / 512: some saturate.
  out, low, plain = both(q, keys, values, table, last)
  wanted = quantize(out, step, formats.E4M3)
  np.testing.assert_array_equal(low.view(jnp.uint8), wanted.view(jnp.uint8))
  np.testing.assert_allclose(
      np.asarray(out, np.float32).reshape(slots, K, group, H),
      np.asarray(plain, np.float32),
      rtol=0,
      atol=2.0**-7,
  )
  assert not np.asarray(out[3]).any()


def test_the_forward_kernel_reads_fp8_keys_as_the_cpu_form_does():
  q, k, v, _ = _qkv(dtype=jnp.bfloat16)
  k, v = (attention.store(x, 'float8_e4m3fn') for x in (k, v))

  @hurried_jit
  def both(*args):
    found = attention_kernel.forward(*args, TILE, interpret=True)
    return found, attention._reference(*args, TILE)

  found, expected = both(q, k, v, FIRST, LAST)
  for a, b in zip(found, expected, strict=True):
    np.testing.assert_allclose(
        np.asarray(a, np.float32), np.asarray(b, np.float32), atol=2.0**-6
    )


def test_values_in_pairs_are_neighbours_in_time():
  values = jnp.arange(8.0).reshape(4, 2)  # Token t has 2 t and 2 t + 1.
  pairs = attention_kernel.pair(values)
  assert pairs.tolist() == [[[0, 2], [1, 3]], [[4, 6], [5, 7]]]
  np.testing.assert_array_equal(attention_kernel.unpair(pairs), values)


def test_stored_keys_and_values_are_read_by_training_and_decode_alike():
  # 1.0625 lies between two values of E4M3, and 500 beyond the largest.
  x = jnp.asarray([1.0625, -500.0, 0.3], jnp.bfloat16)
  stored = attention.store(x, 'float8_e4m3fn')
  assert np.asarray(stored, np.float32).tolist() == [1.0, -448.0, 0.3125]
  q, k, v, dout = _qkv(dtype=jnp.bfloat16)

  def run(q, k, v, kv_dtype):
    return attention.flash_attention(q, k, v, FIRST, LAST, TILE, kv_dtype)

  rounded = (
      x.astype(jnp.bfloat16)
      for x in (attention.store(x, 'float8_e4m3fn') for x in (k, v))
  )

  def both(kv_dtype, *args):
    out, pull = jax.vjp(lambda *a: run(*a, kv_dtype), *args)
    return out, pull(dout)

  out, grads = hurried_jit(functools.partial(both, 'float8_e4m3fn'))(q, k, v)
  same, same_grads = hurried_jit(functools.partial(both, None))(q, *rounded)
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
