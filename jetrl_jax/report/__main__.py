"""Writes a report: jetrl_jax report WORKDIR [WORKDIR ...].

One HTML file that needs no network: curves, FP8 health, answers, config and
versions of a run, at any time of its life; of several runs a comparison; of a
folder of runs a list.
"""

import sys
import time

from absl import app, flags

from jetrl_jax.core import launchers
from jetrl_jax.report.contents import prepare, write_report

_OUT = flags.DEFINE_string(
    'out',
    None,
    'The file to write. By default report.html: of one run, or of a folder of'
    ' runs, in that folder; of several runs in the current one.',
)
_ANSWERS = flags.DEFINE_float(
    'answers_mib',
    8.0,
    'MiB of answers in the page; of a longer run steps are left out, evenly.',
    lower_bound=0,
)
_WATCH = flags.DEFINE_bool(
    'watch',
    False,
    'Write the page again and again while the run goes on; it reloads itself.',
)
_INTERVAL = flags.DEFINE_float(
    'interval', 30.0, 'Seconds between two pages of --watch.', lower_bound=1
)


def main(argv: list[str]) -> None:
  """Writes the report of the workdirs on the command line."""
  try:
    launchers.check_alone()
    if _WATCH.value:
      _watch(argv[1:], _INTERVAL.value)
    else:
      how = {'answers_mib': _ANSWERS.value}
      print(f'Wrote {write_report(argv[1:], _OUT.value, **how)}')
  except ValueError as error:
    sys.exit(f'error: {error}')
  except KeyboardInterrupt:
    print()


def _watch(workdirs: list[str], seconds: float) -> None:
  """Writes the page until all runs are finished."""
  if not workdirs:
    raise ValueError('name the workdir of the run to watch')
  said = ''
  while True:
    try:
      page, path = prepare(workdirs, _OUT.value, _ANSWERS.value)
      page.write(path, 0.0 if page.is_finished else seconds)
      if page.is_finished:
        print(f'Wrote {path}: finished')
        return
      news = f'Writing {path} every {seconds:g} s; Ctrl-C ends it'
    except ValueError as error:  # A run that has not logged a step yet.
      news = f'Waiting: {error}'
    if news != said:
      print(said := news, flush=True)
    time.sleep(seconds)


def _parse(argv: list[str]) -> list[str]:
  try:
    return flags.FLAGS(argv)
  except flags.Error as error:
    sys.exit(f'error: {error}')


if __name__ == '__main__':
  app.run(main, flags_parser=_parse)
