"""What a run has saved: which steps there are, and the newest good one.

Reading hashes every file again, so that a damaged step is skipped with a
warning instead of restored with wrong values (Orbax returns them silently).
`checkpoint_manager` writes; `checkpoint_manifest` says what lies in a step's
folder.

Left out on purpose: partial or resharding-by-shape restores.
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
from jetrl_jax.core.typing import PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored:
  """What `restore` found.

  Attributes:
    step: the step that was saved.
    state: the arrays, in the structure and sharding asked for.
    host_state: the JSON object that was saved beside them.
    skipped: newer steps that were found corrupt.
  """

  step: int
  state: PyTree
  host_state: dict[str, Any]
  skipped: tuple[int, ...]


def all_steps(directory: str | os.PathLike) -> list[int]:
  """Lists the steps that exist, ascending: those with a valid manifest."""
  return sorted(checkpoint_folder.manifests(pathlib.Path(directory)))


def restore(
    directory: str | os.PathLike,
    like: PyTree | Callable[[dict[str, Any]], PyTree],
    step: int | None = None,
) -> Restored | None:
  """Restores the newest good step (or one step), verified to the byte.

  Args:
    directory: where a `CheckpointManager` saved. Only read.
    like: pytree of `jax.ShapeDtypeStruct` with sharding, or of arrays: the
      structure, shapes, dtypes and shardings to return. Or a function that
      gives it from the host state, where it depends on the step.
    step: which step; None means the newest one that is not corrupt.

  Returns:
    The restored step, or None when `directory` holds no step at all.

  Raises:
    ValueError: the step asked for is absent or corrupt; every step is
      corrupt (lists why); or the saved leaves differ from `like` in name,
      shape or dtype (lists them).
  """
  directory = pathlib.Path(directory)
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
    if callable(like):
      like = like(manifest.host_state)
    return Restored(
        step=candidate,
        state=checkpoint_arrays.load(folder, manifest, like),
        host_state=manifest.host_state,
        skipped=tuple(corrupt),
    )
  if corrupt:
    reasons = '\n'.join(f'  step {s}: {why}' for s, why in corrupt.items())
    raise ValueError(
        f'no good checkpoint in {directory}:\n{reasons}\n'
        'Bring the files back, or use another folder to start anew.'
    )
  return None


def compare(
    directory: str | os.PathLike, like: Callable[[dict[str, Any]], PyTree]
) -> dict[str, Any]:
  """Refuses what `restore` would, by the newest manifest; reads no array.

  Args:
    directory: holds a step, see `all_steps`.
    like: see `restore`.

  Returns:
    That step's host state.

  Raises:
    ValueError: the saved leaves differ from `like` (lists them).
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
