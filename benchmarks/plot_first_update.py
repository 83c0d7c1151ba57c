"""Draws the first update: python -m benchmarks.plot_first_update.

Left, by formula: a weight's E4M3 value against its master under a power-of-two
scale, with the bfloat16 values that a checkpoint can hold. Right, measured:
the distance of each update of runs from a real checkpoint, from
benchmarks/results/first_update_*.jsonl. Writes docs/first_update.png.
"""

import json
import pathlib

import matplotlib.pyplot as plt
import ml_dtypes
import numpy as np

from tools import figure_style

_RESULTS = pathlib.Path(__file__).parent / 'results'
_FIGURE = pathlib.Path(__file__).parents[1] / 'docs' / 'first_update.png'
_ARMS = {
    'p2_centre': 'E4M3, power-of-two scales, masters as stored',
    'amax_centre': 'E4M3, scales amax/448, masters as stored',
    'p2_spread': 'E4M3, power-of-two scales, masters spread',
    'bf16': 'BF16',
}
_STYLE = {
    'p2_centre': {'color': figure_style.VERMILLION, 'ls': '--'},
    'amax_centre': {'color': figure_style.ORANGE, 'ls': '-.'},
    'p2_spread': {'color': figure_style.BLUE, 'ls': '-'},
    'bf16': {'color': figure_style.BLACK, 'ls': ':'},
}


def records() -> list[dict]:
  """Returns the lines of all result files: an arm's seeds are in several."""
  files = sorted(_RESULTS.glob('first_update_*.jsonl'))
  return [
      json.loads(x) for file in files for x in file.read_text().splitlines()
  ]


def _draw_ties(axes: plt.Axes) -> None:
  """Three E4M3 values, the bfloat16 grid between them, and one update."""
  master = np.linspace(1.0, 1.25, 2001).astype(np.float32)
  codes = master.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
  blue, tied = figure_style.BLUE, figure_style.VERMILLION
  axes.plot(master, codes, color=blue, label='E4M3 value that dots read')
  stored = np.arange(1.0, 1.2501, 2.0**-7).astype(np.float32)
  axes.plot(
      stored,
      stored.astype(ml_dtypes.float8_e4m3fn).astype(np.float32),
      'o',
      markersize=4,
      color=figure_style.BLACK,
      label='values that bfloat16 holds',
  )
  for tie, sign in ((1.0625, 1), (1.1875, -1)):
    at = float(np.float32(tie).astype(ml_dtypes.float8_e4m3fn))
    to = at + sign * 0.125
    axes.plot(tie, at, 'o', markersize=9, color=tied)
    axes.annotate(
        '',
        (tie + sign * 0.006, to),
        (tie, at),
        arrowprops={'arrowstyle': '->', 'color': tied, 'lw': 2},
    )
  axes.plot(
      [],
      [],
      'o-',
      color=tied,
      label='tie (1 of 16), and where the smallest update takes it',
  )
  axes.set_xlabel('master weight / scale')
  axes.set_ylabel('E4M3 weight / scale')
  axes.legend(loc='upper left')
  axes.set_title('A sixteenth of bfloat16 weights lies on a tie')


def _draw_distances(axes: plt.Axes) -> None:
  """k3 of each update: every seed, their mean and their range."""
  lines = records()
  for arm, label in _ARMS.items():
    seeds = {}
    for line in lines:
      name, _, seed = line['arm'].rpartition('_s')
      if name == arm and 'actor/update_k3' in line:
        seeds.setdefault(seed, {})[line['step']] = line['actor/update_k3']
    if not seeds:
      continue
    steps = sorted(set.intersection(*(set(found) for found in seeds.values())))
    values = np.array([[f[step] for step in steps] for f in seeds.values()])
    color = _STYLE[arm]['color']
    for row in values:
      axes.plot(steps, row, '.', color=color, alpha=0.5)
    ends = values.min(axis=0), values.max(axis=0)
    axes.fill_between(steps, *ends, color=color, alpha=0.15, lw=0)
    label = f'{label} ({len(values)} seeds)'
    axes.plot(steps, values.mean(axis=0), label=label, **_STYLE[arm])
  axes.set_yscale('log')
  axes.set_xlabel('training step (one update each)')
  axes.set_ylabel('k3 of the policy, before to after (nats a token)')
  axes.set_ylim(top=5)
  axes.legend(loc='upper right')
  axes.set_title(
      'Qwen2.5-Coder-0.5B, GSM8K, lr 2e-6: mean and range of the seeds'
  )


def main() -> None:
  """Writes the figure."""
  figure_style.use()
  figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.4))
  _draw_ties(left)
  _draw_distances(right)
  figure_style.save(figure, _FIGURE)


if __name__ == '__main__':
  main()
