r"""Joins our runs and TRL's into the one file that `plot_race` draws.

    python -m benchmarks.race --jetrl=runs/race/runs/gsm8k_jetrl/seed3 \
        --bf16=runs/race/runs/gsm8k_bf16/seed3 --trl=OUT.jsonl \
        --output=RACE.json

Ours are workdirs of `study.run`, or files of `study.results`; OUT.jsonl is of
`grpo_in_trl`. Each line has `wall_s`, seconds since its process started. TRL's
lines have it from their process. Ours is --start_s and the sum of
`timing_s/step` up to that line: a run's clock begins after the imports, when
its config is built, and does not stop until the run ends.

In the race of 2026-11-27 ours was noted otherwise, when a line was seen in
metrics.jsonl, looked for twice a second. That is 4.9 to 5.8 s above the sums,
hence the default of --start_s.
"""

import argparse
import gzip
import json
import pathlib

from jetrl_jax.core.files import user_path
from tools import command

START_S = 5.0
# Ours, by the names that `plot_race` has for them.
OURS = 'jetrl', 'bf16'


def ours(path: pathlib.Path, start_s: float = START_S) -> list[dict]:
  """Returns a line a step.

  Args:
    path: a run's workdir, or its file of `study.results`.
    start_s: seconds from the start of the process to its clock's.

  Raises:
    ValueError: the run was resumed, does not begin at step 0 or lacks a step,
      so that no sum is the time since its start.
  """
  rows = _rows(path)
  if [row['step'] for row in rows] != list(range(len(rows))) or not rows:
    raise ValueError(f'{path} must have every step from 0 on, once')
  wall, lines = start_s, []
  for row in rows:
    wall += row['timing_s/step']
    line = {
        'wall_s': round(wall, 1),
        'step': row['step'],
        'step_time': row['timing_s/step'],
        'accuracy': _accuracy(row, 'core'),
        'accuracy_in_bf16': _accuracy(row, 'bf16'),
        'evaluation_s': row.get('timing_s/testing'),
        'response_length': row.get('response_length/mean'),
    }
    lines.append({k: v for k, v in line.items() if v is not None})
  return lines


def _rows(path: pathlib.Path) -> list[dict]:
  """Returns a run's metrics by step; a line that is not whole is left out."""
  if path.is_file():
    # Its first line is on the run, and has no step.
    _, *lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    return [json.loads(line) for line in lines]
  starts = (path / 'starts.jsonl').read_text(encoding='utf-8').splitlines()
  if len(starts) != 1:
    raise ValueError(
        f'{path} was started {len(starts)} times; a race is of runs that were'
        ' started once'
    )
  text = (path / 'metrics.jsonl').read_text(encoding='utf-8')
  return [json.loads(line) for line in text.split('\n')[:-1]]


def _accuracy(row: dict, precision: str) -> float | None:
  """Returns what is held out, of one file of problems; None if not tested."""
  names = [
      name
      for name in row
      if name.startswith(f'val-{precision}/') and name.endswith('/acc/mean@1')
  ]
  if len(names) > 1:
    raise ValueError(f'a race has one file of held-out problems, not {names}')
  return row[names[0]] if names else None


def theirs(path: pathlib.Path) -> list[dict]:
  """Returns the lines of `grpo_in_trl`."""
  lines = path.read_text(encoding='utf-8').splitlines()
  return [json.loads(line) for line in lines]


def text(race: dict[str, list[dict]]) -> str:
  """Returns the file, with a line of it for each line of a run."""
  parts = []
  for name, lines in race.items():
    rows = ',\n'.join(json.dumps(line) for line in lines)
    parts.append(f'"{name}": [\n{rows}\n]')
  return '{\n' + ',\n'.join(parts) + '\n}\n'


@command.in_one_sentence
def main() -> None:
  """Runs the command line."""
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  for name in (*OURS, 'trl', 'output'):
    parser.add_argument(f'--{name}', type=user_path, required=True)
  parser.add_argument('--start_s', type=float, default=START_S)
  found = parser.parse_args()
  race = {name: ours(getattr(found, name), found.start_s) for name in OURS}
  found.output.write_text(
      text(race | {'trl': theirs(found.trl)}), encoding='utf-8'
  )


if __name__ == '__main__':
  main()
