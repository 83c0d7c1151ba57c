"""Paths and Python files of a user, and texts that are written atomically."""

import contextlib
import hashlib
import importlib.util
import os
import pathlib
import sys
import types

# What stands in place of a large file until git lfs pull.
_POINTER = b'version https://git-lfs.github.com/spec/v1'
POINTER_BYTES = len(_POINTER)


def user_path(text: str | os.PathLike[str]) -> pathlib.Path:
  """Returns the path with ~ expanded, which a shell does not do in --x=~/y.

  Raises:
    ValueError: the home folder does not exist, for example in ~runs/y.
  """
  try:
    return pathlib.Path(text).expanduser()
  except RuntimeError:
    raise ValueError(
        f'{text}: there is no such home folder; your own starts with ~/'
    ) from None


def import_file(path: str | os.PathLike[str]) -> types.ModuleType:
  """Imports a Python file as a module of its own; ~ is expanded.

  It may import what is beside it, as a script may; other modules of that name
  come first.

  Raises:
    Exception: whatever the file raises, or OSError if it cannot be read.
  """
  file = user_path(path)
  # The path is part of the name: two files may both be called reward.py.
  digest = hashlib.sha256(str(file).encode()).hexdigest()[:8]
  name = f'{file.stem}_{digest}'
  spec = importlib.util.spec_from_file_location(name, file)
  assert spec is not None and spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  sys.modules[name] = module
  if str(file.absolute().parent) not in sys.path:
    sys.path.append(str(file.absolute().parent))
  spec.loader.exec_module(module)
  return module


def check_pointer(path: pathlib.Path, start: bytes) -> None:
  """Refuses a file that git checked out without Git LFS.

  Args:
    path: the file, for the message.
    start: its first bytes, at least `POINTER_BYTES` if it has as many.

  Raises:
    ValueError: it is a pointer to the content, which is elsewhere.
  """
  if start.startswith(_POINTER):
    raise ValueError(
        f'{path} is a Git LFS pointer, not the content that it stands for; run'
        f' git lfs pull in {path.parent} (and git lfs install before it, once'
        ' on a machine)'
    )


def replace_text(path: pathlib.Path, text: str) -> None:
  """Writes a file; after a kill, a power cut or a full disk the old one stays.

  Raises:
    OSError: the file cannot be written.
  """
  partial = path.with_name(f'.{path.name}.partial')
  try:
    partial.write_text(text, encoding='utf-8')
    sync(partial)
    os.replace(partial, path)
    sync(path.parent)
  finally:
    # A failure leaves a partial file, for which a full disk has no room.
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
  """Returns a number of bytes as text, such as '1.5 MiB'."""
  for unit in ('B', 'KiB', 'MiB'):
    if count < 1024:
      return f'{count:.0f} {unit}' if unit == 'B' else f'{count:.1f} {unit}'
    count /= 1024
  return f'{count:,.1f} GiB'
