"""SwiGLU's kernel: one result in all its forms."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.core.compilation import exact_jit, on_gpu
from jetrl_jax.fp8 import formats
from jetrl_jax.fp8.products import DeferredScale, scale_late
from jetrl_jax.fp8.quantization import quantize
from jetrl_jax.kernels import dispatch
from jetrl_jax.kernels import swiglu as operation
from jetrl_jax.kernels.swiglu import reference
from tests import kernels_in_use
from tests.kernels.test_swiglu_backward import operands

ROWS, COLUMNS = 128, 384
if dispatch.has_mosaic():
  from jetrl_jax.kernels.swiglu import mosaic_backward_sm90, mosaic_sm90


def in_all_forms(rows: int, columns: int, **how):
  """Returns the bytes of h on a scale, by the name of the form."""
  product, dh, scales, mask = operands(rows, columns)
  # Rows of NaN and inf are another test's; here all rows count.
  product = jnp.nan_to_num(product, nan=1.0)
  dh, mask = jnp.nan_to_num(dh, posinf=1.0), jnp.ones_like(mask)
  parts = jnp.stack(jnp.split(product, 2, axis=1))
  pair = scales[0] * 4, jnp.float32(0.25)
  of = functools.partial(mosaic_sm90.swiglu_of, **how)

  def forms(product, parts, pair, dh, scales, mask):
    step = scales[1]
    whole = DeferredScale(values=product, scales=pair)
    few = DeferredScale(values=product[:16], scales=pair)
    y = scale_late(product, pair)
    back, _ = mosaic_backward_sm90.backward(
        product, dh, scales, mask, formats.E4M3, **how
    )
    return {
        'whole': of(whole, step),
        'in parts': of(DeferredScale(values=parts, scales=pair), step),
        'few rows': of(few, step),
        'quantised after': quantize(of(whole), step, formats.E4M3),
        'scaled before': quantize(
            of(DeferredScale(values=y)), step, formats.E4M3
        ),
        'of the backward': back.transposed_NM.T,
        'by XLA': quantize(reference.swiglu(y), step, formats.E4M3),
    }

  found = exact_jit(forms)(product, parts, pair, dh, scales, mask)
  return {k: np.asarray(v).view(np.uint8) for k, v in found.items()}


def check(found):
  """All forms agree to the bit; XLA's exp is another in few values."""
  whole, by_xla = found.pop('whole'), found.pop('by XLA')
  assert np.mean(whole != by_xla) < 2e-3
  assert len(np.unique(whole)) > 200
  for name, values in found.items():
    assert np.array_equal(values, whole[: len(values)]), name


@kernels_in_use.needs_mosaic
def test_all_forms_have_one_result():
  check(in_all_forms(ROWS, COLUMNS, interpret=True))


@kernels_in_use.needs_mosaic
def test_large_values_go_to_zero_or_to_themselves():
  gate = jnp.array([-300.0, -100.0, 0.0, 100.0, 300.0] + [0.0] * 59)
  y = jnp.concatenate([gate, jnp.full((64,), 2.0)]).astype(jnp.bfloat16)
  h = mosaic_sm90.swiglu_of(
      DeferredScale(values=jnp.tile(y, (16, 1))), interpret=not on_gpu()
  )
  np.testing.assert_array_equal(h[3, :5], [0, 0, 0, 200, 600])


@kernels_in_use.needs_mosaic
def test_the_derivative_is_that_of_the_plain_form(monkeypatch):
  y, dh, *_ = operands(ROWS, COLUMNS)
  y, dh = (jnp.nan_to_num(x, posinf=1.0) for x in (y, dh))
  wanted = jax.vjp(operation.swiglu, y)[1](dh)[0]
  kernels_in_use.use(monkeypatch, 'swiglu')
  kernels_in_use.interpret(monkeypatch)
  h, pull = jax.vjp(operation.swiglu, y)
  np.testing.assert_array_equal(pull(dh)[0], wanted)
  np.testing.assert_allclose(
      np.float32(h), np.float32(reference.swiglu(y)), rtol=2**-7
  )


@kernels_in_use.needs_mosaic
@pytest.mark.parametrize('rows, columns', [(12, 64), (8, 320), (16, 512)])
@pytest.mark.parametrize('is_split', [True, False])
def test_the_kernel_takes_any_number_of_rows(rows, columns, is_split):
  product, *_ = operands(max(rows, 15), columns)
  product = jnp.nan_to_num(product[:rows], nan=1.0)
  parts = jnp.stack(jnp.split(product, 2, axis=1)) if is_split else product
  found = mosaic_sm90.swiglu_of(
      DeferredScale(values=parts), interpret=not on_gpu()
  )
  wanted = reference.swiglu(product)
  assert found.shape == (rows, columns)
  np.testing.assert_allclose(np.float32(found), np.float32(wanted), rtol=2**-7)


@pytest.mark.parametrize(
    'columns, is_taken', [(4736, True), (96, False), (24, False)]
)
def test_the_widths_that_the_kernel_takes(columns, is_taken):
  with dispatch.using(dispatch.select(hardware=kernels_in_use.HOPPER)):
    assert operation.has_kernel(columns) is is_taken
