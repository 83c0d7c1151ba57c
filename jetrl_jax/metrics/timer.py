"""Seconds of the phases of a step."""

import contextlib
import time
from collections.abc import Iterator


class Timer:
  """Adds up seconds by phase between two `take`s."""

  def __init__(self):
    self._seconds: dict[str, float] = {}
    self._start = time.monotonic()

  @contextlib.contextmanager
  def __call__(self, phase: str) -> Iterator[None]:
    """Times a block.

    The phases end with a copy to the host, so device work is inside.
    """
    start = time.monotonic()
    try:
      yield
    finally:
      spent = time.monotonic() - start
      self._seconds[phase] = self._seconds.get(phase, 0.0) + spent

  def seconds(self, phase: str) -> float:
    """Seconds of a phase since the last `take`."""
    return self._seconds.get(phase, 0.0)

  def elapsed(self) -> float:
    """Seconds since the last `take`."""
    return time.monotonic() - self._start

  def take(self) -> dict[str, float]:
    """Returns 'timing_s/<phase>' and 'timing_s/step', and starts again."""
    times = {f'timing_s/{k}': v for k, v in self._seconds.items()}
    times['timing_s/step'] = self.elapsed()
    self._seconds, self._start = {}, time.monotonic()
    return times
