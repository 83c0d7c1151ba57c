"""A spread copy is the checkpoint, rounded, and starts as an 8-bit run does."""

import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from jetrl_jax.fp8 import Recipe
from jetrl_jax.models import load_checkpoint, load_config
from study.spread import spread
from tests.models import tiny


def _is_dot(path):
  return path.endswith('/kernel') and Recipe().quantizes(
      path[: -len('/kernel')]
  )


def test_the_copy_has_the_masters_of_an_8_bit_run_and_rounds_to_its_source(
    tmp_path,
):
  source, target = tmp_path / 'source', tmp_path / 'spread'
  tiny.save(source, tiny.config('llama'), dtype='bfloat16')
  spread(source, target)

  def load(folder, spreads):
    config = load_config(source)
    found = load_checkpoint(folder, config, dtype='float32', spreads=spreads)
    return traverse_util.flatten_dict(found, sep='/')

  plain, wanted = load(source, lambda path: False), load(source, _is_dot)
  # What is spread already stays where it is.
  written = load(target, _is_dot)
  assert any(map(_is_dot, plain)) and written.keys() == plain.keys()
  for path, leaf in written.items():
    np.testing.assert_array_equal(leaf, wanted[path])
    np.testing.assert_array_equal(leaf.astype(jnp.bfloat16), plain[path])
    moved = np.mean(np.asarray(leaf) != np.asarray(plain[path]))
    assert moved > 0.9 if _is_dot(path) else moved == 0, path
