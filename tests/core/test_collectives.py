import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jetrl_jax.core import collectives, sharding
from jetrl_jax.core.collectives import Axes
from jetrl_jax.core.compilation import exact_jit
from jetrl_jax.core.sharding import DATA, FSDP, ROWS
from jetrl_jax.fp8 import Recipe, init_state, scaling_state
from jetrl_jax.fp8.quantization import QTensor
from jetrl_jax.kernels.quantized_dot import linear
from jetrl_jax.kernels.quantized_dot.weights import prepare_weights
from jetrl_jax.models.layers import gather_quantized

MESHES = [(1, 8), (2, 4), (8, 1)]
DEVICES, PER_DEVICE, INNER, OUTER = 8, 16, 32, 24


def _data():
  rng = np.random.default_rng(0)

  def make(*shape):
    return rng.normal(size=shape).astype(np.float32)

  rows = DEVICES * PER_DEVICE
  return make(rows, INNER), make(OUTER, INNER), make(rows, OUTER)


def _numpy(tree):
  return jax.tree.map(np.asarray, tree)


def test_devices_that_share_dots_keep_no_whole_gradients():
  found = 'mesh.whole_gradients is True and mesh.tensor is 2'
  with pytest.raises(ValueError, match=found):
    collectives.axes_of(sharding.make_mesh(tensor=2), whole_gradients=True)


def test_collectives_vanish_on_one_device():
  # They would raise outside of shard_map otherwise.
  axes, x = Axes(), jnp.arange(4.0)
  for same in (axes.psum(x), axes.pmax(x), axes.reduce_scatter(x, 4)):
    assert same is x
  assert axes.gather(x, 4) is x
  mesh = sharding.make_mesh()
  assert sharding.per_device(_numpy, mesh, P(), P()) is _numpy


@pytest.mark.parametrize('shape', MESHES)
def test_gathered_fp8_weights_are_the_whole_ones_on_every_device(shape):
  mesh = sharding.make_mesh(data=shape[0], fsdp=shape[1])
  axes = collectives.axes_of(mesh)
  values = np.arange(OUTER * INNER, dtype=np.uint8).reshape(OUTER, INNER)
  values = np.where(values & 0x7F == 0x7F, 0, values).astype(np.uint8)
  values = values.view('float8_e4m3fn')

  def gather(part):
    assert part.shape == (OUTER // axes.fsdp, INNER)
    return axes.gather(part, OUTER)[None]

  spec = sharding.leaf_spec(values.shape, mesh)
  gather = sharding.per_device(gather, mesh, (spec,), ROWS)
  run = exact_jit(gather)
  found = np.asarray(run(values))
  assert found.dtype == values.dtype and found.shape == (8, OUTER, INNER)
  for copy in found:
    np.testing.assert_array_equal(copy.view(np.uint8), values.view(np.uint8))
  if axes.fsdp > 1:
    # What travels is one byte wide; the CPU backend widens it on its own.
    sent = r'all_gather.*: \(tensor<\d+x32xf8E4M3FN>\)'
    assert re.search(sent, run.lower(values).as_text())


@pytest.mark.parametrize('shape', [(1, 1, 2), (1, 2, 2), (2, 1, 4)])
def test_rows_are_read_in_pieces_and_cotangents_return_to_them(shape):
  mesh = sharding.make_mesh(
      **dict(zip(('data', 'fsdp', 'tensor'), shape, strict=True))
  )
  axes, pieces = collectives.axes_of(mesh), ((16, shape[2]), (16, shape[2]))
  rows = np.arange(32.0, dtype=np.float32)[:, None] * np.ones(3, np.float32)
  size = 32 // axes.stored

  def both(stored):
    read = axes.gather(stored, 32, pieces)
    # As many devices as read a row add up.
    back = axes.reduce_scatter(read, size, 32, pieces)
    return read[None], back

  where = sharding.leaf_spec(rows.shape, mesh)
  split = sharding.per_device(
      both, mesh, (where,), (jax.P(sharding.TENSOR), where)
  )
  read, back = exact_jit(split)(rows)
  half = 16 // axes.tensor
  for t, found in enumerate(np.asarray(read)):
    wanted = [*range(t * half, (t + 1) * half)]
    wanted += [16 + row for row in wanted]
    np.testing.assert_array_equal(found, rows[wanted])
  np.testing.assert_array_equal(back, rows * axes.size)


@pytest.mark.parametrize('shape', MESHES)
def test_psum_and_pmax_join_all_devices(shape):
  mesh = sharding.make_mesh(data=shape[0], fsdp=shape[1])
  axes = collectives.axes_of(mesh)
  join = sharding.per_device(
      lambda x: (axes.psum(jnp.sum(x)), axes.pmax(jnp.max(x))),
      mesh,
      (ROWS,),
      (P(), P()),
  )
  total, top = exact_jit(join)(np.arange(8.0, dtype=np.float32))
  assert (total, top) == (28, 7)


def _loss(axes, recipe):
  """One device's loss of its rows; the weight is gathered where it is used."""

  def loss(params, state, weights, x, dy):
    master = params['dot']['kernel']
    weight = weights['dot']['kernel']
    if isinstance(weight, QTensor):
      values = axes.gather(weight.values, OUTER)
      weight = QTensor(values=values, scale=weight.scale)
    else:
      weight = axes.gather(weight, OUTER)
    if axes.size > 1:
      master = collectives.grad_sink(axes, (OUTER, INNER), master)
    y = linear.dot(
        recipe, x, master, weight, state.get('dot'), jnp.ones(x.shape[0])
    )
    return jnp.sum(y * dy), y

  return loss


def _grads(axes, recipe):
  def run(params, state, weights, x, dy):
    grad = jax.grad(_loss(axes, recipe), argnums=(0, 1), has_aux=True)
    (params_grad, seen), y = grad(params, state, weights, x, dy)
    seen = scaling_state.stack_observations(seen)
    return params_grad, scaling_state.reduce_over_devices(seen, axes), y

  return run


@pytest.mark.parametrize('shape', MESHES)
@pytest.mark.parametrize('name', ['fp8_delayed', 'bf16'])
def test_eight_devices_compute_what_one_does(shape, name):
  recipe = Recipe(name=name, compute_dtype='float32')
  x, kernel, dy = _data()
  params = {'dot': {'kernel': kernel}}
  state = init_state(params, recipe)
  state = scaling_state.observe_kernels(state, params, recipe, Axes())
  weights = prepare_weights(params, state, recipe)
  args = (params, state, weights, x, dy)
  one_grad, one_seen, one_y = _numpy(exact_jit(_grads(Axes(), recipe))(*args))

  mesh = sharding.make_mesh(data=shape[0], fsdp=shape[1])
  specs = [sharding.tree_specs(tree, mesh) for tree in args[:3]]
  run = sharding.per_device(
      _grads(collectives.axes_of(mesh), recipe),
      mesh,
      (*specs, ROWS, ROWS),
      (specs[0], P(), ROWS),
  )
  grad, seen, y = _numpy(exact_jit(run)(*args))
  # Each device runs the one-device program on its rows: the same bits.
  np.testing.assert_array_equal(y, one_y)
  # The gradient is a sum over all rows in another order; FP8 rounds both sides
  # of it before, by the same scales.
  x64, dy64 = np.abs(x.astype(np.float64)), np.abs(dy.astype(np.float64))
  bound = DEVICES * PER_DEVICE * 2.0**-23 * (dy64.T @ x64)
  found, expected = grad['dot']['kernel'], one_grad['dot']['kernel']
  assert found.shape == expected.shape
  assert np.all(np.abs(found - expected) <= bound)
  # One device's rows alone, or a mean for the sum, would be far off.
  assert np.abs(expected).max() > 1000 * bound.max()
  if name == 'fp8_delayed':
    # Of the input and of the output gradient: amax, three counts, two sums.
    for i, array in enumerate((x, dy)):
      a, b = seen['dot'][i, 0], one_seen['dot'][i, 0]
      assert a[0] == np.abs(array).max()
      np.testing.assert_array_equal(a[:4], b[:4])
      np.testing.assert_allclose(a, b, rtol=1e-5)


def test_the_gradient_of_a_whole_leaf_is_added_over_all_devices():
  # A vector is not split: each device has it all and gets the whole sum.
  mesh = sharding.make_mesh(data=2, fsdp=4)
  axes = collectives.axes_of(mesh)

  def grad(gain, x):
    return jax.grad(
        lambda gain: jnp.sum(x @ collectives.grad_sink(axes, (4,), gain))
    )(gain)

  run = sharding.per_device(grad, mesh, (P(), ROWS), P())
  x = np.arange(32.0, dtype=np.float32).reshape(8, 4)
  found = exact_jit(run)(np.ones(4, np.float32), x)
  np.testing.assert_array_equal(found, x.sum(0))


def test_a_stand_in_has_no_values_and_the_dtype_of_the_master():
  stand_in = collectives.grad_sink(Axes(1, 2), (8, 3), jnp.full((4, 3), 7.0))
  assert stand_in.shape == (8, 3) and not np.any(stand_in)
  half = collectives.grad_sink(Axes(1, 2), (8,), jnp.ones(4, jnp.bfloat16))
  assert half.dtype == jnp.bfloat16


def test_rows_are_split_over_both_axes_in_order():
  mesh = sharding.make_mesh(data=2, fsdp=4)

  def index(x):
    return x + 10 * jax.lax.axis_index(DATA) + jax.lax.axis_index(FSDP)

  run = sharding.per_device(index, mesh, (ROWS,), ROWS)
  found = exact_jit(run)(np.zeros(8, np.int32))
  assert found.tolist() == [0, 1, 2, 3, 10, 11, 12, 13]


@pytest.mark.parametrize('name', ['fp8_token', 'fp8_block'])
def test_scales_are_split_and_gathered_with_the_rows_they_belong_to(name):
  recipe, mesh = Recipe(name=name), sharding.make_mesh(data=2, fsdp=4)
  axes, rng = collectives.axes_of(mesh), np.random.default_rng(0)
  sizes = 10.0 ** rng.uniform(-2, 2, (512, 1))
  kernel = (rng.normal(size=(512, 128)) * sizes).astype(np.float32)
  params = {'dot': {'kernel': kernel}}
  expected = prepare_weights(params, {}, recipe)['dot']['kernel']

  def there_and_back(params):
    local = prepare_weights(params, {}, recipe)['dot']['kernel']
    return local, gather_quantized(axes, local, 512)

  specs = sharding.tree_specs(expected, mesh)
  assert specs.scale == specs.values == P('fsdp')
  run = sharding.per_device(
      there_and_back,
      mesh,
      (sharding.tree_specs(params, mesh),),
      (specs, jax.tree.map(lambda _: P(), expected)),
  )
  for found in _numpy(exact_jit(run)(params)):
    np.testing.assert_array_equal(found.scale, expected.scale)
    np.testing.assert_array_equal(
        found.values.view(np.uint8), np.asarray(expected.values).view(np.uint8)
    )
