"""Figures and tables of the cells on a real model; see `study.figures`."""

import itertools
import pathlib
from collections import Counter, defaultdict
from typing import Literal

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from scipy import stats

from study import statistics
from study.arms import ARMS, DESCRIBED, PRIMARY, SECONDARY
from study.results import Run
from tools import figure_style

_PANELS = (
    ('held-out accuracy (%), as it samples', 'core', 'linear'),
    ('held-out accuracy (%), in BF16', 'bf16', 'linear'),
    (
        'k3 of rollout and training (nats)',
        'rollout_corr/k3_kl',
        'symlog',
    ),
    ('k3 of an update (nats)', 'actor/update_k3', 'log'),
    ('gradient norm', 'actor/grad_norm', 'log'),
    ('tokens an answer', 'response_length/mean', 'linear'),
)
# Steps that are one point of a curve.
_BIN = 10
# Seeds from which a mean has an interval; of fewer their range is drawn.
ENOUGH = 5
# Arms of the cells, for readers who do not know their names.
_IN_WORDS = {
    'jetrl': 'one FP8 flow',
    'bf16': 'BF16',
    'fp8_rollout': 'BF16 training, FP8 rollout',
    'flashrl': 'the same, corrected (TIS)',
}


def _points(run: Run, name: str) -> list[tuple[int, float]]:
  if name in ('core', 'bf16'):
    return [(step, 100 * value) for step, value in run.accuracy(name)]
  return run.series(name)


def mean_by_step(
    runs: list[list[tuple[int, float]]],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns (steps, mean over seeds, half width of its 95% interval).

  Args:
    runs: (step, value) of each run. Only steps that all have count; half widths
      are 0 for one run.
  """
  values = defaultdict(list)
  for points in runs:
    for step, value in points:
      values[step].append(value)
  steps = [s for s in sorted(values) if len(values[s]) == len(runs)]
  table_SR = np.array([values[s] for s in steps]).reshape(len(steps), len(runs))
  mean_S, half_S = table_SR.mean(axis=1), np.zeros(len(steps))
  if len(runs) > 1:
    error_S = table_SR.std(axis=1, ddof=1) / np.sqrt(len(runs))
    half_S = stats.t.ppf(0.975, len(runs) - 1) * error_S
  return np.array(steps), mean_S, half_S


def draw_mean(
    panel: Axes,
    runs: list[list[tuple[int, float]]],
    style: dict[str, str],
    scale: str,
    *,
    band: Literal['interval', 'range'] = 'interval',
    label: str | None = None,
) -> None:
  """Draws the mean over seeds by step, with a band.

  With a range on a logarithmic axis it is the median: one seed's peak would
  carry the mean far above all others.

  Args:
    panel: where.
    runs: (step, value) of each run; without any nothing is drawn.
    style: colour and dash.
    scale: of the y axis: 'linear', 'log' or 'symlog'.
    band: the mean's 95% interval, or the range of the seeds. Where an interval
      reaches below 0 a logarithmic axis cuts it at its own end.
    label: of the line.
  """
  steps, mean_S, half_S = mean_by_step(runs)
  if not len(steps):
    return
  line_S, low, high = mean_S, mean_S - half_S, mean_S + half_S
  if band == 'range':
    table_RS = np.array([[dict(points)[s] for s in steps] for points in runs])
    low, high = table_RS.min(axis=0), table_RS.max(axis=0)
    if scale != 'linear':
      line_S = np.median(table_RS, axis=0)
  panel.plot(steps, line_S, label=label, **style)
  panel.fill_between(steps, low, high, color=style['color'], alpha=0.15, lw=0)


def binned(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
  """Returns the means of ten steps each, at their last step.

  Lines of single steps would cover each other. Fewer steps at the end are left
  out.
  """
  bins = defaultdict(list)
  for step, value in points:
    bins[-(-step // _BIN) * _BIN].append(value)
  return [(s, sum(v) / _BIN) for s, v in bins.items() if len(v) == _BIN]


def band_of(seeds: int) -> Literal['interval', 'range']:
  """Returns the band of held-out accuracy; of few seeds an interval is wide.

  Args:
    seeds: of an arm. From five on the band is the mean's 95% interval.
  """
  return 'interval' if seeds >= ENOUGH else 'range'


def _spread(runs: list[Run]) -> str:
  """Says what lines and bands are; a single seed has no band."""
  seeds = Counter(run.arm.name for run in runs).values()
  if len({run.seed for run in runs}) == 1:
    return (
        f'one seed, so no spread is known; all but accuracy are means of {_BIN}'
        ' steps'
    )
  if max(seeds) < ENOUGH:
    least, most = min(seeds), max(seeds)
    count = f'{least} to {most}' if least < most else f'{most}'
    return (
        f'mean (on log axes median) and range of {count} seeds; all but'
        f' accuracy are means of {_BIN} steps'
    )
  less = f', of fewer than {ENOUGH} their range' * (min(seeds) < ENOUGH)
  return (
      f'mean over seeds, on log axes median;\nheld out with its 95%'
      f' interval{less}, else means of {_BIN} steps with the range of seeds'
  )


def means(runs: list[Run], output: pathlib.Path, origin: str) -> None:
  """Draws six metrics by step: the mean over seeds, with a band.

  The band is the mean's 95% interval for held-out accuracy, of arms with five
  seeds. All else is means of ten steps, and the band is the range of the seeds:
  an interval of a ratio, symmetric about the mean of three, ends below zero.
  """
  names = list(dict.fromkeys(run.arm.name for run in runs))
  style = figure_style.lines(names)
  figure, axes = plt.subplots(2, 3, figsize=(13, 7))
  for panel, (title, metric, scale) in zip(axes.flat, _PANELS, strict=True):
    for name in names:
      of = [_points(run, metric) for run in runs if run.arm.name == name]
      held_out = metric in ('core', 'bf16')
      draw_mean(
          panel,
          of if held_out else [binned(points) for points in of],
          style[name],
          scale,
          band=band_of(len(of)) if held_out else 'range',
          label=name,
      )
    if scale == 'symlog':
      panel.set_yscale('symlog', linthresh=1e-5)
      panel.set_ylim(bottom=0)
    else:
      panel.set_yscale(scale)
    panel.set_title(title)
    panel.set_xlabel('step')
  handles, labels = axes.flat[0].get_legend_handles_labels()
  figure.legend(handles, labels, loc='outside lower center', ncols=4)
  figure.suptitle(f'{origin}: {_spread(runs)}')
  figure_style.save(figure, output)


def held_out(runs: list[Run], output: pathlib.Path, origin: str) -> None:
  """Draws held-out accuracy by step with its 95% interval, and the mismatch.

  Of fewer than five seeds the range is drawn in the interval's place. For a
  reader who knows no names of arms.
  """
  names = list(dict.fromkeys(run.arm.name for run in runs))
  style = figure_style.lines(names)
  figure, (accuracy, mismatch) = plt.subplots(1, 2, figsize=(10, 4))
  for name in names:
    of = [run for run in runs if run.arm.name == name]
    flow = name.removeprefix(f'{of[0].arm.cell.name}_')
    draw_mean(
        accuracy,
        [_points(run, 'core') for run in of],
        style[name],
        'linear',
        band=band_of(len(of)),
        label=f'{_IN_WORDS.get(flow, flow)} ({len(of)} seeds)',
    )
    draw_mean(
        mismatch,
        [binned(_points(run, 'rollout_corr/k3_kl')) for run in of],
        style[name],
        'linear',
        band='range',
    )
  title = 'held-out accuracy (%): mean of seeds, 95%'
  if len(runs) < ENOUGH * len(names):
    title += f' (fewer than {ENOUGH}: range)'
  accuracy.set_title(title)
  mismatch.set_title('k3 of rollout and training (nats): mean, range')
  for panel in (accuracy, mismatch):
    panel.set_xlabel('step')
  figure.legend(loc='outside lower center', ncols=len(names))
  figure.suptitle(origin)
  figure_style.save(figure, output)


def minutes(run: Run) -> dict[int, float]:
  """Returns step -> minutes until it was over, from the start of the run.

  Tests are left out: arms with 8 bits are tested twice, in BF16 too. Of a run
  that was resumed only those minutes in which it ran.
  """
  tests = dict(run.series('timing_s/testing'))
  steps, seconds = zip(*run.series('timing_s/step'), strict=True)
  left = [
      s - tests.get(step, 0) for step, s in zip(steps, seconds, strict=True)
  ]
  return dict(zip(steps, np.cumsum(left) / 60, strict=True))


def by_time(runs: list[Run], output: pathlib.Path, origin: str) -> None:
  """Draws held-out accuracy by wall time: a thin line a seed, and their means.

  The start counts, tests do not. Only of runs that had a GPU each: of others
  the time is no time.
  """
  names = list(dict.fromkeys(run.arm.name for run in runs))
  style = figure_style.lines(names)
  figure, panel = plt.subplots(figsize=(8, 4.8))
  for name in names:
    of = [run for run in runs if run.arm.name == name]
    lines = []
    for run in of:
      at = minutes(run)
      lines.append([(at[s], value) for s, value in _points(run, 'core')])
      if len(of) > 1:
        panel.plot(*zip(*lines[-1], strict=True), **style[name], lw=0.6)
    # A run that failed has fewer evaluations.
    shortest = min(map(len, lines))
    means_SX = np.mean([line[:shortest] for line in lines], axis=0)
    panel.plot(*means_SX.T, **style[name], lw=2, label=name)
  panel.set_xlabel('minutes, with the start and without tests')
  panel.set_ylabel('held-out accuracy (%), as it samples')
  panel.legend()
  panel.set_title(f'{origin}: seeds (thin) and their mean')
  figure_style.save(figure, output)


def endpoint(run: Run) -> float | None:
  """Returns what the design compares of a run, None if it has none."""
  points = run.judged()
  if run.arm.cell.compares_final:
    return statistics.final([value for _, value in points])
  return statistics.endpoint(points)


def _endpoints(runs: list[Run], name: str) -> dict[int, float]:
  found = {run.seed: endpoint(run) for run in runs if run.arm.name == name}
  return {seed: value for seed, value in found.items() if value is not None}


def _planned(pair: tuple[str, str]) -> int:
  return len(set(ARMS[pair[0]].seeds) & set(ARMS[pair[1]].seeds))


def _said(pair, d, p_values) -> tuple[str, str]:
  """Returns the adjusted p-value and the conclusion, of a row."""
  if pair in DESCRIBED:
    return '', 'decides nothing'
  count, planned = len(d.differences), _planned(pair)
  missing = f' ({count} of {planned} pairs)' if count < planned else ''
  if pair == PRIMARY:
    return '', f'as good: {statistics.is_as_good(d, planned)}{missing}'
  p = p_values[pair]
  if missing:
    return f'{p:.2g}', f'not decided{missing}'
  return f'{p:.2g}', 'different' if p < 0.05 else 'not shown to differ'


def endpoints(
    runs: list[Run],
    output: pathlib.Path,
    origin: str,
    *,
    exploratory: bool = False,
) -> None:
  """Draws and prints the differences of the endpoint, seed by seed.

  Runs that the design has not are exploratory, and left out, unless
  `exploratory`: then nothing is decided.
  """
  if not exploratory:
    for run in runs:
      if not run.is_of_design:
        print(f'left out, exploratory: {run.arm.name} seed {run.seed}')
    runs = [run for run in runs if run.is_of_design]
  found = {}
  for pair in (PRIMARY, *SECONDARY, *DESCRIBED):
    a, b = (_endpoints(runs, name) for name in pair)
    if set(a) & set(b):
      found[pair] = statistics.paired(a, b)
  if not found:
    raise ValueError(
        'no two arms of a pair were run with the same seed, with evaluations'
        f' after step {statistics.AFTER}; --exploratory takes runs that the'
        ' design has not'
    )
  adjusted = statistics.holm(
      {pair: found[pair].p_value if pair in found else 1 for pair in SECONDARY}
  )
  print('| arm | against | seeds | difference, points | 95% | p, Holm | |')
  print('|---|---|---|---|---|---|---|')
  for pair, d in found.items():
    wide = 'one pair, no interval'
    if len(d.differences) > 1:
      wide = ' to '.join(f'{100 * x:+.1f}' for x in d.interval)
    p, word = _said(pair, d, adjusted)
    if exploratory:
      p, word = '', 'decides nothing'
    print(
        f'| {pair[0]} | {pair[1]} | {len(d.differences)} |'
        f' {100 * d.mean:+.1f} | {wide} | {p} | {word} |'
    )
  figure, panel = plt.subplots(figsize=(9, 1.4 + 0.4 * len(found)))
  finals = {ARMS[name].cell.compares_final for pair in found for name in pair}
  what = 'final accuracy' if finals == {True} else 'the endpoint'
  said = f'difference of {what} (points): circles are seeds, diamonds means'
  said += '\nwith 95% t intervals'
  if PRIMARY in found and not exploratory:
    margin = 100 * statistics.NON_INFERIORITY
    panel.axvline(-margin, color=figure_style.GREY, lw=1.2, ls='--')
    said += ', dashed the margin of the primary question'
  panel.axvline(0, color=figure_style.GREY, lw=0.8)
  for y, (pair, d) in enumerate(reversed(found.items())):
    wide = len(d.differences) > 1
    panel.errorbar(
        100 * d.mean,
        y,
        xerr=100 * d.half_width if wide else None,
        fmt='D',
        color=(
            figure_style.BLUE if pair == PRIMARY else figure_style.VERMILLION
        ),
    )
    dots = [100 * x for x in d.differences]
    # Seeds lie beside each other, so that equal ones do not hide each other.
    heights = y + 0.15 * np.linspace(-1, 1, len(dots) + 2)[1:-1]
    panel.plot(dots, heights, 'o', mfc='none', color='black', ms=6)
  labels = [f'{a} - {b}' for a, b in reversed(found)]
  panel.set_yticks(range(len(labels)), labels)
  panel.set_ylim(-0.6, len(labels) - 0.4)
  figure_style.without_grid(panel, along='y')
  panel.set_xlabel(said)
  panel.set_title(origin)
  figure_style.save(figure, output)


def k3(runs: list[Run], output: pathlib.Path, origin: str) -> None:
  """Draws the endpoint over the median k3 of rollout and training."""
  names = list(dict.fromkeys(run.arm.name for run in runs))
  style = figure_style.lines(names)
  figure, panel = plt.subplots(figsize=(7, 4.5))
  # Hollow, so that arms without a mismatch do not hide each other.
  for name, marker in zip(names, itertools.cycle('osD^vP'), strict=False):
    points = []
    for run in runs:
      value = endpoint(run)
      if run.arm.name == name and value is not None:
        measured = [v for _, v in run.series('rollout_corr/k3_kl')]
        points.append((float(np.median(measured)), 100 * value))
    if points:
      x, y = zip(*points, strict=True)
      color = style[name]['color']
      panel.plot(x, y, marker, color=color, mfc='none', mew=2, ms=8, label=name)
  panel.set_xlabel('k3 of rollout and training (nats), median of the steps')
  panel.set_ylabel('endpoint: accuracy (%)')
  panel.legend()
  panel.set_title(origin)
  figure_style.save(figure, output)
