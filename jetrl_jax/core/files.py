"""Paths as a user writes them; text files written whole or not at all."""

import contextlib
import os
import pathlib


def user_path(text: str | os.PathLike[str]) -> pathlib.Path:
  """Returns the path; ~ is the home folder, which a shell leaves in --x=~/y.

  Raises:
    ValueError: there is no such home, as for a mistyped ~runs/y.
  """
  try:
    return pathlib.Path(text).expanduser()
  except RuntimeError:
    raise ValueError(
        f'{text}: there is no such home folder; your own begins with ~/'
    ) from None


def replace_text(path: pathlib.Path, text: str) -> None:
  """Writes a file; a kill or a full disk leaves what was there before.

  Raises:
    OSError: it cannot be written.
  """
  partial = path.with_name(f'.{path.name}.partial')
  try:
    partial.write_text(text, encoding='utf-8')
    os.replace(partial, path)
  finally:
    # Half a file is left where it failed: a full disk has no room for it.
    with contextlib.suppress(OSError):
      partial.unlink()


def sync(path: pathlib.Path) -> None:
  """Makes a file's content, or a folder's names, survive a power cut."""
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


def size(count: float) -> str:
  """Writes bytes for people."""
  for unit in ('B', 'KiB', 'MiB'):
    if count < 1024:
      return f'{count:.0f} {unit}' if unit == 'B' else f'{count:.1f} {unit}'
    count /= 1024
  return f'{count:,.1f} GiB'
