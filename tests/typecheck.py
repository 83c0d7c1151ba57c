"""The checker that jaxtyping's import hook applies to the package in tests."""

import inspect
import types
import typing

import jaxtyping
from beartype import BeartypeConf, beartype

# An int is a float, as in PEP 484: `tuple[Float[Array, 'B'], float]`.
_CHECK = beartype(conf=BeartypeConf(is_pep484_tower=True))


def check_arrays(function: types.FunctionType):
  """Checks the array shapes of a public signature at every call.

  Only annotations that hold a jaxtyping shape are checked. The others are the
  static checker's work: at run time a wrong setting must reach the ValueError
  that explains it, and the tests call with wrong settings on purpose. Private
  helpers are reached through public functions.

  Args:
    function: a function that jaxtyping made with the signature of the one it
      decorates (a dataclass's `__init__` included).

  Returns:
    The function, checking its arguments and result where they are arrays.
  """
  name = function.__name__
  if name.startswith('_') and not name.endswith('__'):
    return function
  annotations = inspect.get_annotations(function)
  kept = {k: v for k, v in annotations.items() if _has_shape(v)}
  if not kept:
    return function
  function.__annotations__ = kept
  return _CHECK(function)


def _has_shape(annotation) -> bool:
  if isinstance(annotation, type):
    if issubclass(annotation, jaxtyping.AbstractArray):
      return True
  return any(_has_shape(a) for a in typing.get_args(annotation))
