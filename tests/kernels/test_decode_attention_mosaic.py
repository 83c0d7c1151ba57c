"""Decode's attention as a kernel, interpreted, beside its reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.fp8 import formats, quantize
from jetrl_jax.kernels import kv_storage
from jetrl_jax.kernels.decode_attention import reference
from tests.hurry import fast_compile_jit
from tests.kernels_in_use import needs_mosaic

_TILE = 64


def _operands(kind, group, head_dim, last, page_size):
  slots, pages, kv_heads = len(last), 256 // page_size, 2
  rng = np.random.default_rng(0)

  def draw(*shape):
    return jnp.asarray(rng.normal(size=shape), jnp.bfloat16)

  pool = slots * pages, kv_heads, page_size, head_dim
  table = rng.permutation(slots * pages).reshape(slots, pages)
  return (
      2 * draw(slots, kv_heads * group, head_dim),
      kv_storage.store(draw(*pool), kind),
      kv_storage.store_values(draw(*pool), kind),
      jnp.asarray(table, jnp.int32),
      jnp.asarray(last, jnp.int32),
  )


def _bits(x):
  return np.asarray(x).view(np.uint8)


# A first key, tiles that end with the last key or one before or after it, more
# tiles than are on their way, and a slot that waits (-1).
@needs_mosaic
@pytest.mark.parametrize(
    'kind, group, head_dim, page_size, last',
    [
        ('bfloat16', 7, 128, 128, [255, 63, -1]),
        ('float8_e4m3fn', 7, 128, 128, [254, 64, -1]),
        pytest.param(
            'bfloat16', 1, 64, 64, [0, 127, 200], marks=pytest.mark.slow
        ),
        pytest.param(
            'float8_e4m3fn', 1, 128, 256, [-1, 0, 192], marks=pytest.mark.slow
        ),
        pytest.param(
            'bfloat16', 14, 128, 256, [62, -1, 191], marks=pytest.mark.slow
        ),
        pytest.param(
            'float8_e4m3fn', 14, 64, 64, [128, 1, 255], marks=pytest.mark.slow
        ),
    ],
)
def test_the_kernel_computes_what_its_reference_does(
    kind, group, head_dim, page_size, last
):
  from jetrl_jax.kernels.decode_attention import mosaic_sm90

  operands = _operands(kind, group, head_dim, last, page_size)
  step = jnp.float32(2.0**-9)  # 448 / 512: some saturate.

  def run(*args, scale=None):
    options = dict(stages=2, interpret=True)
    return mosaic_sm90.decode(*args, scale, **options)

  found = jax.jit(run)(*operands)
  plain = fast_compile_jit(lambda *args: reference.decode(*args, _TILE))(
      *operands
  )
  assert found.dtype == jnp.bfloat16 and found.shape == plain.shape
  values, wanted = (np.asarray(x, np.float32) for x in (found, plain))
  np.testing.assert_allclose(values, wanted, rtol=0, atol=2.0**-7)
  is_parked = np.asarray(last) < 0
  has_values = values.any(axis=-1)
  assert not has_values[is_parked].any() and has_values[~is_parked].all()
  low = jax.jit(lambda *args: run(*args, scale=step))(*operands)
  assert np.array_equal(_bits(low), _bits(quantize(found, step, formats.E4M3)))
