"""Reads checkpoints: which steps exist, and the newest good one.

Reading hashes every file again. A damaged step is skipped with a warning;
Orbax alone would silently return wrong values. `manager.py` writes the steps,
and `manifest.py` describes a step's folder.

Partial restores and restores to other shapes are not supported.
"""

import dataclasses
import os
import pathlib
from collections.abc import Callable
from typing import Any

from absl import logging

from jetrl_jax.checkpoint import arrays as checkpoint_arrays
from jetrl_jax.checkpoint import folder as checkpoint_folder
from jetrl_jax.checkpoint import manifest as checkpoint_manifest
from jetrl_jax.checkpoint.manifest import CorruptError
from jetrl_jax.core import processes
from jetrl_jax.core.typing import PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored:
  """The result of `restore`.

  Attributes:
    step: the saved step.
    state: the arrays, in the wanted structure and sharding.
    host_state: the JSON object that was saved with them.
    skipped: newer steps that were found corrupt.
  """

  step: int
  state: PyTree
  host_state: dict[str, Any]
  skipped: tuple[int, ...]


def all_steps(directory: str | os.PathLike) -> list[int]:
  """Returns the steps with a valid manifest, ascending."""
  return sorted(checkpoint_folder.manifests(pathlib.Path(directory)))


def restore(
    directory: str | os.PathLike,
    like: PyTree | Callable[[dict[str, Any]], PyTree],
    step: int | None = None,
) -> Restored | None:
  """Restores the newest good step (or one step), verified to the byte.

  Args:
    directory: the directory of a `CheckpointManager`; it is only read.
    like: pytree of `jax.ShapeDtypeStruct` with sharding, or of arrays, with the
      structure, shapes, dtypes and shardings to return. If these depend on the
      step, a function from the host state to such a pytree.
    step: the step to restore; by default the newest one that is not corrupt.

  Returns:
    The restored step; None if `directory` holds no step.

  Raises:
    ValueError: the given step is missing or corrupt; every step is corrupt; or
      the saved leaves differ from `like` in name, shape or dtype. The message
      lists the reasons.
  """
  directory = pathlib.Path(directory)
  # Every process reads its own shards; one is enough to hash all files.
  found = processes.from_first(
      'choosing a checkpoint', lambda: _newest_good(directory, step)
  )
  if found is None:
    return None
  candidate, manifest, skipped = found
  if callable(like):
    like = like(manifest.host_state)
  folder = directory / str(candidate)
  return Restored(
      step=candidate,
      state=checkpoint_arrays.load(folder, manifest, like),
      host_state=manifest.host_state,
      skipped=skipped,
  )


def _newest_good(
    directory: pathlib.Path, step: int | None
) -> tuple[int, checkpoint_manifest.Manifest, tuple[int, ...]] | None:
  """Returns (step, manifest, corrupt newer steps); see `restore`."""
  folders = checkpoint_folder.step_folders(directory)
  if step is not None:
    if step not in folders:
      raise ValueError(
          f'{directory} has no step {step}; found {sorted(folders)}'
      )
    folders = {step: folders[step]}
  corrupt: dict[int, str] = {}
  for candidate in sorted(folders, reverse=True):
    folder = folders[candidate]
    try:
      manifest = checkpoint_manifest.read(folder)
      checkpoint_manifest.verify(folder, manifest)
    except CorruptError as error:
      corrupt[candidate] = str(error)
      logging.warning(
          'Checkpoint of step %d is corrupt and skipped: %s', candidate, error
      )
      continue
    return candidate, manifest, tuple(corrupt)
  if corrupt:
    reasons = '\n'.join(f'  step {s}: {why}' for s, why in corrupt.items())
    raise ValueError(
        f'no good checkpoint in {directory}:\n{reasons}\n'
        'Restore the files, or start again in another folder.'
    )
  return None


def compare(
    directory: str | os.PathLike, like: Callable[[dict[str, Any]], PyTree]
) -> dict[str, Any]:
  """Compares the newest step's manifest with `like`; reads no array.

  Args:
    directory: it holds a step, see `all_steps`.
    like: see `restore`.

  Returns:
    The newest step's host state.

  Raises:
    ValueError: the saved leaves differ from `like`; the message lists them.
  """
  manifests = checkpoint_folder.manifests(pathlib.Path(directory))
  step = max(manifests)
  host_state = manifests[step].host_state
  checkpoint_arrays.check_leaves(
      pathlib.Path(directory, str(step)),
      manifests[step].leaves,
      checkpoint_arrays.named_leaves(like(host_state)),
  )
  return host_state
