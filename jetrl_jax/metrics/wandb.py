"""Logs a run's scalars to Weights & Biases too (the extra `wandb`).

`metrics.jsonl` remains the record. The workdir keeps the run's id, so that a
resumed run continues the same curves.
"""

import dataclasses
import importlib
import importlib.util
import os
import pathlib
import secrets
from typing import Any

_ID_FILE = 'wandb_run_id'


@dataclasses.dataclass(frozen=True, kw_only=True)
class WandbConfig:
  """Where the scalars go, besides the workdir.

  Attributes:
    project: project of Weights & Biases that gets the scalars, besides
      metrics.jsonl and TensorBoard; '' is off. Needs the extra `wandb`;
      WANDB_MODE=offline works.
    entity: team or user; '' is the account's own.
    run_config: the run's config, as JSON values, shown beside the curves.

  Raises:
    ValueError: the package is not installed.
  """

  project: str = ''
  entity: str = ''
  run_config: dict[str, Any]

  def __post_init__(self):
    if importlib.util.find_spec('wandb') is None:
      raise ValueError(
          f'logger.wandb_project is {self.project!r}, and the package wandb is'
          " not installed: pip install 'jetrl_jax[wandb]' (pip install -e"
          " '.[wandb]' in a clone), or leave logger.wandb_project at ''"
      )


class WandbRun:
  """Sends one run's scalars to Weights & Biases.

  Steps that a resumed run computes again were sent before and are not sent
  twice; except for times they are the same to the bit. (If settings changed,
  they differ, and the values that were sent first stay.)
  """

  def __init__(self, config: WandbConfig, workdir: str | os.PathLike):
    """Starts, or continues, the run of a workdir.

    Args:
      config: project and entity.
      workdir: an existing folder, for the run's id and wandb's own files.

    Raises:
      ValueError: wandb did not start, for example without a key or network.
    """
    self._config, self._workdir = config, pathlib.Path(workdir)
    self._run = self._start()

  def _start(self) -> Any:
    wandb = importlib.import_module('wandb')
    id_file = self._workdir / _ID_FILE
    # A full disk may have left an empty file.
    if not id_file.exists() or not id_file.stat().st_size:
      id_file.write_text(secrets.token_hex(8))
    try:
      return wandb.init(
          project=self._config.project,
          entity=self._config.entity or None,
          name=self._workdir.resolve().name,
          id=id_file.read_text().strip(),
          resume='allow',
          dir=str(self._workdir),
          config=self._config.run_config,
          settings=wandb.Settings(console='off', silent=True),
      )
    except wandb.Error as error:
      raise ValueError(
          f'wandb did not start: {str(error).rstrip(".")}. Log in (wandb'
          ' login), or set WANDB_MODE=offline, or leave logger.wandb_project at'
          " ''"
      ) from error

  def begin_anew(self) -> None:
    """Starts a new run if this one has steps, which wandb cannot delete."""
    if self._run.step:
      self._run.finish()
      (self._workdir / _ID_FILE).unlink()
      self._run = self._start()

  def write_scalars(self, step: int, scalars: dict[str, float]) -> None:
    """Sends the scalars of a step."""
    if step >= self._run.step:
      self._run.log(scalars, step=step)

  def close(self) -> None:
    """Waits until everything is sent (or, offline, written)."""
    self._run.finish()
