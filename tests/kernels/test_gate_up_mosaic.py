"""gate_up and SwiGLU as Mosaic's kernel, interpreted, beside dot and SwiGLU."""

import numpy as np
import pytest

from jetrl_jax.config.model import SHAPES
from jetrl_jax.kernels.gate_up import mosaic_sm90 as gate_up
from tests.kernels import test_gate_up as triton
from tests.kernels_in_use import needs_mosaic


@needs_mosaic
@pytest.mark.parametrize('rows', gate_up.ROWS)
# Programs of 80 columns, the last of which overlaps; and of 16.
@pytest.mark.parametrize('columns', [304, 64])
def test_the_kernel_is_the_dot_and_swiglu(monkeypatch, rows, columns):
  monkeypatch.setattr(gate_up, '_core_count', lambda: 4)
  assert gate_up.fits(rows, (256, columns))
  assert gate_up.width_of(columns) == {304: 80, 64: 16}[columns]
  args = triton.operands(rows, 256, columns, whole=True)
  # Not as another test has had it compiled, for more multiprocessors.
  found = gate_up.hidden.__wrapped__(*args, interpret=True)
  wanted = np.asarray(triton.apart(*args, ('interpret',))).view(np.uint8)
  assert len(np.unique(wanted)) > 50
  assert np.array_equal(np.asarray(found.values).view(np.uint8), wanted)


@pytest.mark.parametrize('columns', [16, 4864, 14336, 18944, 27648, 53248])
def test_programs_are_equal_and_cover_all_columns(columns):
  width = gate_up.width_of(columns)
  assert width % 16 == 0 and width <= 144
  # As few rounds of all multiprocessors as registers allow.
  assert -(-columns // width // 132) == -(-columns // (132 * 144))


def test_a_7b_has_a_program_on_every_multiprocessor():
  shape = SHAPES['qwen2.5-7b']
  assert gate_up.fits(128, (shape.model_dim, shape.ffn_dim))
  assert not gate_up.fits(256, (shape.model_dim, shape.ffn_dim))
