"""Line and area charts as inline SVG, with the data of their read-outs.

A chart is drawn whole without any script; the script adds a cursor and the
values under it. Long series are thinned to the smallest and largest value of
each stretch, so that no spike is lost.
"""

import dataclasses
from typing import Any

import numpy as np

from jetrl_jax.report.axes import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Axis,
    grid,
    step_axis,
    value_axis,
)
from jetrl_jax.report.text import escape, number, steps_text

_MAX_POINTS = 400
# Colours that the style sheet has; later lines are dashed.
_COLORS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
  """One curve.

  Attributes:
    label: in the legend.
    color: 0, 1, ...: which colour of the style sheet.
    steps: int64 [n].
    values: float64 [n]; NaN is a gap.
    band: float64 [2, n]: lower and upper edge of a band around the curve.
  """

  label: str
  color: int
  steps: np.ndarray
  values: np.ndarray
  band: np.ndarray | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chart:
  """A drawn chart or heat map.

  Attributes:
    html: the figure.
    data: what the script reads; JSON values.
  """

  html: str
  data: dict[str, Any]


def line_chart(
    title: str,
    lines: list[Line],
    *,
    unit: str = '',
    log: bool = False,
    smooth: bool = False,
    note: str = '',
) -> Chart:
  """Draws curves over steps.

  Args:
    title: heading.
    lines: curves with at least one finite value.
    unit: of all of them, see `report_text.number`.
    log: use a logarithmic axis where all values are positive and spread over
      more than a factor of 30.
    smooth: draw a moving average over each curve of 40 values or more.
    note: a sentence below.
  """
  thin = [thinned(line) for line in lines]
  x = step_axis(np.concatenate([line.steps for line in thin]))
  y = value_axis(_all_values(thin), log)
  notes = [note, _gap_note(lines)]
  # One window for all: averages over different stretches do not compare.
  longest = max(len(line.steps) for line in lines)
  width = longest // 10 | 1
  marks = []
  for line, whole in zip(thin, lines, strict=True):
    marks.append(_band(line, x, y))
    window = width if smooth and len(whole.steps) >= 40 else 0
    style = f'line {color_class(line.color)}'
    faint = ' faint' if window else ''
    marks.append(f'<path class="{style}{faint}" d="{_path(line, x, y)}"/>')
    if window:
      average = thinned(moving_average(whole, window))
      marks.append(f'<path class="{style}" d="{_path(average, x, y)}"/>')
      notes.append(f'Bold: mean of {window} steps.')
  shown = _beside_numbers(unit)
  body = grid(x, y, shown) + ''.join(marks)
  data = {
      'x': [x.low, x.high],
      'y': [y.low, y.high],
      'log': y.log,
      'unit': shown,
      'lines': [_readout(line) for line in thin],
  }
  labels = [(line.label, _last(line, shown), line.color) for line in lines]
  ends = {int(line.steps[-1]) for line in lines}
  at = f'step {ends.pop()}' if len(ends) == 1 else 'last steps'
  if len(lines) == 1 and (band := thin[0].band) is not None:
    at += f', {" to ".join(number(float(e), shown) for e in band[:, -1])}'
  notes = list(dict.fromkeys(filter(None, notes)))
  return Chart(
      html=figure(_titled(title, unit), at, body, labels, notes), data=data
  )


def still(lines: list[Line], unit: str) -> str:
  """Returns '5e-5 at all 60 steps' where no curve moves, else ''.

  A sentence says that better than a picture of nothing. A curve with a band is
  worth drawing: the band moves.
  """
  values = np.concatenate([line.values for line in lines])
  if len(values) < 2 or not (values == values[0]).all():  # A NaN is a gap.
    return ''
  if any(line.band is not None for line in lines):
    return ''
  counts = {len(line.steps) for line in lines}
  steps = steps_text(counts.pop()) if len(counts) == 1 else 'steps'
  value = 'exactly 0' if values[0] == 0 else number(float(values[0]), unit)
  return f'{value} at all {steps}'


def area_chart(
    title: str, layers: list[Line], *, unit: str = '', note: str = ''
) -> Chart:
  """Draws layers on top of each other; all have the same steps.

  A few steps that dwarf the others (those that compile) are cut off, and the
  note says so.
  """
  steps = layers[0].steps
  stacked = np.stack([np.nan_to_num(layer.values) for layer in layers])
  totals = stacked.sum(axis=0)
  top, cut = _cut_off(totals)
  if cut.any():
    said = ', '.join(
        f'step {step}: {number(total, unit)}'
        for step, total in list(zip(steps[cut], totals[cut], strict=True))[:3]
    )
    note = f'{note} Cut off: {said}{" ..." if cut.sum() > 3 else ""}.'.strip()
  steps, stacked = _bucket_means(steps, stacked)
  x = step_axis(steps)
  y = Axis(low=0.0, high=top, start=BOTTOM, end=TOP)
  edges = np.cumsum(np.vstack([np.zeros(len(steps)), stacked]), axis=0)
  marks = []
  for i, layer in enumerate(layers):
    upper = _points(steps, edges[i + 1], x, y)
    lower = _points(steps[::-1], edges[i][::-1], x, y)
    if len(steps) == 1:  # One step: a bar as wide as the plot.
      upper = f'{LEFT} {upper.split()[1]} {RIGHT} {upper.split()[1]}'
      lower = f'{RIGHT} {lower.split()[1]} {LEFT} {lower.split()[1]}'
    style = f'area {color_class(layer.color)}'
    marks.append(f'<path class="{style}" d="M{upper} {lower}Z"/>')
  shown = _beside_numbers(unit)
  data = {
      'x': [x.low, x.high],
      'y': [y.low, y.high],
      'log': False,
      'unit': shown,
      'stacked': True,
      'lines': [
          {'x': steps.tolist(), 'y': list(map(_short, values))}
          for values in stacked
      ],
  }
  labels = [(one.label, _last(one, shown), one.color) for one in layers]
  body = ''.join(marks) + grid(x, y, shown)
  at = f'step {steps[-1]}'
  html = figure(_titled(title, unit), at, body, labels, [note])
  return Chart(html=html, data=data)


def figure(
    title: str,
    at: str,
    body: str,
    labels: list[tuple[str, str, int]],
    notes: list[str],
) -> str:
  """Returns a card: heading, legend with values, drawing, notes.

  Args:
    title: heading.
    at: what the values of the legend are of: the last step.
    body: SVG.
    labels: of each curve, its label, last value and colour.
    notes: sentences below.
  """
  legend = ''.join(
      f'<li><i class="swatch {color_class(color)}"></i>{escape(label)}'
      f' <b>{escape(value)}</b></li>'
      for label, value, color in labels
  )
  below = ''.join(f'<p class="note">{escape(n)}</p>' for n in notes if n)
  spoken = '; '.join(f'{label}: last {value}' for label, value, _ in labels)
  return (
      f'<figure class="card chart"><figcaption><h3>{escape(title)}</h3>'
      f'<span class="at">{escape(at)}</span><ul>{legend}</ul></figcaption>'
      f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" tabindex="0" role="img"'
      f' aria-label="{escape(title)}. {escape(spoken)}">{body}'
      f'<g class="cursor"></g></svg>{below}</figure>'
  )


def thinned(line: Line) -> Line:
  """Keeps the smallest and the largest value of each stretch of steps."""
  count = len(line.steps)
  if count <= _MAX_POINTS:
    return line
  kept = {0, count - 1}
  for part in np.array_split(np.arange(count), _MAX_POINTS // 2):
    values = line.values[part]
    if np.isfinite(values).any():
      kept |= {
          int(part[np.nanargmin(values)]),
          int(part[np.nanargmax(values)]),
      }
    # A gap stays a gap.
    kept |= set(part[~np.isfinite(values)][:1].tolist())
  index = np.asarray(sorted(kept))
  return dataclasses.replace(
      line,
      steps=line.steps[index],
      values=line.values[index],
      band=None if line.band is None else line.band[:, index],
  )


def moving_average(line: Line, window: int) -> Line:
  """Returns the centred mean over `window` values, NaN left out."""
  good = np.isfinite(line.values)
  # Not convolve's 'same', which is as long as the window where that is longer.
  centred = slice(window // 2, window // 2 + len(good))
  ones = np.ones(window)
  sums = np.convolve(np.where(good, line.values, 0.0), ones)[centred]
  counts = np.convolve(good.astype(np.float64), ones)[centred]
  values = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
  return dataclasses.replace(line, values=values, band=None)


def color_class(i: int) -> str:
  """Returns the classes of a curve's colour in the style sheet."""
  return f'c{i % _COLORS}' + (' dashed' if i >= _COLORS else '')


def _all_values(lines: list[Line]) -> np.ndarray:
  bands = [line.band.ravel() for line in lines if line.band is not None]
  return np.concatenate([*(line.values for line in lines), *bands])


def _cut_off(totals: np.ndarray) -> tuple[float, np.ndarray]:
  """Returns the top of the axis, and which steps reach above it."""
  usual = float(np.quantile(totals, 0.9)) if len(totals) > 4 else 0.0
  usual = usual or float(np.median(totals))
  if usual > 0 and totals.max() > 3 * usual:
    top = 1.3 * float(totals[totals <= 3 * usual].max())
    return top, totals > top
  return 1.05 * float(totals.max()) or 1.0, np.zeros(len(totals), bool)


def _bucket_means(
    steps: np.ndarray, stacked: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  if len(steps) <= _MAX_POINTS:
    return steps, stacked
  parts = np.array_split(np.arange(len(steps)), _MAX_POINTS)
  means = np.stack([stacked[:, part].mean(axis=1) for part in parts], axis=1)
  return np.asarray([steps[part[-1]] for part in parts]), means


def _points(steps, values, x: Axis, y: Axis) -> str:
  return ' '.join(
      f'{x.place(float(s)):.1f} {y.place(float(v)):.1f}'
      for s, v in zip(steps, values, strict=True)
  )


def _path(line: Line, x: Axis, y: Axis) -> str:
  """Returns the path's commands; a single point is a short dash."""
  parts: list[list[str]] = [[]]
  for step, value in zip(line.steps, line.values, strict=True):
    if np.isfinite(value):
      point = f'{x.place(float(step)):.1f} {y.place(float(value)):.1f}'
      parts[-1].append(point)
    elif parts[-1]:
      parts.append([])
  return ''.join(
      f'M{"L".join(points)}' if len(points) > 1 else f'M{points[0]}h.1'
      for points in parts
      if points
  )


def _band(line: Line, x: Axis, y: Axis) -> str:
  if line.band is None:
    return ''
  good = np.isfinite(line.band).all(axis=0)
  if good.sum() < 2:
    return ''
  steps, (low, high) = line.steps[good], line.band[:, good]
  upper = _points(steps, high, x, y)
  lower = _points(steps[::-1], low[::-1], x, y)
  return f'<path class="band c{line.color % _COLORS}" d="M{upper} {lower}Z"/>'


def _gap_note(lines: list[Line]) -> str:
  gaps = sum(int((~np.isfinite(line.values)).sum()) for line in lines)
  return f'{gaps} values were not finite and are left out.' if gaps else ''


def _last(line: Line, unit: str) -> str:
  finite = line.values[np.isfinite(line.values)]
  return number(float(finite[-1]), unit) if finite.size else '–'


def _beside_numbers(unit: str) -> str:
  """Returns the unit if it is '%'; any other is in the title."""
  return unit if unit == '%' else ''


def _titled(title: str, unit: str) -> str:
  return f'{title}, {unit}' if unit and unit != '%' else title


def _readout(line: Line) -> dict[str, list]:
  data = {'x': line.steps.tolist(), 'y': list(map(_short, line.values))}
  if line.band is not None:
    data['low'], data['high'] = (list(map(_short, e)) for e in line.band)
  return data


def _short(value: float) -> float | None:
  return float(f'{value:.4g}') if np.isfinite(value) else None
