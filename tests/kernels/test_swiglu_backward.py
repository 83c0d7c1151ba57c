import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.fp8 import formats, health
from jetrl_jax.fp8.products import scale_late
from jetrl_jax.fp8.quantization import QTensor, quantize
from jetrl_jax.kernels import dispatch
from jetrl_jax.kernels.swiglu import reference
from tests.hurry import fast_compile_jit
from tests.kernels_in_use import needs_mosaic

if dispatch.has_mosaic():
  from jetrl_jax.kernels.swiglu import mosaic_backward_sm90


def _bytes(x):
  return np.asarray(x).view(np.uint8)


def operands(rows: int, columns: int):
  """(the first dot's product, dh, scales, a mask without every 7th row)."""
  random = np.random.default_rng(0)

  def make(spread, *shape):
    values = random.standard_normal(shape)
    values *= np.exp(spread * random.standard_normal(shape))
    return jnp.asarray(values, jnp.bfloat16)

  product, dh = make(1.0, rows, 2 * columns) * 8, make(3.0, rows, columns)
  # Padding may hold anything.
  product, dh = product.at[7].set(jnp.nan), dh.at[14].set(jnp.inf)
  # With these, of gate|up, h and the gradient, some values saturate, and some
  # become zeros.
  scales = jnp.array([2.0**-3, 2.0**-6, 2.0**-5], jnp.float32)
  mask = jnp.asarray(np.arange(rows) % 7 != 0, jnp.float32)
  return product, dh, scales, mask


def plain(product, dh, scales, mask, dtype):
  """By XLA: (8-bit values, amax and sums) of h and of the gradient."""
  y = scale_late(product, (scales[0],))
  h, pull = jax.vjp(reference.swiglu, y)
  pairs = (h, scales[1], formats.E4M3), (pull(dh)[0], scales[2], dtype)
  found = []
  for x, scale, kind in pairs:
    x = jnp.where(mask[:, None] > 0, x, 0)
    values = quantize(x, scale, kind)
    seen = health.measure(x, QTensor(values=values, scale=scale), mask)
    found.append((values, *seen))
  return found


def assert_like(found, wanted, others: float):
  """Compares the kernel's two results; a share of bytes may be other ones.

  exp2 of a multiple is not exp: another float32 next to a tie between two
  stored values becomes the other of them.
  """
  for out, (values, amax, sums) in zip(found, wanted, strict=True):
    differ = _bytes(out['transposed_NM']) != _bytes(values).T
    assert np.mean(differ) <= others
    np.testing.assert_allclose(out['amax'], amax, rtol=2.0**-7)
    np.testing.assert_allclose(out['quantization_error'], sums[1:], rtol=1e-3)
    assert np.all(out['quantization_error'][:2] > 0)
  h, dy = found
  assert h['row_major_MN'] is None
  assert np.array_equal(
      _bytes(dy['row_major_MN']), _bytes(dy['transposed_NM']).T
  )
  # Rows that do not count.
  assert not np.any(_bytes(dy['row_major_MN'])[::7])


@needs_mosaic
@pytest.mark.parametrize(
    'dtype',
    [pytest.param(formats.E4M3, marks=pytest.mark.slow), formats.E5M2],
)
def test_one_pass_gives_what_xla_differentiates_quantises_and_turns(dtype):
  # Two tiles of both dims.
  arguments = operands(128, 128)
  wanted = fast_compile_jit(lambda *args: plain(*args, dtype))(*arguments)
  found = mosaic_backward_sm90.backward(*arguments, dtype, interpret=True)
  found = [vars(part) for part in found]
  assert_like(found, wanted, others=1e-4)
