"""SIGTERM and SIGINT: finish or abandon the step, save, exit."""

import signal
from typing import Any


class StopRequested(Exception):
  """The run was asked to stop; raised while the state is consistent."""


class Interrupt:
  """Remembers a termination signal until `check` is called.

  Its handlers are installed only inside the context. Call `check` while the
  state is still that of the last step's end.
  """

  def __init__(self):
    self._signal: int | None = None
    self._previous: dict[int, Any] = {}

  def check(self) -> None:
    """Raises StopRequested if a signal has arrived."""
    if self._signal is not None:
      raise StopRequested(signal.Signals(self._signal).name)

  def _remember(self, number, frame):
    del frame
    self._signal = number

  def __enter__(self) -> 'Interrupt':
    for number in (signal.SIGTERM, signal.SIGINT):
      self._previous[number] = signal.signal(number, self._remember)
    return self

  def __exit__(self, *_) -> None:
    for number, handler in self._previous.items():
      signal.signal(number, handler)
