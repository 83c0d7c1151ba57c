"""Prints the few most important metrics during a run.

A terminal also gets a progress bar with the remaining time. `Progress` is for
one long task: a bar on a terminal, a line now and then elsewhere.
"""

import os
import pathlib
import sys
import threading
import time

from absl import logging
from rich import console as rich_console
from rich import progress

# The whole path, because a clone may contain a .venv with other packages.
_PACKAGE = str(pathlib.Path(__file__).parents[1]) + os.sep

_SHOWN = (
    ('critic/score/mean', 'score', '.3f'),
    ('critic/acc/mean', 'acc', '.3f'),
    ('response_length/mean', 'length', '.0f'),
    ('actor/entropy', 'entropy', '.3f'),
    ('actor/grad_norm', 'grad', '.2e'),
    ('training/mismatch_token_frac', 'mismatch', '.2g'),
    ('guard/over', 'over bounds', '.0f'),
    ('timing_s/step', 's/step', '.1f'),
)


def show_own_sentences() -> None:
  """Logs this package's info messages, and only warnings of libraries.

  Orbax logs about thirty info messages per checkpoint.
  """
  logging.set_verbosity(logging.INFO)
  logging.get_absl_handler().addFilter(
      lambda record: (
          record.levelno >= 30 or record.pathname.startswith(_PACKAGE)
      )
  )


def before_and_after(
    first: dict, last: dict, ended: int | None = None
) -> list[str]:
  """Returns a line for each held-out accuracy and mean reward.

  Args:
    first: metrics of the first evaluation that has a line; after a resume it
      may lack some names, and earlier lines may be lost.
    last: metrics of its last evaluation.
    ended: the run's last step; None is that of `last`. Of a run that was
      resumed with trainer.test_freq=0 it is a later one.
  """
  lines, start, end = [], first.get('step', 0), last.get('step', 0)
  when = f'at step {start}' if start else 'before'
  ended = end if ended is None else ended
  at_end = 'after' if end == ended else f'at step {end} of {ended}'
  for name, value in last.items():
    for measure in ('/acc/mean@', '/reward/mean@'):
      if measure in name and not name.endswith('/ci95'):
        numbers = [value]
        if name in first and (start < end or end == ended and not start):
          numbers.insert(0, first[name])
        form = _form(*numbers) if measure == '/acc/mean@' else '.4f'
        *before, after = (f'{number:{form}}' for number in numbers)
        before = f'{before[0]} {when}, ' if before else ''
        lines.append(f'{name}: {before}{after} {at_end}')
  return lines


def _form(*accuracies: float) -> str:
  """Returns how accuracies are shown: as shares, if all of them can be.

  Where no reward gives one, a reward stands in its place (`alarms.py`).
  """
  return '.1%' if all(0 <= x <= 1 for x in accuracies) else '.4f'


class Console:
  """Prints one line per step.

  Args:
    total: training steps of the run.
  """

  def __init__(self, total: int):
    self._total = total
    self._console = rich_console.Console(soft_wrap=True)
    self._bar = None
    if sys.stdout.isatty():
      self._bar = progress.Progress(
          *progress.Progress.get_default_columns(), console=self._console
      )
      self._task = self._bar.add_task('training', total=total)
      self._bar.start()

  def step(self, step: int, metrics: dict) -> None:
    """Prints a step's metrics."""
    shown = [
        f'{label} {metrics[name]:{form}}'
        for name, label, form in _SHOWN
        if name in metrics
    ]
    shown += [
        f'{name.removeprefix("val-core/")} {value:{_form(value)}}'
        for name, value in metrics.items()
        if name.startswith('val-core/')
        and '/acc/mean@' in name
        and not name.endswith('/ci95')
    ]
    line = f'step {step}/{self._total}  ' + '  '.join(shown)
    self._console.print(line, markup=False, highlight=False)
    if self._bar is not None:
      self._bar.update(self._task, completed=step)

  def close(self) -> None:
    """Ends the progress bar."""
    if self._bar is not None:
      self._bar.stop()


class Progress:
  """Shows on stderr how much of one long task is done; call `close`.

  Args:
    task: what is being done.
    total: parts of it.
    every_s: seconds between two lines where stderr is no terminal; also while
      nothing gets done, as during compilation.
  """

  def __init__(self, task: str, total: int, every_s: float = 10.0):
    self._task, self._total, self._every_s = task, total, every_s
    self._done, self._note, self._first = 0, '', 0.0
    self._start = time.monotonic()
    self._console = rich_console.Console(stderr=True, soft_wrap=True)
    self._bar, self._closed = None, threading.Event()
    if sys.stderr.isatty():
      self._bar = progress.Progress(
          progress.TextColumn('{task.description}'),
          progress.BarColumn(),
          progress.MofNCompleteColumn(),
          progress.TimeElapsedColumn(),
          progress.TextColumn('{task.fields[note]}'),
          console=self._console,
      )
      self._id = self._bar.add_task(task, total=total, note='')
      self._bar.start()
    else:
      self._thread = threading.Thread(target=self._print, daemon=True)
      self._thread.start()

  def update(self, done: int, note: str = '') -> None:
    """Says how many parts are done, and a few words more."""
    # The time before the first visit was compilation.
    self._first = self._first or time.monotonic()
    self._done, self._note = done, note
    if self._bar is not None:
      self._bar.update(self._id, completed=done, note=self._words())

  def _words(self) -> str:
    """Returns the time that is left, as far as it is known, and the note."""
    words = []
    if 0 < self._done < self._total:
      took = time.monotonic() - self._first
      left = took * (self._total - self._done) / self._done
      words.append(f'about {left:.0f} s left')
    return ', '.join(filter(None, [*words, self._note]))

  def _print(self) -> None:
    while not self._closed.wait(self._every_s):
      elapsed = time.monotonic() - self._start
      words = f'{self._done} of {self._total}, {elapsed:.0f} s'
      words = ', '.join(filter(None, [words, self._words()]))
      self._console.print(
          f'{self._task}: {words}', markup=False, highlight=False
      )

  def close(self) -> None:
    """Ends the bar, or the lines."""
    self._closed.set()
    if self._bar is not None:
      self._bar.stop()
    else:
      self._thread.join()
