"""Draws accuracy by time beside TRL: python -m benchmarks.plot_race.

Reads the newest benchmarks/results/race_beside_trl_*.json, writes docs/race.png
and prints what its table in docs/comparison.md says. Of a race of your own:

    python -m benchmarks.plot_race --race=RACE.json --output=RACE.png

RACE.json is of `race.py`.
"""

import argparse
import json
import pathlib
import statistics

import matplotlib.pyplot as plt

from jetrl_jax.core.files import user_path
from tools import command, figure_style

_RESULTS = pathlib.Path(__file__).parent / 'results'
_NAMES = {
    'jetrl': 'here, FP8',
    'bf16': 'here, BF16',
    'trl': 'TRL with vLLM, BF16',
}
# Percent held out that the race is to.
GOAL = 35


def newest() -> pathlib.Path:
  """Returns the last recorded race, by the date in its name."""
  files = _RESULTS.glob('race_beside_trl_*.json')
  return max(files, key=lambda file: file.stem.rpartition('_')[2])


def read(file: pathlib.Path | None = None) -> dict[str, list[dict]]:
  """Returns system -> lines, of a file of `race.py`; None: the newest."""
  return json.loads((file or newest()).read_text(encoding='utf-8'))


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


@command.in_one_sentence
def main() -> None:
  """Draws and prints."""
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--race', type=user_path)
  output = pathlib.Path('docs/race.png')
  parser.add_argument('--output', type=user_path, default=output)
  flags = parser.parse_args()
  figure_style.use()
  found = read(flags.race)
  (device,) = {line['device'] for line in found['trl'] if 'device' in line}
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
    passed = [row for row in points if row[2] >= GOAL]
    after = 'not reached'
    if passed:
      step, seconds, _ = passed[0]
      after = f'after {seconds:.0f} s (step {step})'
    pace = seconds_a_step(found[name], last)
    print(f'{shown}: {pace:.2f} s a step, {GOAL}% {after}')
  panel.axhline(GOAL, color=figure_style.GREY, lw=0.8)
  panel.set_xlabel('minutes since the start of the process')
  panel.set_ylabel('GSM8K, held out, greedy (%)')
  panel.set_title(
      f'Qwen2.5-Coder-0.5B-Instruct, one {device.removeprefix("NVIDIA ")} each,'
      ' one seed, a point every 20 steps'
  )
  panel.legend()
  figure_style.save(figure, flags.output)


if __name__ == '__main__':
  main()
