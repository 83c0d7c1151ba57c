"""What a run takes beside its devices: room on the disk, memory of the host.

The dry run tells all of it; a run that trains warns of what is missing before
it begins, since a save that finds no room comes hours later.
"""

import dataclasses
import os
import pathlib
import shutil

import jax
from absl import logging

from jetrl_jax.core.files import size
from jetrl_jax.optim.types import TrainState
from jetrl_jax.rl.run import state as states
from jetrl_jax.rl.run.spec import RunSpec
from jetrl_jax.rl.training.workdir import EXPORT


@dataclasses.dataclass(frozen=True, kw_only=True)
class StorageNeeds:
  """What is needed and what there is, in bytes.

  Attributes:
    workdir: of the run.
    rows: (what, bytes, how that comes about) of all that is written there.
    free: on the disk that it is on.
    held: what an earlier start wrote there, which goes or is a part of `rows`.
    checkpoint: one of them, on the disk and on the way there.
    host: memory of this machine.
  """

  workdir: pathlib.Path
  rows: list[tuple[str, int, str]]
  free: int
  held: int
  checkpoint: int
  host: int

  @property
  def free_there(self) -> str:
    """How much is free, in words."""
    held = self.held
    more = f', besides {size(held)} in these folders already' if held else ''
    return f'{size(self.free)}{more}'

  def lacking_disk(self) -> list[str]:
    """Says what is missing on the disk, a sentence, if anything."""
    needed = sum(count for _, count, _ in self.rows)
    if needed <= self.free + self.held:
      return []
    return [
        f'up to {size(needed)} are written to {self.workdir}, and free there'
        f' are {self.free_there}; name another --workdir, or lower'
        ' trainer.keep_latest and trainer.keep_best, or set'
        ' trainer.save_rollouts=False'
    ]

  def lacking_host(self) -> list[str]:
    """Says what is missing of the host's memory, if anything."""
    # On a CPU the arrays are where they are to be copied to.
    if jax.default_backend() == 'cpu' or self.checkpoint <= self.host:
      return []
    return [
        f'a checkpoint is copied to the host, {size(self.checkpoint)}, which'
        f' has {size(self.host)}; use a host with more, or'
        ' model.master_dtype=bfloat16, which takes 2 bytes a parameter less'
    ]

  def warn(self) -> None:
    """Warns of what a save would find missing hours later."""
    for problem in self.lacking_disk() + self.lacking_host():
      logging.warning('This run may not reach its end: %s', problem)


def of_run(
    spec: RunSpec, state: TrainState, workdir: pathlib.Path
) -> StorageNeeds:
  """Returns what a run needs and what there is.

  Args:
    spec: of the run.
    state: its shapes.
    workdir: need not exist.
  """
  rows = written(spec, state)
  place = workdir.absolute()
  while not place.exists():
    place = place.parent
  # An earlier export goes only when the new one is whole.
  held = sum(
      file.stat().st_size
      for name, _, _ in rows
      if name != f'{EXPORT}/'
      for file in (workdir / name).rglob('*')
      if file.is_file()
  )
  return StorageNeeds(
      workdir=workdir,
      rows=rows,
      free=shutil.disk_usage(place).free,
      held=held,
      checkpoint=whole_bytes(states.without_weights(state)),
      host=physical_bytes(),
  )


def written(spec: RunSpec, state: TrainState) -> list[tuple[str, int, str]]:
  """Returns (what, bytes, how that comes about) of all that a run writes."""
  run = spec.run
  checkpoint = whole_bytes(states.without_weights(state))
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
  """Returns the memory of this machine."""
  return os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')


def whole_bytes(tree) -> int:
  """Returns the bytes of a tree of shapes over all devices."""
  return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
