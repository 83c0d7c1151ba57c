"""Saves checkpoints: a pytree of arrays and a small JSON, atomically.

The array files are Orbax's. What is added is trust: a step is written to
`.saving.<step>`, every file is hashed, the manifest that holds the digests is
written last, and one rename makes the step exist. `checkpoint` reads it.

Left out on purpose: several processes (refused, until it is proven).
"""

import concurrent.futures
import dataclasses
import json
import logging as std_logging
import math
import os
import pathlib
import shutil
import threading
from collections.abc import Callable
from typing import Any

import jax
import orbax.checkpoint as ocp
from absl import logging

from jetrl_jax.checkpoint import arrays as checkpoint_arrays
from jetrl_jax.checkpoint import folder as checkpoint_folder
from jetrl_jax.checkpoint import manifest as checkpoint_manifest
from jetrl_jax.checkpoint import restore as checkpoint
from jetrl_jax.checkpoint.manifest import Manifest
from jetrl_jax.checkpoint.restore import Restored
from jetrl_jax.core.files import size, sync
from jetrl_jax.core.typing import PyTree

_SAVING = '.saving.'
_DELETING = '.deleting.'
_CORRUPT = 'corrupt.'
# Trained masters and 8-bit moments are noise to a compressor: it saves a tenth
# of the disk, holds nearly the state's size of memory and keeps the processors
# from the rollout beside it (docs/performance_log.md, "A checkpoint of a
# 7B"). Pinned memory, Orbax's choice on a GPU, would stay taken: see
# `checkpoint_arrays.on_host`.
ORBAX_OPTIONS: dict[str, Any] = {
    'use_ocdbt': True,
    'use_zarr3': True,
    'use_compression': False,
    'enable_pinned_host_transfer': False,
}
# Orbax's threads log a traceback of each exception that they keep for
# `wait_until_finished`, which raises it again.
_KEEPS_EXCEPTIONS = (
    'futures/future.py',
    'checkpointers/async_checkpointer.py',
    'metadata/checkpoint.py',
)


class CheckpointManager:
  """Saves steps in the background and keeps the newest and the best.

  One process at a time may hold a manager on a directory; readers use the
  functions of `checkpoint`.
  """

  def __init__(
      self,
      directory: str | os.PathLike,
      *,
      keep_latest: int,
      keep_best: int,
  ):
    """Opens or makes the directory and clears what a killed run left half done.

    Args:
      directory: absolute or relative path; made if absent.
      keep_latest: how many of the newest steps stay, at least 1.
      keep_best: how many of the steps with the highest metric stay besides.

    Raises:
      ValueError: a count is out of range, another process saves here, or
        there are several JAX processes.
    """
    if keep_latest < 1 or keep_best < 0:
      raise ValueError(
          f'keep_latest is {keep_latest}, keep_best is {keep_best}; allowed: '
          'keep_latest >= 1 (the newest step is never dropped), keep_best >= 0'
      )
    if jax.process_count() > 1:
      raise ValueError(
          f'checkpoints are saved by one process, found {jax.process_count()}; '
          'run one process with all devices of the host'
      )
    self._directory = pathlib.Path(directory).resolve()
    self._directory.mkdir(parents=True, exist_ok=True)
    self._lock = checkpoint_folder.lock(self._directory)
    self._keep_latest = keep_latest
    self._keep_best = keep_best
    # Steps that stay besides; whoever needs them sets it.
    self.pinned: frozenset[int] = frozenset()
    self._corrupt: set[int] = set()
    self._pending: concurrent.futures.Future | None = None
    # What is being saved, until it is on the host.
    self._arrays: dict[str, jax.Array] = {}
    self._copied = threading.Event()
    self._copied.set()
    self._worker = concurrent.futures.ThreadPoolExecutor(1, 'checkpoint')
    self._orbax = ocp.AsyncCheckpointer(
        ocp.PyTreeCheckpointHandler(**ORBAX_OPTIONS)
    )
    for logger in (logging.get_absl_logger(), std_logging.getLogger('asyncio')):
      logger.addFilter(_is_news)
    for path in self._directory.iterdir():
      if path.name.startswith((_SAVING, _DELETING)):
        logging.info('Removing %s, left over by an earlier run', path)
        shutil.rmtree(path)

  def save(
      self,
      step: int,
      state: PyTree,
      host_state: dict[str, Any],
      *,
      metric: float | None,
  ) -> None:
    """Begins to save a step; its arrays are read until `wait_for_copy` returns.

    An earlier save that is still being written is waited for.

    Args:
      step: not saved yet, >= 0.
      state: pytree of jax arrays.
      host_state: JSON object that survives a round trip unchanged (lists, not
        tuples; string keys; finite numbers).
      metric: what "best" means, higher is better; None when not measured.

    Raises:
      ValueError: step, state or host_state cannot be saved.
      RuntimeError: there is no room on the disk, or an earlier save failed;
        the older checkpoints are as they were. Whether this one failed, `check`
        and `wait` say.
    """
    self.wait()
    step = int(step)
    metric = _finite(step, metric)
    host_state = _copied(host_state)
    if step < 0 or step in self.all_steps():
      raise ValueError(
          f'step {step} cannot be saved in {self._directory}: steps are >= 0 '
          f'and are saved once; found {self.all_steps()}'
      )
    named = checkpoint_arrays.named_leaves(state)
    leaves = {
        name: checkpoint_arrays.signature(leaf) for name, leaf in named.items()
    }
    needed = sum(leaf.nbytes for leaf in named.values())
    free = shutil.disk_usage(self._directory).free
    if free < needed:
      # Found by the writer, it would come minutes later.
      raise self._failure(
          step, f'it takes {size(needed)}, and free are {size(free)}'
      )
    temporary = self._directory / f'{_SAVING}{step}'
    self._arrays, self._copied = named, threading.Event()
    self._pending = self._worker.submit(
        self._write, temporary, step, metric, host_state, leaves
    )

  def amend(
      self, step: int, host_state: dict[str, Any], *, metric: float | None
  ) -> None:
    """Replaces what was saved beside a step's arrays, atomically.

    Args:
      step: a step that was saved.
      host_state: see `save`.
      metric: see `save`.
    """
    self.wait()
    manifest = dataclasses.replace(
        self._good()[step],
        host_state=_copied(host_state),
        metric=_finite(step, metric),
    )
    checkpoint_manifest.write(self._directory / str(step), manifest)
    self._retire(step)

  @property
  def is_copying(self) -> bool:
    """Whether arrays that are being saved are still read."""
    return not self._copied.is_set()

  def wait_for_copy(self) -> None:
    """Returns when the arrays last saved may be donated."""
    self._copied.wait()

  def check(self) -> None:
    """Raises RuntimeError if the background save has failed; never waits."""
    if self._pending is not None and self._pending.done():
      self.wait()

  def wait(self) -> None:
    """Returns when nothing is being saved; raises RuntimeError if it failed."""
    if self._pending is not None:
      pending, self._pending = self._pending, None
      pending.result()

  def close(self) -> None:
    """Waits, then lets go of the threads and of the directory."""
    try:
      self.wait()
    finally:
      self._worker.shutdown()
      self._orbax.close()
      self._lock.close()

  def all_steps(self) -> list[int]:
    """Lists the steps that exist and were not found corrupt, ascending."""
    return sorted(self._good())

  def restore(
      self,
      like: PyTree | Callable[[dict[str, Any]], PyTree],
      step: int | None = None,
  ) -> Restored | None:
    """Restores like `checkpoint.restore` and remembers what was corrupt."""
    self.wait()
    restored = checkpoint.restore(self._directory, like, step)
    if restored is not None:
      self._corrupt |= set(restored.skipped)
    return restored

  def _good(self) -> dict[int, Manifest]:
    manifests = checkpoint_folder.manifests(self._directory)
    return {s: m for s, m in manifests.items() if s not in self._corrupt}

  def _write(
      self,
      temporary: pathlib.Path,
      step: int,
      metric: float | None,
      host_state: dict[str, Any],
      leaves: dict[str, tuple[str, tuple[int, ...]]],
  ) -> None:
    """Writes files, proves them, makes the step exist, then retires."""
    final = self._directory / str(step)
    # Their copies on the host go as they are written: nothing here keeps them.
    named, self._arrays = self._arrays, {}
    try:
      try:
        temporary.mkdir()
        named = checkpoint_arrays.on_host(named)
        self._orbax.save(
            temporary / checkpoint_manifest.PAYLOAD,
            args=checkpoint_arrays.save_args(named),
        )
      finally:
        del named
        self._copied.set()
      self._orbax.wait_until_finished()
      manifest = Manifest(
          step=step,
          metric=metric,
          host_state=host_state,
          leaves=leaves,
          files=checkpoint_manifest.digest_payload(temporary),
      )
      checkpoint_manifest.write(temporary, manifest)
      if final.exists():
        # Only a corrupt step can stand here; it may still be worth a look.
        aside = self._directory / f'{_CORRUPT}{step}'
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(final, aside)
        logging.warning('Moved the corrupt step %d to %s', step, aside)
      os.rename(temporary, final)
      sync(self._directory)
      self._corrupt.discard(step)
    except Exception as error:
      shutil.rmtree(temporary, ignore_errors=True)
      raise self._failure(step, error) from error
    try:
      self._retire(step)
    except OSError as error:
      raise RuntimeError(
          f'checkpoint of step {step} is saved, but an older one cannot be '
          f'deleted: {error}'
      ) from error

  def _retire(self, newest: int) -> None:
    """Deletes the steps that retention no longer keeps."""
    good = self._good()
    keep = {newest, *sorted(good)[-self._keep_latest :]}
    keep |= set(checkpoint_folder.ranked(good)[: self._keep_best])
    keep |= self.pinned
    for step in sorted(set(good) - keep):
      # Renamed first: a half deleted step must not look like a corrupt one.
      doomed = self._directory / f'{_DELETING}{step}'
      os.rename(self._directory / str(step), doomed)
      shutil.rmtree(doomed)

  def _failure(self, step: int, error: Exception | str) -> RuntimeError:
    return RuntimeError(
        f'checkpoint of step {step} was not saved in {self._directory}: '
        f'{error}; the newest good step is {max(self._good(), default=None)}'
    )


def _is_news(record: std_logging.LogRecord) -> bool:
  """Says whether a record is none of an exception that Orbax raises later.

  A full disk is one sentence of ours; Orbax's three tracebacks would bury it,
  and so would asyncio's lines on each array that Orbax no longer waits for.
  """
  if record.name == 'asyncio':
    return f'/{_SAVING}' not in record.getMessage()
  path = pathlib.PurePath(record.pathname).as_posix()
  is_kept = '/orbax/checkpoint/' in path and path.endswith(_KEEPS_EXCEPTIONS)
  return not (is_kept and record.exc_info)


def _finite(step: int, metric: float | None) -> float | None:
  """Returns the metric, None where it cannot be compared."""
  if metric is None:
    return None
  if not math.isfinite(metric):
    logging.warning('Step %d has metric %s and cannot be best', step, metric)
    return None
  return float(metric)


def _copied(host_state: dict[str, Any]) -> dict[str, Any]:
  """Copies by way of JSON; refuses what would come back as something else.

  A copy, because the caller goes on counting in it while the save runs.
  """
  try:
    back = json.loads(json.dumps(host_state, allow_nan=False))
  except (TypeError, ValueError) as error:
    raise ValueError(f'host_state is no JSON object: {error}') from error
  if not isinstance(host_state, dict) or back != host_state:
    raise ValueError(
        'host_state would not come back from JSON as it is; use a dict with '
        f'string keys, and lists instead of tuples; found {host_state!r}'
    )
  return back
