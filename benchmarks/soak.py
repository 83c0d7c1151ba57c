"""The long tests in full, and a record of them.

Every test marked soak, file by file: kills of whole runs and of the saver,
damaged checkpoints, hostile answers, a study. Half an hour and more on two
cores. The record is written after every file, so that a run that was cut off
leaves what it found.

  python -m benchmarks.soak --output=benchmarks/results/soak_cpu

Its runs read the code when they start: do not edit the clone meanwhile, or run
it in another one.
"""

import pathlib
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree

from absl import app, flags

from benchmarks import common

_FILES = flags.DEFINE_list('files', [], 'Test files; all with soak tests.')
_WORKERS = flags.DEFINE_integer('workers', 2, 'Processes of pytest.')
_ONLY = flags.DEFINE_string(
    'only', '', 'Names of tests, as pytest -k has them.'
)
_MINUTES = flags.DEFINE_float(
    'minutes', float('inf'), 'See --soak-minutes in tests/conftest.py.'
)

_ROOT = pathlib.Path(__file__).parents[1]
_COLUMNS = (
    ('file', 'file', ''),
    ('test', 'test', ''),
    ('outcome', 'outcome', ''),
    ('seconds', 's', '.0f'),
    ('counts', 'counts', ''),
)


def _soak_files() -> list[str]:
  found = sorted((_ROOT / 'tests').rglob('test_*.py'))
  return [
      str(path.relative_to(_ROOT))
      for path in found
      if 'pytest.mark.soak' in path.read_text()
  ]


def _run(file: str) -> list[dict]:
  """Returns a row for each soak test of a file."""
  with tempfile.TemporaryDirectory() as folder:
    report = pathlib.Path(folder) / 'report.xml'
    options = ['-m', 'soak', '--run-soak', f'--junitxml={report}']
    options += ['-o', 'junit_family=xunit1']  # With properties.
    options += ['-n', str(_WORKERS.value), '--dist', 'worksteal']
    options += [f'--soak-minutes={_MINUTES.value}', '-k', _ONLY.value]
    subprocess.run(
        [sys.executable, '-m', 'pytest', '-q', *options, file],
        cwd=_ROOT,
        check=False,
    )
    cases = list(ElementTree.parse(report).iter('testcase'))
  return [
      {
          'file': file,
          'test': case.get('name', ''),
          # Passed: a case without a child that says otherwise.
          'outcome': next(
              (c.tag for c in case if c.tag in ('failure', 'error', 'skipped')),
              'passed',
          ),
          'seconds': float(case.get('time', 0)),
          'counts': '; '.join(
              f'{found.get("name")}: {found.get("value")}'
              for found in case.iter('property')
          ),
      }
      for case in cases
  ]


def main(argv: list[str]) -> None:
  """Runs the files and exits 1 where a test failed."""
  if argv[1:]:
    raise app.UsageError(f'unexpected arguments {argv[1:]}')
  rows = []
  for file in _FILES.value or _soak_files():
    rows += _run(file)
    outcomes = [row['outcome'] for row in rows]
    summary = {kind: outcomes.count(kind) for kind in sorted(set(outcomes))}
    common.write(rows, summary, common.table(rows, _COLUMNS))
  sys.exit(any(row['outcome'] in ('failure', 'error') for row in rows))


if __name__ == '__main__':
  common.run(main)
