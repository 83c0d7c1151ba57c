"""What a command takes of a GPU's memory, and what it says if that is full."""

import os

# A GPU keeps a part of its memory for itself and for libraries.
USABLE = 0.95
# Both are JAX's; it refuses to be given both.
_FRACTIONS = 'XLA_CLIENT_MEM_FRACTION', 'XLA_PYTHON_CLIENT_MEM_FRACTION'


def take_most() -> None:
  """Lets JAX take `USABLE` of a GPU, which by itself takes three quarters.

  Not where the environment says how much. JAX reads it when it first looks for
  devices.
  """
  if not any(os.environ.get(name) for name in _FRACTIONS):
    os.environ[_FRACTIONS[0]] = str(USABLE)


def explained(error: Exception) -> str:
  """Returns the text of an error, with what to do where memory ran out."""
  text = str(error)
  if not text.startswith('RESOURCE_EXHAUSTED'):
    return text
  return (
      f'{text.splitlines()[0]}\nThe device has no room for this. What a run'
      ' needs, phase by phase, and what to lower, python -m jetrl_jax.main'
      ' --dry_run tells with its --config.'
  )
