"""Which steps a directory holds, and who may write there."""

import fcntl
import pathlib
import re
from typing import IO

from absl import logging

from jetrl_jax.checkpoint import manifest as checkpoint_manifest
from jetrl_jax.checkpoint.manifest import CorruptError, Manifest


def step_folders(directory: pathlib.Path) -> dict[int, pathlib.Path]:
  """Maps every step that has a folder, good or not, to it."""
  if not directory.is_dir():
    return {}
  return {
      int(path.name): path
      for path in directory.iterdir()
      if re.fullmatch('0|[1-9][0-9]*', path.name, re.ASCII) and path.is_dir()
  }


def manifests(directory: pathlib.Path) -> dict[int, Manifest]:
  """Reads the manifest of every step that has a valid one."""
  found = {}
  for step, folder in step_folders(directory).items():
    try:
      found[step] = checkpoint_manifest.read(folder)
    except CorruptError:
      continue
  return found


def ranked(good: dict[int, Manifest]) -> list[int]:
  """Orders the steps that have a metric, best first, the newer of equals."""
  scored = [
      (m.metric, step) for step, m in good.items() if m.metric is not None
  ]
  return [step for _, step in sorted(scored, reverse=True)]


def lock(directory: pathlib.Path) -> IO[str]:
  """Holds the directory for this process; the kernel lets go when it dies.

  Args:
    directory: an existing folder.

  Returns:
    The open lock file; closing it lets go.

  Raises:
    ValueError: another process holds it.
  """
  file = open(directory / '.lock', 'w')
  try:
    # A record lock: unlike flock's it is not inherited by reward workers,
    # which may outlive a killed run for a moment.
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except (BlockingIOError, PermissionError) as error:
    file.close()
    raise ValueError(
        f'another process saves checkpoints in {directory}; stop it, or use '
        'another folder'
    ) from error
  except OSError as error:
    logging.warning('%s cannot be locked: %s', directory, error)
  return file
