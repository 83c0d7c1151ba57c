"""Records versions, commit and device of each start: `starts.jsonl`.

A run may be resumed on another machine or after an upgrade. Each start appends
a line, so that it is known which start computed which numbers.
"""

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import sys
from typing import Any

import jax

from jetrl_jax.core.files import user_path

FILE = 'starts.jsonl'
_PACKAGES = (
    'jetrl_jax',
    'jax',
    'jaxlib',
    'flax',
    'optax',
    'orbax-checkpoint',
    'numpy',
)
_SOURCE = pathlib.Path(__file__).parents[1]


def record_start(
    workdir: str | os.PathLike, num_devices: int, **facts: Any
) -> dict[str, Any]:
  """Appends a line about this process to `<workdir>/starts.jsonl`.

  Args:
    workdir: the run's folder; it must exist.
    num_devices: number of devices that the run uses.
    **facts: more facts about this start, as JSON values.

  Returns:
    The line: `time` (UTC), `command`, `folder` (the current one, which the
    config's relative paths start from), `versions`, `commit` (None outside of a
    clone; it ends in '+' if files differ from it), `device`, `num_devices` and
    the facts.
  """
  record = {
      'time': datetime.datetime.now(datetime.UTC).isoformat('T', 'seconds'),
      'command': [*_program(), *sys.argv[1:]],
      'folder': os.getcwd(),
      'versions': versions(),
      'commit': commit(),
      'device': jax.devices()[0].device_kind,
      'num_devices': num_devices,
      **facts,
  }
  path = pathlib.Path(workdir) / FILE
  # A kill may have cut the last line; the new one must not continue it.
  torn = path.exists() and not path.read_bytes().endswith(b'\n')
  with open(path, 'a', encoding='utf-8') as file:
    file.write('\n' * torn + json.dumps(record) + '\n')
  return record


def start_folder(workdir: str | os.PathLike) -> pathlib.Path | None:
  """Returns the folder that a run was last started in; None if unknown."""
  path = pathlib.Path(workdir) / FILE
  lines = path.read_bytes().splitlines() if path.is_file() else []
  for line in reversed(lines):
    try:
      return pathlib.Path(json.loads(line)['folder'])
    # A kill may have cut the line, or an earlier version wrote it.
    except (ValueError, KeyError, TypeError):
      continue
  return None


def path_of_run(workdir: str | os.PathLike, text: str) -> str:
  """Returns a path of a run's config as it is found from the current folder.

  A relative path starts from the folder that the run was last started in. Where
  that does not hold it, as on another machine, it stays: the current folder
  may.

  Args:
    workdir: the run's folder.
    text: the path; '' is none, and stays.
  """
  start = start_folder(workdir)
  if not text or start is None or start == pathlib.Path.cwd():
    return text
  # An absolute path stays as it is below any folder.
  path = start / user_path(text)
  return str(path) if os.path.exists(path) else text


def _program() -> list[str]:
  """Returns the command of this process, as it can be typed anywhere."""
  file = pathlib.Path(sys.argv[0])
  try:
    module = file.resolve().relative_to(_SOURCE.parent).with_suffix('')
  except ValueError:
    return [file.name]
  return ['python', '-m', '.'.join(module.parts)]


def versions() -> dict[str, str]:
  """Returns the versions of Python and of the packages that affect numbers."""
  found = {'python': platform.python_version()}
  for package in _PACKAGES:
    try:
      found[package] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
      continue  # This package may run from a clone without being installed.
  return found


def commit(source: pathlib.Path = _SOURCE) -> str | None:
  """Returns the git commit of the clone that contains `source`.

  Args:
    source: the package's folder; only tests pass another one.

  Returns:
    The hash, with '+' if tracked files differ from it; None if the folder above
    `source` is not a clone (an installed package), or git is missing.
  """
  root = source.parent
  # Git would also find a clone farther up, in which an environment with this
  # package is installed.
  if not (root / '.git').exists():
    return None
  try:
    head = _git(root, 'rev-parse', 'HEAD')
    changed = _git(root, 'status', '--porcelain', '--untracked-files=no')
  except (OSError, subprocess.SubprocessError):
    return None
  return head + ('+' if changed else '')


def _git(root: pathlib.Path, *arguments: str) -> str:
  return subprocess.run(
      ['git', '-C', str(root), *arguments],
      capture_output=True,
      check=True,
      text=True,
      timeout=20,
  ).stdout.strip()
