"""Draws the quickstart's curves: python -m benchmarks.plot_quickstart.

Reads benchmarks/results/quickstart_seed*.jsonl and writes docs/quickstart.png.
"""

import json
import pathlib

import matplotlib.pyplot as plt

_HELD_OUT = 'val-core/heldout/acc/mean@1'


def main() -> None:
  """Draws held-out accuracy and training score of every seed."""
  figure, axes = plt.subplots(figsize=(7, 3.6), layout='constrained')
  files = sorted(pathlib.Path('benchmarks/results').glob('quickstart_seed*'))
  for color, file in zip(('#1b6ca8', '#c8553d', '#3c8d53'), files, strict=True):
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    seed = file.name.removeprefix('quickstart_seed')[0]
    held = [(r['step'], 100 * r[_HELD_OUT]) for r in rows if _HELD_OUT in r]
    # Files until 2026-11 have accuracy under the score's name.
    name = 'critic/acc/mean'
    name = name if name in rows[1] else 'critic/score/mean'
    score = [(r['step'], 100 * r[name]) for r in rows[1:]]
    axes.plot(*zip(*score, strict=True), color=color, alpha=0.25, lw=1)
    axes.plot(
        *zip(*held, strict=True), color=color, marker='o', label=f'seed {seed}'
    )
  axes.set_xlabel('training step (16 prompts x 8 samples)')
  axes.set_ylabel('accuracy (%)')
  axes.set_title(
      'Quickstart: held-out, greedy (marked); training samples (faint)',
      fontsize=10,
  )
  axes.set_ylim(0, 100)
  axes.grid(alpha=0.3)
  axes.legend(frameon=False, loc='lower right')
  figure.savefig('docs/quickstart.png', dpi=130)


if __name__ == '__main__':
  main()
