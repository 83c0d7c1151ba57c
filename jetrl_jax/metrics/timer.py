"""Measures the seconds of a step's phases."""

import contextlib
import time
from collections.abc import Iterator

from jetrl_jax.core import processes


class Timer:
  """Adds up the seconds of each phase between two calls of `take`."""

  def __init__(self):
    self._seconds: dict[str, float] = {}
    self._start = time.monotonic()

  @contextlib.contextmanager
  def __call__(self, phase: str) -> Iterator[None]:
    """Times a block.

    Each phase ends with a copy to the host, so its device work is included.
    """
    processes.touch(phase)
    start = time.monotonic()
    try:
      yield
    finally:
      spent = time.monotonic() - start
      self._seconds[phase] = self._seconds.get(phase, 0.0) + spent

  def seconds(self, phase: str) -> float:
    """Returns the seconds of a phase since the last `take`."""
    return self._seconds.get(phase, 0.0)

  def elapsed(self) -> float:
    """Returns the seconds since the last `take`."""
    return time.monotonic() - self._start

  def take(self) -> dict[str, float]:
    """Returns 'timing_s/<phase>' and 'timing_s/step', and resets the timer."""
    times = {f'timing_s/{k}': v for k, v in self._seconds.items()}
    times['timing_s/step'] = self.elapsed()
    self._seconds, self._start = {}, time.monotonic()
    return times
