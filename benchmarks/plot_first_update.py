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

_RESULTS = pathlib.Path(__file__).parent / 'results'
_FIGURE = pathlib.Path(__file__).parents[1] / 'docs' / 'first_update.png'
# Okabe and Ito's colours, which colour-blind readers tell apart.
_ARMS = {
    'p2_centre': ('E4M3, power-of-two scales, masters as stored', '#d55e00'),
    'amax_centre': ('E4M3, scales amax/448, masters as stored', '#e69f00'),
    'p2_spread': ('E4M3, power-of-two scales, masters spread', '#0072b2'),
    'bf16': ('BF16', '#444444'),
}


def records(pattern: str = 'first_update_*.jsonl') -> list[dict]:
  """Returns the lines of the newest result file."""
  newest = sorted(_RESULTS.glob(pattern))[-1]
  return [json.loads(line) for line in newest.read_text().splitlines()]


def _draw_ties(axes: plt.Axes) -> None:
  """Three E4M3 values, the bfloat16 grid between them, and one update."""
  master = np.linspace(1.0, 1.25, 2001).astype(np.float32)
  codes = master.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
  axes.plot(master, codes, color='#0072b2', label='E4M3 value that dots read')
  stored = np.arange(1.0, 1.2501, 2.0**-7).astype(np.float32)
  axes.plot(
      stored,
      stored.astype(ml_dtypes.float8_e4m3fn).astype(np.float32),
      'o',
      markersize=4,
      color='#444444',
      label='values that bfloat16 holds',
  )
  for tie, sign in ((1.0625, 1), (1.1875, -1)):
    at = float(np.float32(tie).astype(ml_dtypes.float8_e4m3fn))
    to = at + sign * 0.125
    axes.plot(tie, at, 'o', markersize=9, color='#d55e00')
    axes.annotate(
        '',
        (tie + sign * 0.006, to),
        (tie, at),
        arrowprops={'arrowstyle': '->', 'color': '#d55e00', 'lw': 2},
    )
  axes.plot(
      [],
      [],
      'o-',
      color='#d55e00',
      label='tie (1 of 16), and where the smallest update takes it',
  )
  axes.set_xlabel('master weight / scale')
  axes.set_ylabel('E4M3 weight / scale')
  axes.legend(loc='upper left', fontsize=8)
  axes.set_title('A sixteenth of bfloat16 weights lies on a tie', fontsize=10)


def _draw_distances(axes: plt.Axes) -> None:
  """k3 of each update: every seed, and their mean."""
  lines = records()
  for arm, (label, color) in _ARMS.items():
    seeds = {}
    for line in lines:
      name, _, seed = line['arm'].rpartition('_s')
      if name == arm and 'actor/update_k3' in line:
        seeds.setdefault(seed, {})[line['step']] = line['actor/update_k3']
    if not seeds:
      continue
    steps = sorted(set.intersection(*(set(found) for found in seeds.values())))
    values = np.array([[f[step] for step in steps] for f in seeds.values()])
    for row in values:
      axes.plot(steps, row, '.', color=color, alpha=0.5)
    axes.plot(steps, values.mean(axis=0), color=color, label=label)
  axes.set_yscale('log')
  axes.set_xlabel('training step (one update each)')
  axes.set_ylabel('k3 of the policy, before to after (nats a token)')
  axes.legend(fontsize=8)
  axes.set_title(
      'Qwen2.5-Coder-0.5B, GSM8K, lr 2e-6, 2 or 3 seeds', fontsize=10
  )


def main() -> None:
  """Writes the figure."""
  figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
  _draw_ties(left)
  _draw_distances(right)
  for axes in (left, right):
    axes.grid(alpha=0.3)
  figure.tight_layout()
  figure.savefig(_FIGURE, dpi=130)


if __name__ == '__main__':
  main()
