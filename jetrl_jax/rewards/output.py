"""What reward functions print, shown up to a limit.

A function that prints for every answer, or prints what an answer says, would
fill a disk in a night. The limit is one for all workers of a pool: they are
forks of one process, and share its count.
"""

import io
import mmap
import os
import struct
import sys

LIMIT = 2**20  # Bytes.
_COUNT = struct.Struct('<q')


class _Bounded(io.RawIOBase):
  """Writes to a file descriptor until the count is at the limit.

  Args:
    descriptor: of the file.
    count: memory shared by all who write.
  """

  def __init__(self, descriptor: int, count: mmap.mmap):
    super().__init__()
    self.name = f'<{descriptor}>'
    self._descriptor = descriptor
    self._count = count

  def writable(self) -> bool:
    """Returns True."""
    return True

  def fileno(self) -> int:
    """Returns the descriptor, for what a function starts."""
    return self._descriptor

  def isatty(self) -> bool:
    """Returns whether this is a terminal."""
    return os.isatty(self._descriptor)

  def write(self, data) -> int:
    """Writes what there is room for; the rest is as if it were written."""
    view = memoryview(data).cast('B')
    # Two workers at once may count less than they write: a few lines more.
    (count,) = _COUNT.unpack_from(self._count)
    _COUNT.pack_into(self._count, 0, count + len(view))
    shown = bytes(view[: max(0, LIMIT - count)])
    if count < LIMIT < count + len(view):
      shown += (
          b'\n[reward functions have printed more than %d KiB; the rest is not'
          b' shown]\n' % (LIMIT // 1024)
      )
    while shown:
      shown = shown[os.write(self._descriptor, shown) :]
    return len(view)


def bound() -> None:
  """Bounds what this process and its forks print through Python."""
  count = mmap.mmap(-1, _COUNT.size)
  for name, descriptor in (('stdout', 1), ('stderr', 2)):
    if getattr(sys, name) is None:  # Closed.
      continue
    stream = io.TextIOWrapper(
        _Bounded(descriptor, count),
        encoding='utf-8',
        errors='backslashreplace',
        line_buffering=True,
        write_through=True,
    )
    setattr(sys, name, stream)
