"""What tests of `fp8_block`'s kernels share, on a CPU and on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jetrl_jax.core.compilation import exact_jit
from jetrl_jax.fp8 import formats, health
from jetrl_jax.fp8.quantization import QTensor, dequantize, quantize_groups
from jetrl_jax.kernels.block_scaled_dot.reference import grouped_dot


def matrix(rows: int, columns: int, seed: int = 0):
  """Float32 values whose rows spread over five powers of ten."""
  random = np.random.default_rng(seed)
  spread = 10.0 ** random.uniform(-5, 0, (rows, 1))
  return jnp.asarray(random.standard_normal((rows, columns)) * spread, 'f4')


def operands(rows, columns, inner, *, blocks, exact, seed=0):
  """Returns (a, its scales, b, its scales) of a dot over `inner` values.

  A CPU adds a dot in an order of its own. `exact` values are small integers on
  powers of two, whose sums are exact in any order.
  """
  rng = np.random.default_rng(seed)

  def values(count):
    x = rng.normal(size=(count, inner)) * 4
    return jnp.asarray(np.round(x) if exact else x).astype(formats.E4M3)

  def scales(count):
    power = rng.integers(-4, 5, (count, inner // 128))
    spread = 1.0 if exact else rng.uniform(1, 2, power.shape)
    return jnp.asarray(2.0**power * spread, jnp.float32)

  of_b = columns // 128 if blocks else columns
  return values(rows), scales(rows), values(columns), scales(of_b)


def results(block_dot, args, *, power_of_two, **options):
  """Returns (an interpreted kernel's result, its definition's), in float32."""
  kernel = block_dot(
      *args, 'float32', power_of_two=power_of_two, interpret=True, **options
  )

  def definition(*args):
    return grouped_dot(*args, jnp.float32, power_of_two=power_of_two)

  return np.asarray(kernel), np.asarray(exact_jit(definition)(*args))


def _same(found: QTensor, wanted: QTensor) -> None:
  assert found.values.dtype == wanted.values.dtype
  for name in ('values', 'scale'):
    a, b = (np.asarray(getattr(q, name)) for q in (found, wanted))
    np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


def _transposed(q: QTensor) -> QTensor:
  return QTensor(values=q.values.T, scale=q.scale.T)


def _grouped(x, dtype, group, how) -> QTensor:
  run = functools.partial(quantize_groups, dtype=dtype, group=group, **how)
  return exact_jit(run)(x)


def assert_both_ways(found, x, mask_M, dtype, how) -> None:
  """Asserts that `quantize_both_ways` gave what passes of XLA's give."""
  row_major, transposed, amax, quantization_error = found
  valid = jnp.where(mask_M[:, None] > 0, x, 0)
  wanted = _grouped(valid, dtype, (1, 128), how)
  _same(row_major, wanted)
  _same(transposed, _transposed(_grouped(valid, dtype, (128, 1), how)))
  seen, sums = health.measure(x, wanted, mask_M)
  assert amax == seen
  np.testing.assert_array_equal(quantization_error[:2], sums[1:3])
  np.testing.assert_allclose(quantization_error[2:], sums[3:], rtol=1e-4)


def assert_regrouped(found: QTensor, x8: QTensor, how) -> None:
  """Asserts that `regroup_and_transpose` gave what passes of XLA's give."""
  restored = dequantize(x8, 'float32')
  _same(found, _transposed(_grouped(restored, formats.E4M3, (128, 1), how)))


def lowered_for_gpu(run, *args) -> str:
  """Returns the program of an H200, lowered where there is none."""
  h200 = jax.sharding.AbstractDevice('NVIDIA H200', None, 'gpu')
  auto = (jax.sharding.AxisType.Auto,)
  mesh = jax.sharding.AbstractMesh(
      (1,), ('x',), axis_types=auto, abstract_device=h200
  )
  with jax.sharding.use_abstract_mesh(mesh):
    traced = jax.jit(run).trace(*args)
    return traced.lower(lowering_platforms=('cuda',)).as_text()
