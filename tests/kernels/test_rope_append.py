import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.core.compilation import exact_jit
from jetrl_jax.fp8 import DeferredScale
from jetrl_jax.kernels.rope_append import triton as rope_append
from jetrl_jax.models import attention, rope
from jetrl_jax.models.attention import DecodeAttention
from tests.models import tiny

SLOTS, N, K, H, PAGES, SIZE = 16, 6, 2, 32, 2, 32


def _arguments(kv_dtype, scales, has_bias):
  """(DeferredScale, positions, table, keys, values); slot 3 is idle."""
  random = np.random.default_rng(0)

  def draw(*shape):
    return jnp.asarray(random.normal(size=shape), jnp.bfloat16)

  width = (N + 2 * K) * H
  qkv = DeferredScale(
      values=draw(SLOTS, width) * 8,
      scales=tuple(map(jnp.float32, scales)),
      bias_O=draw(width) if has_bias else None,
  )
  pool = SLOTS * PAGES, K, SIZE, H
  keys = attention.store(draw(*pool), kv_dtype)
  values = attention.store_values(draw(*pool), kv_dtype)
  position = random.integers(0, PAGES * SIZE, SLOTS).astype(np.int32)
  position[:4] = 0, SIZE, 2 * SIZE - 1, -1
  table = random.permutation(SLOTS * PAGES).reshape(SLOTS, PAGES)
  return qkv, position, table.astype(np.int32), keys, values


@pytest.mark.parametrize(
    'kv_dtype, scales, has_bias',
    [
        ('bfloat16', (), False),
        ('bfloat16', (2.0**-3, 0.5), True),
        ('float8_e4m3fn', (2.0**-3, 0.5), True),
        ('float8_e4m3fn', (), True),
    ],
)
def test_one_kernel_does_what_xla_does_in_three(kv_dtype, scales, has_bias):
  args = _arguments(kv_dtype, scales, has_bias)
  frequencies = rope.inverse_frequencies(tiny.config('qwen2', head_dim=H))

  @exact_jit
  def fused(qkv, position, table, keys, values):
    rotation = rope.rotation(jnp.maximum(position, 0), frequencies)
    return rope_append.rotate_and_append(
        qkv, *rotation, position, table, keys, values, interpret=True
    )

  @exact_jit
  def plain(qkv, position, table, keys, values):
    y = qkv.values.astype(jnp.float32)
    for scale in qkv.scales:
      y = y * scale
    y = y.astype(jnp.bfloat16)
    if qkv.bias_O is not None:
      y = y + qkv.bias_O[None]
    y = y.reshape(SLOTS, -1, H)
    rotation = rope.rotation(jnp.maximum(position, 0), frequencies)
    q, k = (rope.rotate(x, *rotation) for x in (y[:, :N], y[:, N : N + K]))
    attend = DecodeAttention(position_B=position, table_BP=table, tile=16)
    return q, *attend.append((k, y[:, N + K :]), (keys, values))

  found, wanted = fused(*args), plain(*args)
  for name, a, b in zip(('q', 'keys', 'values'), found, wanted, strict=True):
    a, b = (np.atleast_1d(np.asarray(x)).view(np.uint8) for x in (a, b))
    np.testing.assert_array_equal(a, b, err_msg=name)
  assert np.any(np.asarray(found[1], np.float32) != np.asarray(args[3]))
