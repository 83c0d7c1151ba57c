"""Prints the tables of docs/study_*.md from committed metrics.

    python -m study.tables --results FOLDER MORE

FOLDER is what `study.results` wrote. Of each arm: held-out accuracy by step,
seed by seed and their mean, as it samples and read in BF16, in percent; what
the design compares of a run; accuracy after the last step; and how a run went.
"""

import argparse
import statistics as numbers

from jetrl_jax.core.files import user_path
from study import cell_figures
from study.results import Run, read
from tools import command

_PRECISIONS = {'core': 'as it samples', 'bf16': 'in BF16'}
# Steps at each end of a run, of which a median is printed.
_ENDS = 20
# From this step on seconds a step count: all shapes are compiled.
_WARM = 40
_HOW = (
    ('tokens with unequal bits', 'training/mismatch_token_frac'),
    ('k3 of rollout and training', 'rollout_corr/k3_kl'),
    ('k3 of an update', 'actor/update_k3'),
    ('gradient norm', 'actor/grad_norm'),
    ('answers that are cut off', 'response_length/clip_ratio'),
)


@command.in_one_sentence
def main() -> None:
  """Runs the command line."""
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  parser.add_argument('--results', type=user_path, required=True, nargs='+')
  runs = [run for run in read(*parser.parse_args().results) if run.is_over]
  if not runs:
    raise ValueError(
        '--results has no run that is over; python -m study.run goes on with'
        ' unfinished ones'
    )
  print('\n'.join(lines(runs)))


def lines(runs: list[Run]) -> list[str]:
  """Returns the lines of all tables."""
  arms: dict[str, list[Run]] = {}
  for run in runs:
    arms.setdefault(run.arm.name, []).append(run)
  found = []
  for name, of in arms.items():
    found += [f'`{name}`', '']
    found += [*_accuracies(of), '', *_ends(of), '', *_how(of), '']
  return found


def seconds(run: Run) -> float | None:
  """Returns the median of a warm step's seconds, without those that test."""
  tests = dict(run.series('timing_s/testing'))
  warm = [
      value
      for step, value in run.series('timing_s/step')
      if step >= _WARM and step not in tests
  ]
  return numbers.median(warm) if warm else None


def _row(*cells: str) -> str:
  return f'| {" | ".join(cells)} |'


def _head(*cells: str) -> list[str]:
  return [_row(*cells), '|---' * len(cells) + '|']


def _percent(values: list[float]) -> list[str]:
  return [f'{100 * value:.1f}' for value in values]


def _accuracies(runs: list[Run]) -> list[str]:
  steps = [step for step, _ in runs[0].judged()]
  found = _head('step', *map(str, steps))
  for precision, words in _PRECISIONS.items():
    table = [[v for _, v in run.judged(precision)] for run in runs]
    for run, values in zip(runs, table, strict=True):
      found.append(_row(f'seed {run.seed}, {words}', *_percent(values)))
    if len(runs) > 1:
      means = [numbers.mean(column) for column in zip(*table, strict=True)]
      found.append(_row(f'mean, {words}', *_percent(means)))
  return found


def _ends(runs: list[Run]) -> list[str]:
  found = _head('seed', *(str(run.seed) for run in runs), 'mean')
  final = runs[0].arm.cell.compares_final
  compared = [cell_figures.endpoint(run) for run in runs]
  last = [run.judged()[-1][1] for run in runs]
  for words, values in (
      ('final accuracy' if final else 'endpoint', compared),
      ('after the last step', last),
  ):
    known = [value for value in values if value is not None]
    if len(known) == len(runs):
      found.append(_row(words, *_percent([*known, numbers.mean(known)])))
  return found


def _how(runs: list[Run]) -> list[str]:
  ends = f'medians of the first and the last {_ENDS} steps'
  found = _head(ends, *(f'seed {run.seed}' for run in runs))
  for words, name in _HOW:
    cells = []
    for run in runs:
      values = [value for _, value in run.series(name)]
      parts = (values[:_ENDS], values[-_ENDS:]) if values else ()
      cells.append(', '.join(f'{numbers.median(part):.2g}' for part in parts))
    if any(cells):
      found.append(_row(words, *cells))
  took = [seconds(run) for run in runs]
  found.append(
      _row(
          f'seconds a step, median from step {_WARM} on',
          *('' if one is None else f'{one:.2f}' for one in took),
      )
  )
  return found


if __name__ == '__main__':
  main()
