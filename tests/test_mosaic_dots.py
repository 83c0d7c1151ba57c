"""The dots in Pallas' Mosaic form, which a GPU only times, still are dots."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu

from benchmarks import mosaic_dots
from jetrl_jax.fp8 import formats

_RANDOM = functools.partial(jax.random.normal, dtype=jnp.bfloat16)


def _operands(rows, columns, dim):
  shapes = ((rows, dim), (columns, dim))
  return [
      _RANDOM(jax.random.key(i), shape).astype(formats.E4M3)
      for i, shape in enumerate(shapes)
  ]


@pytest.mark.skipif(
    not hasattr(mosaic_gpu, 'force_gpu_interpret_mode'),
    reason='needs a jax that interprets such kernels',
)
def test_a_dot_is_the_product():
  # 152 columns: the last program makes some once more.
  x, w = _operands(128, 152, 512)
  program = mosaic_dots.Program((64, 48), (2, 1), 2, 256)
  with mosaic_gpu.force_gpu_interpret_mode():
    y = mosaic_dots.dots(x, w[None], program, lambda y: y, jnp.float32)
  wanted = np.asarray(x, np.float32) @ np.asarray(w, np.float32).T
  np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize('name', mosaic_dots.PROGRAMS)
def test_every_program_lowers_for_a_gpu(name):
  dims = {'gate_up': (3584, 18944), 'down': (18944, 3584), 'qkv': (3584, 4608)}
  dim, columns = dims.get(name, (3584, 3584))
  parts, finish, dtype = 1, lambda y: y, jnp.float32
  if name == 'gate_up':
    finish = functools.partial(mosaic_dots.swiglu, scales=(0.5,), step=0.25)
    parts, dtype = 2, formats.E4M3
  for rows, program in mosaic_dots.PROGRAMS[name].items():
    shapes = (rows, dim), (parts, columns, dim)
    operands = [jax.ShapeDtypeStruct(s, formats.E4M3) for s in shapes]
    run = functools.partial(
        mosaic_dots.dots, program=program, finish=finish, dtype=dtype
    )
    lowered = jax.jit(run).trace(*operands).lower(lowering_platforms=('cuda',))
    assert 'mosaic_gpu' in lowered.as_text()
