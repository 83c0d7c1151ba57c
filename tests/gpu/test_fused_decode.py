"""A fused decode step has the bits of what training computes one by one."""

import jax
import numpy as np
import pytest

from jetrl_jax.config.model import SHAPES
from jetrl_jax.core.compilation import on_gpu
from jetrl_jax.fp8 import Recipe
from tests.models import fused, tiny

pytestmark = pytest.mark.gpu


# Of 64 and 128 rows gate_up and SwiGLU are one kernel.
@pytest.mark.parametrize('rows', [16, 64, 128])
@pytest.mark.parametrize(
    'recipe, kv',
    [
        ('fp8_delayed', 'float8_e4m3fn'),
        ('fp8_delayed', 'compute'),
        ('bf16', 'compute'),
    ],
)
def test_a_fused_step_has_the_bits_of_the_step(recipe, kv, rows):
  config = SHAPES['qwen2.5-7b']
  if not on_gpu():  # To try the test itself.
    config = tiny.config('qwen2', model_dim=64, head_dim=16, ffn_dim=96)
  sizes = dict(num_layers=2, vocab_size=1024)
  policy = fused.policy(
      type(config)(**vars(config) | sizes), Recipe(name=recipe), kv
  )
  params = fused.params(policy)
  joined, apart = (
      fused.steps(policy, params, fused=f, rows=rows) for f in (True, False)
  )
  for a, b in zip(jax.tree.leaves(joined), jax.tree.leaves(apart), strict=True):
    a, b = (np.asarray(x).view(np.uint8) for x in (a, b))
    assert np.array_equal(a, b)
