"""How much of a GPU's memory a command takes, and the error if it is full."""

import os

# The driver and libraries need the rest of a GPU's memory.
USABLE = 0.95
# JAX reads either of these and refuses both.
_FRACTIONS = 'XLA_CLIENT_MEM_FRACTION', 'XLA_PYTHON_CLIENT_MEM_FRACTION'


def take_most() -> None:
  """Lets JAX take `USABLE` of a GPU's memory; its default is three quarters.

  A share that the environment sets has priority. Call this before JAX first
  looks for devices.
  """
  if not any(os.environ.get(name) for name in _FRACTIONS):
    os.environ[_FRACTIONS[0]] = str(USABLE)


def explained(error: Exception) -> str:
  """Returns an error's text, with advice if the device ran out of memory."""
  text = str(error)
  if not text.startswith('RESOURCE_EXHAUSTED'):
    return text
  return (
      f'{text.splitlines()[0]}\nThe device ran out of memory. Run python -m'
      ' jetrl_jax.main --dry_run with the same --config: it prints what each'
      ' phase of a run needs, and which settings to lower.'
  )
