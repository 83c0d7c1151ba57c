"""Which charts the report has, and how runs become their curves."""

import dataclasses
import re

import numpy as np

from jetrl_jax.report_charts import Chart, Line, area_chart, line_chart, still
from jetrl_jax.report_data import Run
from jetrl_jax.report_facts import Fact
from jetrl_jax.report_heat import heat_map
from jetrl_jax.report_text import duration, steps_text


@dataclasses.dataclass(frozen=True, kw_only=True)
class Panel:
  """One chart of a run; in a comparison its first curve, run by run.

  Attributes:
    title: heading.
    curves: (metric, label); the first is the one that runs are compared by.
    band: (lower edge, upper edge) of a band around the first curve: metrics.
    unit, log, smooth, note: see `report_charts.line_chart`.
    absent: when none of the metrics is there: the reason.
    unless: (metric, name) that the first curve is often equal to; where it is
      in all runs, a sentence says so instead.
  """

  title: str
  curves: tuple[tuple[str, str], ...]
  band: tuple[str, str] | None = None
  unit: str = ''
  log: bool = False
  smooth: bool = False
  note: str = ''
  absent: str = 'no line of metrics.jsonl has it'
  unless: tuple[str, str] | None = None


LEARNING = (
    Panel(
        title='Reward',
        curves=(('critic/rewards/mean', 'mean score'),),
        smooth=True,
        note='Of the sampled answers, before the update.',
    ),
    Panel(
        title='Training accuracy',
        curves=(('critic/score/mean', 'accuracy'),),
        unit='%',
        smooth=True,
        unless=('critic/rewards/mean', 'the reward'),
    ),
    Panel(
        title='Response length',
        curves=(('response_length/mean', 'mean'),),
        band=('response_length/min', 'response_length/max'),
        unit='tokens',
        note='Band: shortest to longest.',
    ),
    Panel(
        title='Answers cut at the length limit',
        curves=(('response_length/clip_ratio', 'share'),),
        unit='%',
    ),
    Panel(
        title='Prompts that teach',
        curves=(('critic/mixed_group_frac', 'share'),),
        unit='%',
        smooth=True,
        note='Groups whose scores differ; the others have no advantage.',
    ),
    Panel(
        title='Turns per episode',
        curves=(('num_turns/mean', 'mean'),),
        band=('num_turns/min', 'num_turns/max'),
        note='Band: fewest to most.',
        absent='',
    ),
    Panel(
        title='Environment',
        curves=(
            ('environment/observation_frac', 'tokens observed'),
            ('environment/turn_limit_frac', 'at the turn limit'),
        ),
        unit='%',
        absent='',
    ),
    Panel(title='Warm-start loss', curves=(('sft/loss', 'loss'),), absent=''),
)
FLOW = (
    Panel(
        title='Mismatch: tokens that differ',
        curves=(('training/mismatch_token_frac', 'share of tokens'),),
        unit='%',
        note='Rollout and training log-prob of a token, in any bit.',
    ),
    Panel(
        title='Mismatch: size',
        curves=(
            ('training/rollout_logprob_diff_max', 'largest'),
            ('training/rollout_logprob_diff_mean', 'mean'),
        ),
        unit='nats',
        log=True,
    ),
    Panel(
        title='Mismatch: divergence',
        curves=(
            ('rollout_corr/kl', 'KL(mu, pi old)'),
            ('rollout_corr/k3_kl', 'k3'),
        ),
        unit='nats',
    ),
)
UPDATE = (
    Panel(
        title='Entropy',
        curves=(('actor/entropy', 'entropy'),),
        unit='nats',
        smooth=True,
    ),
    Panel(
        title='Clipped tokens',
        curves=(
            ('actor/pg_clipfrac', 'clipped'),
            ('actor/pg_clipfrac_lower', 'dual clip'),
        ),
        unit='%',
    ),
    Panel(
        title='KL of the update',
        curves=(('actor/ppo_kl', 'from the rollout policy'),),
        unit='nats',
    ),
    Panel(
        title='KL to the reference',
        curves=(('actor/kl_loss', 'to the reference'),),
        unit='nats',
        absent='only with algorithm.kl_loss_coef > 0',
    ),
    Panel(
        title='Gradient norm',
        curves=(('actor/grad_norm', 'before clipping'),),
        log=True,
        smooth=True,
    ),
    Panel(title='Learning rate', curves=(('actor/lr', 'lr'),)),
    Panel(title='Objective', curves=(('actor/pg_loss', 'loss'),)),
)
SPEED = (
    Panel(
        title='Tokens per second and device',
        curves=(
            ('perf/throughput', 'whole step'),
            ('perf/rollout_throughput', 'rollout'),
        ),
    ),
    Panel(
        title='Model FLOPs utilisation',
        curves=(
            ('perf/mfu/actor', 'update'),
            ('perf/mfu/rollout', 'rollout'),
        ),
        unit='%',
        absent='only on GPUs whose peak is in the table of rl/flops.py',
    ),
    Panel(
        title='Memory at the peak',
        curves=(
            ('perf/max_memory_allocated_gb', 'device'),
            ('perf/cpu_memory_used_gb', 'host'),
        ),
        unit='GiB',
    ),
    Panel(
        title='Packing efficiency',
        curves=(('perf/packing_efficiency', 'places with a token'),),
        unit='%',
    ),
)
_NO_FP8 = 'only with FP8 dots, see precision.recipe'
FP8 = (
    Panel(
        title='Weight bytes changed per step',
        curves=(
            ('fp8/changed_weight_bytes/mean', 'mean over kernels'),
            ('fp8/changed_weight_bytes/min', 'least'),
        ),
        unit='%',
        note='FP8 bytes that the update moved: 0 would be no learning.',
        absent=_NO_FP8,
    ),
    Panel(
        title='Weight bytes changed per step, rollout',
        curves=(
            ('rollout_fp8/changed_weight_bytes/mean', 'mean over kernels'),
            ('rollout_fp8/changed_weight_bytes/min', 'least'),
        ),
        unit='%',
        note='Of the weights that a mixed flow samples with.',
        absent='',
    ),
)
_OPERANDS = (
    ('input', 'inputs'),
    ('kernel', 'kernels'),
    ('output_grad', 'output gradients'),
)
# measure, title, unit, log, which value of several dots or steps is shown.
_MAPS = (
    ('saturated_frac', 'Saturated', '%', True, 'max'),
    ('flushed_frac', 'Flushed to zero', '%', True, 'max'),
    ('sqnr_db', 'Signal to noise', 'dB', False, 'min'),
)
# In a comparison, where the maps of every dot would be too many.
FP8_WORST = tuple(
    Panel(
        title=f'{title}: {label}, worst dot',
        curves=((f'fp8/{operand}/{measure}/{worst}', worst),),
        unit=unit,
        log=log,
        absent='',
    )
    for measure, title, unit, log, worst in _MAPS
    for operand, label in _OPERANDS
)
# metric, label, colour: fixed, so that phases look alike in all reports.
PHASES = (
    ('timing_s/gen', 'rollout', 0),
    ('timing_s/update_actor', 'update', 1),
    ('timing_s/reward', 'rewards', 2),
    ('timing_s/old_log_prob', 'old log-probs', 3),
    ('timing_s/testing', 'evaluation', 4),
    ('timing_s/ref', 'reference', 5),
    ('timing_s/save_checkpoint', 'checkpoint', 6),
)


def heldout_panels(runs: list[Run]) -> list[Panel]:
  """Returns a panel of held-out accuracy per data source and precision."""
  found: dict[tuple[str, str], list[str]] = {}
  for name in dict.fromkeys(m for run in runs for m in run.series):
    match = re.fullmatch(r'val-([^/]+)/(.+)/acc/mean@(.+)', name)
    if match and '/ci95' not in name:
      found.setdefault((match[1], match[2]), []).append(match[3])
  panels = []
  for (precision, source), counts in found.items():
    # Runs may have taken different numbers of samples.
    kinds = [f'mean@{count}' for count in counts]
    if len(runs) == 1 and counts[0] != '1':
      kinds += [f'{kind}@{counts[0]}' for kind in ('best', 'maj')]
    elsewhere = '' if precision == 'core' else f', in {precision}'
    panels.append(
        Panel(
            title=f'Held-out accuracy: {source}{elsewhere}',
            curves=tuple(
                (f'val-{precision}/{source}/acc/{k}', k) for k in kinds
            ),
            unit='%',
            note='Band: 95% interval over problems.',
            absent='',
        )
    )
  return panels


def draw(panel: Panel, runs: list[Run]) -> Chart | Fact | None:
  """Draws a panel for one run, or its first curve for several.

  Returns:
    A sentence where there is nothing to see; None where no run has a finite
    value.
  """
  compared = len(runs) > 1
  lines, missing, labels = [], [], []
  for i, run in enumerate(runs):
    curves = [c for c in panel.curves if run.finite(c[0]).size]
    if not curves:
      missing.append(run.name)
    # One curve per run of a comparison: the first that it has.
    for metric, label in curves[:1] if compared else curves:
      series = run.series[metric]
      low, high = _band(run, panel, metric, compared)
      labels.append(label)
      lines.append(
          Line(
              label=run.name if compared else label,
              color=i if compared else panel.curves.index((metric, label)),
              steps=series.steps,
              values=series.values,
              low=low,
              high=high,
          )
      )
  if not lines:
    return None
  title, note = panel.title, panel.note
  if panel.band and all(line.low is None for line in lines):
    note = ''  # It speaks of the band.
  if compared and len(set(labels)) > 1:
    lines = [
        dataclasses.replace(line, label=f'{line.label} {label}')
        for line, label in zip(lines, labels, strict=True)
    ]
  elif compared and len(panel.curves) > 1:
    title += f' ({labels[0]})'
  if missing and compared:
    note = f'{note} Not in {", ".join(missing)}.'.strip()
  said = _equal(panel, runs) or still(lines, panel.unit)
  if said:
    return Fact(label=title, value=said, detail=note)
  return line_chart(
      title,
      lines,
      unit=panel.unit,
      log=panel.log,
      smooth=panel.smooth,
      note=note,
  )


def _equal(panel: Panel, runs: list[Run]) -> str:
  """Says that a panel's curve is another one in all runs; else ''."""
  if panel.unless is None:
    return ''
  other, name = panel.unless
  for run in runs:
    one, two = run.get(panel.curves[0][0]), run.get(other)
    if one is None or two is None or not np.array_equal(one.values, two.values):
      return ''
  return f'equal to {name}'


def _band(
    run: Run, panel: Panel, metric: str, compared: bool
) -> tuple[np.ndarray | None, np.ndarray | None]:
  """Returns the edges of the band around a curve, if it has one."""
  series, half = run.series[metric], run.get(f'{metric}/ci95')
  if half is not None and np.array_equal(half.steps, series.steps):
    low, high = series.values - half.values, series.values + half.values
    return np.maximum(low, 0.0), np.minimum(high, 1.0)
  # Bands from the smallest to the largest hide each other.
  if panel.band and metric == panel.curves[0][0] and not compared:
    edges = [run.get(name) for name in panel.band]
    if all(e and np.array_equal(e.steps, series.steps) for e in edges):
      low, high = (e.values for e in edges if e)
      return low, high
  return None, None


def time_chart(run: Run) -> Chart | None:
  """Draws the seconds of each step by phase; None without them."""
  whole = run.get('timing_s/step')
  trained = whole.steps > 0 if whole else np.zeros(0, bool)
  if whole is None or not trained.any():
    return None
  steps = whole.steps[trained]
  rest = np.nan_to_num(whole.values[trained])
  layers = []
  for metric, label, color in PHASES:
    series = run.get(metric)
    if series is None:
      continue
    values = np.zeros(len(steps))
    kept = np.isin(series.steps, steps)
    places = np.searchsorted(steps, series.steps[kept])
    values[places] = np.nan_to_num(series.values[kept])
    # A phase of microseconds would only fill the legend.
    if values.sum() > 0.002 * rest.sum():
      rest = rest - values
      layers.append(Line(label=label, color=color, steps=steps, values=values))
  rest = np.maximum(rest, 0.0)
  layers.append(Line(label='the rest', color=7, steps=steps, values=rest))
  start = whole.values[~trained]
  note = ''
  if start.size:
    note = f'Not drawn: {duration(float(start[0]))} before step 1.'
  return area_chart('Time by phase', layers, unit='s', note=note)


def heat_maps(run: Run) -> tuple[list[Chart], list[Fact]]:
  """Returns the FP8 health maps, and sentences for those that are all zero."""
  health = run.health
  if health is None:
    return [], []
  wanted = [
      (operand, measure, f'{title}: {label}', unit, log, worst)
      for measure, title, unit, log, worst in _MAPS
      for operand, label in _OPERANDS
  ]
  wanted.append(('kernel', 'changed', 'Weight bytes changed', '%', True, 'min'))
  maps, sentences = [], []
  dots = steps_text(len(health.dots), 'dot')
  count = f'{steps_text(len(health.steps))} in all {dots}'
  for operand, measure, title, unit, log, worst in wanted:
    values = health.values[operand, measure]
    good = values[np.isfinite(values)]
    if not good.size:
      sentences.append(Fact(label=title, value='not recorded'))
    elif not good.any():
      said = f'exactly 0 at all {count}'
      sentences.append(Fact(label=title, value=said))
    else:
      maps.append(
          heat_map(
              title,
              health.dots,
              health.steps,
              values,
              unit=unit,
              log=log,
              worst=worst,
          )
      )
  return maps, sentences
