"""Kernels whose 8-bit arrays have more values than an int32 counts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from jetrl_jax.fp8 import formats
from jetrl_jax.fp8.products import DeferredScale
from jetrl_jax.kernels import dispatch
from jetrl_jax.kernels.block_scaled_dot import triton as block_scaled_dot
from jetrl_jax.kernels.quantize_transpose import triton as transpose
from jetrl_jax.kernels.swiglu import triton as swiglu
from jetrl_jax.kernels.swiglu import triton_backward as swiglu_backward
from tests.hurry import fast_compile_jit

# As gate|up of a 7B are.
FFN = 18944


def _swiglu(product, step):
  return swiglu.swiglu_of.__wrapped__(
      DeferredScale(values=product), step, interpret=True
  )


def _backward(product, dh, scales, mask):
  found = swiglu_backward.backward.__wrapped__(
      product, dh, scales, mask, formats.E4M3, interpret=True
  )
  return [vars(part) for part in found]


def _transpose(x, scale, mask):
  return vars(
      transpose.quantize_and_transpose.__wrapped__(
          x, scale, mask, formats.E5M2, row_major=True, interpret=True
      )
  )


_dot = functools.partial(
    block_scaled_dot.block_dot.__wrapped__,
    out_dtype='float32',
    power_of_two=True,
    interpret=True,
)


def _shapes(rows: int, ffn: int):
  """Functions, and shapes and dtypes of what they take of so many rows."""
  low, groups = formats.E4M3, ffn // 128
  scale, mask = ((), 'f4'), ((rows,), 'f4')
  both = ((rows, 2 * ffn), 'bfloat16')
  return {
      'swiglu': (_swiglu, (both, scale)),
      'in parts': (_swiglu, (((2, rows, ffn), 'bfloat16'), scale)),
      'backward': (
          _backward,
          (both, ((rows, ffn), 'bfloat16'), ((3,), 'f4'), mask),
      ),
      'turn': (_transpose, (both, scale, mask)),
      'dot': (
          _dot,
          (
              *(((rows, ffn), low), ((rows, groups), 'f4')),
              *(((128, ffn), low), ((1, groups), 'f4')),
          ),
      ),
      'wgrad': (
          _dot,
          (
              *(((256, rows), low), ((256, rows // 128), 'f4')),
              *(((ffn, rows), low), ((ffn, rows // 128), 'f4')),
          ),
      ),
  }


NAMES = list(_shapes(128, 128))


@pytest.mark.parametrize('name', NAMES)
def test_no_kernel_takes_more_8_bit_values_than_it_can_count(monkeypatch, name):
  sizes = []

  def pallas_call(*_, out_shape, **options):
    del options

    def call(*operands):
      found = *operands, *jax.tree.leaves(out_shape)
      sizes.extend(x.size for x in found if x.dtype.itemsize == 1)
      return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), out_shape)

    return call

  monkeypatch.setattr(pl, 'pallas_call', pallas_call)
  run, shapes = _shapes(2**17, FFN)[name]
  made = jax.eval_shape(run, *(jax.ShapeDtypeStruct(*s) for s in shapes))
  assert max(x.size for x in jax.tree.leaves(made)) > 128 * FFN
  assert 0 < max(sizes) <= 2**31


@pytest.mark.parametrize(
    'name',
    [
        pytest.param(
            n, marks=[] if n in ('swiglu', 'wgrad') else pytest.mark.slow
        )
        for n in NAMES
    ],
)
def test_parts_of_the_rows_give_what_all_of_them_give(monkeypatch, name):
  run, shapes = _shapes(384, 256)[name]
  random = np.random.default_rng(0)
  operands = [
      # Powers of two for scales; whole numbers have exact sums.
      jnp.asarray(random.integers(1, 3, shape), dtype)
      for shape, dtype in shapes
  ]
  whole = fast_compile_jit(run)(*operands)
  monkeypatch.setattr(dispatch, 'MOST_VALUES', 256 * 256)
  parts = fast_compile_jit(lambda *args: run(*args))(*operands)
  for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
    np.testing.assert_allclose(
        np.asarray(a, 'f4'), np.asarray(b, 'f4'), rtol=1e-6 * (a.ndim == 1)
    )
