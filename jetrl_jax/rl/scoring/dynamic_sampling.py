"""Dynamic sampling: prompts are drawn until the batch is full of lessons.

A group whose answers are all right, or all wrong, has no advantage and takes
its place in the batch for nothing. So prompts are sampled and scored in
generation batches, groups of one outcome are dropped, and what is left is
collected until the batch is full. Outcomes are judged by accuracy, before any
shaping of the reward: a length penalty would make every group a mixed one.

A step meets a prompt once: its answers have the address (step, prompt, sample),
and would be the same ones again. The groups that are kept are those that were
drawn first, so a step is a function of the state and the sampler's position.
"""

import collections
import dataclasses
from collections.abc import Callable

import numpy as np

from jetrl_jax.core.typing import Array, Bool, Float, NpArray
from jetrl_jax.data import Prompt
from jetrl_jax.rl.scoring import experience
from jetrl_jax.rl.scoring.experience import Experience
from jetrl_jax.rl.settings import AlgorithmConfig
from jetrl_jax.rl.types import Completion


class NotEnoughGroupsError(RuntimeError):
  """A step found too few groups with mixed outcomes; the state is untouched."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampledBatch:
  """A full batch, and what it took.

  Attributes:
    experience: the groups that were kept; errors are those of all answers.
    prompts: all prompts that were sampled.
    completions: all their answers.
    metrics: of the filter.
  """

  experience: Experience
  prompts: list[Prompt]
  completions: list[Completion]
  metrics: dict[str, float]


def mixed_groups(
    accuracy_PG: Float[Array | NpArray, 'P G'],
) -> Bool[NpArray, ' P']:
  """Marks the groups whose answers differ in accuracy.

  With accuracies of 0 and 1: 0 < number of right answers < G.

  References:
    DAPO, arXiv:2503.14476, eq. 11. Between 0 and 1: verl, whose criterion is a
    standard deviation above 0.
  """
  accuracy_PG = np.asarray(accuracy_PG)
  return accuracy_PG.max(axis=1) > accuracy_PG.min(axis=1)


def fill(
    generate: Callable[[], Experience | None],
    *,
    groups: int,
    config: AlgorithmConfig,
) -> SampledBatch:
  """Generates once, or until `groups` groups have mixed outcomes.

  Args:
    generate: samples and scores the next prompts; None when the step has met
      every prompt.
    groups: prompts per step.
    config: whether to filter, the cap, and how advantages are made.

  Returns:
    Without the filter, all groups. With it the first `groups` mixed ones; a
    surplus of the last batch is dropped, as in verl's DAPO recipe.

  Raises:
    NotEnoughGroupsError: max_num_gen_batches did not fill the batch, or the
      prompts ran out. (That recipe raises too; going on with fewer groups
      would change the size of the mini-batches without a word.)
  """
  if not config.filter_groups.enable:
    only = generate()
    assert only is not None
    return SampledBatch(
        experience=only,
        prompts=only.prompts,
        completions=only.completions,
        metrics={},
    )
  cap = config.filter_groups.max_num_gen_batches
  batches: list[Experience] = []
  found = 0
  while found < groups:
    batch = None if cap and len(batches) == cap else generate()
    if batch is None:
      raise NotEnoughGroupsError(_too_few(batches, found, groups, cap))
    batches.append(batch)
    found += int(mixed_groups(batch.accuracy_PG).sum())
  kept = [
      (batch, int(p))
      for batch in batches
      for p in np.flatnonzero(mixed_groups(batch.accuracy_PG))
  ][:groups]
  errors = collections.Counter[str]()
  for batch in batches:
    errors.update(batch.errors)
  made = experience.from_scores(
      [batch.prompts[p] for batch, p in kept],
      [c for batch, p in kept for c in _group(batch, p)],
      np.concatenate([batch.scores_PG[p] for batch, p in kept]),
      np.concatenate([batch.accuracy_PG[p] for batch, p in kept]),
      errors,
      config,
  )
  return SampledBatch(
      experience=made,
      prompts=[prompt for batch in batches for prompt in batch.prompts],
      completions=[c for batch in batches for c in batch.completions],
      metrics=_metrics(batches),
  )


def _group(batch: Experience, p: int) -> list[Completion]:
  size = batch.scores_PG.shape[1]
  return batch.completions[p * size : (p + 1) * size]


def _metrics(batches: list[Experience]) -> dict[str, float]:
  accuracy_PG = np.concatenate([batch.accuracy_PG for batch in batches])
  dropped_P = ~mixed_groups(accuracy_PG)
  right_P = accuracy_PG.min(axis=1) == 1
  return {
      'training/num_gen_batches': len(batches),
      'training/filter_groups/dropped_frac': float(dropped_P.mean()),
      'training/filter_groups/all_right_frac': float(right_P.mean()),
      'training/filter_groups/generated_score': float(accuracy_PG.mean()),
  }


def _too_few(
    batches: list[Experience], found: int, groups: int, cap: int
) -> str:
  accuracy_PG = np.concatenate([batch.accuracy_PG for batch in batches])
  right = int((accuracy_PG.min(axis=1) == 1).sum())
  dropped = len(accuracy_PG) - found
  why = 'every prompt was met'
  if len(batches) == cap:
    why = f'algorithm.filter_groups.max_num_gen_batches is {cap}'
  return (
      f'dynamic sampling found {found} of {groups} groups with mixed outcomes'
      f' in {len(batches)} generation batches ({len(accuracy_PG)} groups:'
      f' {right} all right, {dropped - right} otherwise equal), and {why}.'
      ' The prompts are too easy or too hard for this policy: use others, more'
      ' rollout.num_generations or a higher cap, or set'
      ' algorithm.filter_groups.enable=False and resume'
  )
