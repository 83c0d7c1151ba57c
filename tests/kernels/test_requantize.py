"""The kernel that quantises moved masters, against the three XLA programs."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jetrl_jax import kernels
from jetrl_jax.core import collectives, sharding
from jetrl_jax.core.collectives import Axes
from jetrl_jax.fp8 import formats, scaling_state
from jetrl_jax.fp8.quantization import QTensor, quantize
from jetrl_jax.fp8.recipes import Recipe
from jetrl_jax.kernels import dispatch
from jetrl_jax.kernels.requantize import changed_share, groups
from tests.hurry import fast_compile_jit
from tests.kernels_in_use import needs_mosaic

if dispatch.has_mosaic():
  from jetrl_jax.kernels.requantize import mosaic_sm90

_RECIPE = Recipe(name='fp8_delayed', high_precision_layers=('head',))


def _part(seed: int, dtype):
  random = np.random.default_rng(seed)

  def make(*shape):
    spread = np.exp(3 * random.standard_normal(shape))
    return jnp.asarray(random.standard_normal(shape) * spread, dtype)

  return {
      'mlp': {'up': {'kernel': make(48, 256), 'bias': make(48)}},
      # Of 56 rows, which no program of the most rows divides.
      'out': {'kernel': make(56, 128)},
      'head': {'kernel': make(8, 128)},
      'norm': make(128),
  }


@pytest.mark.parametrize(
    'dtype, power_of_two', [(jnp.float32, False), (jnp.bfloat16, True)]
)
@needs_mosaic
def test_one_pass_gives_the_weights_the_health_and_what_changed(
    dtype, power_of_two
):
  recipe = dataclasses.replace(_RECIPE, power_of_two_scales=power_of_two)
  before, params = _part(0, dtype), _part(1, dtype)
  # The scales stay those of `before`: the largest of eight times more saturate.
  params = jax.tree.map(lambda x: 8 * x, params)
  # Half of the values of one kernel do not move.
  params['out']['kernel'] = (
      params['out']['kernel'].at[::2].set(before['out']['kernel'][::2])
  )

  @jax.jit
  def prepare(before):
    state = scaling_state.init_state(before, recipe)
    state = scaling_state.observe_kernels(state, before, recipe, Axes())
    return state, kernels.prepare_weights(before, state, recipe)

  @jax.jit
  def reference(params, state, weights):
    wanted = kernels.requantize_weights(params, state, weights, recipe)
    measured = scaling_state.measure_kernels(state, params, wanted, Axes())
    return wanted, measured, changed_share(weights, wanted, Axes())

  @fast_compile_jit
  def kernel(params, state, weights):
    one = functools.partial(mosaic_sm90.requantize_kernel, interpret=True)
    return groups.requantize(one, params, state, weights, recipe, Axes())

  state, weights = prepare(before)
  # Neither is lost: the largest value that is held, and zero.
  limit = 448 * state['out']['kernel']['scale']
  held = jnp.stack([limit, 0 * limit]).astype(dtype)
  params['out']['kernel'] = params['out']['kernel'].at[1, :2].set(held)
  assert groups.fits(params, weights, recipe)
  requantized, seen, changed = kernel(params, state, weights)
  wanted, measured, shares = reference(params, state, weights)
  assert jax.tree.structure(requantized) == jax.tree.structure(wanted)
  for a, b in zip(*map(jax.tree.leaves, (requantized, wanted)), strict=True):
    assert a.dtype == b.dtype and a.shape == b.shape
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
  assert jax.tree.structure(seen) == jax.tree.structure(measured)
  for a, b in zip(*map(jax.tree.leaves, (seen, measured)), strict=True):
    # Counts are exact; powers are added in another order.
    np.testing.assert_allclose(a, b, rtol=1e-5)
  health = seen['mlp']['up']['kernel']['health']
  assert health[0] == 48 * 256 and health[1] > 0 and health[2] > 0
  assert jax.tree.structure(changed) == jax.tree.structure(shares)
  for a, b in zip(*map(jax.tree.leaves, (changed, shares)), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-6)
  assert 0.2 < changed['out']['kernel'] <= 0.5


def requantized(master_OI, old_OI, scale):
  """What the kernel returns, in plain JAX."""
  x = master_OI.astype(jnp.float32)
  new = quantize(master_OI, scale, formats.E4M3)
  held = new.astype(jnp.float32)
  error = x - held * scale
  seen = (
      jnp.abs(x) > 448 * scale,
      (x != 0) & (held == 0),
      x * x,
      error * error,
      old_OI.astype(jnp.float32) != held,
  )
  return new, jnp.stack([jnp.sum(part.astype(jnp.float32)) for part in seen])


# With the kernel in plain JAX, because its interpreter takes two devices'
# programs for one's.
def test_devices_with_rows_of_their_own_see_what_one_does():
  recipe, mesh = Recipe(), sharding.make_mesh(fsdp=2)
  before, params = (
      {'kernel': jnp.asarray(_part(i, jnp.float32)['out']['kernel'][:32])}
      for i in range(2)
  )
  params['kernel'] = params['kernel'].at[20:].set(before['kernel'][20:])
  state = scaling_state.init_state({'out': before}, recipe)['out']
  weights = kernels.prepare_weights(before, state, recipe)

  def of(axes):
    return lambda params, state, weights: groups.requantize(
        requantized, params, state, weights, recipe, axes
    )

  arguments = params, state, weights
  specs = tuple(sharding.tree_specs(tree, mesh) for tree in arguments)
  run = sharding.per_device(
      of(collectives.axes_of(mesh)),
      mesh,
      specs,
      (specs[2], specs[1], P()),
  )
  found, wanted = (
      fast_compile_jit(run)(*arguments),
      fast_compile_jit(of(Axes()))(*arguments),
  )
  for a, b in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
    a, b = (np.asarray(leaf, np.float32) for leaf in (a, b))
    np.testing.assert_allclose(a, b, rtol=1e-6)
  assert 0 < wanted[2]['kernel'] < 20 / 32


def test_only_whole_rows_of_delayed_scales_fit():
  def fits(shape, recipe=_RECIPE):
    master = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    values: Any = jax.ShapeDtypeStruct(shape, jnp.float8_e4m3fn)
    scale: Any = jax.ShapeDtypeStruct((), jnp.float32)
    old = QTensor(values=values, scale=scale)
    params = {'kernel': master, 'bias': jax.ShapeDtypeStruct((3,), jnp.float32)}
    return groups.fits(params, {'kernel': old, 'bias': params['bias']}, recipe)

  assert fits((3584, 18944)) and fits((8, 128))
  assert not fits((4, 128)) and not fits((8, 100)) and not fits((2**20, 2048))
  assert not fits((128, 128), Recipe(name='fp8_token'))
