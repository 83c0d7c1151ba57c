"""Alarms: what a user should look at first, judged step by step.

An alarm is a condition on a step's metrics, and one sentence on what to do. A
run writes alarms as `alarm/<name>`. It says each alarm once, and again when it
changes, and names at its end those that still hold. The report shows the same
at its top.
"""

import collections
import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from absl import logging

# The metrics of a step, and how many answers were sampled for it (0: unknown).
Metrics: TypeAlias = Mapping[str, Any]
Condition: TypeAlias = Callable[[Metrics, float], bool]

PREFIX = 'alarm/'
# Counts named `reward/...` that are no failures of the reward.
NO_FAILURES = ('reward/unscored', 'reward/no_answer')
# The number of held-out prompts that are also trained on; an evaluation writes
# it.
SHARED = 'alarm/heldout_in_training'
# An alarm is over after this many steps in which it did not hold. The summary
# at a run's end looks at as many steps.
RECENT = 5
_MOST = 0.9
# Nats a token. The study's runs in one precision have at most 0.37, also at a
# rate that hurts. Mixed flows exceed it in single steps, and so did the first
# updates of SmolLM2 with masters on ties (1.6 to 11). Those of a 0.5B did not
# (0.22 to 0.45): the start warns of ties.
_LARGE_K3 = 0.5
# Share of the inputs of one dot. INT8 flushes at most 48% of a healthy 0.5B's,
# 56% of a 135M's and 30% of the quickstart's. One channel of each norm made 2^8
# times as large, which ruins it, gave 66% and 83%. So close to healthy models
# it says something only where nothing is learnt.
_FLUSHED = 0.6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alarm:
  """One alarm.

  Attributes:
    name: its metric is `alarm/<name>`.
    holds: whether it holds at a step.
    label: what is wrong.
    advice: what to do.
    patience: steps in a row at which it holds before it is said.
    unless: alarms that explain it: it is not said beside them.
  """

  name: str
  holds: Condition
  label: str
  advice: str
  patience: int = 1
  unless: tuple[str, ...] = ()


def failures(metrics: Metrics) -> dict[str, float]:
  """Returns reason -> answers that count 0 because their reward failed."""
  return {
      name.removeprefix('reward/'): value
      for name, value in metrics.items()
      if name.startswith('reward/') and name not in NO_FAILURES
  }


def _share(name: str) -> Condition:
  return lambda m, n: bool(n) and m.get(name, 0) >= _MOST * n


def _zero(name: str) -> Condition:
  return lambda m, n: m.get(name) == 0


def _no_signal(metrics: Metrics, answers: float) -> bool:
  # It is absent if no answer of the step has a score.
  name, lacks = 'critic/mixed_group_frac', 'reward/unscored' in metrics
  return metrics.get(name, 0 if lacks else None) == 0


def _is_large_update(metrics: Metrics, answers: float) -> bool:
  # In a mixed flow either side may jump alone.
  names = ('actor/update_k3', 'rollout_actor/update_k3')
  return any(metrics.get(name, 0) > _LARGE_K3 for name in names)


def _is_no_accuracy(metrics: Metrics, answers: float) -> bool:
  value = metrics.get('critic/acc/mean')
  return value is not None and not 0 <= value <= 1


# Causes come before their consequences.
ALARMS = (
    Alarm(
        name='rewards_fail',
        holds=lambda m, n: bool(n) and sum(failures(m).values()) >= 0.1 * n,
        label='Rewards fail for a tenth of the answers or more',
        advice=(
            'These answers count 0: raise reward.timeout_s or'
            ' reward.memory_limit_mb (of an environment environment.timeout_s),'
            ' or mend what fails; reward/* in metrics.jsonl counts the reasons'
            ' (docs/rewards.md).'
        ),
    ),
    Alarm(
        name='unscored',
        holds=_share('reward/unscored'),
        label='Nearly no answer has a score',
        advice=(
            'Every reward returned None for them, so they teach nothing: look'
            ' at which rows the reward functions are for.'
        ),
    ),
    Alarm(
        name='accuracy_range',
        holds=_is_no_accuracy,
        label='The accuracy is not between 0 and 1',
        advice=(
            "Nothing gives one, so the first reward's score takes its place:"
            " return 'acc' beside 'score', or add a reward that knows it with"
            ' weight 0, such as last_number (docs/rewards.md); an environment'
            ' has Outcome(accuracy=...).'
        ),
    ),
    Alarm(
        name='swapped',
        holds=lambda m, n: m.get('alarm/swapped') == 1,
        label='Score and accuracy may be swapped',
        advice=(
            'Every score is 0 or 1 and the accuracies are other numbers: the'
            " policy is trained on the reward's 'score', and 'acc' is only"
            ' reported.'
        ),
    ),
    Alarm(
        name='inexact',
        holds=lambda m, n: m.get('alarm/inexact') == 1,
        label='Rollout and training differ in bits',
        advice=(
            'This flow is meant to be exact, and here it is not: python -m'
            ' jetrl_jax.mismatch --bisect names the first operation that'
            ' differs; kernels=reference may be exact.'
        ),
    ),
    Alarm(
        name='large_update',
        holds=_is_large_update,
        label=(
            f'An update moved the policy by more than {_LARGE_K3} nats a token'
        ),
        advice=(
            'Usual are 0.0001 to 0.04 (actor/update_k3, and'
            ' rollout_actor/update_k3 of a mixed flow): lower optim.lr, or'
            ' raise optim.lr_warmup_steps. At the first update of an 8-bit'
            ' recipe from a 16-bit checkpoint: model.spread_masters must be'
            ' True, the default. In a mixed flow: look at rollout_corr/k3_kl,'
            ' too (docs/flows.md).'
        ),
    ),
    Alarm(
        name='flushed_inputs',
        holds=lambda m, n: (
            m.get('fp8/input/flushed_frac/max', 0) > _FLUSHED
            and _no_signal(m, n)
        ),
        label=(
            f'More than {_FLUSHED:.0%} of the inputs of a dot are read as 0,'
            ' and no group had a learning signal'
        ),
        advice=(
            'Probably a few channels are far larger than the others, and the'
            ' format has no room for both; the k3 that the cold start printed'
            ' says what that costs. Take fp8_delayed, fp8_block or bf16 in'
            ' place of int8 (precision.recipe), or keep these dots in high'
            ' precision (precision.high_precision_layers, docs/tuning.md).'
        ),
    ),
    Alarm(
        name='cut',
        holds=lambda m, n: m.get('response_length/clip_ratio', 0) >= _MOST,
        label='Nearly all answers are cut at the length limit',
        advice=(
            'Raise rollout.max_response_length, or look at why no answer ends'
            ' (a wrong data.template, a base model).'
        ),
    ),
    Alarm(
        name='no_answer',
        holds=_share('reward/no_answer'),
        label='Nearly no answer holds a final answer',
        advice=(
            'Read some in the report: the prompt (data.instruction) must ask'
            ' for the form that reward.functions looks for.'
        ),
    ),
    Alarm(
        name='no_signal',
        holds=_no_signal,
        label='No group had a learning signal',
        advice=(
            'All answers to a prompt earned the same, so no advantage differs'
            ' from 0: take easier or harder prompts, a larger'
            ' rollout.num_generations, or look at the reward.'
        ),
        patience=3,
        unless=('rewards_fail', 'unscored'),
    ),
    Alarm(
        name='no_update',
        holds=_zero('training/updates'),
        label='No update was applied',
        advice='The gradient norm or the loss was not finite: lower optim.lr.',
    ),
    Alarm(
        name='zero_gradient',
        holds=_zero('actor/grad_norm'),
        label='The gradient is exactly 0',
        advice=(
            'Nothing is learnt: all answers that count earned the same, or'
            ' none counts (algorithm.mask_truncated_completions).'
        ),
        patience=3,
        unless=('rewards_fail', 'unscored', 'no_signal'),
    ),
    Alarm(
        name='no_weight_change',
        holds=_zero('fp8/changed_weight_bytes/mean'),
        label='The update changes no FP8 weight',
        advice='It is too small for the grid: raise optim.lr.',
        patience=RECENT,
        unless=(
            'rewards_fail',
            'unscored',
            'no_signal',
            'no_update',
            'zero_gradient',
        ),
    ),
)
NAMED = {alarm.name: alarm for alarm in ALARMS}
_IDLE = ('no_signal', 'zero_gradient')


def judge(metrics: Metrics, answers: float) -> dict[str, int]:
  """Returns `alarm/<name>` -> 1 where an alarm holds at a step, else 0.

  Args:
    metrics: the metrics of the step; what is absent raises no alarm.
    answers: sampled for it, also for groups that were dropped; 0 is unknown.
  """
  return {PREFIX + a.name: int(a.holds(metrics, answers)) for a in ALARMS}


def is_idle(found: Mapping[str, int]) -> bool:
  """Returns whether a step taught nothing, given the metrics of `judge`."""
  return any(found[PREFIX + name] for name in _IDLE)


def unexplained(held: Iterable[str]) -> list[Alarm]:
  """Returns the alarms of these names, without those that others explain."""
  names = set(held)
  return [a for a in ALARMS if a.name in names and not names & set(a.unless)]


class Watch:
  """Says each alarm of a run once, and again when it changes."""

  def __init__(self):
    # The number of last steps in a row at which an alarm held, or did not hold.
    self._held = collections.Counter[str]()
    self._quiet = collections.Counter[str]()
    self._said: set[str] = set()

  def step(self, step: int, metrics: Metrics, answers: float) -> dict[str, int]:
    """Judges a step and logs what changed; returns `judge`'s metrics.

    Args:
      step: the step.
      metrics: see `judge`.
      answers: see `judge`.
    """
    found = judge(metrics, answers)
    for alarm in ALARMS:
      holds, name = found[PREFIX + alarm.name], alarm.name
      self._held[name] = self._held[name] + 1 if holds else 0
      self._quiet[name] = 0 if holds else self._quiet[name] + 1
    due = [a.name for a in ALARMS if self._held[a.name] >= a.patience]
    for alarm in unexplained(due):
      if alarm.name not in self._said:
        self._said.add(alarm.name)
        logging.warning(
            'ALARM at step %d: %s. %s (Said once.)',
            step,
            alarm.label,
            alarm.advice,
        )
    for alarm in ALARMS:
      if alarm.name in self._said and self._quiet[alarm.name] >= RECENT:
        self._said.remove(alarm.name)
        logging.info(
            'Step %d: over for %d steps: %s.', step, RECENT, alarm.label
        )
    return found


class Tally:
  """Counts the alarms of a run's lines, for its end."""

  def __init__(self):
    self._steps = self._idle = self._shared = 0
    self._counts = collections.Counter[str]()
    self._recent: collections.deque[set[str]] = collections.deque(maxlen=RECENT)

  def add(self, line: Metrics) -> None:
    """Adds a line of metrics.jsonl."""
    self._shared = int(line.get(SHARED, self._shared))
    found = {a.name: line.get(PREFIX + a.name) for a in ALARMS}
    if all(value is None for value in found.values()):
      return  # Step 0, or a run with synthetic rewards.
    held = {name for name, value in found.items() if value}
    self._steps += 1
    self._idle += bool(held & set(_IDLE))
    self._counts.update(held)
    self._recent.append(held)

  def sentences(self) -> list[str]:
    """Returns the sentences about the run; none if all is well."""
    lines = []
    if self._steps and self._idle == self._steps:
      steps = (
          'the only step' if self._steps == 1 else f'all {self._steps} steps'
      )
      lines.append(
          f'ALARM: This run has learnt nothing: {steps} had no learning signal.'
      )
    always = set.intersection(*self._recent) if self._recent else set()
    often = {n for n, count in self._counts.items() if 2 * count > self._steps}
    for alarm in unexplained(always | often):
      lines.append(
          f'ALARM: {alarm.label} ({self._counts[alarm.name]} of'
          f' {self._steps} steps). {alarm.advice}'
      )
    if self._shared:
      lines.append(f'ALARM: {shared_sentence(self._shared)}')
    return lines


def stopped(idle: int, workdir: pathlib.Path) -> str:
  """Returns the error of a run that ends after so many idle steps."""
  return (
      f'{idle} steps in a row had no learning signal'
      ' (trainer.stop_after_idle_steps): all answers to a prompt earned the'
      f' same. The run is saved. python -m jetrl_jax.report {workdir} shows the'
      ' answers; take easier or harder prompts or look at the reward. The same'
      ' command resumes for as many steps more'
  )


def shared_sentence(count: int) -> str:
  """Says that held-out prompts are trained on."""
  are = 'prompt is' if count == 1 else 'prompts are'
  return (
      f'{count} held-out {are} among the training prompts, so held-out accuracy'
      ' shows what was learnt by heart. Leave them out of data.train_files or'
      ' data.val_files.'
  )
