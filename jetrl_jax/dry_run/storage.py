"""The storage that a run needs: disk space and host memory.

The dry run prints all of it. A training run warns before it starts if something
is missing, because otherwise a save would fail hours later, and does not start
if not even one checkpoint can be written.
"""

import contextlib
import dataclasses
import os
import pathlib
import shutil
import socket

import jax
from absl import logging

from jetrl_jax.checkpoint import folder as checkpoint_folder
from jetrl_jax.checkpoint import restore
from jetrl_jax.core import processes
from jetrl_jax.core.files import size
from jetrl_jax.fp8 import scaling_state
from jetrl_jax.optim.types import TrainState
from jetrl_jax.rl.run import train_state
from jetrl_jax.rl.run.spec import RunSpec
from jetrl_jax.rl.training.workdir import EXPORT

# A process with a GPU before its first checkpoint, and copies in flight.
_PROCESS, _ON_THE_WAY = 6 * 2**30, 7 * 2**30
# Bytes of a line of metrics and of one of its 8-bit dots, of a step's
# TensorBoard events, of a token's text, of a sample besides, of a report with
# its answers.
_LINE, _LINE_OF_DOT, _EVENTS = 3500, 400, 3000
_TOKEN, _NAMES, _REPORT = 5, 100, 13 * 2**20
# Files with a container's memory limit: control groups, version 2 and 1.
_LIMITS = (
    '/sys/fs/cgroup/memory.max',
    '/sys/fs/cgroup/memory/memory.limit_in_bytes',
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StorageNeeds:
  """Needed and available storage, in bytes.

  Attributes:
    workdir: the run's workdir.
    rows: (name, bytes, explanation) of everything that is written there.
    free: free bytes on the workdir's disk.
    held: bytes that an earlier start wrote there and that this run replaces or
      reuses.
    checkpoint: what a checkpoint takes of this machine's memory.
    next_checkpoint: what the next checkpoint takes of the disk; 0 where none
      will be written.
    host: memory of this machine.
  """

  workdir: pathlib.Path
  rows: list[tuple[str, int, str]]
  free: int
  held: int
  checkpoint: int
  next_checkpoint: int
  host: int

  @property
  def free_there(self) -> str:
    """How much is free, as text."""
    held = self.held
    more = f', and {size(held)} already in these folders' if held else ''
    return f'{size(self.free)}{more}'

  def lacking_disk(self) -> list[str]:
    """Returns a sentence if the disk has too little space; else nothing."""
    needed = sum(count for _, count, _ in self.rows)
    if needed <= self.free + self.held:
      return []
    return [
        f'up to {size(needed)} are written to {self.workdir}, but free there'
        f' are {self.free_there}; choose another --workdir, or lower'
        ' trainer.keep_latest and trainer.keep_best, or set'
        ' trainer.save_rollouts=False'
    ]

  @property
  def host_needed(self) -> int:
    """Bytes of the host's memory while a checkpoint is copied, about.

    The process itself, the checkpoint, and the pieces of it that are on their
    way: measured for a 7B, whose 44 GiB took 57
    (docs/performance_log.md).
    """
    return _PROCESS + self.checkpoint + min(self.checkpoint, _ON_THE_WAY)

  def lacking_host(self) -> list[str]:
    """Returns a sentence if host memory is too small; else nothing."""
    # On a CPU the arrays are in host memory already.
    if jax.default_backend() == 'cpu' or self.host_needed <= self.host:
      return []
    return [
        f'a checkpoint is copied to the host, {size(self.checkpoint)}, which'
        f' takes about {size(self.host_needed)} of its memory, and it has'
        f' {size(self.host)}; use a host with more, or'
        ' model.master_dtype=bfloat16, which takes 2 bytes a parameter less'
    ]

  def check(self) -> None:
    """Refuses a run whose next checkpoint could not be written.

    Raises:
      ValueError: the disk has too little space for it.
    """
    lacking = checkpoint_folder.lacking(self.free, self.next_checkpoint)
    if lacking:
      raise ValueError(
          f'no checkpoint can be saved in {self.workdir}: {lacking}; choose'
          ' another --workdir, or free the space'
      )

  def warn(self) -> None:
    """Warns if a save would fail hours later."""
    for problem in self.lacking_disk() + self.lacking_host():
      logging.warning('This run may not reach its end: %s', problem)


def of_run(
    spec: RunSpec, state: TrainState, workdir: pathlib.Path
) -> StorageNeeds:
  """Returns the storage that a run needs and that is available.

  Args:
    spec: the run's specification.
    state: shapes of its state.
    workdir: the run's workdir; it need not exist.
  """
  rows = written(spec, state)
  place = nearest(workdir)
  # An earlier export is deleted only after the new one is complete.
  held = sum(
      file.stat().st_size
      # Not elsewhere, because process 0 may be deleting some of them.
      for name, _, _ in (rows if processes.is_first() else ())
      if name != f'{EXPORT}/'
      for file in (workdir / name, *(workdir / name).rglob('*'))
      if file.is_file()
  )
  checkpoint = whole_bytes(train_state.without_weights(state))
  return StorageNeeds(
      workdir=workdir,
      rows=rows,
      free=shutil.disk_usage(place).free,
      held=held,
      checkpoint=int(checkpoint * _share_of_host(spec)),
      next_checkpoint=checkpoint if _will_save(spec, workdir) else 0,
      host=physical_bytes(),
  )


def nearest(folder: pathlib.Path) -> pathlib.Path:
  """Returns the folder, or the nearest one above it that exists."""
  place = folder.absolute()
  while not place.exists():
    place = place.parent
  return place


def _will_save(spec: RunSpec, workdir: pathlib.Path) -> bool:
  """Whether the run, as it stands, has a checkpoint to write."""
  run, steps = spec.run, restore.all_steps(workdir / 'checkpoints')
  is_over = bool(steps) and steps[-1] >= run.total_training_steps
  return not is_over and bool(run.save_freq or not run.synthetic)


def _share_of_host(spec: RunSpec) -> float:
  """Returns which part of the arrays the processes of this machine hold."""
  if processes.count() == 1:
    return 1.0
  names = processes.together('host names', socket.gethostname)
  here = names.count(socket.gethostname()) / processes.count()
  axes = spec.policy.axes
  return min(1.0, here * axes.devices / axes.stored)


def written(spec: RunSpec, state: TrainState) -> list[tuple[str, int, str]]:
  """Returns (name, bytes, reason) of everything that a run writes."""
  run = spec.run
  checkpoint = whole_bytes(train_state.without_weights(state))
  # The newest is whole before an older one goes; a guard may roll back to one
  # that is neither new nor the best.
  kept = run.keep_latest + run.keep_best + spec.guard.enable + 1
  response = spec.engine.max_response_length
  sequences = run.train_batch_size * run.num_generations
  # tokens, two log-probs and the version, 4 bytes each.
  rollout = sequences * (16 * response + 4 * spec.engine.max_prompt_length)
  rows = [
      (
          'checkpoints/',
          kept * checkpoint,
          f'{kept} x {size(checkpoint)} at most, one of them being written',
      )
  ]
  if run.save_rollouts:
    steps = run.total_training_steps
    rows.append(
        (
            'rollouts/',
            steps * rollout,
            f'{steps} steps x {size(rollout)} at most',
        )
    )
  lines = run.total_training_steps + 1
  dots = len(scaling_state.dot_paths(state.fp8_state))
  line = _LINE + dots * _LINE_OF_DOT
  rows += [
      ('metrics.jsonl', lines * line, f'{lines} lines x {size(line)}, about'),
      ('tensorboard/', lines * _EVENTS, 'their scalars, about'),
  ]
  if spec.val_set is not None and run.test_freq:
    times = 1 + -(-run.total_training_steps // run.test_freq)
    tokens = spec.engine.max_prompt_length + response
    samples = len(spec.val_set) * (tokens * _TOKEN + _NAMES)
    rows.append(
        ('samples/', times * samples, f'{times} times, {size(samples)} at most')
    )
  rows.append(('report.html', _REPORT, 'at the end, about'))
  if spec.needs_reference:
    reference = whole_bytes((state.weights, state.fp8_state))
    rows.append(('reference/', reference, 'weights and scales of step 0'))
  if spec.export_source is not None and not run.synthetic:
    rows.append(
        (
            f'{EXPORT}/',
            2 * spec.policy.model.num_params,
            'the policy in bfloat16, at the end',
        )
    )
  return rows


def physical_bytes() -> int:
  """Returns the memory of this machine, or the limit of its container."""
  found = [os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')]
  for name in _LIMITS:
    with contextlib.suppress(OSError, ValueError):  # 'max' is no limit.
      found.append(int(pathlib.Path(name).read_text()))
  return min(found)


def whole_bytes(tree) -> int:
  """Returns the bytes of a tree of shapes over all devices."""
  return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
