"""Where a kernel runs, and the plain JAX that it stands for.

The check of the precision flow (`fp8/flow/walk.py`) reads the program that
runs. It cannot look into a kernel. And in a decode step a kernel may do work
that training does elsewhere: a norm's kernel adds what the dot before it left.
So `kernel` and `deferred` put an operation into the program that holds both
what runs now and what it stands for, and the check reads the latter. In the
compiled program the operation is gone.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import mlir

from jetrl_jax.fp8.products import DeferredScale

_primitive = core.Primitive('stands_for')
_primitive.multiple_results = True


def _run(*arrays, runs, **_):
  return core.jaxpr_as_fun(runs)(*arrays)


@_primitive.def_abstract_eval
def _shapes(*_, runs, **__):
  return runs.out_avals


_primitive.def_impl(_run)
mlir.register_lowering(_primitive, mlir.lower_fun(_run, multiple_results=True))


def kernel(
    operation: str,
    implementation: str,
    run: Callable[..., Any],
    reference: Callable[..., Any],
    *operands: Any,
    **static: Any,
) -> Any:
  """Runs an operation's kernel, which stands for its reference.

  Args:
    operation: a row of `dispatch.TABLE`.
    implementation: its name there.
    run: what runs, of the operands.
    reference: plain JAX of the same results. A `DeferredScale` among its
      operands is finished: see `deferred`.
    *operands: trees of arrays, or None.
    **static: keywords of both functions that are no arrays.
  """
  run = functools.partial(run, **static)
  reference = functools.partial(reference, **static)
  name = (operation, implementation)
  return _bind(name, run, reference, operands, _finished(operands))


def deferred(
    run: Callable[..., Any],
    meaning: Callable[..., Any],
    *operands: Any,
    finished: Any = None,
) -> Any:
  """Runs a part of an operation, and leaves the rest to the next kernel.

  Args:
    run: what runs now, of the operands.
    meaning: the whole operation; its results may have other shapes.
    *operands: trees of arrays, or None.
    finished: the operands as `meaning` takes them, where those of a deferred
      operation have another shape or dtype.
  """
  return _bind(None, run, meaning, operands, finished or _finished(operands))


def _bind(name, run, meaning, operands, like):
  arrays, tree = jax.tree.flatten(operands)
  like = jax.tree.leaves(like)
  assert len(like) == len(arrays)
  out_trees = []

  def flat(*arrays):
    out = run(*jax.tree.unflatten(tree, arrays))
    leaves, out_tree = jax.tree.flatten(out)
    out_trees.append(out_tree)
    return leaves

  def reference():
    return jax.make_jaxpr(lambda *x: meaning(*jax.tree.unflatten(tree, x)))(
        *like
    )

  runs = jax.make_jaxpr(flat)(*arrays)
  if runs.effects:  # An interpreter has effects; an operation cannot hold them.
    return run(*operands)
  leaves = _primitive.bind(*arrays, kernel=name, runs=runs, reference=reference)
  return jax.tree.unflatten(out_trees[-1], leaves)


def shape(x: jax.Array, *dims: int, dtype=None) -> jax.ShapeDtypeStruct:
  """Returns the shape of an array, or another one of its dtype."""
  return jax.ShapeDtypeStruct(dims or x.shape, dtype or x.dtype)


def finished(product: DeferredScale, dtype=None) -> DeferredScale:
  """Returns a product's shapes in one part: scaled, with its bias."""
  *parts, rows, columns = product.values.shape
  dims = rows, columns * (parts[0] if parts else 1)
  shapes: Any = jax.tree.map(shape, product)
  values: Any = shape(product.values, *dims, dtype=dtype)
  return dataclasses.replace(shapes, values=values)


def _finished(operands):
  def one(x):
    return finished(x) if isinstance(x, DeferredScale) else shape(x)

  return jax.tree.map(
      one, operands, is_leaf=lambda x: isinstance(x, DeferredScale)
  )
