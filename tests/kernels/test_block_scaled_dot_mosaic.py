"""The kernel of `fp8_block`, interpreted, beside its definition.

A CPU adds a dot in an order of its own, so where bits are compared the values
are small integers and the scales powers of two: their sums are exact.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.fp8 import formats
from jetrl_jax.kernels import block_scaled_dot, dispatch
from jetrl_jax.kernels.block_scaled_dot import mosaic_sm90
from jetrl_jax.kernels.block_scaled_dot.mosaic_sm90 import Tiles, block_dot
from tests.kernels import block
from tests.kernels_in_use import HOPPER, needs_mosaic

pytestmark = needs_mosaic
# More groups than are on their way at a time: tiles are written over.
INNER = 384
TILES = Tiles(64, 64, 2), Tiles(128, 128, 2)


operands = functools.partial(block.operands, inner=INNER)
results = functools.partial(block.results, block_dot)


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


@pytest.mark.parametrize('groups, fits', [(256, True), (296, False)])
def test_as_many_groups_as_a_copy_may_bring(groups, fits):
  # 296: the gradient of a 7B's gate_up, whose outputs are 37888.
  shapes = ((1024, 128 * groups), formats.E4M3), ((1024, groups), 'f4')
  shapes += ((128, 128 * groups), formats.E4M3), ((1, groups), 'f4')
  args = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
  assert mosaic_sm90.fits(args[-1], 128) == fits
  # A scale per row comes group by group.
  assert mosaic_sm90.fits(jax.ShapeDtypeStruct((128, groups), 'f4'), 128)
  run = functools.partial(
      block_scaled_dot.block_dot, out_dtype='bfloat16', power_of_two=True
  )
  with dispatch.using(dispatch.select('auto', HOPPER)):
    text = block.lowered_for_gpu(run, *args)
  assert ('mosaic_gpu' in text) is fits
