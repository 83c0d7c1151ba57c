"""SIGTERM and SIGINT: finish or abandon the step, save, exit."""

import signal
from typing import Any


class StopRequested(Exception):
  """The run was asked to stop; raised while the state is consistent."""


# The name of the signal that asked this process, or another one of the run, to
# stop; '' if none did. It is global, because signals belong to a process.
_asked = ''


def asked() -> str:
  """Returns the name of the signal that asks the run to stop; '' if none."""
  return _asked


def ask(name: str) -> None:
  """Asks the run to stop, as a signal does."""
  global _asked
  _asked = _asked or name


class Interrupt:
  """Remembers a termination signal until `check` is called.

  Its handlers are installed only inside the context. Call `check` while the
  state is still that of the last step's end. With several processes, a signal
  to one of them reaches all, see `processes.together`.
  """

  def __init__(self):
    self._previous: dict[int, Any] = {}

  def check(self) -> None:
    """Raises StopRequested if a signal has arrived."""
    if _asked:
      raise StopRequested(_asked)

  def _remember(self, number, frame):
    del frame
    ask(signal.Signals(number).name)

  def __enter__(self) -> 'Interrupt':
    global _asked
    _asked = ''
    for number in (signal.SIGTERM, signal.SIGINT):
      self._previous[number] = signal.signal(number, self._remember)
    return self

  def __exit__(self, *_) -> None:
    for number, handler in self._previous.items():
      signal.signal(number, handler)
