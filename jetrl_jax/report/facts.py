"""The sentences and numbers of a report: results and problems."""

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from jetrl_jax.core.compilation import NOT_CLAIMED
from jetrl_jax.metrics import alarms as metric_alarms
from jetrl_jax.report.run import Run

_CUT, _MIXED = 'response_length/clip_ratio', 'critic/mixed_group_frac'


@dataclasses.dataclass(frozen=True)
class Fact:
  """One number or sentence.

  Attributes:
    label: what it is.
    value: the number, with its unit.
    detail: a few words more.
    tone: 'good', 'bad' or '': how it is coloured, besides its words.
  """

  label: str
  value: str
  detail: str = ''
  tone: str = ''


def number(value: float | None, unit: str = '') -> str:
  """Returns a value of about three digits with its unit.

  Args:
    value: None and NaN are a dash.
    unit: '%' for a share in [0, 1]; else appended.
  """
  if value is None or not math.isfinite(value):
    return '–'
  if unit == '%':
    return f'{number(100 * value)}%'
  size, unit = abs(value), f' {unit}' if unit else ''
  if size and not 1e-3 <= size < 1e6:
    mantissa, exponent = f'{value:.2e}'.split('e')
    return f'{mantissa.rstrip("0").rstrip(".")}e{int(exponent)}{unit}'
  return (f'{value:.0f}' if size >= 100 else f'{value:.3g}') + unit


def share(*values: np.ndarray) -> str:
  """Returns the unit of accuracies: '%', or '' if any is outside [0, 1].

  Where no reward gives an accuracy, a reward stands in its place
  (`metrics/alarms.py`).
  """
  return '%' if all(((v >= 0) & (v <= 1)).all() for v in values) else ''


def duration(seconds: float) -> str:
  """Returns '41 s', '4 min 12 s', '3 h 05 min' or '2 d 04 h'."""
  if seconds < 60:
    return number(round(seconds, 1), 's')
  whole = round(seconds)
  if whole < 3600:
    return f'{whole // 60} min {whole % 60:02d} s'
  if whole < 86400:
    return f'{whole // 3600} h {whole % 3600 // 60:02d} min'
  return f'{whole // 86400} d {whole % 86400 // 3600:02d} h'


def count(n: int, noun: str = 'step') -> str:
  """Returns '1 step', '60 steps'."""
  return f'{n} {noun}{"" if n == 1 else "s"}'


def at_all(steps: set[int]) -> str:
  """Returns 'at all 60 steps' of curves of so many steps."""
  if steps == {1}:
    return 'at the only step'
  return f'at all {min(steps)} steps' if len(steps) == 1 else 'at all steps'


def heldout_metrics(run: Run) -> list[str]:
  """Returns the names of mean@N, source by source."""
  return [
      name
      for name in run.series
      if name.startswith('val-core/')
      and '/acc/mean@' in name
      and not name.endswith('/ci95')
      and run.finite(name).size
  ]


def headline(run: Run) -> list[Fact]:
  """Returns the numbers on top of a report."""
  facts = [_heldout(run, name) for name in heldout_metrics(run)]
  facts += [_reward(run), _mismatch(run), _steps(run), _time(run), _speed(run)]
  return [fact for fact in facts if fact]


def _heldout(run: Run, name: str) -> Fact:
  steps, every = run.series[name]
  steps, values = steps[np.isfinite(every)], run.finite(name)
  source, _, samples = name.removeprefix('val-core/').partition('/acc/')
  detail = f'{source}, {samples}'
  unit = share(values)
  # If all samples are right or all are wrong, it is 0 and says nothing.
  if half := run.last(f'{name}/ci95'):
    detail += f', ±\xa0{number(half, unit)}'
  value = number(values[-1], unit)
  if len(values) == 1:
    return Fact('Held-out accuracy', value, f'{detail}; at step {steps[0]}')
  # Lines may be lost: the first is then not the accuracy before training.
  detail += f'; from step {steps[0]}' if steps[0] else ''
  best = int(values.argmax())
  detail += f'; best {number(values[best], unit)} at step {steps[best]}'
  tones = {1.0: 'good', -1.0: 'bad'}
  tone = tones.get(np.sign(values[-1] - values[0]), '')
  value = f'{number(values[0], unit)} → {value}'
  return Fact('Held-out accuracy', value, detail, tone)


def _reward(run: Run) -> Fact | None:
  values = run.finite('critic/rewards/mean')
  few = min(5, max(1, len(values) // 4))
  if len(values) < 2:
    return Fact('Reward', number(values[0])) if values.size else None
  value = f'{number(values[:few].mean())} → {number(values[-few:].mean())}'
  which = 'the first and the last step'
  if few > 1:
    which = f'mean of the first and the last {few} steps'
  return Fact('Reward', value, which)


def _mismatch(run: Run) -> Fact | None:
  values = run.finite('training/mismatch_token_frac')
  if not values.size:
    return None
  claim, get = '', run.config.get
  sampled = get('precision.rollout_recipe')
  if sampled and sampled != get('precision.recipe'):
    claim = '; the flow is meant to be mixed'
  if get('precision.exact') is False:
    claim = f'; {NOT_CLAIMED}'
  sizes = {get('trainer.mini_batch_size'), get('trainer.train_batch_size')}
  of_first = (
      get('trainer.measure_mismatch') == 'first'
      and get('algorithm.old_logprobs') != 'recompute'
      and len(sizes) > 1
  )
  part = ' of the first mini-batch' if of_first else ''
  if not values.any():
    detail = (
        f'no token{part} of {count(len(values))} differed in any bit between'
        f' rollout and training{claim}'
    )
    return Fact('Mismatch', '0', detail, '' if claim else 'good')
  detail = (
      f'of the tokens{part} of the worst step differ between rollout and'
      f' training; {(values > 0).sum()} of {len(values)} steps have some{claim}'
  )
  share = number(values.max(), '%')
  return Fact('Mismatch', share, detail, '' if claim else 'bad')


def _steps(run: Run) -> Fact:
  last = int(run.steps[-1])
  total = run.config.get('trainer.total_training_steps')
  skipped = int(run.finite('training/skipped_updates').sum())
  updates = int(run.finite('training/updates').sum()) + skipped
  detail = f'{skipped or "none"} of {count(updates, "update")} skipped'
  # A warm start counts other steps than trainer.total_training_steps.
  if not isinstance(total, int) or not run.finite('timing_s/gen').size:
    return Fact('Steps', str(last), detail, 'bad' if skipped else '')
  starts = count(len(run.starts), 'start') if run.starts else ''
  if run.is_finished:
    state = f'finished in {starts}' if starts else 'finished'
  else:  # It was stopped or still runs; the files do not say which.
    state = f'not finished; {starts}' if starts else 'not finished'
  tone = 'bad' if skipped else ''
  return Fact('Steps', f'{last} of {total}', f'{state}; {detail}', tone)


def _time(run: Run) -> Fact | None:
  if 'timing_s/step' not in run.series:
    return None
  steps, values = run.series['timing_s/step']
  trained = values[(steps > 0) & np.isfinite(values)]
  median = duration(float(np.median(trained))) if trained.size else '–'
  whole = duration(float(np.nansum(values)))
  return Fact('Time', whole, f'{median} per step (median)')


def _speed(run: Run) -> Fact | None:
  speed = run.finite('perf/throughput')
  detail = 'per device, median of steps'
  for metric, label, unit in (
      ('perf/rollout_throughput', 'rollout', ''),
      ('perf/mfu/actor', 'MFU of the update', '%'),
      ('perf/mfu/rollout', 'of the rollout', '%'),
  ):
    if (values := run.finite(metric)).size:
      detail += f'; {label} {number(float(np.median(values)), unit)}'
  if not speed.size:
    return None
  return Fact('Speed', number(float(np.median(speed)), 'tokens/s'), detail)


def guarded(run: Run) -> list[tuple[str, str, str]]:
  """Returns (name, count, meaning) of all that was skipped or guarded."""
  skipped = run.finite('training/skipped_updates').sum()
  where = _where(run, 'training/skipped_updates')
  meaning = 'The gradient norm or the loss was not finite; nothing was changed.'
  rows = [('Updates skipped', f'{skipped:.0f}{where}', meaning)]
  errors = ', '.join(f'{n:.0f} {name}' for name, n in _errors(run)) or '0'
  meaning = 'The reward ran out of time or memory, died, refused or failed.'
  rows.append(('Answers that got 0 by an error', errors, meaning))
  for metric, what, meaning in (
      (
          'reward/no_answer',
          'Answers without a final answer',
          'The reward found none, so they are wrong.',
      ),
      (
          'reward/unscored',
          'Answers without a score',
          'Every reward returned None; they are left out.',
      ),
  ):
    if (counts := run.finite(metric)).size:
      rows.append((what, f'{counts.sum():.0f}', meaning))
  if least := run.config.get('precision.min_sqnr_db'):
    named = ', '.join(f'{dot} ({db:.1f} dB)' for dot, db in run.chosen.items())
    meaning = (
        'In rollout and training: an input or a kernel kept less than'
        f' precision.min_sqnr_db={least} at the cold start.'
    )
    rows.append(('Dots kept in high precision', named or '0', meaning))
  if (over := run.finite('guard/over')).size:
    named = ', '.join(
        f'{name} {run.finite(metric).sum():.0f}{_where(run, metric)}'
        for name in ('recalibrate', 'high_precision', 'rollback')
        if run.finite(metric := f'guard/{name}').size
    )
    much = f'{(over > 0).sum()}{_where(run, "guard/over")}'
    meaning = 'Each is warned of; guard.patience of them in a row are acted on.'
    rows.append(('Steps over a bound of the guard', much, meaning))
    meaning = (
        'Decided after these steps, done before the next; high_precision counts'
        ' dots, which guard_dots in metrics.jsonl names.'
    )
    rows.append(('Actions of the guard', named or '0', meaning))
  for kind, title in (('train', 'Training'), ('val', 'Held-out')):
    start = run.starts[-1] if run.starts else {}
    kept, lost = start.get(f'{kind}_prompts'), start.get(f'{kind}_left_out')
    if isinstance(kept, int) and isinstance(lost, int):
      much, meaning = f'{lost} of {kept + lost}', 'Over data.max_prompt_length.'
      rows.append((f'{title} prompts left out', much, meaning))
  if (cut := run.finite(_CUT)).size:
    meaning = 'They are in the loss (mask_truncated_completions is off).'
    if run.config.get('algorithm.mask_truncated_completions'):
      meaning = 'They are left out of the loss.'
    much = f'{number(cut.mean(), "%")} (last step {number(cut[-1], "%")})'
    rows.append(('Answers cut at the length limit', much, meaning))
  if (mixed := run.finite(_MIXED)).size:
    much, meaning = (
        number(1 - mixed.mean(), '%'),
        'All answers scored the same.',
    )
    rows.append(('Prompts without an advantage', much, meaning))
  if (clip := run.finite('actor/pg_clipfrac')).size:
    much = f'{number(clip.mean(), "%")} (at most {number(clip.max(), "%")})'
    meaning = 'Their ratio left the clip range in the direction that pays.'
    rows.append(('Tokens clipped', much, meaning))
  named = ', '.join(f'{n} ({c})' for n, c in run.nonfinite.items()) or '0'
  meaning = 'Lines of metrics.jsonl with a null.'
  return [*rows, ('Metrics that were not finite', named, meaning)]


def _errors(run: Run) -> list[tuple[str, float]]:
  """Returns (reason, answers that got 0 for it)."""
  sums = {name: run.finite(name).sum() for name in sorted(run.series)}
  return list(metric_alarms.failures(sums).items())


def _where(run: Run, metric: str) -> str:
  """Names the first steps at which a count is above 0."""
  steps, values = run.series.get(metric, (np.zeros(0), np.zeros(0)))
  named = [str(step) for step in steps[values > 0]]
  more = ' ...' if named[5:] else ''
  return f' (steps {", ".join(named[:5])}{more})' if named else ''


def alarms(run: Run, unanswered: float | None = None) -> list[Fact]:
  """Returns what a user should look at before all else.

  Args:
    run: the run.
    unanswered: share of the newest answers that hold no final answer, for runs
      whose metrics do not say; None where that is not known.
  """
  recent = run.steps[run.steps > 0][-metric_alarms.RECENT :].tolist()
  lines = [_at(run, step) for step in recent]
  per_step = _answers_per_step(run)
  judged = [metric_alarms.judge(line, per_step(line)) for line in lines]
  held = [
      alarm.name
      for alarm in metric_alarms.ALARMS
      # One unequal step is enough, see below.
      if alarm.name != 'inexact'
      and judged
      and all(f[metric_alarms.PREFIX + alarm.name] for f in judged)
  ]
  found = []
  for alarm in metric_alarms.unexplained(held):
    value, advice = _last(len(recent)), alarm.advice
    if alarm.name == 'rewards_fail':
      value = _failing(lines, per_step) + value
      reasons = ', '.join(f'{n:.0f} {name}' for name, n in _errors(run))
      advice += f' In the run: {reasons}.'
    found.append(Fact(alarm.label, value, advice))
  is_known = f'{metric_alarms.PREFIX}no_answer' in run.series
  if not is_known and unanswered is not None and unanswered >= 0.9:
    alarm = metric_alarms.NAMED['no_answer']
    share = f'{number(unanswered, "%")} of the newest'
    found.append(Fact(alarm.label, share, alarm.advice))
  if shared := run.last(metric_alarms.SHARED):
    label, value = 'Held-out prompts are trained on', f'{shared:.0f} of them'
    advice = metric_alarms.shared_sentence(int(shared))
    found.append(Fact(label, value, advice))
  mismatch = _mismatch(run)
  if mismatch and mismatch.tone == 'bad':
    label = 'Rollout and training differ in a unified flow'
    share = f'{mismatch.value} of the tokens of the worst step'
    found.append(Fact(label, share, 'docs/mismatch.md says how to find where.'))
  return [*found, *filter(None, [_fall(run)])]


def _at(run: Run, step: int) -> dict[str, float]:
  """Returns the finite metrics of a step."""
  found = {}
  for name, (steps, values) in run.series.items():
    i = int(np.searchsorted(steps, step))
    if i < len(steps) and steps[i] == step and np.isfinite(values[i]):
      found[name] = float(values[i])
  return found


def _last(steps: int) -> str:
  return 'the last step' if steps == 1 else f'the last {steps} steps'


def _answers_per_step(run: Run) -> Callable[[dict[str, float]], float]:
  """Returns a function from a step to its number of answers; 0 is unknown."""
  names = ('trainer.train_batch_size', 'rollout.num_generations')
  sizes = [run.config.get(name) for name in names]
  usual = math.prod(s if isinstance(s, int) else 0 for s in sizes)
  return lambda line: usual * line.get('training/num_gen_batches', 1)


def _failing(
    lines: list[dict[str, float]],
    per_step: Callable[[dict[str, float]], float],
) -> str:
  failed = sum(sum(metric_alarms.failures(line).values()) for line in lines)
  share = min(failed / sum(map(per_step, lines)), 1.0)
  return f'{number(share, "%")} of the answers of '


def _fall(run: Run) -> Fact | None:
  """Says that held-out accuracy fell by more than its intervals."""
  for name in heldout_metrics(run):
    values, half = run.finite(name), run.finite(f'{name}/ci95')
    best = values.argmax()
    if len(half) == len(values):
      if values[best] - values[-1] > half[best] + half[-1]:
        value = f'{number(values[best], "%")} → {number(values[-1], "%")}'
        advice = 'From the best to the last, by more than both intervals.'
        return Fact('Held-out accuracy fell', value, advice)
  return None
