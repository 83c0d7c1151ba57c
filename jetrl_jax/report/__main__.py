"""Writes a report: python -m jetrl_jax.report WORKDIR [WORKDIR ...].

One HTML file that needs no network: curves, FP8 health, answers, config and
versions of a run, at any time of its life; of several runs a comparison.
"""

import os
import pathlib
import sys
from collections.abc import Sequence

from absl import app, flags

from jetrl_jax.core.files import replace_text, user_path
from jetrl_jax.report import data as report_data
from jetrl_jax.report import page as report_page

FILE = 'report.html'
_OUT = flags.DEFINE_string(
    'out',
    None,
    'The file to write. By default report.html: of one run in its workdir, of'
    ' several in the current folder.',
)


def write_report(
    workdirs: Sequence[str | os.PathLike],
    out: str | os.PathLike | None = None,
) -> pathlib.Path:
  """Writes the report of a run, or the comparison of several.

  Args:
    workdirs: folders of runs.
    out: the file; by default report.html, in the workdir of a single run.

  Returns:
    The file.

  Raises:
    ValueError: there is nothing to report on (see `report_data.read_run`), or
      the file cannot be written.
  """
  folders = [user_path(workdir) for workdir in workdirs]
  if not folders:
    raise ValueError('name the workdir of a run, or of several to compare')
  names = report_data.names(folders)
  try:
    runs = [
        report_data.read_run(folder, name)
        for folder, name in zip(folders, names, strict=True)
    ]
  except OSError as error:
    raise ValueError(f'{error.filename}: {error.strerror}') from error
  if out is None:
    out = folders[0] / FILE if len(folders) == 1 else FILE
  path = user_path(out)
  page = report_page.render(runs)
  try:
    replace_text(path, page)
  except OSError as error:
    raise ValueError(f'{path} cannot be written: {error.strerror}') from error
  return path


def main(argv: list[str]) -> None:
  """Writes the report of the workdirs on the command line."""
  try:
    print(f'Wrote {write_report(argv[1:], _OUT.value)}')
  except ValueError as error:
    sys.exit(f'error: {error}')


def _parse(argv: list[str]) -> list[str]:
  try:
    return flags.FLAGS(argv)
  except flags.Error as error:
    sys.exit(f'error: {error}')


if __name__ == '__main__':
  app.run(main, flags_parser=_parse)
