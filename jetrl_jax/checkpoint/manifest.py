"""The manifest of a checkpoint folder, with a digest of every file.

A step's folder holds `state/` (files in the writer's format) and
`manifest.json`, which is written last. The manifest holds the small host state,
the list of array leaves, the size and SHA-256 of every file under `state/`, and
a digest of itself. It detects any later change of the folder: a flipped bit, a
truncation, swapped or lost files, a folder renamed to another step. This file
does not know about arrays.
"""

import concurrent.futures
import dataclasses
import hashlib
import json
import os
import pathlib
import stat
from typing import Any

from jetrl_jax.core.files import sync

MANIFEST = 'manifest.json'
PAYLOAD = 'state'

_FORMAT = 1
# Hashing releases the GIL, so threads help; beyond a few the disk is the limit.
_HASH_THREADS = min(8, os.cpu_count() or 1)


class CorruptError(ValueError):
  """A checkpoint folder does not match its manifest."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
  """The content of `manifest.json`.

  Attributes:
    step: the saved step; also the folder's name.
    metric: `keep_best` compares it, higher is better; None if not measured.
    host_state: the JSON object that `save` was given.
    leaves: name of every array leaf -> (dtype, shape).
    files: path below `state/` -> (bytes, hexadecimal SHA-256).
  """

  step: int
  metric: float | None
  host_state: dict[str, Any]
  leaves: dict[str, tuple[str, tuple[int, ...]]]
  files: dict[str, tuple[int, str]]


def digest_payload(folder: pathlib.Path) -> dict[str, tuple[int, str]]:
  """Hashes every file below `folder/state` and makes it durable.

  Args:
    folder: a step's folder.

  Returns:
    Path of every file below `state/` -> (bytes, hexadecimal SHA-256).

  Raises:
    CorruptError: something is neither a plain file nor a folder.
    OSError: a file cannot be read or synced.
  """
  root = folder / PAYLOAD
  names = _payload_files(root)
  with concurrent.futures.ThreadPoolExecutor(_HASH_THREADS) as pool:
    digests = list(pool.map(lambda name: _digest(root / name, True), names))
  for directory, _, _ in os.walk(root):
    sync(pathlib.Path(directory))
  return dict(zip(names, digests, strict=True))


def write(folder: pathlib.Path, manifest: Manifest) -> None:
  """Writes `folder/manifest.json` durably and atomically."""
  body = {'format': _FORMAT} | dataclasses.asdict(manifest)
  text = json.dumps({'body': body, 'sha256': _body_digest(body)}, indent=1)
  temporary = folder / f'{MANIFEST}.tmp'
  with open(temporary, 'w', encoding='utf-8') as file:
    file.write(text)
    file.flush()
    os.fsync(file.fileno())
  os.rename(temporary, folder / MANIFEST)
  sync(folder)


def read(folder: pathlib.Path) -> Manifest:
  """Reads and checks `folder/manifest.json`, but none of the payload.

  Args:
    folder: a step's folder, named by its step.

  Returns:
    The manifest.

  Raises:
    CorruptError: the file is missing, unreadable or of an unknown format,
      differs from its own digest, or belongs to another step than the folder's
      name says.
  """
  path = folder / MANIFEST
  try:
    content = json.loads(path.read_bytes())
    body, digest = content['body'], content['sha256']
    damaged = digest != _body_digest(body)
  except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
    # Not the repr, which holds the whole file if a byte cannot be decoded.
    why = f'{type(error).__name__}: {error}'
    raise CorruptError(f'{path} cannot be read: {why}') from error
  if damaged:
    raise CorruptError(f'{path} differs from its own SHA-256')
  if body['format'] != _FORMAT:
    raise CorruptError(
        f'{path} has format {body["format"]}; this version reads {_FORMAT}'
    )
  if str(body['step']) != folder.name:
    raise CorruptError(
        f'{path} belongs to step {body["step"]}, but the folder is'
        f' {folder.name}'
    )
  return Manifest(
      step=body['step'],
      metric=body['metric'],
      host_state=body['host_state'],
      leaves={
          name: (dtype, tuple(shape))
          for name, (dtype, shape) in body['leaves'].items()
      },
      files={name: (size, sha) for name, (size, sha) in body['files'].items()},
  )


def verify(folder: pathlib.Path, manifest: Manifest) -> None:
  """Compares every payload file with the manifest.

  Args:
    folder: a step's folder.
    manifest: the folder's manifest.

  Raises:
    CorruptError: files are missing, unexpected or changed; the message names
      them.
  """
  root = folder / PAYLOAD
  try:
    names = set(_payload_files(root))
  except OSError as error:
    raise CorruptError(f'{root} cannot be read: {error}') from error
  expected = set(manifest.files)
  problems = [f'{root / name} is missing' for name in sorted(expected - names)]
  problems += [
      f'{root / name} is not in the manifest'
      for name in sorted(names - expected)
  ]

  def compare(name: str) -> str | None:
    size, sha = manifest.files[name]
    path = root / name
    try:
      found_size = path.stat().st_size
      if found_size != size:
        return f'{path} has {found_size} bytes, the manifest says {size}'
      if _digest(path, False)[1] != sha:
        return f'{path} differs from its SHA-256'
    except OSError as error:
      return f'{path} cannot be read: {error}'
    return None

  with concurrent.futures.ThreadPoolExecutor(_HASH_THREADS) as pool:
    found = pool.map(compare, sorted(names & expected))
    problems += [problem for problem in found if problem]
  if problems:
    raise CorruptError('; '.join(problems))


def _payload_files(root: pathlib.Path) -> list[str]:
  """Returns the plain files below root, sorted; other things are an error."""
  names = []
  for directory, folders, files in os.walk(root, onerror=_raise):
    for name in folders + files:
      path = pathlib.Path(directory, name)
      mode = path.lstat().st_mode
      # A link could point out of the folder.
      if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise CorruptError(f'{path} is neither a plain file nor a folder')
    names += [os.path.relpath(os.path.join(directory, f), root) for f in files]
  return sorted(names)


def _raise(error: OSError) -> None:
  raise error


def _digest(path: pathlib.Path, durable: bool) -> tuple[int, str]:
  """Returns (bytes, SHA-256) of one file; syncs it first if `durable`."""
  with open(path, 'rb', buffering=0) as file:
    if durable:
      os.fsync(file.fileno())
    sha = hashlib.file_digest(file, 'sha256').hexdigest()
    return os.fstat(file.fileno()).st_size, sha


def _body_digest(body: dict[str, Any]) -> str:
  text = json.dumps(body, sort_keys=True, separators=(',', ':'))
  return hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()
