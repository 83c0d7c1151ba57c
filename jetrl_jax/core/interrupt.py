"""SIGTERM and SIGINT: finish or abandon the step, save, leave."""

import signal
from typing import Any


class StopRequested(Exception):
  """The run was asked to stop; raised where the state is whole."""


class Interrupt:
  """Remembers a termination signal until someone asks.

  A context manager: the handlers are installed inside it only. Call `check`
  where nothing of the state has changed since the last step's end.
  """

  def __init__(self):
    self._signal: int | None = None
    self._previous: dict[int, Any] = {}

  def check(self) -> None:
    """Raises StopRequested if a signal came."""
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
