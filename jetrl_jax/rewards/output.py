"""Shows what reward functions print, up to a limit.

A function that prints for every answer, or prints what an answer says, would
fill a disk in a night. The limit holds for all workers of a pool together. A
count in shared memory would not hold it: a worker that is interrupted between
reading and storing the count sets it back. So the workers, which are forks of
one process, share a pipe that was filled once. Each takes from it what it may
print. What a killed worker had taken is lost.
"""

import io
import os
import sys

LIMIT = 2**20  # Bytes.
# Bytes that a worker may print for each byte of the pipe.
_PORTION = 4096
# The last byte in the pipe; one worker takes it.
_LAST = b'e'


class _Bounded(io.RawIOBase):
  """Writes to a file descriptor as long as there are portions to take.

  Args:
    descriptor: the descriptor of the file.
    portions: the pipe's end to read from, without waiting.
    credit: one number, of bytes taken and not printed; shared by the streams
      of a process.
  """

  def __init__(self, descriptor: int, portions: int, credit: list[int]):
    super().__init__()
    self.name = f'<{descriptor}>'
    self._descriptor = descriptor
    self._portions = portions
    self._credit = credit

  def writable(self) -> bool:
    """Returns True."""
    return True

  def fileno(self) -> int:
    """Returns the descriptor, for processes that a function starts."""
    return self._descriptor

  def isatty(self) -> bool:
    """Returns whether this is a terminal."""
    return os.isatty(self._descriptor)

  def write(self, data) -> int:
    """Writes as much as the limit allows; the rest counts as written."""
    view = memoryview(data).cast('B')
    ended = False
    while self._credit[0] < len(view) and (taken := self._take()):
      ended = taken == _LAST
      self._credit[0] += 0 if ended else _PORTION
    shown = bytes(view[: self._credit[0]])
    self._credit[0] -= len(shown)
    if ended:
      shown += (
          b'\n[reward functions have printed more than %d KiB; the rest is not'
          b' shown]\n' % (LIMIT // 1024)
      )
    while shown:
      shown = shown[os.write(self._descriptor, shown) :]
    return len(view)

  def _take(self) -> bytes:
    """Takes one portion; empty where none is left."""
    try:
      return os.read(self._portions, 1)
    except OSError:  # The pipe is empty, or a reward function has closed it.
      return b''


def _portions(limit: int) -> int:
  """Returns the end to read from of a pipe with portions of `limit` bytes."""
  portions, filling = os.pipe()
  os.set_blocking(portions, False)
  os.write(filling, b'.' * (limit // _PORTION) + _LAST)
  os.close(filling)
  return portions


def bound() -> None:
  """Bounds what this process and its forks print through Python."""
  portions, credit = _portions(LIMIT), [0]
  for name, descriptor in (('stdout', 1), ('stderr', 2)):
    if getattr(sys, name) is None:  # The stream is closed.
      continue
    stream = io.TextIOWrapper(
        _Bounded(descriptor, portions, credit),
        encoding='utf-8',
        errors='backslashreplace',
        line_buffering=True,
        write_through=True,
    )
    setattr(sys, name, stream)
