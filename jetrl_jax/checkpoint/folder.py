"""Lists the steps in a checkpoint directory, and locks it for one writer."""

import fcntl
import pathlib
import re
from typing import IO

from absl import logging

from jetrl_jax.checkpoint import manifest as checkpoint_manifest
from jetrl_jax.checkpoint.manifest import CorruptError, Manifest
from jetrl_jax.core.files import size


def step_folders(directory: pathlib.Path) -> dict[int, pathlib.Path]:
  """Returns step -> folder for every step, good or corrupt."""
  if not directory.is_dir():
    return {}
  return {
      int(path.name): path
      for path in directory.iterdir()
      if re.fullmatch('0|[1-9][0-9]*', path.name, re.ASCII) and path.is_dir()
  }


def manifests(directory: pathlib.Path) -> dict[int, Manifest]:
  """Returns step -> manifest for every step with a valid manifest."""
  found = {}
  for step, folder in step_folders(directory).items():
    try:
      found[step] = checkpoint_manifest.read(folder)
    except CorruptError:
      continue
  return found


def ranked(good: dict[int, Manifest]) -> list[int]:
  """Returns the steps with a metric, best first; newer first among equals."""
  scored = [
      (m.metric, step) for step, m in good.items() if m.metric is not None
  ]
  return [step for _, step in sorted(scored, reverse=True)]


def lacking(free: int, needed: int) -> str:
  """Says that a checkpoint does not fit; '' if it does.

  Args:
    free: bytes on the checkpoints' disk.
    needed: bytes of the checkpoint.
  """
  if free >= needed:
    return ''
  return f'it needs {size(needed)} of disk, but {size(free)} are free'


def lock(directory: pathlib.Path) -> IO[str]:
  """Locks the directory for this process, until it closes the file or ends.

  Args:
    directory: an existing folder.

  Returns:
    The open lock file; closing it releases the lock.

  Raises:
    ValueError: another process holds the lock.
  """
  file = open(directory / '.lock', 'w')
  try:
    # A record lock, because reward workers would inherit flock's lock, and they
    # may outlive a killed run for a moment.
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
