"""Draws accuracy by time beside TRL: python -m benchmarks.plot_race.

Reads the newest benchmarks/results/race_beside_trl_*.json, writes docs/race.png
and prints what its table in docs/comparison.md says.
"""

import json
import pathlib
import statistics

import matplotlib.pyplot as plt

from tools import figure_style

_RESULTS = pathlib.Path(__file__).parent / 'results'
_NAMES = {
    'jetrl': 'here, FP8',
    'bf16': 'here, BF16',
    'trl': 'TRL with vLLM, BF16',
}
# Percent held out that the race is to.
GOAL = 35


def read() -> dict[str, list[dict]]:
  """Returns system -> lines, of the newest file."""
  newest = max(_RESULTS.glob('race_beside_trl_*.json'))
  return json.loads(newest.read_text(encoding='utf-8'))


def evaluations(lines: list[dict]) -> list[tuple[int, float, float]]:
  """Returns (step, seconds since the start, accuracy in percent)."""
  return [
      (line['step'], line['wall_s'], 100 * line['accuracy'])
      for line in lines
      if 'accuracy' in line
  ]


def seconds_a_step(lines: list[dict], last: int) -> float:
  """Returns the median of steps 1 to `last` that do not evaluate."""
  return statistics.median(
      line['step_time']
      for line in lines
      if 'step_time' in line
      and 'accuracy' not in line
      and 1 <= line['step'] <= last
  )


def main() -> None:
  """Draws and prints."""
  figure_style.use()
  found = read()
  last = evaluations(found['trl'])[-1][0]
  style = figure_style.lines(list(_NAMES))
  figure, panel = plt.subplots(figsize=(8, 4.2))
  for name, shown in _NAMES.items():
    points = evaluations(found[name])
    panel.plot(
        [seconds / 60 for _, seconds, _ in points],
        [accuracy for *_, accuracy in points],
        marker='o',
        label=shown,
        **style[name],
    )
    step, seconds, _ = next(row for row in points if row[2] >= GOAL)
    print(
        f'{shown}: {seconds_a_step(found[name], last):.2f} s a step, {GOAL}%'
        f' after {seconds:.0f} s (step {step})'
    )
  panel.axhline(GOAL, color=figure_style.GREY, lw=0.8)
  panel.set_xlabel('minutes since the start of the process')
  panel.set_ylabel('GSM8K, held out, greedy (%)')
  panel.set_title(
      'Qwen2.5-Coder-0.5B-Instruct, one H200 each, one seed, a point every 20'
      ' steps'
  )
  panel.legend()
  figure_style.save(figure, pathlib.Path('docs/race.png'))


if __name__ == '__main__':
  main()
