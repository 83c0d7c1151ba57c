"""Saves checkpoints atomically: a pytree of arrays and a small JSON.

Orbax writes the array files. This file makes them reliable: a step is written
to `.saving.<step>`, every file is hashed, the manifest with the digests is
written last, and one rename makes the step exist. `restore.py` reads it.

Of several processes each writes its own shards of the arrays. Process 0 does
the rest: the lock, the manifest, the rename, the deletion of older steps.
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
from typing import IO, Any

import jax
from absl import logging

from jetrl_jax.checkpoint import arrays as checkpoint_arrays
from jetrl_jax.checkpoint import folder as checkpoint_folder
from jetrl_jax.checkpoint import manifest as checkpoint_manifest
from jetrl_jax.checkpoint import restore as checkpoint
from jetrl_jax.checkpoint.manifest import Manifest
from jetrl_jax.checkpoint.restore import Restored
from jetrl_jax.core import processes
from jetrl_jax.core.files import sync
from jetrl_jax.core.typing import PyTree

_SAVING = '.saving.'
_DELETING = '.deleting.'
_CORRUPT = 'corrupt.'
# Trained masters and 8-bit moments hardly compress. Compression would save a
# tenth of the disk, take nearly the state's size of memory, and take processors
# from a rollout at the same time (docs/performance_log.md, "A checkpoint of a
# 7B"). Pinned memory, Orbax's default on a GPU, would never be freed, see
# `arrays.on_host`.
ORBAX_OPTIONS: dict[str, Any] = {
    'use_ocdbt': True,
    'use_zarr3': True,
    'use_compression': False,
    'enable_pinned_host_transfer': False,
}
# Files in which Orbax's threads log the traceback of an exception that
# `wait_until_finished` raises again.
_KEEPS_EXCEPTIONS = (
    'futures/future.py',
    'checkpointers/async_checkpointer.py',
    'metadata/checkpoint.py',
)


class CheckpointManager:
  """Saves steps in the background and keeps the newest and the best.

  Only one run at a time may have a manager on a directory. Readers use the
  functions of `restore.py`. The processes of a run call the same functions in
  the same order.
  """

  def __init__(
      self,
      directory: str | os.PathLike,
      *,
      keep_latest: int,
      keep_best: int,
  ):
    """Opens the directory and deletes incomplete steps of a killed run.

    Args:
      directory: absolute or relative path; it is created if missing.
      keep_latest: number of newest steps to keep, at least 1.
      keep_best: number of steps with the highest metric to keep as well.

    Raises:
      ValueError: a count is out of range, or another run saves here.
    """
    if keep_latest < 1 or keep_best < 0:
      raise ValueError(
          f'keep_latest is {keep_latest}, keep_best is {keep_best}; allowed: '
          'keep_latest >= 1 (the newest step is never deleted), keep_best >= 0'
      )
    self._directory = pathlib.Path(directory).resolve()
    self._directory.mkdir(parents=True, exist_ok=True)
    self._is_first = processes.is_first()
    self._lock: IO[str] | None = None
    if self._is_first:
      self._lock = checkpoint_folder.lock(self._directory)
    self._keep_latest = keep_latest
    self._keep_best = keep_best
    # More steps to keep; the caller may set this.
    self.pinned: frozenset[int] = frozenset()
    self._corrupt: set[int] = set()
    self._pending: concurrent.futures.Future | None = None
    # Arrays that are being saved, until they are on the host.
    self._arrays: dict[str, jax.Array] = {}
    self._copied = threading.Event()
    self._copied.set()
    self._worker = concurrent.futures.ThreadPoolExecutor(1, 'checkpoint')
    self._orbax = checkpoint_arrays.writer(ORBAX_OPTIONS)
    for logger in (logging.get_absl_logger(), std_logging.getLogger('asyncio')):
      logger.addFilter(_is_news)
    for path in self._directory.iterdir() if self._is_first else ():
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
    """Starts to save a step; waits for an earlier save first.

    The arrays are read until `wait_for_copy` returns. `check` and `wait` raise
    an error if the save fails.

    Args:
      step: a new step, >= 0.
      state: pytree of jax arrays.
      host_state: JSON object that survives a round trip unchanged (lists, not
        tuples; string keys; finite numbers).
      metric: ranks the best steps, higher is better; None if not measured.

    Raises:
      ValueError: step, state or host_state cannot be saved.
      RuntimeError: the disk has too little space, or an earlier save failed;
        older checkpoints are unchanged.
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
    lacking = checkpoint_folder.lacking(free, needed)
    if lacking and self._is_first:
      # Otherwise the writer would fail minutes later.
      raise self._failure(step, lacking)
    temporary = self._directory / f'{_SAVING}{step}'
    self._arrays, self._copied = named, threading.Event()
    self._pending = self._worker.submit(
        self._write, temporary, step, metric, host_state, leaves
    )

  def amend(
      self, step: int, host_state: dict[str, Any], *, metric: float | None
  ) -> None:
    """Replaces a saved step's host state and metric, atomically.

    Args:
      step: a saved step.
      host_state: see `save`.
      metric: see `save`.
    """
    self.wait()
    if not self._is_first:
      return
    manifest = dataclasses.replace(
        self._good()[step],
        host_state=_copied(host_state),
        metric=_finite(step, metric),
    )
    checkpoint_manifest.write(self._directory / str(step), manifest)
    self._retire(step)

  @property
  def is_copying(self) -> bool:
    """Whether a save still reads the arrays."""
    return not self._copied.is_set()

  def wait_for_copy(self) -> None:
    """Waits until the arrays of the last save may be donated."""
    self._copied.wait()

  def check(self) -> None:
    """Raises RuntimeError if the background save has failed; never waits."""
    if self._pending is not None and self._pending.done():
      self.wait()

  def wait(self) -> None:
    """Waits for the background save; raises RuntimeError if it failed."""
    if self._pending is not None:
      pending, self._pending = self._pending, None
      pending.result()

  def close(self) -> None:
    """Waits, then ends the threads and unlocks the directory."""
    try:
      self.wait()
    finally:
      self._worker.shutdown()
      self._orbax.close()
      if self._lock is not None:
        self._lock.close()

  def all_steps(self) -> list[int]:
    """Returns the steps that exist and are not known as corrupt, ascending."""
    return sorted(self._good())

  def restore(
      self,
      like: PyTree | Callable[[dict[str, Any]], PyTree],
      step: int | None = None,
  ) -> Restored | None:
    """Calls `restore.restore` and remembers which steps were corrupt."""
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
    """Writes and hashes the files, makes the step exist, deletes old steps."""
    final = self._directory / str(step)
    # No reference is kept, so that host copies are freed as they are written.
    named, self._arrays = self._arrays, {}
    try:
      try:
        if self._is_first:
          temporary.mkdir()
        processes.barrier('checkpoint folder')
        named = checkpoint_arrays.on_host(named)
        self._orbax.save(
            temporary / checkpoint_manifest.PAYLOAD,
            args=checkpoint_arrays.save_args(named),
        )
      finally:
        del named
        self._copied.set()
      self._orbax.wait_until_finished()
      processes.barrier('checkpoint arrays')
      if self._is_first:
        self._seal(temporary, final, step, metric, host_state, leaves)
      processes.barrier('checkpoint')
    except Exception as error:
      if self._is_first:
        shutil.rmtree(temporary, ignore_errors=True)
      raise self._failure(step, error) from error
    if not self._is_first:
      return
    try:
      self._retire(step)
    except OSError as error:
      raise RuntimeError(
          f'checkpoint of step {step} is saved, but an older one cannot be '
          f'deleted: {error}'
      ) from error

  def _seal(
      self,
      temporary: pathlib.Path,
      final: pathlib.Path,
      step: int,
      metric: float | None,
      host_state: dict[str, Any],
      leaves: dict[str, tuple[str, tuple[int, ...]]],
  ) -> None:
    """Hashes the files, writes the manifest and makes the step exist."""
    manifest = Manifest(
        step=step,
        metric=metric,
        host_state=host_state,
        leaves=leaves,
        files=checkpoint_manifest.digest_payload(temporary),
    )
    checkpoint_manifest.write(temporary, manifest)
    if final.exists():
      # Only a corrupt step can be here; it is kept for inspection.
      aside = self._directory / f'{_CORRUPT}{step}'
      shutil.rmtree(aside, ignore_errors=True)
      os.rename(final, aside)
      logging.warning('Moved the corrupt step %d to %s', step, aside)
    os.rename(temporary, final)
    sync(self._directory)
    self._corrupt.discard(step)

  def _retire(self, newest: int) -> None:
    """Deletes the steps that are not to be kept."""
    good = self._good()
    keep = {newest, *sorted(good)[-self._keep_latest :]}
    keep |= set(checkpoint_folder.ranked(good)[: self._keep_best])
    keep |= self.pinned
    for step in sorted(set(good) - keep):
      # Renamed first, because a half deleted step would look corrupt.
      doomed = self._directory / f'{_DELETING}{step}'
      os.rename(self._directory / str(step), doomed)
      shutil.rmtree(doomed)

  def _failure(self, step: int, error: Exception | str) -> RuntimeError:
    good, why = self._good(), str(error)
    # Orbax's own words for it are a paragraph.
    if 'No space left' in why or 'RESOURCE_EXHAUSTED' in why:
      why = 'no space is left on its disk'
    there = f'the newest good step is {max(good)}' if good else 'none is there'
    return RuntimeError(
        f'checkpoint of step {step} was not saved in {self._directory}: {why};'
        f' {there}'
    )


def _is_news(record: std_logging.LogRecord) -> bool:
  """Returns False for log records of exceptions that Orbax raises later.

  For a full disk this package logs one sentence. Orbax's three tracebacks and
  asyncio's line for each unfinished array would bury it.
  """
  if record.name == 'asyncio':
    return f'/{_SAVING}' not in record.getMessage()
  path = pathlib.PurePath(record.pathname).as_posix()
  is_kept = '/orbax/checkpoint/' in path and path.endswith(_KEEPS_EXCEPTIONS)
  return not (is_kept and record.exc_info)


def _finite(step: int, metric: float | None) -> float | None:
  """Returns the metric; None if it is not finite."""
  if metric is None:
    return None
  if not math.isfinite(metric):
    logging.warning('Step %d has metric %s and cannot be best', step, metric)
    return None
  return float(metric)


def _copied(host_state: dict[str, Any]) -> dict[str, Any]:
  """Copies a host state through JSON; raises an error if JSON changes it.

  The caller may change its own object while the save runs.
  """
  try:
    back = json.loads(json.dumps(host_state, allow_nan=False))
  except (TypeError, ValueError) as error:
    raise ValueError(f'host_state is not a JSON object: {error}') from error
  if not isinstance(host_state, dict) or back != host_state:
    raise ValueError(
        'host_state changes in a JSON round trip; use a dict with string keys, '
        f'and lists instead of tuples; found {host_state!r}'
    )
  return back
