"""Draws the study's figures and prints its tables from committed metrics.

    python -m study.figures curves --results FOLDER --arms=2x2 --output=a.png
    python -m study.figures pairs --results FOLDER --output=b.png
    python -m study.figures control --results FOLDER MORE --output=c.png
    python -m study.figures means --results FOLDER --output=d.png
    python -m study.figures held_out --results FOLDER --output=h.png
    python -m study.figures time --results FOLDER --output=t.png
    python -m study.figures endpoints --results FOLDER --output=e.png
    python -m study.figures k3 --results FOLDER --output=f.png

FOLDER is what `study.results` wrote; the runs of several are drawn together.
curves: every metric over the steps, a line per seed, and a table of the arms.
pairs: differences of final accuracy seed by seed, with 95% intervals, and a
table of them. control: final accuracy over the measured mismatch, with the
range of k3 that papers report marked. Both take finished runs only, and so do
the figures of the cells on a real model (docs/study.md): means over seeds by
step, accuracy by wall time, the endpoint's differences with the answers to the
design's questions, and the endpoint over k3. held_out is the short form of
means: accuracy and mismatch, with arms in words.
"""

import argparse
import pathlib
import statistics as numbers
from collections import Counter

import matplotlib.pyplot as plt
from matplotlib.lines import Line2D

from jetrl_jax.core.files import user_path
from study import cell_figures, statistics
from study.arms import BITS, PAIRS, named
from study.results import Run, read
from tools import command, figure_style

# k3 of dense models in the papers of docs/flows.md.
REPORTED_K3 = (1e-5, 1e-3)
_PANELS = (
    ('held-out accuracy (%), as it samples', 'core', 'linear'),
    ('held-out accuracy (%), in BF16', 'bf16', 'linear'),
    ('accuracy of the training samples (%)', 'train', 'linear'),
    (
        'mismatch: mean |log-prob difference| (nats)',
        'training/rollout_logprob_diff_mean',
        'symlog',
    ),
    ('entropy (nats)', 'actor/entropy', 'linear'),
    ('tokens clipped (%)', 'actor/pg_clipfrac', 'linear'),
    (
        'effective sample size (%)',
        'rollout_corr/rollout_is_eff_sample_size',
        'linear',
    ),
    ('gradient norm', 'actor/grad_norm', 'log'),
    ('8-bit weight bytes that an update changes (%)', 'changed', 'linear'),
)


def series(
    run: Run, name: str, *, in_percent: bool = False
) -> list[tuple[int, float]]:
  """Returns (step, value) of a panel."""
  found = _as_written(run, name)
  return [(step, 100 * value) for step, value in found] if in_percent else found


def _as_written(run: Run, name: str) -> list[tuple[int, float]]:
  if name in ('core', 'bf16'):
    return run.accuracy(name)
  if name == 'train':
    # Until 2026-11 accuracy had the name that the score has.
    return run.series('critic/acc/mean') or run.series('critic/score/mean')
  if name == 'changed':
    side = 'rollout_fp8' if run.arm.is_mixed else 'fp8'
    return run.series(f'{side}/changed_weight_bytes/mean')
  return run.series(name)


def curves(runs: list[Run], output: pathlib.Path) -> None:
  """Draws nine metrics over the steps: the mean over seeds, with a band.

  The band is the mean's 95% interval for held-out accuracy, of arms with five
  seeds, and else the range of the seeds. The seeds of held-out accuracy are
  thin lines too. A collapse is a cross.
  """
  figure, axes = plt.subplots(3, 3, figsize=(13, 9))
  names = list(dict.fromkeys(run.arm.name for run in runs))
  style = figure_style.lines(names)
  for panel, (title, name, scale) in zip(axes.flat, _PANELS, strict=True):
    percent, held_out = '(%)' in title, name in ('core', 'bf16')
    for arm in names:
      of = [run for run in runs if run.arm.name == arm]
      color = style[arm]['color']
      # A BF16 rollout has no 8-bit weights.
      found = [series(run, name, in_percent=percent) for run in of]
      band = cell_figures.band_of(len(of)) if held_out else 'range'
      cell_figures.draw_mean(panel, found, style[arm], scale, band=band)
      for points in found if held_out else ():
        steps, values = zip(*points, strict=True)
        panel.plot(steps, values, color=color, lw=0.6, alpha=0.35)
        at = statistics.collapse(values)
        if at is not None:
          panel.plot(steps[at], values[at], 'x', color='black', ms=9)
    if scale == 'symlog':
      panel.set_yscale('symlog', linthresh=1e-5)
      panel.set_ylim(bottom=0)
    else:
      panel.set_yscale(scale)
    panel.set_title(title)
    panel.set_xlabel('step')
  handles = [Line2D([], [], **style[name]) for name in names]
  figure.legend(handles, names, loc='outside lower center', ncols=6)
  figure.suptitle(f'{_origin(runs)}: {_spread(runs)}')
  figure_style.save(figure, output)


def _spread(runs: list[Run]) -> str:
  """Says what lines and bands of the curves are."""
  bands = {
      cell_figures.band_of(seeds)
      for seeds in Counter(run.arm.name for run in runs).values()
  }
  said = 'mean over seeds (on log axes median)'
  if bands == {'range'}:
    return f'{said} with their range; held out with the seeds (thin), too'
  less = f'\n(of fewer than {cell_figures.ENOUGH} seeds: range)'
  return (
      f'{said}; held out with its 95% interval{less * (len(bands) > 1)} and the'
      ' seeds (thin), else with their range'
  )


def finals(runs: list[Run], arm: str, precision: str) -> dict[int, float]:
  """Returns final accuracy by seed."""
  return {
      run.seed: statistics.final([v for _, v in run.judged(precision)])
      for run in runs
      if run.arm.name == arm
  }


def print_arms(runs: list[Run]) -> None:
  """Prints a row per arm of finished runs, final accuracies by seed."""
  print(
      "| arm | start | final, rollout's precision (%) | final, BF16 (%) | most"
      ' tokens that differ | k3, median (largest) | smallest effective sample'
      ' size | tokens clipped |'
  )
  print('|---|---|---|---|---|---|---|---|')
  for name in dict.fromkeys(run.arm.name for run in runs):
    of = [run for run in runs if run.arm.name == name]

    def values(metric, of=of):
      return [value for run in of for _, value in run.series(metric)]

    def final(precision, name=name):
      found = finals(runs, name, precision).values()
      return ', '.join(f'{100 * value:.1f}' for value in found)

    start = numbers.mean(run.accuracy()[0][1] for run in of)
    k3 = values('rollout_corr/k3_kl')
    print(
        f'| `{name}` | {start:.1%} | {final("core")} | {final("bf16")} |'
        f' {max(values("training/mismatch_token_frac")):.0%} |'
        f' {numbers.median(k3):.1e} ({max(k3):.1e}) |'
        f' {min(values("rollout_corr/rollout_is_eff_sample_size")):.2f} |'
        f' {numbers.mean(values("actor/pg_clipfrac")):.2%} |'
    )


def pairs(runs: list[Run], output: pathlib.Path) -> None:
  """Draws and prints the differences of `arms.PAIRS` that were run."""
  rows = []
  for ours, others in PAIRS:
    for precision in ('core', 'bf16'):
      a, b = (finals(runs, name, precision) for name in (ours, others))
      if set(a) & set(b):
        rows.append((ours, others, precision, statistics.paired(a, b)))
  if not rows:
    raise ValueError('no two arms of a pair were run with the same seed')
  figure, panel = plt.subplots(figsize=(9, 1.2 + 0.34 * len(rows)))
  print('| arm | against | evaluated in | difference | 95% | verdict |')
  print('|---|---|---|---|---|---|')
  for y, (_, _, precision, found) in enumerate(reversed(rows)):
    in_core = precision == 'core'
    color = figure_style.BLUE if in_core else figure_style.VERMILLION
    wide = len(found.differences) > 1
    panel.errorbar(
        100 * found.mean,
        y,
        xerr=100 * found.half_width if wide else None,
        fmt='D' if in_core else 's',
        color=color,
    )
    dots = [100 * d for d in found.differences]
    panel.plot(dots, [y] * len(dots), 'o', mfc='none', color='black', ms=6)
  for ours, others, precision, found in rows:
    low, high = (f'{100 * x:+.1f}' for x in found.interval)
    where = "rollout's" if precision == 'core' else 'BF16'
    print(
        f'| {ours} | {others} | {where} | {100 * found.mean:+.1f} |'
        f' {low} to {high} | {statistics.verdict(found)} |'
    )
  margin = 100 * statistics.MARGIN
  panel.axvspan(-margin, margin, **figure_style.SHADE)
  panel.axvline(0, color=figure_style.GREY, lw=0.8)
  labels = [
      f'{a} - {b}, in {"rollout" if p == "core" else "BF16"}'
      for a, b, p, _ in reversed(rows)
  ]
  panel.set_yticks(range(len(rows)), labels)
  panel.set_ylim(-0.6, len(rows) - 0.4)
  figure_style.without_grid(panel, along='y')
  panel.set_xlabel(
      'difference of final held-out accuracy (points): circles are seeds,'
      '\ndiamonds (in BF16: squares) means with 95% t intervals,'
      '\ngrey what is called none'
  )
  panel.set_title(_origin(runs))
  figure_style.save(figure, output)


def control(runs: list[Run], output: pathlib.Path) -> None:
  """Draws final accuracy over mismatch and k3, for the reduced bits."""
  shown = ('bf16', 'fp8_rollout', 'jetrl')
  shown += tuple(f'{side}_{b}' for b in BITS for side in ('mixed', 'unified'))
  runs = [r for r in runs if r.arm.name.removesuffix('_long') in shown]
  figure, axes = plt.subplots(1, 2, figsize=(12, 4.8))
  for panel, name, label in (
      (axes[0], 'training/rollout_logprob_diff_mean', 'mean |difference|'),
      (axes[1], 'rollout_corr/k3_kl', 'k3'),
  ):
    for run in runs:
      measured = [value for _, value in run.series(name)]
      x = numbers.median(measured) if measured else 0.0
      values = [value for _, value in run.accuracy('core')]
      panel.plot(
          max(x, 1e-8),
          100 * statistics.final(values),
          's' if run.arm.is_long else 'o',
          color=_color(run),
          mfc='none' if not run.arm.is_mixed else _color(run),
          ms=8,
      )
      if statistics.collapse(values) is not None:
        panel.plot(max(x, 1e-8), 100 * statistics.final(values), 'kx', ms=11)
    panel.set_xscale('log')
    panel.set_xlim(3e-9, 10)
    panel.set_xlabel(
        f'{label} of rollout and training (nats), median; 0 at 1e-8'
    )
    panel.set_ylabel("final held-out accuracy, rollout's precision (%)")
    panel.set_ylim(0, 100)
  axes[1].axvspan(*REPORTED_K3, **figure_style.SHADE)
  axes[1].set_title('grey: k3 that papers report of dense models')
  axes[0].set_title(f'{_origin(runs)}, a point each')
  names = sorted({run.arm.rollout for run in runs}, key=_FORMATS.index)
  handles = [
      Line2D([], [], marker='o', ls='', color=_of_format(name))
      for name in names
  ]
  handles += [
      Line2D([], [], marker=marker, ls='', color='black', mfc=face)
      for marker, face in (('o', 'black'), ('o', 'none'), ('s', 'black'))
  ]
  handles += [Line2D([], [], marker='x', ls='', color='black')]
  words = ['mixed', 'unified (open)', 'long answers (squares)', 'collapsed']
  figure.legend(handles, [*names, *words], loc='outside lower center', ncols=6)
  figure_style.save(figure, output)


_FORMATS = ('bf16', 'fp8_token', *(f'fake_{bits}' for bits in BITS))


def _color(run: Run) -> str:
  return _of_format(run.arm.rollout)


def _of_format(name: str) -> str:
  # Black is the legend's for what is no format.
  colors = [c for c in figure_style.COLORS if c != figure_style.BLACK]
  return colors[_FORMATS.index(name)]


def _origin(runs: list[Run]) -> str:
  """Says where the runs ran: a figure is read without its file's name."""
  devices = sorted({run.about['device'] for run in runs})
  steps = max(int(run.rows[-1]['step']) for run in runs)
  return f'{len(runs)} runs of up to {steps} steps on {", ".join(devices)}'


def _of_cell(draw):
  return lambda runs, output: draw(runs, output, _origin(runs))


# What takes finished runs only.
_FINISHED = {
    'pairs': pairs,
    'control': control,
    'means': _of_cell(cell_figures.means),
    'held_out': _of_cell(cell_figures.held_out),
    'time': _of_cell(cell_figures.by_time),
    'endpoints': _of_cell(cell_figures.endpoints),
    'k3': _of_cell(cell_figures.k3),
}


@command.in_one_sentence
def main() -> None:
  """Runs the command line."""
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  parser.add_argument('figure', choices=('curves', *_FINISHED))
  parser.add_argument('--results', type=user_path, required=True, nargs='+')
  parser.add_argument('--arms', default='', help='by default all')
  parser.add_argument('--output', type=user_path, required=True)
  parser.add_argument(
      '--exploratory',
      action='store_true',
      help='endpoints: with runs that the design has not; decides nothing',
  )
  flags = parser.parse_args()
  if flags.exploratory and flags.figure != 'endpoints':
    raise ValueError(
        f'--exploratory is for endpoints, not {flags.figure}, which draws all'
        ' runs'
    )
  figure_style.use()
  runs = read(*flags.results)
  if flags.arms:
    chosen = {arm.name for arm in named(flags.arms.split(','))}
    runs = [run for run in runs if run.arm.name in chosen]
  if flags.figure != 'curves':
    # A run on its way has no final accuracy. One that failed has.
    for run in runs:
      if not run.is_over:
        print(f'left out, not finished: {run.arm.name} seed {run.seed}')
      elif run.about.get('failed'):
        at = run.rows[-1]['step']
        print(f'failed at step {at}: {run.arm.name} seed {run.seed}')
    runs = [run for run in runs if run.is_over]
  else:
    print_arms([run for run in runs if run.is_over])
  if not runs:
    raise ValueError(
        f'--results has no run to draw of --arms={flags.arms or "(all)"};'
        ' python -m study.run goes on with unfinished ones'
    )
  if flags.figure == 'curves':
    curves(runs, flags.output)
  elif flags.exploratory:
    cell_figures.endpoints(runs, flags.output, _origin(runs), exploratory=True)
  else:
    _FINISHED[flags.figure](runs, flags.output)
  print(f'Wrote {flags.output}')


if __name__ == '__main__':
  main()
