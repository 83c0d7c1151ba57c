"""The kernel of `fp8_block`, interpreted, beside its definition.

A CPU adds a dot in an order of its own, so where bits are compared the values
are small integers and the scales powers of two: their sums are exact.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.core.compilation import exact_jit
from jetrl_jax.fp8 import formats
from jetrl_jax.kernels.block_scaled_dot.mosaic_sm90 import Tiles, block_dot
from jetrl_jax.kernels.block_scaled_dot.reference import grouped_dot
from tests.kernels import block
from tests.kernels_in_use import needs_mosaic

pytestmark = needs_mosaic
# More groups than are on their way at a time: tiles are written over.
INNER = 384
TILES = Tiles(64, 64, 2), Tiles(128, 128, 2)


def operands(rows, columns, *, blocks, exact, seed=0):
  """Returns (a, its scales, b, its scales)."""
  rng = np.random.default_rng(seed)

  def values(count):
    x = rng.normal(size=(count, INNER)) * 4
    return jnp.asarray(np.round(x) if exact else x).astype(formats.E4M3)

  def scales(count):
    power = rng.integers(-4, 5, (count, INNER // 128))
    spread = 1.0 if exact else rng.uniform(1, 2, power.shape)
    return jnp.asarray(2.0**power * spread, jnp.float32)

  of_b = columns // 128 if blocks else columns
  return values(rows), scales(rows), values(columns), scales(of_b)


def results(args, **options):
  """Returns (kernel's result, definition's), in float32."""
  power_of_two = options.pop('power_of_two')
  kernel = block_dot(
      *args, 'float32', power_of_two=power_of_two, interpret=True, **options
  )

  def definition(*args):
    return grouped_dot(*args, jnp.float32, power_of_two=power_of_two)

  return np.asarray(kernel), np.asarray(exact_jit(definition)(*args))


@pytest.mark.parametrize(
    'rows, columns, tiles, blocks',
    [
        (16, 256, TILES[0], True),
        (128, 128, TILES[1], True),
        (80, 128, TILES[0], False),
        (136, 256, TILES[1], False),
    ],
)
def test_the_kernel_is_the_definition(rows, columns, tiles, blocks):
  args = operands(rows, columns, blocks=blocks, exact=True)
  found, expected = results(args, power_of_two=True, tiles=tiles)
  assert np.abs(expected).max() > 0
  np.testing.assert_array_equal(found, expected)


def test_scales_that_are_no_powers_of_two():
  args = operands(64, 128, blocks=True, exact=False)
  found, expected = results(args, power_of_two=False, tiles=TILES[0])
  np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-4)


def test_more_neighbours_than_one_tile_of_rows():
  # Ten tiles of 64 rows go by two: every tile in its place.
  args = operands(10 * 64, 128, blocks=True, exact=True)
  found, expected = results(args, power_of_two=True, tiles=Tiles(64, 128, 2))
  np.testing.assert_array_equal(found, expected)


def test_a_row_has_its_bits_among_any_others():
  args = operands(128, 128, blocks=True, exact=False)
  whole, _ = results(args, power_of_two=True, tiles=TILES[1])
  a, scale_a, *b = args
  part, _ = results(
      (a[:64], scale_a[:64], *b), power_of_two=True, tiles=TILES[0]
  )
  np.testing.assert_array_equal(part, whole[:64])


def test_the_result_is_rounded_once():
  args = operands(64, 128, blocks=True, exact=False)
  wide, low = (
      block_dot(*args, dtype, power_of_two=True, interpret=True)
      for dtype in ('float32', 'bfloat16')
  )
  assert low.dtype == jnp.bfloat16
  np.testing.assert_array_equal(wide.astype(jnp.bfloat16), low)


@pytest.mark.parametrize('a_dtype', [formats.E4M3, formats.E5M2])
def test_it_lowers_for_a_gpu_where_there_is_none(a_dtype):
  shapes = ((64, INNER), a_dtype), ((64, 3), 'f4')
  shapes += ((128, INNER), formats.E4M3), ((1, 3), 'f4')
  run = functools.partial(block_dot, out_dtype='bfloat16', power_of_two=True)
  args = (jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes)
  assert 'mosaic_gpu' in block.lowered_for_gpu(run, *args)
