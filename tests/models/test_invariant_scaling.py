import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.models import invariant_scaling
from tests.models import tiny


def _params(dtype='float32'):
  cast = lambda x: jnp.asarray(x, dtype)  # noqa: E731
  return jax.tree.map(cast, tiny.params(tiny.config('qwen2')))


def _leaves(tree):
  return {
      jax.tree_util.keystr(path, simple=True, separator='/'): np.asarray(leaf)
      for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }


def test_kernels_after_norms_are_divided_and_their_gains_multiplied():
  before = _leaves(_params())
  after = _leaves(invariant_scaling.fold(_params(), 4.0))
  factors = {
      'attn_norm/scale': 4,
      'attn/qkv/kernel': 1 / 4,
      'mlp_norm/scale': 4,
      'mlp/gate_up/kernel': 1 / 4,
  }
  scaled = 0
  for path, leaf in before.items():
    found = [f for name, f in factors.items() if path.endswith(name)]
    scaled += len(found)
    # Biases, o, down, embedding and the final norm stay.
    np.testing.assert_array_equal(after[path], leaf * (found or [1])[0])
  assert scaled == 2 * 4


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_a_power_of_two_is_undone_to_the_bit(dtype):
  folded = invariant_scaling.fold(_params(dtype), 2.0)
  found = _leaves(invariant_scaling.unfold(folded, 2.0))
  for path, leaf in _leaves(_params(dtype)).items():
    np.testing.assert_array_equal(found[path], leaf)
    assert found[path].dtype == leaf.dtype
  # What is exported is a copy: training could go on.
  assert np.any(_leaves(folded)['layers_0/attn/qkv/kernel'])


def test_the_paper_s_factor_is_undone_but_for_one_rounding():
  original = _leaves(_params())
  folded = invariant_scaling.fold(_params(), 1.5)
  for path, leaf in _leaves(invariant_scaling.unfold(folded, 1.5)).items():
    # Two products with factors that are themselves rounded, 2^-24 each.
    np.testing.assert_allclose(leaf, original[path], rtol=4 * 2.0**-24)
    # These masters are bfloat16 values, and come out as the same ones.
    np.testing.assert_array_equal(
        leaf.astype(jnp.bfloat16), original[path].astype(jnp.bfloat16)
    )


def test_all_layers_are_scaled_by_the_same_programs(monkeypatch):
  traced, times = [], invariant_scaling._times

  def counted(*args):
    traced.append(args)
    return times(*args)

  monkeypatch.setattr(invariant_scaling, '_times', counted)
  invariant_scaling.fold(_params(), 1.5)
  # Two layers of two gains, which have one shape, and two kernels.
  assert len(traced) == 3


@pytest.mark.parametrize('scale', [0.0, -1.5, 65.0, float('nan')])
def test_a_factor_that_cannot_be_meant_is_refused(scale):
  message = f'precision.invariant_scale is {scale}; allowed: 1/64 to 64'
  with pytest.raises(ValueError, match=re.escape(message)):
    invariant_scaling.check(scale)
