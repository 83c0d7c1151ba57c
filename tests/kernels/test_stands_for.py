"""What runs, and what it stands for."""

import jax
import jax.numpy as jnp
import numpy as np

from jetrl_jax.fp8 import flow
from jetrl_jax.fp8.products import DeferredScale
from jetrl_jax.kernels import stands_for

X = jnp.arange(6.0, dtype=jnp.float32).reshape(2, 3)


def _twice(x, *, by):
  return {'y': x * by, 'nothing': None}


def _twice_by_adding(x, *, by):
  assert by == 2
  return {'y': x + x, 'nothing': None}


def _kernel(x):
  return stands_for.kernel(
      'an_operation', 'fast', _twice, _twice_by_adding, x, by=2
  )


def test_the_kernel_runs_and_its_tree_comes_back():
  for run in (_kernel, jax.jit(_kernel)):
    found = run(X)
    np.testing.assert_array_equal(found['y'], 2 * X)
    assert found['nothing'] is None


def test_a_compiled_program_is_that_of_the_kernel_alone():

  def named(f, name):
    f.__name__ = name
    return jax.jit(f).lower(X).as_text()

  marked = named(lambda x: _kernel(x)['y'], 'f')
  assert marked == named(lambda x: _twice(x, by=2)['y'], 'f')


def test_the_flow_has_the_reference_and_names_the_kernel():
  graph = flow.extract(jax.make_jaxpr(_kernel)(X))
  assert [node.op for node in graph.nodes] == ['add']
  (kernel,) = graph.kernels
  assert (kernel.operation, kernel.implementation) == ('an_operation', 'fast')


def test_a_kernel_whose_result_nobody_reads_is_not_named():
  graph = flow.extract(jax.make_jaxpr(lambda x: (_kernel(x), x - 1)[1])(X))
  assert [node.op for node in graph.nodes] == ['sub']
  assert not graph.kernels


def _deferred(x, scale):
  """A product that the next kernel scales."""

  def product(x, scale):
    return DeferredScale(values=x.astype(jnp.float32), scales=(scale,))

  def whole(x, scale):
    return DeferredScale(values=x.astype('bfloat16') * scale, scales=(scale,))

  return stands_for.deferred(product, whole, x, scale)


def test_what_is_postponed_counts_where_it_is_left():

  def of_finished(product):
    return product.values + 1

  def scaled(product):
    return product.values * product.scales[0] + 1

  def program(x, scale):
    with jax.named_scope('dot'):
      product = _deferred(x, scale)
    with jax.named_scope('next'):
      return stands_for.kernel('next', 'fast', scaled, of_finished, product)

  args = X, jnp.float32(4)
  np.testing.assert_array_equal(program(*args), 4 * X + 1)
  graph = flow.extract(jax.make_jaxpr(program)(*args))
  where = {node.op: node.path for node in graph.nodes}
  assert where == {'convert_element_type': 'dot', 'mul': 'dot', 'add': 'next'}
