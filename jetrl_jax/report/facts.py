"""The sentences and numbers of a report: what came out, what was guarded."""

import dataclasses

import numpy as np

from jetrl_jax.core.compilation import NOT_CLAIMED
from jetrl_jax.report.data import Run
from jetrl_jax.report.text import duration, number, steps_text

_MISMATCH = 'training/mismatch_token_frac'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fact:
  """One headline number.

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
  for fact in (_reward(run), _mismatch(run), _steps(run), *_times(run)):
    if fact is not None:
      facts.append(fact)
  return facts


def _heldout(run: Run, name: str) -> Fact:
  series, values = run.series[name], run.finite(name)
  source, _, count = name.removeprefix('val-core/').partition('/acc/')
  best = int(series.steps[np.nanargmax(series.values)])
  half = run.last(f'{name}/ci95')
  detail = f'{source}, {count}'
  detail += f', ±\xa0{number(half, "%")}' if half is not None else ''
  if len(values) == 1:
    return Fact(
        label='Held-out accuracy', value=number(values[0], '%'), detail=detail
    )
  detail += f'; best {number(float(values.max()), "%")} at step {best}'
  return Fact(
      label='Held-out accuracy',
      value=f'{number(values[0], "%")} → {number(values[-1], "%")}',
      detail=detail,
      tone='good' if values[-1] > values[0] else 'bad',
  )


def _reward(run: Run) -> Fact | None:
  values = run.finite('critic/rewards/mean')
  if not values.size:
    return None
  few = min(5, max(1, len(values) // 4))
  return Fact(
      label='Reward',
      value=f'{number(values[:few].mean())} → {number(values[-few:].mean())}',
      detail=f'mean of the first and the last {steps_text(few)}',
  )


def _mismatch(run: Run) -> Fact | None:
  values = run.finite(_MISMATCH)
  if not values.size:
    return None
  claim, is_meant = '', False
  sampled = run.config.get('precision.rollout_recipe')
  if sampled and sampled != run.config.get('precision.recipe'):
    claim, is_meant = '; the flow is meant to be mixed', True
  if run.config.get('precision.exact') is False:
    claim, is_meant = f'; {NOT_CLAIMED}', True
  part = ' of the first mini-batch' if _compares_some(run) else ''
  if not values.any():
    return Fact(
        label='Mismatch',
        value='0',
        detail=f'no token{part} of'
        f' {steps_text(len(values))} differed in any bit between rollout and'
        f' training{claim}',
        tone='' if claim else 'good',
    )
  return Fact(
      label='Mismatch',
      value=number(float(values.max()), '%'),
      detail=f'of the tokens{part} of the worst step differ between rollout'
      f' and training; {int((values > 0).sum())} of {len(values)} steps have'
      f' some{claim}',
      tone='' if is_meant else 'bad',
  )


def _compares_some(run: Run) -> bool:
  """Whether `trainer.measure_mismatch` left most of a step out."""
  sizes = ('trainer.mini_batch_size', 'trainer.train_batch_size')
  of_first = run.config.get('trainer.measure_mismatch') == 'first'
  return of_first and len({run.config.get(name) for name in sizes}) > 1


def _steps(run: Run) -> Fact:
  last, total = int(run.steps[-1]), run.config.get(
      'trainer.total_training_steps'
  )
  skipped = int(run.finite('training/skipped_updates').sum())
  updates = int(run.finite('training/updates').sum()) + skipped
  tone = 'bad' if skipped else ''
  detail = f'{skipped or "none"} of {updates} updates skipped'
  # A warm start counts other steps than trainer.total_training_steps.
  if not isinstance(total, int) or not run.finite('timing_s/gen').size:
    return Fact(label='Steps', value=str(last), detail=detail, tone=tone)
  done = last >= total
  starts = f' in {steps_text(len(run.starts), "start")}' if run.starts else ''
  return Fact(
      label='Steps',
      value=f'{last} of {total}',
      detail=f'{"finished" if done else "not finished"}{starts}; {detail}',
      tone=tone if done else 'bad',
  )


def _times(run: Run) -> list[Fact]:
  series = run.get('timing_s/step')
  if series is None:
    return []
  steps = series.values[(series.steps > 0) & np.isfinite(series.values)]
  median = duration(float(np.median(steps))) if steps.size else '–'
  facts = [
      Fact(
          label='Time',
          value=duration(float(np.nansum(series.values))),
          detail=f'{median} per step (median)',
      )
  ]
  speed = run.finite('perf/throughput')
  if speed.size:
    rollout = run.finite('perf/rollout_throughput')
    detail = 'per device, median of steps'
    if rollout.size:
      detail += f'; rollout {number(float(np.median(rollout)))}'
    for metric, label in (
        ('perf/mfu/actor', 'MFU of the update'),
        ('perf/mfu/rollout', 'of the rollout'),
    ):
      if (mfu := run.finite(metric)).size:
        detail += f'; {label} {number(float(np.median(mfu)), "%")}'
    facts.append(
        Fact(
            label='Speed',
            value=number(float(np.median(speed)), 'tokens/s'),
            detail=detail,
        )
    )
  return facts


def guarded(run: Run) -> list[tuple[str, str, str]]:
  """Returns (what, how much, meaning) of all that was skipped or guarded."""
  rows = []
  skipped = run.finite('training/skipped_updates')
  rows.append(
      (
          'Updates skipped',
          f'{skipped.sum():.0f}' + _where(run, 'training/skipped_updates'),
          'The gradient norm or the loss was not finite; weights and moments'
          ' stayed as they were.',
      )
  )
  errors = [n for n in run.series if n.startswith('reward/')]
  rows.append(
      (
          'Answers that got 0 by an error',
          ', '.join(
              f'{run.finite(n).sum():.0f} {n.removeprefix("reward/")}'
              for n in sorted(errors)
          )
          or '0',
          'The reward function ran too long, took too much memory, died or'
          ' refused.',
      )
  )
  rows += _chosen(run)
  rows += _guard(run)
  rows += _left_out(run)
  cut = run.finite('response_length/clip_ratio')
  if cut.size:
    masked = run.config.get('algorithm.mask_truncated_completions')
    rows.append(
        (
            'Answers cut at the length limit',
            f'{number(cut.mean(), "%")} (last step {number(cut[-1], "%")})',
            'They are left out of the loss.'
            if masked
            else 'They are in the loss (mask_truncated_completions is off).',
        )
    )
  mixed = run.finite('critic/mixed_group_frac')
  if mixed.size:
    rows.append(
        (
            'Prompts without an advantage',
            number(1 - mixed.mean(), '%'),
            'All their answers had the same score.',
        )
    )
  clipped = run.finite('actor/pg_clipfrac')
  if clipped.size:
    rows.append(
        (
            'Tokens clipped',
            f'{number(clipped.mean(), "%")} (most in a step'
            f' {number(clipped.max(), "%")})',
            'Their ratio left the clip range in the direction that pays.',
        )
    )
  rows.append(
      (
          'Metrics that were not finite',
          ', '.join(f'{n} ({c})' for n, c in run.nonfinite.items()) or '0',
          'Lines of metrics.jsonl with a null.',
      )
  )
  return rows


def _chosen(run: Run) -> list[tuple[str, str, str]]:
  """Names the dots that min_sqnr_db chose; nothing of a run without it."""
  least = run.config.get('precision.min_sqnr_db')
  if not least:
    return []
  named = (f'{dot} ({db:.1f} dB)' for dot, db in run.chosen.items())
  return [
      (
          'Dots kept in high precision',
          ', '.join(named) or '0',
          'On both sides: an input or a kernel kept less than'
          f' precision.min_sqnr_db={least:g} at the cold start.',
      )
  ]


def _guard(run: Run) -> list[tuple[str, str, str]]:
  """Tells what the guard saw and did; nothing of a run without one."""
  over = run.finite('guard/over')
  if not over.size:
    return []
  actions = [
      f'{name} {run.finite(metric).sum():.0f}{_where(run, metric)}'
      for name in ('recalibrate', 'high_precision', 'rollback')
      if run.finite(metric := f'guard/{name}').size
  ]
  return [
      (
          'Steps over a bound of the guard',
          f'{(over > 0).sum()}' + _where(run, 'guard/over'),
          'Warned of; guard.patience of them in a row are acted on.',
      ),
      (
          'Actions of the guard',
          ', '.join(actions) or '0',
          'Decided behind these steps, done before the next; high_precision'
          ' counts dots, which guard_dots in metrics.jsonl names.',
      ),
  ]


def _where(run: Run, metric: str) -> str:
  """Names the first steps at which a count is above 0."""
  series = run.get(metric)
  if series is None:
    return ''
  steps = series.steps[series.values > 0]
  if not steps.size:
    return ''
  named = ', '.join(str(step) for step in steps[:5])
  return f' (steps {named}{" ..." if len(steps) > 5 else ""})'


def _left_out(run: Run) -> list[tuple[str, str, str]]:
  """Counts over-long prompts, as the last start did."""
  start = run.starts[-1] if run.starts else {}
  rows = []
  for kind, title in (('train', 'Training'), ('val', 'Held-out')):
    kept, lost = start.get(f'{kind}_prompts'), start.get(f'{kind}_left_out')
    if isinstance(kept, int) and isinstance(lost, int):
      rows.append(
          (
              f'{title} prompts left out',
              f'{lost} of {kept + lost}',
              'Longer than data.max_prompt_length.',
          )
      )
  return rows
