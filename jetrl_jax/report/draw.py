"""How a run's panels and heat maps are drawn."""

import dataclasses

import numpy as np

from jetrl_jax.report.charts import Chart, Line, area_chart, line_chart, still
from jetrl_jax.report.data import Run
from jetrl_jax.report.facts import Fact
from jetrl_jax.report.heat import heat_map
from jetrl_jax.report.panels import MAPS, OPERANDS, PHASES, Panel
from jetrl_jax.report.text import duration, steps_text


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
      labels.append(label)
      lines.append(
          Line(
              label=run.name if compared else label,
              color=i if compared else panel.curves.index((metric, label)),
              steps=series.steps,
              values=series.values,
              band=_band(run, panel, metric, compared),
          )
      )
  if not lines:
    return None
  title, note = panel.title, panel.note
  if panel.band and all(line.band is None for line in lines):
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
) -> np.ndarray | None:
  """Returns the edges of the band around a curve, if it has one: [2, n]."""
  series, half = run.series[metric], run.get(f'{metric}/ci95')
  if half is not None and np.array_equal(half.steps, series.steps):
    low, high = series.values - half.values, series.values + half.values
    return np.stack([np.maximum(low, 0.0), np.minimum(high, 1.0)])
  # Bands from the smallest to the largest hide each other.
  if panel.band and metric == panel.curves[0][0] and not compared:
    edges = [run.get(name) for name in panel.band]
    if all(e and np.array_equal(e.steps, series.steps) for e in edges):
      return np.stack([e.values for e in edges if e])
  return None


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
      for measure, title, unit, log, worst in MAPS
      for operand, label in OPERANDS
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
