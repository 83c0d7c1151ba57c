"""Figures and tables of the cells on a real model; see `study.figures`."""

import pathlib
from collections import defaultdict

import matplotlib

matplotlib.use('Agg')
import matplotlib.pyplot as plt
import numpy as np
from scipy import stats

from study import statistics
from study.arms import PRIMARY, SECONDARY
from study.results import Run

# Okabe and Ito's colours, which colour-blind readers tell apart, and a dash for
# each: the figure is readable in grey as well.
_COLORS = (
    *('#0072B2', '#000000', '#D55E00', '#E69F00'),
    *('#56B4E9', '#CC79A7', '#009E73', '#7F7F7F'),
)
_DASHES = ('-', '-', '--', '-.', ':', '--', '-.', ':')
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


def _style(names: list[str]) -> dict[str, dict]:
  return {
      name: {'color': _COLORS[i % 8], 'ls': _DASHES[i % 8]}
      for i, name in enumerate(names)
  }


def _points(run: Run, name: str) -> list[tuple[int, float]]:
  if name in ('core', 'bf16'):
    return [(step, 100 * value) for step, value in run.accuracy(name)]
  return run.series(name)


def mean_by_step(
    runs: list[Run], name: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns (steps, mean over seeds, half width of its 95% interval).

  Only steps that every run has; half widths are 0 for one run.
  """
  values = defaultdict(list)
  for run in runs:
    for step, value in _points(run, name):
      values[step].append(value)
  steps = [s for s in sorted(values) if len(values[s]) == len(runs)]
  table_SR = np.array([values[s] for s in steps]).reshape(len(steps), len(runs))
  mean_S, half_S = table_SR.mean(axis=1), np.zeros(len(steps))
  if len(runs) > 1:
    error_S = table_SR.std(axis=1, ddof=1) / np.sqrt(len(runs))
    half_S = stats.t.ppf(0.975, len(runs) - 1) * error_S
  return np.array(steps), mean_S, half_S


def means(runs: list[Run], output: pathlib.Path, origin: str) -> None:
  """Draws six metrics by step: mean over seeds, and its 95% interval."""
  names = list(dict.fromkeys(run.arm.name for run in runs))
  style = _style(names)
  figure, axes = plt.subplots(2, 3, figsize=(13, 7), layout='constrained')
  for panel, (title, metric, scale) in zip(axes.flat, _PANELS, strict=True):
    for name in names:
      of = [run for run in runs if run.arm.name == name]
      steps, mean_S, half_S = mean_by_step(of, metric)
      if not len(steps):
        continue
      panel.plot(steps, mean_S, lw=1.5, label=name, **style[name])
      color = style[name]['color']
      low, high = mean_S - half_S, mean_S + half_S
      if scale == 'log':
        low = np.maximum(low, mean_S / 10)
      elif scale == 'symlog':
        low = np.maximum(low, 0)
      panel.fill_between(steps, low, high, color=color, alpha=0.15, lw=0)
    if scale == 'symlog':
      panel.set_yscale('symlog', linthresh=1e-5)
      panel.set_ylim(bottom=0)
    else:
      panel.set_yscale(scale)
    panel.set_title(title, fontsize=10)
    panel.set_xlabel('step', fontsize=9)
    panel.grid(alpha=0.3)
  handles, labels = axes.flat[0].get_legend_handles_labels()
  figure.legend(handles, labels, loc='outside lower center', ncols=4)
  figure.suptitle(f'{origin}: mean over seeds, 95% interval', fontsize=10)
  figure.savefig(output, dpi=110)


def _endpoints(runs: list[Run], name: str) -> dict[int, float]:
  found = {
      run.seed: statistics.endpoint(run.accuracy())
      for run in runs
      if run.arm.name == name
  }
  return {seed: value for seed, value in found.items() if value is not None}


def endpoints(runs: list[Run], output: pathlib.Path, origin: str) -> None:
  """Draws and prints the differences of the endpoint, seed by seed."""
  found = {}
  for pair in (PRIMARY, *SECONDARY):
    a, b = (_endpoints(runs, name) for name in pair)
    if set(a) & set(b):
      found[pair] = statistics.paired(a, b)
  if not found:
    raise ValueError(
        'no two arms of a pair were run with the same seed, with evaluations'
        f' after step {statistics.AFTER}'
    )
  adjusted = statistics.holm(
      {pair: d.p_value for pair, d in found.items() if pair != PRIMARY}
  )
  print('| arm | against | seeds | difference, points | 95% | p, Holm | |')
  print('|---|---|---|---|---|---|---|')
  for pair, d in found.items():
    low, high = (f'{100 * x:+.1f}' for x in d.interval)
    if pair == PRIMARY:
      p, word = '', f'as good: {statistics.is_as_good(d)}'
    else:
      p = f'{adjusted[pair]:.2g}'
      word = 'different' if adjusted[pair] < 0.05 else 'not shown to differ'
    print(
        f'| {pair[0]} | {pair[1]} | {len(d.differences)} |'
        f' {100 * d.mean:+.1f} | {low} to {high} | {p} | {word} |'
    )
  figure, panel = plt.subplots(
      figsize=(9, 1.4 + 0.4 * len(found)), layout='constrained'
  )
  margin = 100 * statistics.NON_INFERIORITY
  panel.axvspan(-margin, margin, color='gray', alpha=0.15)
  panel.axvline(0, color='gray', lw=0.8)
  for y, (pair, d) in enumerate(reversed(found.items())):
    wide = len(d.differences) > 1
    panel.errorbar(
        100 * d.mean,
        y,
        xerr=100 * d.half_width if wide else None,
        fmt='D',
        color=_COLORS[0] if pair == PRIMARY else _COLORS[2],
        capsize=3,
    )
    dots = [100 * x for x in d.differences]
    panel.plot(dots, [y] * len(dots), 'o', mfc='none', color='black', ms=6)
  labels = [f'{a} - {b}' for a, b in reversed(found)]
  panel.set_yticks(range(len(labels)), labels, fontsize=8)
  panel.set_xlabel(
      f'difference of mean accuracy after step {statistics.AFTER} (points):'
      '\ncircles are seeds, diamonds means with 95% t intervals, gray the'
      ' margin'
  )
  panel.set_title(origin, fontsize=9)
  figure.savefig(output, dpi=110)


def k3(runs: list[Run], output: pathlib.Path, origin: str) -> None:
  """Draws the endpoint over the median k3 of rollout and training."""
  names = list(dict.fromkeys(run.arm.name for run in runs))
  style = _style(names)
  figure, panel = plt.subplots(figsize=(7, 4.5), layout='constrained')
  for name in names:
    points = []
    for run in runs:
      value = statistics.endpoint(run.accuracy())
      if run.arm.name == name and value is not None:
        measured = [v for _, v in run.series('rollout_corr/k3_kl')]
        points.append((max(float(np.median(measured)), 1e-8), 100 * value))
    if points:
      x, y = zip(*points, strict=True)
      panel.plot(x, y, 'o', color=style[name]['color'], ms=7, label=name)
  panel.set_xscale('log')
  panel.set_xlim(3e-9, 1)
  panel.set_xlabel('k3 of rollout and training (nats), median; 0 at 1e-8')
  panel.set_ylabel(f'mean accuracy after step {statistics.AFTER} (%)')
  panel.grid(alpha=0.3)
  panel.legend(fontsize=8)
  panel.set_title(origin, fontsize=9)
  figure.savefig(output, dpi=110)
