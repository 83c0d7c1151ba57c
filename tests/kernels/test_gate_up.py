"""gate_up and SwiGLU as one kernel, interpreted, beside the dot and SwiGLU.

A CPU adds a dot in an order of its own, so the values are small integers and
the scales powers of two: their sums are exact. Real ones: tests/gpu.
"""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.config.model import SHAPES
from jetrl_jax.core.compilation import exact_jit, on_gpu
from jetrl_jax.fp8 import formats
from jetrl_jax.fp8.quantization import QTensor
from jetrl_jax.kernels import gate_up as operation
from jetrl_jax.kernels.gate_up import mosaic_sm90 as gate_up
from jetrl_jax.kernels.quantized_dot import per_tensor
from jetrl_jax.kernels.swiglu import mosaic_sm90 as swiglu
from tests.kernels_in_use import needs_mosaic


def _tensor(values, power: int) -> QTensor:
  values = jnp.asarray(values).astype(formats.E4M3)
  return QTensor(values=values, scale=jnp.float32(2.0**power))


def operands(rows: int, dim: int, columns: int, *, whole: bool):
  """Returns (x, weight, step) in FP8; `whole` for small integers."""
  random = np.random.default_rng(0)
  sizes = (rows, dim), (2 * columns, dim)
  if whole:
    x, w = (random.integers(-2, 3, size) for size in sizes)
  else:
    x, w = (random.normal(size=size) for size in sizes)
  return _tensor(x, -3), _tensor(w, -4), jnp.float32(2.0**-5)


@functools.partial(exact_jit, static_argnums=(3,))
def apart(x8: QTensor, weight: QTensor, step, how: tuple[str, ...] = ()):
  """Returns h by the dot and SwiGLU's kernel."""
  product = per_tensor.unscaled(x8, weight, jnp.bfloat16)
  return swiglu.swiglu_of(product, step, interpret='interpret' in how)


@needs_mosaic
@pytest.mark.parametrize('rows', gate_up.ROWS)
# Programs of 112 columns, the last of which overlaps; and of 32.
@pytest.mark.parametrize('columns', [320, 64])
def test_the_kernel_is_the_dot_and_swiglu(monkeypatch, rows, columns):
  monkeypatch.setattr(gate_up, '_core_count', lambda: 3)
  assert gate_up.fits(rows, (256, columns))
  assert gate_up.width_of(columns) == {320: 112, 64: 32}[columns]
  args = operands(rows, 256, columns, whole=True)
  # Not as another test has had it compiled, for more multiprocessors.
  found = gate_up.hidden.__wrapped__(*args, interpret=True)
  wanted = np.asarray(apart(*args, ('interpret',))).view(np.uint8)
  assert len(np.unique(wanted)) > 50
  assert np.array_equal(np.asarray(found.values).view(np.uint8), wanted)
  assert found.scale == args[-1]


@pytest.mark.parametrize('columns', [16, 4864, 14336, 18944, 27648, 53248])
def test_programs_are_equal_and_cover_all_columns(columns):
  width = gate_up.width_of(columns)
  assert width % 16 == 0 and width <= 144
  # As few rounds of all multiprocessors as registers allow.
  assert -(-columns // width // 132) == -(-columns // (132 * 144))


def test_a_7b_has_a_program_on_every_multiprocessor():
  shape = SHAPES['qwen2.5-7b']
  assert -(-shape.ffn_dim // gate_up.width_of(shape.ffn_dim)) == 132
  assert gate_up.fits(128, (shape.model_dim, shape.ffn_dim))


@pytest.mark.parametrize(
    'rows, dims',
    [
        (16, (256, 64)),
        (96, (256, 64)),
        (256, (256, 64)),
        (64, (192, 64)),
        # Some multiprocessors would have two programs.
        (64, (256, 132 * 144 + 16)),
    ],
)
def test_other_rows_and_widths_are_left_to_the_dot(rows, dims):
  for columns in (64, 132 * 144):
    assert gate_up.fits(64, (256, columns))
  assert not gate_up.fits(rows, dims)


def test_other_devices_have_no_kernel():
  assert on_gpu() or not operation.fits(64, (256, 64))
