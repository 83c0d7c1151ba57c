"""The figures of a report: which there are, and how a run's are drawn.

A figure is Plotly's, without colours: the page's script takes them from the
style sheet, light or dark. Long series keep the smallest and the largest value
of each stretch of steps, so that no spike is lost.
"""

import dataclasses
import html
import itertools
import pathlib
import re
import tomllib
from collections.abc import Sequence

import numpy as np
import plotly.colors
import plotly.graph_objects as go

from jetrl_jax.report.answers import visible
from jetrl_jax.report.facts import (
    Fact,
    at_all,
    count,
    duration,
    number,
    share,
)
from jetrl_jax.report.run import Health, Run, layer_and_kind

_MAX_POINTS, _MAX_BARS, _MAX_COLUMNS = 800, 200, 240
# Curves of this many steps or more are smoothed; of fewer, they have dots.
_SMOOTHED, _MAX_WINDOW = 40, 100


@dataclasses.dataclass(frozen=True)
class Panel:
  """One chart, see panels.toml."""

  title: str
  curves: dict[str, str]
  unit: str = ''
  note: str = ''
  smooth: bool = False
  log: bool = False
  band: Sequence[str] = ()
  absent: str = 'no line of metrics.jsonl has it'
  same_as: Sequence[str] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
  """A drawn panel.

  Attributes:
    title: heading.
    at: which step the keys' values are of.
    keys: (label, last value, colour, traces, run) of each curve; the number of
      the run is None outside of a comparison.
    notes: sentences below.
    plot: the figure; its traces have `meta`: colour and role.
    height: in pixels.
  """

  title: str
  at: str
  keys: list[tuple[str, str, int, list[int], int | None]]
  notes: list[str]
  plot: go.Figure
  height: int = 210


_TABLE = (pathlib.Path(__file__).parent / 'panels.toml').read_text('utf-8')
PANELS = {
    section: [Panel(**panel) for panel in panels]
    for section, panels in tomllib.loads(_TABLE).items()
}
# measure, title, unit, log, which of several values is shown.
_WORST = (
    ('saturated_frac', 'Saturated', '%', True, 'max'),
    ('flushed_frac', 'Flushed to zero', '%', True, 'max'),
    ('sqnr_db', 'Signal to noise', 'dB', False, 'min'),
)
_OPERANDS = {'input': 'inputs', 'kernel': 'kernels'}
_OPERANDS['output_grad'] = 'output gradients'
# For comparisons, in which a map per dot would be too many.
FP8_WORST = [
    Panel(
        f'{title}: {label}, worst dot',
        {worst: f'fp8/{operand}/{measure}/{worst}'},
        unit,
        log=log,
        absent='',
    )
    for measure, title, unit, log, worst in _WORST
    for operand, label in _OPERANDS.items()
]
_KINDS = ('attn/qkv', 'attn/o', 'mlp/gate_up', 'mlp/down')
# metric -> (label, colour): phases look alike in all reports.
PHASES = {
    'timing_s/gen': ('rollout', 0),
    'timing_s/update_actor': ('update', 1),
    'timing_s/reward': ('rewards', 2),
    'timing_s/old_log_prob': ('old log-probs', 3),
    'timing_s/testing': ('evaluation', 4),
    'timing_s/ref': ('reference', 5),
    'timing_s/save_checkpoint': ('checkpoint', 6),
}


def heldout_panels(runs: list[Run]) -> list[Panel]:
  """Returns a panel of held-out accuracy per data source and precision."""
  found: dict[tuple[str, str], list[str]] = {}
  for name in dict.fromkeys(m for run in runs for m in run.series):
    match = re.fullmatch(r'val-([^/]+)/(.+)/acc/mean@(.+)', name)
    if match and '/ci95' not in name:
      found.setdefault((match[1], match[2]), []).append(match[3])
  panels = []
  for (precision, source), samples in found.items():
    # Runs may have taken different numbers of samples.
    kinds = [f'mean@{n}' for n in samples]
    if len(runs) == 1 and samples[0] != '1':
      kinds += [f'{kind}@{samples[0]}' for kind in ('best', 'maj')]
    elsewhere = '' if precision == 'core' else f', in {precision}'
    title = f'Held-out accuracy: {source}{elsewhere}'
    curves = {kind: f'val-{precision}/{source}/acc/{kind}' for kind in kinds}
    note = 'Band: 95% interval over problems.'
    values = [run.finite(name) for run in runs for name in curves.values()]
    panels.append(Panel(title, curves, share(*values), note, absent=''))
  return panels


def reward_panels(run: Run) -> list[Panel]:
  """Returns a panel of the reward functions, where a run has several."""
  found = [re.fullmatch(r'rewards/(.+)/mean', name) for name in run.series]
  curves = {match[1]: match[0] for match in found if match}
  if len(curves) < 2:
    return []
  note = 'Of the sampled answers, before the weights.'
  return [Panel('Reward functions', curves, note=note)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Line:
  """A curve: int64 [n], float64 [n] (NaN is a gap), and a band [2, n]."""

  label: str
  color: int
  steps: np.ndarray
  values: np.ndarray
  band: np.ndarray | None
  run: int | None


def draw(panel: Panel, runs: list[Run]) -> Figure | Fact | None:
  """Draws a panel for one run, or its first curve for several.

  Returns:
    A sentence where there is nothing to see; None where no run has a finite
    value.
  """
  is_compared = len(runs) > 1
  lines, missing, labels = [], [], []
  for i, run in enumerate(runs):
    curves = [c for c in panel.curves.items() if run.finite(c[1]).size]
    missing += [] if curves else [run.name]
    # In a comparison each run has one curve: the first one that exists.
    for label, metric in curves[:1] if is_compared else curves:
      labels.append(label)
      lines.append(
          _Line(
              label=run.name if is_compared else label,
              color=i if is_compared else list(panel.curves).index(label),
              steps=run.series[metric].steps,
              values=run.series[metric].values,
              band=_band(run, panel, metric, is_compared),
              run=i if is_compared else None,
          )
      )
  if not lines:
    return None
  title, note = panel.title, panel.note
  if note.startswith('Band') and all(line.band is None for line in lines):
    note = ''
  if is_compared and len(set(labels)) > 1:
    lines = [
        dataclasses.replace(line, label=f'{line.label} {label}')
        for line, label in zip(lines, labels, strict=True)
    ]
  elif is_compared and len(panel.curves) > 1:
    title += f' ({labels[0]})'
  if is_compared and missing:
    note = f'{note} Not in {", ".join(missing)}.'.strip()
  if said := _equal(panel, runs) or _still(lines, panel.unit):
    return Fact(title, said, note)
  return _line_figure(title, lines, panel, note)


def _band(
    run: Run, panel: Panel, metric: str, is_compared: bool
) -> np.ndarray | None:
  """Returns the edges of the band around a curve, if it has one: [2, n]."""
  steps, values = run.series[metric]
  half = run.series.get(f'{metric}/ci95')
  if half and np.array_equal(half.steps, steps):
    return np.clip([values - half.values, values + half.values], 0.0, 1.0)
  # In a comparison, bands from the smallest to the largest value would hide
  # each other.
  edges = [run.series.get(name) for name in panel.band]
  is_first = metric == next(iter(panel.curves.values()))
  if edges and is_first and not is_compared:
    if all(e and np.array_equal(e.steps, steps) for e in edges):
      return np.stack([e.values for e in edges if e])
  return None


def _equal(panel: Panel, runs: list[Run]) -> str:
  """Says that a panel's curve is another one in all runs; else ''."""
  for run in runs if panel.same_as else ():
    one = run.series.get(next(iter(panel.curves.values())))
    two = run.series.get(panel.same_as[0])
    if not one or not two or not np.array_equal(one.values, two.values):
      return ''
  return f'equal to {panel.same_as[1]}' if panel.same_as else ''


def _still(lines: list[_Line], unit: str) -> str:
  """Returns '5e-5 at all 60 steps' where no curve moves, else ''.

  A sentence says that better than a picture of nothing. A curve with a band is
  worth drawing: the band moves.
  """
  values = np.concatenate([line.values for line in lines])
  if len(values) < 2 or not (values == values[0]).all():  # A NaN is a gap.
    return ''
  if any(line.band is not None and np.ptp(line.band) for line in lines):
    return ''
  exact = 'exactly 0' if values[0] == 0 else number(values[0], unit)
  return f'{exact} {at_all({len(line.values) for line in lines})}'


def _line_figure(
    title: str, lines: list[_Line], panel: Panel, note: str
) -> Figure:
  plots, keys, notes = [], [], [note]
  own_unit = panel.unit if panel.unit == '%' else ''
  # All curves have the same window of past steps, so that equal runs look
  # equal.
  longest = max(len(line.steps) for line in lines)
  window = min(longest // 10, _MAX_WINDOW)
  window = window if panel.smooth and longest >= _SMOOTHED else 0
  if window:
    notes.append(f'Bold: mean of the last {window} steps.')
  for line in lines:
    traces = _traces(line, window, panel.unit, longest < _SMOOTHED)
    finite = line.values[np.isfinite(line.values)]
    last = number(finite[-1], own_unit) if finite.size else '–'
    places = list(range(len(plots), len(plots) + len(traces)))
    keys.append((line.label, last, line.color, places, line.run))
    plots += traces
  if gaps := sum(int((~np.isfinite(line.values)).sum()) for line in lines):
    notes.append(f'{count(gaps, "value")} not finite, left out.')
  values = np.concatenate([line.values for line in lines])
  steps = np.concatenate([line.steps for line in lines])
  axes = {'xaxis': step_axis(steps), 'yaxis': value_axis(values, panel)}
  plot = go.Figure(plots, axes)
  ends = {int(line.steps[-1]) for line in lines}
  at = f'step {ends.pop()}' if len(ends) == 1 else 'last steps'
  if len(lines) == 1 and (band := lines[0].band) is not None:
    at += f', {" to ".join(number(edge, own_unit) for edge in band[:, -1])}'
  if panel.unit != own_unit:
    title += f', {panel.unit}'
  notes = [n for n in notes if n]
  return Figure(title=title, at=at, keys=keys, notes=notes, plot=plot)


def _traces(
    line: _Line, window: int, unit: str, has_dots: bool
) -> list[go.Scatter]:
  """Returns a curve, its band below it and its average above it."""
  index = thinned(line.values)
  x, y = line.steps[index], line.values[index]
  # A value between two gaps would be invisible as a line.
  gap = ~np.isfinite(np.concatenate([[np.nan], y, [np.nan]]))
  has_dots |= bool((gap[:-2] & ~gap[1:-1] & gap[2:]).any())
  traces = [
      go.Scatter(
          x=x,
          y=y,
          name=_inert(line.label),
          mode='lines+markers' if has_dots else 'lines',
          hovertemplate='%{y:.3~p}' if unit == '%' else f'%{{y:.4~g}} {unit}',
          meta={'color': line.color, 'role': 'faint' if window else 'line'},
      )
  ]
  if line.band is not None:
    low, high = line.band[:, index]
    good = np.isfinite(low) & np.isfinite(high)
    places, low, high = x[good], low[good], high[good]
    if len(places) == 1:  # A single point would have no width.
      places, low, high = places[0] + [-0.1, 0.1], low.repeat(2), high.repeat(2)
    around = np.concatenate([places, places[::-1]])
    edges = np.concatenate([high, low[::-1]])
    traces.insert(0, _silent(around, edges, line.color, 'band'))
  if window:
    mean = trailing_mean(line.values, window)
    index = thinned(mean)
    traces.append(_silent(line.steps[index], mean[index], line.color, 'line'))
  return traces


def _silent(x: np.ndarray, y: np.ndarray, color: int, role: str) -> go.Scatter:
  fill = 'toself' if role == 'band' else 'none'
  meta = {'color': color, 'role': role}
  return go.Scatter(
      x=x, y=y, mode='lines', fill=fill, hoverinfo='skip', meta=meta
  )


def thinned(values: np.ndarray) -> np.ndarray:
  """Returns the places of the extremes of each stretch, both ends and gaps."""
  n = len(values)
  if n <= _MAX_POINTS:
    return np.arange(n)
  kept = {0, n - 1}
  for part in np.array_split(np.arange(n), _MAX_POINTS // 2):
    finite = part[np.isfinite(values[part])]
    if finite.size:
      kept.add(int(finite[values[finite].argmin()]))
      kept.add(int(finite[values[finite].argmax()]))
    kept |= set(part[~np.isfinite(values[part])][:1].tolist())
  return np.asarray(sorted(kept))


def trailing_mean(values: np.ndarray, window: int) -> np.ndarray:
  """Returns the mean of the last `window` values at each place, NaN left out.

  It looks at no later value: where runs are equal, their means are.
  """
  padded = np.concatenate([np.full(window - 1, np.nan), values])
  windows = np.lib.stride_tricks.sliding_window_view(padded, window)
  counts = np.isfinite(windows).sum(axis=1)
  sums = np.nansum(windows, axis=1)
  return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def step_axis(steps: np.ndarray) -> dict:
  """Returns the settings of an axis of steps: whole ones."""
  axis: dict = {'tickformat': 'd', 'nticks': 7}
  if np.ptp(steps) <= 8:
    axis['dtick'] = 1
  if np.ptp(steps) == 0:
    axis['range'] = [steps[0] - 0.5, steps[0] + 0.5]
  return axis


def value_axis(values: np.ndarray, panel: Panel) -> dict:
  """Returns the settings of an axis; of shares it ends at 0% and 100%."""
  low, high = float(np.nanmin(values)), float(np.nanmax(values))
  form: dict = {'tickformat': '.5~p'} if panel.unit == '%' else {}
  if panel.log and low > 0 and high / low > 30:
    return {'type': 'log', 'dtick': 1, 'exponentformat': 'power'} | form
  if panel.unit == '%' and 0 <= low and high <= 1:
    form |= {'minallowed': 0, 'maxallowed': 1}
  if low >= 0:
    form['rangemode'] = 'tozero' if low < 0.4 * high else 'nonnegative'
  if abs(high) < 0.01 and panel.unit != '%':
    form['exponentformat'] = 'e'
  return form | {'nticks': 5}


def time_figure(run: Run) -> Figure | None:
  """Draws the seconds of each step by phase; None without them."""
  steps, totals = run.series.get('timing_s/step', (np.zeros(0), np.zeros(0)))
  trained = steps > 0
  if not trained.any():
    return None
  notes = []
  if not trained.all():
    start = duration(float(np.nan_to_num(totals[~trained][0])))
    notes.append(f'Not drawn: {start} before step 1.')
  steps, totals = steps[trained], np.nan_to_num(totals[trained])
  phases, rest = [], totals
  for metric, (label, color) in PHASES.items():
    series, values = run.series.get(metric), np.zeros(len(steps))
    if series:
      kept = np.isin(series.steps, steps)
      places = np.searchsorted(steps, series.steps[kept])
      values[places] = np.nan_to_num(series.values[kept])
    # A phase of microseconds would only fill the legend.
    if values.sum() > 0.002 * totals.sum():
      rest = rest - values
      phases.append((label, color, values))
  phases.append(('the rest', 7, np.maximum(rest, 0.0)))
  # A few steps that dwarf the others (those that compile) are cut off.
  usual = np.quantile(totals, 0.9) if len(totals) > 4 else np.median(totals)
  axis: dict[str, object] = {'rangemode': 'tozero', 'nticks': 5}
  if 0 < 3 * usual < totals.max():
    top = 1.3 * float(totals[totals <= 3 * usual].max())
    axis['range'] = [0, top]
    cut = [
        f'step {steps[i]}: {number(totals[i], "s")}'
        for i in np.flatnonzero(totals > top)
    ]
    notes.append(f'Cut off: {", ".join(cut[:3])}{" ..." if cut[3:] else ""}.')
  parts = np.array_split(np.arange(len(steps)), min(len(steps), _MAX_BARS))
  if len(parts) < len(steps):
    notes.append(f'A bar is the mean of {len(parts[0])} steps.')
  plot, keys = go.Figure(), []
  for i, (label, color, values) in enumerate(phases):
    plot.add_bar(
        x=[steps[part].mean() for part in parts],
        y=[values[part].mean() for part in parts],
        name=label,
        hovertemplate='%{y:.3~g} s',
        meta={'color': color, 'role': 'bar'},
    )
    keys.append((label, number(values[-1]), color, [i], None))
  plot.update_layout(barmode='stack', xaxis=step_axis(steps), yaxis=axis)
  at, title = f'step {steps[-1]}', 'Time by phase, s'
  return Figure(title=title, at=at, keys=keys, notes=notes, plot=plot)


def heat_figures(run: Run) -> tuple[list[Figure], list[Fact]]:
  """Returns the FP8 health maps, and sentences for those that are all zero."""
  health = run.health
  if health is None:
    return [], []
  wanted = [
      (operand, measure, f'{title}: {label}', unit, log, worst)
      for measure, title, unit, log, worst in _WORST
      for operand, label in _OPERANDS.items()
  ]
  wanted.append(('kernel', 'changed', 'Weight bytes changed', '%', True, 'min'))
  maps, sentences = [], []
  when = (
      f'{at_all({len(health.steps)})} in all {count(len(health.dots), "dot")}'
  )
  for operand, measure, title, unit, log, worst in wanted:
    values = health.values[operand, measure]
    if not np.isfinite(values).any():
      sentences.append(Fact(title, 'not recorded'))
    elif not np.nan_to_num(values).any():
      sentences.append(Fact(title, f'exactly 0 {when}'))
    else:
      drawn = heat_figure(title, health, values, unit, log, worst)
      maps.append(drawn)
  return maps, sentences


def heat_figure(
    title: str,
    health: Health,
    values: np.ndarray,
    unit: str,
    log: bool,
    worst: str,
) -> Figure:
  """Draws dots by steps, grouped by kind of dot and ordered by layer.

  Args:
    title: heading.
    health: its dots and steps.
    values: float32 [dots, n]; NaN is absent; at least one is not.
    unit: as in a panel.
    log: colours are logarithmic; zeros have one of their own.
    worst: 'max' or 'min': what stands for several steps that share a column.
  """
  order = sorted(range(len(health.dots)), key=lambda i: _place(health.dots[i]))
  dots = [health.dots[i] for i in order]
  steps, values, every = _columns(health.steps, values[order], worst)
  with np.errstate(divide='ignore', invalid='ignore'):
    levels = np.log10(values) if log else values.copy()
  shown = levels[np.isfinite(levels)]
  low, high = float(shown.min()), float(shown.max())
  if low == high:
    low, high = low - 0.5, high + 0.5
  zeros, bottom, scale = np.isneginf(levels), low, _viridis(0.0)
  if zeros.any():  # Below the scale, in grey.
    bottom, scale = low - 0.1 * (high - low), _viridis(0.08)
  levels[zeros] = bottom
  form = '.3~p}' if unit == '%' else f'.4~g}} {unit}'
  ends = [number(10**e if log else e, unit) for e in (low, high)]
  # A hair inside, as a tick at the very end may be left out.
  inside = np.interp([0.001, 0.999], [0, 1], [low, high])
  bar: dict = {
      'orientation': 'h',
      'thickness': 8,
      'y': 1.02,
      'yanchor': 'bottom',
  }
  bar |= {'tickvals': inside, 'ticktext': ends, 'tickangle': 0, 'ypad': 0}
  bar['ticklabeloverflow'] = 'allow'
  plot = go.Figure(
      go.Heatmap(
          x=steps,
          y=[_inert(dot) for dot in dots],
          z=levels,
          customdata=values,
          zmin=bottom,
          zmax=high,
          colorscale=scale,
          colorbar=bar | {'outlinewidth': 0},
          hovertemplate='%{y}<br>step %{x}<br>%{customdata:'
          + f'{form}<extra></extra>',
      )
  )
  kinds = [layer_and_kind(dot)[1] for dot in dots]
  places = itertools.groupby(range(len(dots)), kinds.__getitem__)
  groups = [list(rows) for _, rows in places]
  for rows in groups[1:]:
    plot.add_hline(y=rows[0] - 0.5, line_width=2, line_color='#8a8f99')
  plot.update_layout(
      xaxis=step_axis(steps),
      yaxis={
          'type': 'category',
          'autorange': 'reversed',
          'tickvals': [rows[len(rows) // 2] for rows in groups],
          'ticktext': [_inert(kinds[rows[0]]) for rows in groups],
      },
      margin={'t': 34, 'r': 24},
  )
  notes = ['Grey: exactly 0.'] if zeros.any() else []
  layers = {layer_and_kind(dot)[0] for dot in dots} - {-1}  # The head's.
  if len(layers) > 1:
    place = f'layer {min(layers)} on top, {max(layers)} below'
    notes.append(f'In each block {place}.')
  if every > 1:
    notes.append(f'A column is the {worst} of {every} steps.')
  if np.isnan(values).any():
    notes.append('Empty: not recorded.')
  last, at = values[:, -1], 'last step: none'
  if np.isfinite(last).any():
    where = int(getattr(np, f'nanarg{worst}')(last))
    at = f'last step, {worst}: {number(last[where], unit)}'
    at += f', {dots[where]}' if last[where] else ''
  height = 70 + min(max(round(len(dots) * 1.6), 140), 300)
  return Figure(
      title=title, at=at, keys=[], notes=notes, plot=plot, height=height
  )


def _viridis(start: float) -> list[list]:
  """Returns a colour scale that begins at a share of it, in grey below."""
  colors = plotly.colors.get_colorscale('Viridis')
  scale = [[start + (1 - start) * at, color] for at, color in colors]
  return [[0, '#8a8f99'], [start, '#8a8f99'], *scale] if start else scale


def _columns(
    steps: np.ndarray, values: np.ndarray, worst: str
) -> tuple[np.ndarray, np.ndarray, int]:
  """Thins the steps; returns (a step per column, values, steps per column)."""
  every = -(-len(steps) // _MAX_COLUMNS)
  reduce = np.fmax if worst == 'max' else np.fmin  # Ignores NaN.
  starts = np.arange(0, len(steps), every)
  columns = reduce.reduceat(values, starts, axis=1)
  middles = np.minimum(starts + every // 2, len(steps) - 1)
  return steps[middles], columns, every


def _place(dot: str) -> tuple[int, str, int]:
  """Sorts by kind, in the order of a block's forward, then by layer."""
  layer, kind = layer_and_kind(dot)
  place = _KINDS.index(kind) if kind in _KINDS else len(_KINDS)
  return place, kind, layer


def _inert(text: str) -> str:
  """Returns text in which Plotly finds no markup of its own."""
  return html.escape(visible(text), quote=False)
