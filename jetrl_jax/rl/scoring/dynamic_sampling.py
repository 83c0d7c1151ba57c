"""Dynamic sampling: draws prompts until enough groups have a learning signal.

A group whose answers are all right or all wrong has zero advantages and teaches
nothing. So the step samples generation batches, drops groups with one outcome,
and collects the others until the training batch is full. An outcome is the
accuracy and not the reward, because a length penalty would make every group a
mixed one.

A step samples each prompt only once: its answers have the address (step,
prompt, sample), so they would be the same again. The step keeps the groups that
were drawn first, so it is a function of the state and the sampler's position.
"""

import collections
import dataclasses
from collections.abc import Iterator

import numpy as np

from jetrl_jax.core.typing import Array, Bool, Float, NpArray
from jetrl_jax.data import Prompt
from jetrl_jax.rl.scoring import experience
from jetrl_jax.rl.scoring.experience import Experience
from jetrl_jax.rl.settings import AlgorithmConfig
from jetrl_jax.rl.types import Completion


class NotEnoughGroupsError(RuntimeError):
  """A step found too few groups with mixed outcomes; the state is unchanged."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampledBatch:
  """A full training batch, and everything that was sampled for it.

  Attributes:
    experience: the groups that were kept; its errors count all completions.
    prompts: all sampled prompts.
    completions: all their completions.
    metrics: the filter's metrics.
  """

  experience: Experience
  prompts: list[Prompt]
  completions: list[Completion]
  metrics: dict[str, float]


def mixed_groups(
    accuracy_PG: Float[Array | NpArray, 'P G'],
) -> Bool[NpArray, ' P']:
  """Marks the groups whose answers differ in accuracy.

  With accuracies of 0 and 1: 0 < number of right answers < G. Answers without
  a score, whose accuracy is NaN, are not compared.

  References:
    DAPO, arXiv:2503.14476, eq. 11. Between 0 and 1: verl, whose criterion is a
    standard deviation above 0.
  """
  lowest_P, highest_P = _range(np.asarray(accuracy_PG))
  return highest_P > lowest_P


def _range(accuracy_PG: NpArray) -> tuple[NpArray, NpArray]:
  """Returns each group's lowest and highest accuracy; inf and -inf of none."""
  scored_PG = ~np.isnan(accuracy_PG)
  return (
      np.where(scored_PG, accuracy_PG, np.inf).min(axis=1),
      np.where(scored_PG, accuracy_PG, -np.inf).max(axis=1),
  )


def fill(
    batches: Iterator[Experience],
    *,
    groups: int,
    config: AlgorithmConfig,
) -> SampledBatch:
  """Takes one batch, or as many until `groups` groups have mixed outcomes.

  Args:
    batches: each is sampled and rewarded as it is asked for; it ends once the
      step has sampled every prompt.
    groups: prompts per step.
    config: whether to filter, the cap, and the advantage estimator.

  Returns:
    Without the filter, all groups. With it, the first `groups` mixed ones; the
    surplus of the last generation batch is dropped, as in verl's DAPO recipe.

  Raises:
    NotEnoughGroupsError: max_num_gen_batches did not fill the batch, or the
      prompts ran out. (verl's recipe raises too. To continue with fewer groups
      would silently change the size of the mini-batches.)
  """
  if not config.filter_groups.enable:
    only = next(batches)
    return SampledBatch(
        experience=only,
        prompts=only.prompts,
        completions=only.completions,
        metrics={},
    )
  cap = config.filter_groups.max_num_gen_batches
  sampled: list[Experience] = []
  found = 0
  while found < groups:
    batch = None if cap and len(sampled) == cap else next(batches, None)
    if batch is None:
      raise NotEnoughGroupsError(_too_few(sampled, found, groups, cap))
    sampled.append(batch)
    found += int(mixed_groups(batch.accuracy_PG).sum())
  kept = [
      (batch, int(p))
      for batch in sampled
      for p in np.flatnonzero(mixed_groups(batch.accuracy_PG))
  ][:groups]
  errors = collections.Counter[str]()
  for batch in sampled:
    errors.update(batch.errors)
  made = experience.from_scores(
      [batch.prompts[p] for batch, p in kept],
      [c for batch, p in kept for c in _group(batch, p)],
      np.concatenate([batch.scores_PG[p] for batch, p in kept]),
      np.concatenate([batch.accuracy_PG[p] for batch, p in kept]),
      errors,
      config,
      _parts(kept),
  )
  return SampledBatch(
      experience=made,
      prompts=[prompt for batch in sampled for prompt in batch.prompts],
      completions=[c for batch in sampled for c in batch.completions],
      metrics=_metrics(sampled),
  )


def _group(batch: Experience, p: int) -> list[Completion]:
  size = batch.scores_PG.shape[1]
  return batch.completions[p * size : (p + 1) * size]


def _parts(kept: list[tuple[Experience, int]]) -> dict[str, NpArray]:
  """Returns what each reward function said of the groups that were kept."""
  names = sorted({name for batch, _ in kept for name in batch.parts_PG})
  return {
      name: np.concatenate(
          [
              # A function that applied to nothing in a batch is absent there.
              batch.parts_PG[name][p]
              if name in batch.parts_PG
              else np.full(batch.scores_PG.shape[1], np.nan)
              for batch, p in kept
          ]
      )
      for name in names
  }


def _metrics(batches: list[Experience]) -> dict[str, float]:
  accuracy_PG = np.concatenate([batch.accuracy_PG for batch in batches])
  dropped_P = ~mixed_groups(accuracy_PG)
  right_P = _range(accuracy_PG)[0] == 1
  return {
      'training/num_gen_batches': len(batches),
      'training/filter_groups/dropped_frac': float(dropped_P.mean()),
      'training/filter_groups/all_right_frac': float(right_P.mean()),
      'training/filter_groups/generated_acc': float(
          # At least one group has mixed outcomes, so the mean exists.
          np.nanmean(accuracy_PG)
      ),
  }


def _too_few(
    batches: list[Experience], found: int, groups: int, cap: int
) -> str:
  accuracy_PG = np.concatenate([batch.accuracy_PG for batch in batches])
  lowest_P, _ = _range(accuracy_PG)
  right = int((lowest_P == 1).sum())
  unscored = int(np.isinf(lowest_P).sum())
  dropped = len(accuracy_PG) - found
  why = 'every prompt was sampled'
  if len(batches) == cap:
    why = f'algorithm.filter_groups.max_num_gen_batches is {cap}'
  return (
      f'dynamic sampling found {found} of {groups} groups with mixed outcomes'
      f' in {len(batches)} generation batches ({len(accuracy_PG)} groups:'
      f' {right} all right,'
      f' {f"{unscored} without a score, " if unscored else ""}'
      f'{dropped - right - unscored} otherwise equal), and {why}.'
      ' The prompts are too easy or too hard for this policy: use others, more'
      ' rollout.num_generations or a higher cap, or set'
      ' algorithm.filter_groups.enable=False and resume'
  )
