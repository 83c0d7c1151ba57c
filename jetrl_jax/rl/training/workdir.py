"""The workdir of a run: everything that the training loop writes.

config.json          the resolved config
metrics.jsonl        one line per step (and TensorBoard's files)
checkpoints/<step>/  states, see `checkpoint/restore.py`
rollouts/<step>.npz  the rollout that a step learnt from, to the bit
samples/<step>.jsonl held-out samples
export/              the trained policy as a Hugging Face checkpoint
"""

import contextlib
import json
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

from absl import logging

from jetrl_jax import models
from jetrl_jax.checkpoint.manager import CheckpointManager
from jetrl_jax.core import processes, sharding
from jetrl_jax.core.files import replace_text
from jetrl_jax.metrics.console import Console
from jetrl_jax.metrics.wandb import WandbConfig
from jetrl_jax.metrics.writer import MetricWriter
from jetrl_jax.models import invariant_scaling
from jetrl_jax.optim.types import TrainState
from jetrl_jax.rl.run import train_state
from jetrl_jax.rl.run.spec import RunSpec
from jetrl_jax.rl.scoring import store
from jetrl_jax.rl.scoring.experience import Experience
from jetrl_jax.rl.settings import RunConfig

EXPORT = 'export'


def changed_settings(before: str | bytes, after: str) -> list[str]:
  """Lists the differences between two configs, 'optim.lr: 1e-06 -> 2e-06'.

  Args:
    before: JSON; text that is not JSON counts as a config without settings.
    after: JSON.
  """
  try:
    old, new = (_flat(json.loads(text)) for text in (before, after))
  except ValueError:
    return []
  # A config of another version may lack a setting.
  return [
      f'{name}: {old[name]!r} -> {new[name]!r}'
      for name in new
      if name in old and old[name] != new[name]
  ]


def _flat(tree: Any, prefix: str = '') -> dict[str, Any]:
  if not isinstance(tree, dict):
    return {prefix: tree}
  flat = {}
  for name, value in tree.items():
    flat |= _flat(value, f'{prefix}.{name}' if prefix else name)
  return flat


class RunFolder:
  """Writes one run's workdir; call `close` at the end.

  Args:
    path: the workdir; it must exist.
    run: retention and the number of steps.
    wandb: also log the scalars to Weights & Biases; None for no.
  """

  def __init__(
      self, path: pathlib.Path, run: RunConfig, wandb: WandbConfig | None
  ):
    self.path = path
    self.checkpoints = CheckpointManager(
        path / 'checkpoints',
        keep_latest=run.keep_latest,
        keep_best=run.keep_best,
    )
    # With several processes the first one writes.
    self._is_first = processes.is_first()
    if self._is_first:
      self._writer = MetricWriter(path, tensorboard=True, wandb=wandb)
      self._console = Console(run.total_training_steps)
    # The step whose state is the newest checkpoint.
    self.saved_step: int | None = None
    # Whether config.json stays that of an earlier start, with its folder; only
    # the first process knows.
    self.keeps_config = False

  def changed(self, text: str) -> list[str]:
    """Returns what changed since an earlier start, see `changed_settings`."""
    file = self.path / 'config.json'
    return changed_settings(file.read_bytes(), text) if file.exists() else []

  def write_config(self, text: str, *, is_over: bool = False) -> None:
    """Writes the resolved config; logs what changed since an earlier start.

    Args:
      text: the resolved config.
      is_over: whether nothing is left to do with it. A config that differs from
        the one that the steps were taken with is not written then.
    """
    if not self._is_first:
      return
    changed = self.changed(text)
    if changed and is_over:
      self.keeps_config = True
      logging.warning(
          'No step is left to train, so these settings change nothing and'
          " config.json in %s keeps the run's own: %s. For a new run choose"
          ' another --workdir',
          self.path,
          '; '.join(changed),
      )
      return
    if changed:
      logging.warning(
          'Settings differ from those that %s was started with. The new ones'
          ' apply from now on: %s',
          self.path,
          '; '.join(changed),
      )
    with self._naming_itself('config.json'):
      replace_text(self.path / 'config.json', text)

  def begin(self, text: str) -> None:
    """Writes the config of a cold start; copies an earlier run's metrics away.

    An earlier run's samples and rollouts stay until the new run writes the same
    steps.

    Args:
      text: the resolved config.
    """
    if not self._is_first:
      return
    lines = self.path / 'metrics.jsonl'
    rows = lines.read_bytes().splitlines() if lines.exists() else []
    if len(rows) > 1:  # The file has more than the line of step 0.
      aside = self.path / 'metrics_before.jsonl'
      count = 1
      while aside.exists():
        count += 1
        aside = self.path / f'metrics_before_{count}.jsonl'
      shutil.copyfile(lines, aside)
      logging.warning(
          'There is no checkpoint in %s to resume from, so the run starts from'
          ' the beginning; the metrics of the earlier run are kept in %s',
          self.path,
          aside.name,
      )
    self.write_config(text)
    self._writer.truncate_after(-1)

  def drop_after(self, step: int, *, is_whole: bool) -> None:
    """Deletes the files of later steps, because they will be written again.

    Args:
      step: the run continues from this step's state.
      is_whole: whether this step was evaluated (if due) and has its line in
        metrics.jsonl. If not, both are done again; its rollout stays.
    """
    if not self._is_first:
      return
    last = step if is_whole else step - 1
    self._writer.truncate_after(last)
    if self._writer.last_step < last:
      logging.warning(
          'metrics.jsonl in %s has lost the lines of steps %d to %d; the run'
          ' continues without them',
          self.path,
          self._writer.last_step + 1,
          last,
      )
    for files, kept in (('samples/*.jsonl', last), ('rollouts/*.npz', step)):
      for file in self.path.glob(files):
        if file.stem.isdecimal() and int(file.stem) > kept:
          file.unlink()

  def log(self, step: int, metrics: dict[str, Any]) -> None:
    """Writes the step's metrics to the file and to the console.

    Raises:
      RuntimeError: a checkpoint could not be saved in the background.
    """
    self.checkpoints.check()
    if not self._is_first:
      return
    with self._naming_itself(f'step {step}'):
      self._writer.write(step, {'training/global_step': step} | metrics)
    self._console.step(step, metrics)

  def save(
      self,
      step: int,
      state: TrainState,
      host_state: dict[str, Any],
      *,
      metric: float | None,
  ) -> None:
    """Saves a checkpoint of a step, unless it is saved already."""
    if step == self.saved_step:
      return
    self.saved_step = step
    self.checkpoints.save(
        step, train_state.without_weights(state), host_state, metric=metric
    )

  def save_rollouts(self, step: int, exp: Experience) -> None:
    """Writes the rollout that a step learns from."""
    if not self._is_first:
      return
    with self._naming_itself(f'step {step}'):
      store.save_rollouts(
          self.path / 'rollouts' / f'{step:06d}.npz',
          exp.completions,
          {
              'score': exp.scores_PG.reshape(-1),
              'accuracy': exp.accuracy_PG.reshape(-1),
              'advantage': exp.advantages_PG.reshape(-1),
          },
      )

  def save_samples(self, step: int, samples: list[dict]) -> None:
    """Writes held-out samples as JSON lines, replacing an older file."""
    if not self._is_first:
      return
    folder = self.path / 'samples'
    lines = [json.dumps(sample, ensure_ascii=False) for sample in samples]
    with self._naming_itself(f'step {step}'):
      folder.mkdir(exist_ok=True)
      replace_text(folder / f'{step:06d}.jsonl', '\n'.join(lines) + '\n')

  @contextlib.contextmanager
  def _naming_itself(self, what: str) -> Iterator[None]:
    """Says what could not be written to which folder, and what to do."""
    try:
      yield
    except OSError as error:
      # The cause of an error that has named its folder already.
      cause = error.__cause__
      reason = cause if isinstance(cause, OSError) else error
      raise OSError(
          f'{what} cannot be written to {self.path}:'
          f' {reason.strerror or reason}. Once there is room, the same command'
          ' resumes from the newest checkpoint, or starts again if there is'
          ' none'
      ) from error

  def export(
      self, spec: RunSpec, state: TrainState, source: pathlib.Path
  ) -> None:
    """Writes the trained policy as a Hugging Face checkpoint.

    Args:
      spec: the run's specification.
      state: its masters are written; the invariant scaling is undone first.
      source: the checkpoint that the run started from; its config is copied.
    """
    folder, partial = self.path / EXPORT, self.path / f'.{EXPORT}.partial'
    masters = invariant_scaling.unfold(state.masters, spec.invariant_scale)
    # With several processes each has a part of the arrays.
    masters = sharding.whole_in_first(masters)
    if not self._is_first:
      return
    shutil.rmtree(partial, ignore_errors=True)
    with self._naming_itself('the export'):
      models.save_checkpoint(
          partial,
          masters,
          spec.policy.model,
          source_folder=source,
          tokenizer_folder=spec.tokenizer.folder,
      )
    # An export exists if this run was extended after it had ended once.
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(partial, folder)
    logging.info('Exported the policy to %s', folder)

  def close(self) -> None:
    """Waits for the last checkpoint and closes all files."""
    if self._is_first:
      self._console.close()
    self.checkpoints.close()
    if not self._is_first:
      return
    # Closing tries again to write what a full disk has refused once.
    with contextlib.suppress(OSError):
      self._writer.close()
