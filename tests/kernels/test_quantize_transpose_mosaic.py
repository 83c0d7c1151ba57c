"""Mosaic's kernels that transpose, interpreted, beside XLA's passes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.fp8 import formats
from jetrl_jax.fp8.quantization import dequantize, quantize_groups
from jetrl_jax.kernels import dispatch, quantize_transpose
from jetrl_jax.kernels.quantize_transpose import (
    mosaic_per_block_sm90,
    mosaic_sm90,
    reference,
)
from tests.kernels import block
from tests.kernels_in_use import HOPPER, needs_mosaic

pytestmark = needs_mosaic
ROWS, COLUMNS = 256, 128
HOW = dict(margin=0, power_of_two=True)


def _matrix():
  return 100 * block.matrix(ROWS, COLUMNS).astype(jnp.bfloat16)


def _mask():
  return jnp.asarray(np.arange(ROWS) % 5 != 0, 'f4')


def _bytes(x):
  return np.asarray(x).view(np.uint8)


@pytest.mark.parametrize(
    'dtype, row_major', [(formats.E4M3, True), (formats.E5M2, False)]
)
def test_one_pass_is_what_xla_quantises_and_transposes(dtype, row_major):
  operands = _matrix(), jnp.float32(2.0**-4), _mask(), dtype
  found = mosaic_sm90.quantize_and_transpose(
      *operands, row_major=row_major, interpret=True
  )
  wanted = reference.quantize_and_transpose(*operands, row_major=row_major)
  assert np.array_equal(
      _bytes(found.transposed_NM), _bytes(wanted.transposed_NM)
  )
  assert found.amax == wanted.amax
  lost = found.quantization_error, wanted.quantization_error
  assert np.array_equal(*(x[:2] for x in lost)) and lost[0][1] > 0
  np.testing.assert_allclose(*lost, rtol=1e-5)
  if row_major:
    pair = found.row_major_MN, wanted.row_major_MN
    assert np.array_equal(*map(_bytes, pair))
  else:
    assert found.row_major_MN is None


def test_all_bytes_are_transposed():
  x = jnp.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS) // 3 % 256
  x = jax.lax.bitcast_convert_type(x.astype(jnp.uint8), formats.E4M3)
  found = mosaic_sm90.transpose(x, interpret=True)
  assert found.dtype == x.dtype
  assert np.array_equal(_bytes(found), _bytes(x).T)


@pytest.mark.parametrize(
    'dtype, power_of_two', [(formats.E4M3, True), (formats.E5M2, False)]
)
def test_one_pass_is_both_groupings_of_xla(dtype, power_of_two):
  how = HOW | {'power_of_two': power_of_two}
  x, mask_M = _matrix(), _mask()
  found = mosaic_per_block_sm90.quantize_both_ways(
      x, mask_M, dtype, **how, interpret=True
  )
  block.assert_both_ways(found, x, mask_M, dtype, how)


def test_a_group_of_zeros_has_a_scale_and_nan_stays_in_its_groups():
  x = _matrix().at[:128].set(0).at[200, 100].set(jnp.nan)
  row_major, transposed, *_ = mosaic_per_block_sm90.quantize_both_ways(
      x, jnp.ones(ROWS), formats.E4M3, **HOW, interpret=True
  )
  for q in (row_major, transposed):
    assert np.all(np.isfinite(q.scale)) and np.all(np.asarray(q.scale) > 0)
  rows, columns = (dequantize(q, 'float32') for q in (row_major, transposed))
  assert np.all(rows[:128] == 0) and np.all(columns[:, :128] == 0)
  assert np.isnan(rows[200, 100]) and np.isnan(columns[100, 200])


def test_a_kept_input_is_grouped_along_its_tokens():
  x8 = quantize_groups(_matrix(), formats.E4M3, (1, 128), **HOW)
  found = mosaic_per_block_sm90.regroup_and_transpose(x8, **HOW, interpret=True)
  block.assert_regrouped(found, x8, HOW)


@pytest.mark.parametrize('dtype, has', [('bfloat16', True), ('float32', False)])
def test_what_lowers_for_a_gpu_and_what_is_left_to_the_reference(dtype, has):
  x = jax.ShapeDtypeStruct((ROWS, COLUMNS), dtype)
  mask_M, scale = (jax.ShapeDtypeStruct(s, 'f4') for s in ((ROWS,), ()))
  per_tensor = functools.partial(
      quantize_transpose.quantize_and_transpose,
      dtype=formats.E4M3,
      row_major=True,
  )
  per_block = functools.partial(
      quantize_transpose.quantize_both_ways, dtype=formats.E4M3, **HOW
  )
  kernels = dispatch.select('quantize_transpose=mosaic_sm90', HOPPER)
  for run, args in (
      (lambda *a: vars(per_tensor(*a)), (x, scale, mask_M)),
      (per_block, (x, mask_M)),
  ):
    with dispatch.using(kernels):
      assert ('mosaic_gpu' in block.lowered_for_gpu(run, *args)) is has
