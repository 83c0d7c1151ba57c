"""What a cold start settles about precision, kept in the workdir.

Two things are part of the masters' meaning and not of their values: the factor
of the invariant scaling, and the dots that were chosen to stay in high
precision. A resumed run, and whoever reads its checkpoints, must use those
of its start.
"""

import dataclasses
import json
import pathlib

import jax
from absl import logging

from jetrl_jax.checkpoint import restore
from jetrl_jax.core.files import replace_text
from jetrl_jax.core.sharding import Axes
from jetrl_jax.fp8 import Recipe, adaptive, health, scaling_state
from jetrl_jax.models.policy import Policy
from jetrl_jax.optim.apply import merge
from jetrl_jax.optim.types import TrainState

_FILE = 'precision.json'


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunPrecision:
  """What was settled.

  Attributes:
    invariant_scale: what the masters were folded by, 1 for nothing.
    min_sqnr_db: the threshold of the choice, 0 for no choice.
    high_precision: paths of the dots that were chosen, with their dB.
  """

  invariant_scale: float
  min_sqnr_db: float
  high_precision: dict[str, float]


def write(workdir: pathlib.Path, settled: RunPrecision) -> None:
  """Keeps what a cold start settled, before its first checkpoint."""
  text = json.dumps(dataclasses.asdict(settled), indent=1)
  replace_text(workdir / _FILE, text + '\n')


def read(workdir: pathlib.Path) -> RunPrecision | None:
  """Returns what the run in `workdir` settled; None before it has.

  A run that has no checkpoint yet starts again from its masters, and settles
  again.

  Raises:
    ValueError: the file cannot be read.
  """
  file = workdir / _FILE
  if not restore.all_steps(workdir / 'checkpoints') or not file.exists():
    return None
  try:
    return RunPrecision(**json.loads(file.read_text(encoding='utf-8')))
  except (OSError, ValueError, TypeError) as error:
    raise ValueError(
        f'{file} does not say which precision the run has: {error}'
    ) from error


def resolve(
    workdir: pathlib.Path, policy: Policy, invariant_scale: float
) -> Policy:
  """Returns the policy of the run in `workdir`, if it has begun.

  Args:
    workdir: of the run.
    policy: as configured.
    invariant_scale: as configured.

  Raises:
    ValueError: the configuration contradicts what the run settled.
  """
  settled = read(workdir)
  if settled is None:
    return policy
  for name, new, old in (
      ('invariant_scale', invariant_scale, settled.invariant_scale),
      ('min_sqnr_db', policy.recipe.min_sqnr_db, settled.min_sqnr_db),
  ):
    if new != old:
      raise ValueError(
          f'precision.{name} is {new}, but the run in {workdir} began with'
          f' {old}, and its masters belong to that; use {old}, or a new workdir'
      )
  return keeping(policy, settled)


def told(workdir: pathlib.Path, recipe: Recipe) -> str:
  """Returns which dots min_sqnr_db chose, in words; '' where it is off.

  Args:
    workdir: of a run, which may not have begun.
    recipe: training's.
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


def keeping(policy: Policy, settled: RunPrecision) -> Policy:
  """Returns the policy with the chosen dots in high precision."""
  if not settled.high_precision:
    return policy
  recipe = policy.recipe.keeping(tuple(settled.high_precision))
  return dataclasses.replace(policy, recipe=recipe)


def settle(
    sides: list[tuple[Policy, TrainState]], invariant_scale: float
) -> RunPrecision:
  """Chooses the dots of a calibrated cold start; logs them.

  Args:
    sides: training's policy and state and, in a mixed flow, the rollout's. The
      input slots hold the health of real tokens.
    invariant_scale: what the masters were folded by.

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
  # Whole arrays, outside of shard_map: no collectives.
  fp8_state = policy.jit(
      lambda s, p, w: scaling_state.measure_kernels(s, p, w, Axes())
  )(state.fp8_state, merge(state.trainable, state.frozen), state.weights)
  return health.summarize(
      jax.device_get(fp8_state), scaling_state.slot_paths(fp8_state)
  )
