"""The kernel of `fp8_block`, interpreted, beside its definition.

A CPU adds a dot in an order of its own, so where bits are compared the values
are small integers and the scales powers of two: their sums are exact.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.fp8 import formats
from jetrl_jax.kernels.block_scaled_dot.triton import block_dot
from tests.kernels import block

INNER = 256


operands = functools.partial(block.operands, inner=INNER)
results = functools.partial(block.results, block_dot)


# Every two of the three settings meet.
@pytest.mark.parametrize(
    'rows, columns, few, blocks',
    [
        (16, 256, True, True),
        (16, 256, False, False),
        (128, 128, True, False),
        (128, 128, False, True),
        (192, 384, True, True),
        (192, 384, False, False),
    ],
)
def test_the_kernel_is_the_definition(rows, columns, few, blocks):
  args = operands(rows, columns, blocks=blocks, exact=True)
  found, expected = results(args, power_of_two=True, few=few)
  assert np.abs(expected).max() > 0
  np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize('blocks', [True, False])
def test_scales_that_are_no_powers_of_two(blocks):
  args = operands(64, 128, blocks=blocks, exact=False)
  found, expected = results(args, power_of_two=False)
  np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-4)


def test_more_neighbours_than_one_tile_of_rows():
  # 24 tiles of 64 rows go by eight, 6 by two: every tile in its place.
  for rows in (24 * 64, 6 * 64):
    args = operands(rows, 128, blocks=True, exact=True)
    found, expected = results(args, power_of_two=True, few=True)
    np.testing.assert_array_equal(found, expected)


def test_a_row_has_its_bits_among_any_others():
  args = operands(192, 256, blocks=True, exact=False)
  whole, _ = results(args, power_of_two=True, few=False)
  a, scale_a, *b = args
  for rows, few in itertools.product((64, 128), (True, False)):
    part, _ = results(
        (a[:rows], scale_a[:rows], *b), power_of_two=True, few=few
    )
    np.testing.assert_array_equal(part, whole[:rows])


def test_the_result_is_rounded_once():
  args = operands(64, 128, blocks=True, exact=False)
  wide = block_dot(*args, 'float32', power_of_two=True, interpret=True)
  low = block_dot(*args, 'bfloat16', power_of_two=True, interpret=True)
  assert low.dtype == jnp.bfloat16
  np.testing.assert_array_equal(wide.astype(jnp.bfloat16), low)


@pytest.mark.parametrize('a_dtype', [formats.E4M3, formats.E5M2])
def test_it_lowers_for_a_gpu_where_there_is_none(a_dtype):
  # Its dot is an operation of our own, in a part of JAX that is not public.
  shapes = ((64, INNER), a_dtype), ((64, 2), 'f4')
  shapes += ((128, INNER), formats.E4M3), ((1, 2), 'f4')
  run = functools.partial(block_dot, out_dtype='bfloat16', power_of_two=True)
  args = (jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes)
  assert 'triton' in block.lowered_for_gpu(run, *args)
