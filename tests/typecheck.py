"""The checker that jaxtyping's import hook applies to the package in tests."""

from beartype import BeartypeConf, beartype

# An int is a float, as in PEP 484: `clip_low=0` is not a mistake.
_CONF = BeartypeConf(is_pep484_tower=True)
_CHECK = beartype(conf=_CONF)


def check_public(function):
  """Checks a public signature at every call; leaves private ones alone.

  Private helpers are called through public functions whose arguments have
  been checked already; checking them again would only cost time.

  Args:
    function: the function that the hook decorates; jaxtyping passes a
      dataclass's fields as a function called `__init__`.

  Returns:
    The function, checked or as it was.
  """
  name = function.__name__
  if name.startswith('_') and not name.endswith('__'):
    return function
  return _CHECK(function)
