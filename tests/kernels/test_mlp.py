"""gate_up, SwiGLU and down with one derivative, against one for each."""

import collections
import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jetrl_jax import fp8, kernels
from jetrl_jax.core import collectives, sharding
from jetrl_jax.core.collectives import Axes
from jetrl_jax.fp8 import Recipe, flow, health, scaling_state
from jetrl_jax.fp8.products import Rows
from jetrl_jax.fp8.quantization import QTensor, quantize
from jetrl_jax.kernels import mlp as fused_mlp
from jetrl_jax.kernels.quantize_transpose import mosaic_sm90 as transpose
from jetrl_jax.kernels.swiglu import mosaic_backward_sm90 as swiglu_backward
from jetrl_jax.kernels.swiglu import mosaic_sm90 as swiglu
from jetrl_jax.kernels.swiglu import reference
from jetrl_jax.models import remat
from jetrl_jax.models.decoder import MLP, variables
from tests import kernels_in_use
from tests.hurry import fast_compile_jit
from tests.kernels.test_swiglu_backward import plain as swiglu_by_xla
from tests.models import tiny

ROWS, DIM, INNER = 256, 128, 256
_PADDING = 9
FP8 = Recipe()


def _quantize_and_transpose(x, scale, mask, dtype, *, row_major):
  """As the kernel, which test_implementations.py compares with this."""
  values = quantize(jnp.where(mask[:, None] > 0, x, 0), scale, dtype)
  amax, sums = health.measure(x, QTensor(values=values, scale=scale), mask)
  return transpose.QuantizedPair(
      row_major_MN=values if row_major else None,
      transposed_NM=values.T,
      amax=amax,
      quantization_error=sums[1:],
  )


def _backward(product, dh, scales, mask, dtype):
  """As the kernel, which test_swiglu_backward.py compares with this."""
  pairs = []
  for values, amax, sums in swiglu_by_xla(product, dh, scales, mask, dtype):
    pairs.append(
        transpose.QuantizedPair(
            row_major_MN=values if pairs else None,
            transposed_NM=values.T,
            amax=amax,
            quantization_error=sums[1:],
        )
    )
  return tuple(pairs)


# By their names the tests find them.
@jax.jit
def swiglu_of(product, out_scale=None):
  return reference.swiglu_of(product, out_scale)


@functools.partial(jax.jit, static_argnums=4)
def swiglu_backward_kernel(*args):
  return _backward(*args)


@pytest.fixture
def as_on_gpu(monkeypatch):
  """The path of a GPU. The kernels' interpreter does not go with remat."""
  kernels_in_use.use(monkeypatch, 'mlp', 'quantize_transpose', 'swiglu')
  monkeypatch.setattr(transpose, 'transpose', jnp.transpose)
  monkeypatch.setattr(
      transpose, 'quantize_and_transpose', _quantize_and_transpose
  )
  monkeypatch.setattr(swiglu, 'swiglu_of', swiglu_of)
  monkeypatch.setattr(swiglu_backward, 'backward', swiglu_backward_kernel)


class Inside(nn.Module):
  """An MLP as a block holds it."""

  recipe: Recipe
  mode: str = 'none'
  axes: Axes = Axes()

  @nn.compact
  def __call__(self, x_MD, mask_M):
    config = tiny.config(model_dim=DIM, ffn_dim=INNER)
    module = remat.wrap(MLP, self.mode)
    mlp = module(self.recipe, self.axes, config, name='mlp')
    return self.axes.gather_outputs(mlp(Rows(x_MD), mask_M))


@functools.cache
def _trees(recipe=FP8):
  """(params, dot states, weights, x, mask, a cotangent of the result)."""
  random = np.random.default_rng(0)

  def make(*shape):
    return jnp.asarray(random.standard_normal(shape), jnp.float32)

  params = {
      'mlp': {
          'gate_up': {'kernel': make(2 * INNER, DIM) / 8},
          'down': {'kernel': make(DIM, INNER) / 8},
      }
  }
  state = fp8.init_state(params, recipe)
  # h goes beyond 14, the limit, and the gradient of gate|up beyond 28.
  for name, size, grad_size in (
      ('gate_up', 2.0**-6, 2.0**-4),
      ('down', 2.0**-5, 2.0**-6),
  ):
    dot_state = state['mlp'][name]
    dot_state['input']['scale'] = jnp.float32(size)
    dot_state['output_grad']['scale'] = jnp.float32(grad_size)
  state = fp8.observe_kernels(state, params, recipe, Axes())
  weights = kernels.prepare_weights(params, state, recipe)
  x, dz = (make(ROWS, DIM).astype(jnp.bfloat16) for _ in range(2))
  # Padding has no gradient: on a GPU such rows are transposed as zeros.
  mask = (jnp.arange(ROWS) >= _PADDING) * 1.0
  dz = jnp.where(mask[:, None] > 0, dz, 0)
  return params, state, weights, x, mask, dz


def _result(
    recipe, mode, params, state, weights, x, mask, axes=collectives.ALONE
):
  tree = variables(weights, state, params)
  return Inside(recipe, mode, axes).apply(tree, x, mask)


def _both(
    recipe, mode, params, state, weights, x, mask, dz, axes=collectives.ALONE
):
  """Returns the result and the cotangents of (params, dot states, x)."""

  def run(params, state, x):
    return _result(recipe, mode, params, state, weights, x, mask, axes)

  z, pull = jax.vjp(run, params, state, x)
  return z, *pull(dz)


def _assert_equal(found, wanted):
  """Bits of the result, and all else but for the order of sums."""
  assert np.array_equal(found[0], wanted[0])
  pairs = zip(
      jax.tree_util.tree_leaves_with_path(wanted[1:]),
      jax.tree.leaves(found[1:]),
      strict=True,
  )
  for (path, leaf), other in pairs:
    leaf, other = (np.asarray(a, np.float64) for a in (leaf, other))
    atol = 1e-6 * np.abs(leaf).max(initial=0)
    name = jax.tree_util.keystr(path)
    np.testing.assert_allclose(other, leaf, 1e-5, atol, err_msg=name)


def _computed(mode):
  return fast_compile_jit(functools.partial(_both, FP8, mode))(*_trees())


@kernels_in_use.needs_mosaic
def test_both_dots_have_the_gradients_and_observations_of_each_alone(
    as_on_gpu, monkeypatch
):
  found = _computed('none')
  monkeypatch.undo()
  _assert_equal(found, _computed('none'))
  for name, operand in (('down', 'input'), ('gate_up', 'output_grad')):
    sums = found[2]['mlp'][name][operand]['health']
    # Padding is in no sum; of the rest some is lost at both ends.
    assert sums[0] % (ROWS - _PADDING) == 0
    assert np.all(sums[1:3] > 0) and sums[3] > 100 * sums[4] > 0


@kernels_in_use.needs_mosaic
def test_rows_that_fill_no_tile_have_what_they_have_in_one(as_on_gpu):
  params, state, weights, x, mask, dz = _trees()
  run = fast_compile_jit(functools.partial(_both, FP8, 'none'))
  some = slice(0, ROWS - 48)
  masked = mask.at[some.stop :].set(0)
  whole = run(
      *(params, state, weights, x, masked),
      jnp.where(masked[:, None] > 0, dz, 0),
  )
  z, *cotangents, dx = run(
      *(params, state, weights, x[some], mask[some], dz[some])
  )
  assert np.array_equal(z, whole[0][some])
  _assert_equal((z, *cotangents, dx), (z, *whole[1:-1], whole[-1][some]))


@kernels_in_use.needs_mosaic
def test_rows_that_are_quantised_already_fill_no_tile_either(as_on_gpu):
  params, state, weights, x, mask, _ = _trees()
  dots = [
      tuple(tree['mlp'][name] for tree in (params, weights, state))
      for name in ('gate_up', 'down')
  ]
  dots = [(p['kernel'], w['kernel'], dot_state) for p, w, dot_state in dots]
  rows = ROWS - 48

  def both(x, low):
    run = functools.partial(fused_mlp.mlp, FP8)
    z, pull = jax.vjp(lambda x: run(Rows(x, low), *dots, mask[:rows]), x)
    return pull(z)[0]

  low = jax.ShapeDtypeStruct((rows, DIM), fp8.E4M3)
  assert jax.eval_shape(both, x[:rows], low).shape == (rows, DIM)


@kernels_in_use.needs_mosaic
@pytest.mark.slow
@pytest.mark.parametrize('mode', remat.MODES)
def test_what_is_computed_again_changes_no_gradient(as_on_gpu, mode):
  _assert_equal(_computed(mode), _computed('full'))


def _equations(jaxpr):
  """Yields the equations of a jaxpr and of those inside."""
  for eqn in jaxpr.eqns:
    yield eqn
    for inner in jax.tree.leaves(
        list(eqn.params.values()), is_leaf=lambda x: hasattr(x, 'eqns')
    ):
      inner = getattr(inner, 'jaxpr', inner)
      if hasattr(inner, 'eqns'):
        yield from _equations(inner)


@kernels_in_use.needs_mosaic
@pytest.mark.parametrize('mode, times', [('none', 1), ('full', 2)])
def test_only_the_first_dot_is_computed_again(as_on_gpu, mode, times):
  run = functools.partial(_both, FP8, mode)
  found = collections.Counter()
  for eqn in _equations(jax.make_jaxpr(run)(*_trees()).jaxpr):
    name = eqn.primitive.name
    if name == 'dot_general':
      found[eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape] += 1
    found[str(eqn.params.get('name'))] += 1
  rows, gate_up, inner = (ROWS, DIM), (ROWS, 2 * INNER), (ROWS, INNER)
  assert found[rows, gate_up] == times
  assert found[inner, rows] == found[rows, inner] == found[gate_up, rows] == 1
  assert found['swiglu_of'] == found['swiglu_backward_kernel'] == 1


@kernels_in_use.needs_mosaic
def test_the_rollout_is_part_of_the_forward_that_has_this_derivative(as_on_gpu):
  params, state, weights, x, mask, dz = _trees()
  train = jax.make_jaxpr(functools.partial(_both, FP8, 'full'))(*_trees())
  forward = functools.partial(_result, FP8, 'none', None)
  rollout = jax.make_jaxpr(forward)(state, weights, x, mask)
  train, rollout = flow.extract(train), flow.extract(rollout)
  flow.require_subgraph(rollout, train)
  dots = {n.path: n.inputs for n in rollout.nodes if n.kind == 'dot'}
  assert len(dots) == 2 and set(dots.values()) == {('e4m3', 'e4m3')}


@kernels_in_use.needs_mosaic
def test_only_calibrated_fp8_in_whole_tiles_has_the_kernel(as_on_gpu):
  dims = DIM, INNER
  assert fused_mlp.is_fused(FP8, dims)
  assert not fused_mlp.is_fused(FP8, (DIM, 192))
  for changes in (
      {'calibrating': True},
      {'power_of_two_scales': False},
      {'compute_dtype': 'float32'},
      {'name': 'fp8_token'},
      {'name': 'bf16'},
  ):
    assert not fused_mlp.is_fused(dataclasses.replace(FP8, **changes), dims)


def test_without_a_gpu_there_is_no_kernel():
  assert not fused_mlp.is_fused(FP8, (DIM, INNER))


def _observed(dot_states_ct, axes=collectives.ALONE):
  """What all devices see: (inputs, output gradients), each by number."""
  observed = scaling_state.stack_observations(dot_states_ct)
  observed = scaling_state.reduce_over_devices(observed, axes)['mlp']
  return [[seen[:, i] for i in range(6)] for seen in observed]


@kernels_in_use.needs_mosaic
@pytest.mark.slow
def test_devices_with_rows_of_their_own_have_the_gradients_of_one(as_on_gpu):
  axes = Axes(data=2)
  devices = np.asarray(jax.devices()[:2]).reshape(2, 1, 1)
  mesh = Mesh(devices, (sharding.DATA, sharding.FSDP, sharding.TENSOR))

  def run(*args):
    z, params_ct, dot_states_ct, dx = _both(FP8, 'full', *args)
    return z, axes.psum(params_ct), _observed(dot_states_ct, axes), dx

  rows = sharding.ROWS
  split = sharding.per_device(
      run, mesh, (P(), P(), P(), rows, rows, rows), (rows, P(), P(), rows)
  )
  z, params_ct, dot_states_ct, dx = _computed('full')
  wanted = z, params_ct, _observed(dot_states_ct), dx
  _assert_equal(fast_compile_jit(split)(*_trees()), wanted)


@kernels_in_use.needs_mosaic
@pytest.mark.slow
def test_devices_that_share_both_dots_have_the_gradients_of_one(
    as_on_gpu, monkeypatch
):
  monkeypatch.setitem(globals(), 'DIM', 256)  # A whole tile for each device.
  axes, trees = Axes(tensor=2), _trees.__wrapped__()
  assert fused_mlp.is_fused(FP8, (DIM // 2, INNER // 2))

  def run(*args):
    z, params_ct, dot_states_ct, dx = _both(FP8, 'full', *args, axes)
    return z, params_ct, _observed(dot_states_ct, axes), dx

  mesh = sharding.make_mesh(tensor=2)
  split = sharding.per_device(run, mesh, (P(),) * 6, (P(),) * 4)
  found = [
      (e.primitive.name, e.invars[0].aval.dtype, e.invars[0].aval.shape)
      for e in _equations(jax.make_jaxpr(split)(*trees).jaxpr)
      if e.primitive.name == 'all_to_all'
  ]
  # Down's kernel is exchanged in 8 bits, and no product of the rows.
  assert found == [('all_to_all', jnp.float8_e4m3fn, (DIM // 2, INNER))]
  found = fast_compile_jit(split)(*trees)
  wanted = fast_compile_jit(functools.partial(_both, FP8, 'full'))(*trees)
  assert np.array_equal(found[0], wanted[0])
  # No sum is shared before that of x's gradient: both kernels' gradients, and
  # what all operands show, are one device's.
  seen, wanted_seen = found[2], _observed(wanted[2])
  _assert_equal((*found[:2], seen), (*wanted[:2], wanted_seen))
  a, b = (np.asarray(x[-1], np.float64) for x in (found, wanted))
  assert np.linalg.norm(a - b) < 0.02 * np.linalg.norm(b)
