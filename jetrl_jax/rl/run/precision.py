"""What a cold start settles about precision; the workdir keeps it.

The masters alone do not say two things: the factor of the invariant scaling,
and which dots were chosen to stay in high precision. A resumed run, and anyone
who reads its checkpoints, must use those of the run's start.
"""

import dataclasses
import json
import pathlib

from absl import logging

from jetrl_jax.checkpoint import restore
from jetrl_jax.core import processes, sharding
from jetrl_jax.core.collectives import Axes
from jetrl_jax.core.files import replace_text
from jetrl_jax.fp8 import Recipe, adaptive, health, scaling_state
from jetrl_jax.models.policy import Policy
from jetrl_jax.optim.types import TrainState

_FILE = 'precision.json'
_RESTORE = 'Restore it from a copy of the workdir, or start in a new one'


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunPrecision:
  """The precision that a cold start settled.

  Attributes:
    invariant_scale: the factor of the masters' invariant scaling; 1 is off.
    min_sqnr_db: the threshold below which a dot was chosen; 0 is off.
    high_precision: path of each chosen dot -> its SQNR, dB.
  """

  invariant_scale: float
  min_sqnr_db: float
  high_precision: dict[str, float]


def write(workdir: pathlib.Path, settled: RunPrecision) -> None:
  """Writes what a cold start settled, before its first checkpoint."""
  if not processes.is_first():
    return
  text = json.dumps(dataclasses.asdict(settled), indent=1)
  replace_text(workdir / _FILE, text + '\n')


def read(workdir: pathlib.Path) -> RunPrecision | None:
  """Returns what the run in `workdir` settled; None if it has not yet.

  A run without a checkpoint starts again from its masters and settles again.

  Raises:
    ValueError: the file cannot be read.
  """
  file = workdir / _FILE
  if not _has_begun(workdir) or not file.exists():
    return None
  try:
    return RunPrecision(**json.loads(file.read_text(encoding='utf-8')))
  except (OSError, ValueError, TypeError) as error:
    raise ValueError(
        f'{file} cannot be read, so the precision of the run is unknown:'
        f' {error}. {_RESTORE}'
    ) from error


def _has_begun(workdir: pathlib.Path) -> bool:
  """Whether a run has saved a checkpoint there."""
  return bool(restore.all_steps(workdir / 'checkpoints'))


def resolve(
    workdir: pathlib.Path, policy: Policy, invariant_scale: float
) -> Policy:
  """Returns the policy in the precision that the run in `workdir` settled.

  Args:
    workdir: the run's workdir. Before the run has started, the configured
      policy is returned.
    policy: the configured policy.
    invariant_scale: the configured factor.

  Raises:
    ValueError: the configuration contradicts what the run settled, or what it
      settled is lost.
  """
  settled = read(workdir)
  if settled is None:
    # Otherwise the dots would be quantised that the run keeps, and what differs
    # would be said of the checkpoint's arrays.
    if policy.recipe.min_sqnr_db and _has_begun(workdir):
      raise ValueError(
          f'{workdir / _FILE} is missing, which says which dots'
          f' precision.min_sqnr_db={policy.recipe.min_sqnr_db:g} keeps in high'
          f' precision. {_RESTORE}'
      )
    return policy
  decibels = policy.recipe.min_sqnr_db
  for name, new, old, what in (
      (
          'invariant_scale',
          invariant_scale,
          settled.invariant_scale,
          'scaling of masters',
      ),
      ('min_sqnr_db', decibels, settled.min_sqnr_db, 'choice of dots'),
  ):
    if new != old:
      raise ValueError(
          f'precision.{name} is {new}, but the run in {workdir} started with'
          f' {old}, and its {what} depends on it; use {old}, or a new workdir'
      )
  return with_high_precision(policy, settled)


def describe(workdir: pathlib.Path, recipe: Recipe) -> str:
  """Returns which dots min_sqnr_db chose, as text; '' if it is off.

  Args:
    workdir: the run's workdir; the run may not have started yet.
    recipe: training's recipe.
  """
  if not recipe.min_sqnr_db:
    return ''
  name, settled = f'precision.min_sqnr_db={recipe.min_sqnr_db:g}', read(workdir)
  if settled is None:
    return (
        f'\n{name}: dots that keep less at the cold start stay in'
        f' {recipe.compute_dtype} on both sides; which ones is not known yet\n'
    )
  chosen = settled.high_precision.items()
  named = ', '.join(f'{dot} ({db:.1f} dB)' for dot, db in chosen) or 'none'
  return f'\n{name} chose at the cold start: {named}\n'


def with_high_precision(policy: Policy, settled: RunPrecision) -> Policy:
  """Returns the policy with the chosen dots in high precision."""
  if not settled.high_precision:
    return policy
  recipe = policy.recipe.with_high_precision(tuple(settled.high_precision))
  return dataclasses.replace(policy, recipe=recipe)


def settle(
    sides: list[tuple[Policy, TrainState]], invariant_scale: float
) -> RunPrecision:
  """Chooses the high-precision dots of a calibrated cold start and logs them.

  Args:
    sides: training's (policy, state) and, in a mixed flow, the rollout's. The
      scaling state holds the health of inputs on real tokens.
    invariant_scale: the factor of the masters' invariant scaling.

  Raises:
    ValueError: see `adaptive.choose`.
  """
  recipe, chosen = sides[0][0].recipe, {}
  if recipe.min_sqnr_db:
    summaries = {
        policy.recipe.name: _summary(policy, state)
        for policy, state in sides
        if policy.recipe.needs_calibration
    }
    chosen = adaptive.choose(summaries, recipe.min_sqnr_db)
    logging.info(
        '%d of %d dots keep less than %g dB (%s) and stay in %s, in rollout and'
        ' training: %s',
        len(chosen),
        max(map(len, summaries.values()), default=0),
        recipe.min_sqnr_db,
        ' or '.join(summaries) or 'nothing is quantised',
        recipe.compute_dtype,
        ', '.join(f'{path} ({db:.1f})' for path, db in chosen.items()) or '-',
    )
  return RunPrecision(
      invariant_scale=invariant_scale,
      min_sqnr_db=recipe.min_sqnr_db,
      high_precision=chosen,
  )


def _summary(policy: Policy, state: TrainState) -> adaptive.Summary:
  """Returns the health of one side's inputs and kernels."""
  # Outside of shard_map every array is whole, so there are no collectives.
  fp8_state = policy.jit(
      lambda s, p, w: scaling_state.measure_kernels(s, p, w, Axes())
  )(state.fp8_state, state.masters, state.weights)
  return health.summarize(
      sharding.fetch(fp8_state), scaling_state.dot_paths(fp8_state)
  )
