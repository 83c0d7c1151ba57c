"""What stands on the page of a run, of several side by side, of a folder."""

import datetime
import json
import os
import pathlib
import urllib.parse
from collections.abc import Sequence
from typing import Any

from jetrl_jax.core.files import user_path
from jetrl_jax.report import answers, facts, figures
from jetrl_jax.report import run as workdir
from jetrl_jax.report.facts import duration, number
from jetrl_jax.report.page import Page
from jetrl_jax.report.run import Run

FILE = 'report.html'
# Curves of more runs than these are not told apart in a list.
_MAX_CURVES = 16
_MAX_VALUES = 8
# And characters of such a value.
_MAX_CHARS = 24


def write_report(
    workdirs: Sequence[str | os.PathLike],
    out: str | os.PathLike | None = None,
    *,
    answers_mib: float = 8.0,
) -> pathlib.Path:
  """Writes the report of a run, a comparison of several, or a list.

  Args:
    workdirs: folders of runs; a single one may hold runs, which are listed.
    out: the file; by default report.html, in the folder if it is a single one.
    answers_mib: room for answers in the page, in MiB; steps beyond are left
      out.

  Returns:
    The file.

  Raises:
    ValueError: there is nothing to report on (see `run.read_run`), or the file
      cannot be written.
  """
  page, path = prepare(workdirs, out, answers_mib)
  page.write(path)
  return path


def prepare(
    workdirs: Sequence[str | os.PathLike],
    out: str | os.PathLike | None,
    answers_mib: float,
) -> tuple[Page, pathlib.Path]:
  """Returns the page of `write_report`, and where it goes."""
  folders = [user_path(folder) for folder in workdirs]
  if not folders:
    raise ValueError('name the workdir of a run, or of several to compare')
  path = user_path(out or (folders[0] / FILE if len(folders) == 1 else FILE))
  try:
    below = workdir.find_runs(folders[0]) if len(folders) == 1 else []
    if below:
      return list_page(folders[0], below, path.parent), path
    named = zip(folders, workdir.names(folders), strict=True)
    runs = [workdir.read_run(folder, name) for folder, name in named]
    return run_page(runs, answers_mib), path
  except OSError as error:
    raise ValueError(f'{error.filename}: {error.strerror}') from error


def run_page(runs: list[Run], answers_mib: float = 8.0) -> Page:
  """Returns the page of one run, or of several side by side."""
  if len(runs) == 1:
    return _single_page(runs[0], answers_mib)
  return _pair_page(runs)


def _single_page(run: Run, answers_mib: float) -> Page:
  budget = int(answers_mib * 2**19)  # Half for each kind.
  heldout = answers.heldout(run, budget)
  training = answers.training(run, budget)
  unanswered = heldout.unanswered
  if training.unanswered is not None:
    unanswered = training.unanswered
  alarms = [('', alarm) for alarm in facts.alarms(run, unanswered)]
  tiles = facts.headline(run)
  page = Page(
      [run], run.name, _what(run), tiles=tiles, alarms=alarms, notes=run.notes
  )
  found = figures.heldout_panels([run]) + figures.reward_panels(run)
  page.panels('Learning', [run], found)
  page.panels('One precision flow', [run])
  page.panels('The update', [run])
  page.panels('Speed and memory', [run], first=figures.time_figure(run))
  maps, zeros = figures.heat_figures(run)
  page.panels('FP8 health', [run], maps=maps, said=zeros)
  page.answers('Held-out answers', heldout, is_paired=True)
  page.answers('Training answers', training, is_paired=False)
  head = ['what', 'how much', 'which means']
  page.add('Skipped and guarded', _table(head, facts.guarded(run), 'keys'))
  page.add('Config', *_config(run))
  page.add('Versions and checkpoints', *_starts(run))
  return page


def _pair_page(runs: list[Run]) -> Page:
  names = [run.name for run in runs]
  alarms = [(run.name, alarm) for run in runs for alarm in facts.alarms(run)]
  notes = [f'{run.name}: {note}' for run in runs for note in run.notes]
  title, subtitle = ' / '.join(names), f'{len(runs)} runs'
  page = Page(runs, title, subtitle, legend=names, alarms=alarms, notes=notes)
  page.add('Final numbers', _final_numbers(runs))
  page.add('Differences in config', *_config_differences(runs))
  page.panels('Learning', runs, figures.heldout_panels(runs))
  page.panels('One precision flow', runs)
  page.panels('The update', runs)
  page.panels('Speed and memory', runs, below=_phase_table(runs))
  page.panels('FP8 health', runs, figures.FP8_WORST)
  return page


def list_page(
    folder: pathlib.Path, below: list[pathlib.Path], beside: pathlib.Path
) -> Page:
  """Returns the page that lists the runs of a folder.

  Args:
    folder: the folder.
    below: its runs.
    beside: where the page will be: links are relative to it.
  """
  runs, notes = [], []
  for one in below:
    try:
      runs.append(workdir.read_run(one, one.relative_to(folder).as_posix()))
    except (ValueError, OSError) as error:
      notes.append(str(error))
  title, subtitle = folder.resolve().name, facts.count(len(runs), 'run')
  page = Page(runs, title, subtitle, notes=notes)
  head = ['run', 'steps', 'held-out accuracy', 'reward', 'mismatch', 'speed']
  head += ['time', 'last line (UTC)', 'alarms', 'config that differs']
  # A value that a run lacks says nothing.
  differing = [
      name
      for name in _differing(runs)
      if len({_value(r.config[name]) for r in runs if name in r.config}) > 1
  ]
  rows = [_listed(run, differing, beside) for run in runs]
  page.add('Runs', _table(head, rows, 'list sortable'))
  if 1 < len(runs) <= _MAX_CURVES:
    page.top['legend'] = [run.name for run in runs]
    page.panels('Learning', runs, figures.heldout_panels(runs))
  return page


def _listed(run: Run, differing: list[str], beside: pathlib.Path) -> list:
  """Returns a run's row in the list of a folder."""
  report = run.folder / FILE
  link = './' + urllib.parse.quote(os.path.relpath(report, beside))
  row: list = [{'text': run.name, 'href': link if report.is_file() else ''}]
  found = {fact.label: fact for fact in reversed(facts.headline(run))}
  heldout = [run.last(name) for name in facts.heldout_metrics(run)]
  for label, value in (
      ('Steps', int(run.steps[-1])),
      ('Held-out accuracy', heldout[0] if heldout else None),
      ('Reward', run.last('critic/rewards/mean')),
      ('Mismatch', run.last('training/mismatch_token_frac')),
      ('Speed', run.last('perf/throughput')),
      ('Time', float(run.finite('timing_s/step').sum())),
  ):
    text = found[label].value if label in found else '–'
    row.append({'text': text, 'value': value})
  written = (run.folder / workdir.METRICS).stat().st_mtime
  time = datetime.datetime.fromtimestamp(written, datetime.UTC)
  alarms = '\n'.join(alarm.label for alarm in facts.alarms(run))
  values = ((n, run.config[n]) for n in differing if n in run.config)
  config = [f'{name}={_short(_value(value))}' for name, value in values]
  if more := config[_MAX_VALUES:]:
    config[_MAX_VALUES:] = [f'and {len(more)} more']
  row += [f'{time:%Y-%m-%d %H:%M}', {'text': alarms, 'style': 'bad'}]
  return [*row, '\n'.join(config)]


def _what(run: Run) -> str:
  """Returns one line: the model, the devices and the run's folder."""
  words = []
  if run.config:
    name = run.config.get('model.path') or run.config.get('model.shape')
    words.append(f'{name}, {run.config.get("precision.recipe")}')
  if run.starts:
    start = run.starts[-1]
    words.append(f'{start.get("num_devices")} x {start.get("device")}')
  return ' · '.join([*words, str(run.folder)])


def _table(head: list[str], rows: Sequence[Sequence], style: str) -> dict:
  """Returns a table; the first column heads its row."""
  return {'kind': 'table', 'head': head, 'rows': rows, 'style': style}


def _text(paragraph: str) -> dict:
  return {'kind': 'text', 'paragraph': paragraph}


def _value(value: Any) -> str:
  return value if isinstance(value, str) and value else json.dumps(value)


def _short(text: str) -> str:
  """Returns the end of a long value: of a path it tells most."""
  return text if len(text) <= _MAX_CHARS else f'…{text[1 - _MAX_CHARS :]}'


def _config(run: Run) -> list[dict]:
  """Returns the values that are not the defaults, and all of them."""
  if not run.config:
    return [_text('The workdir holds no config.')]
  defaults = workdir.default_config()
  every = [[name, _value(value)] for name, value in sorted(run.config.items())]
  changed = [
      [name, {'text': value, 'style': 'changed'}, _value(defaults[name])]
      for name, value in every
      if name in defaults and run.config[name] != defaults[name]
  ]
  said = f'{len(changed)} of {len(every)} values differ from their defaults.'
  table = _table(['name', 'value', 'default'], changed, 'keys')
  parts = [_text(said), table] if changed else [_text(said)]
  summary = f'All {len(every)} values'
  return [
      *parts,
      _table([], every, 'keys') | {'kind': 'details', 'said': summary},
  ]


def _differing(runs: list[Run]) -> list[str]:
  """Returns the names of config values that are not the same in all runs."""
  known = sorted({name for run in runs for name in run.config})
  values = {name: [run.config.get(name, ...) for run in runs] for name in known}
  return [n for n in known if any(v != values[n][0] for v in values[n])]


def _config_differences(runs: list[Run]) -> list[dict]:
  """Returns a table of the config values that differ between runs."""
  known = {name for run in runs for name in run.config}
  differing, defaults = _differing(runs), workdir.default_config()
  if not differing:
    return [_text(f'None: all {len(known)} values are equal.')]
  rows = []
  for name in differing:
    default = defaults.get(name, ...)
    values = [run.config.get(name, ...) for run in runs]
    cells = [
        {
            'text': '(absent)' if value is ... else _value(value),
            'style': 'changed' if default not in (..., value) else '',
        }
        for value in values
    ]
    rows.append([name, *cells, '–' if default is ... else _value(default)])
  head = ['', *(run.name for run in runs), 'default']
  same = f'{len(known) - len(rows)} other values are equal.'
  return [_table(head, rows, 'runs'), _text(same)]


def _starts(run: Run) -> list[dict]:
  """Returns a table of the starts: versions, device, command."""
  kept = ', '.join(map(str, run.by_step('checkpoints/*'))) or 'none'
  checkpoints = _text(f'Checkpoints in the workdir, by step: {kept}.')
  if not run.starts:
    return [_text('Versions: not recorded (no starts.jsonl).'), checkpoints]
  rows = []
  for start in run.starts:
    versions, command = start.get('versions'), start.get('command')
    packages = versions.items() if isinstance(versions, dict) else []
    row = [start.get('time', '–')]
    row.append(f'{start.get("num_devices", "?")} x {start.get("device", "?")}')
    row.append(start.get('commit') or 'no clone')
    row.append(', '.join(f'{name} {version}' for name, version in packages))
    row.append(' '.join(map(str, command if isinstance(command, list) else [])))
    rows.append(row)
  head = ['start', 'device', 'commit', 'versions', 'command']
  return [_table(head, rows, 'keys'), checkpoints]


def _final_numbers(runs: list[Run]) -> dict:
  """Returns the headline of each run, fact by fact."""
  columns = [facts.headline(run) for run in runs]
  rows = []
  for label in dict.fromkeys(f.label for column in columns for f in column):
    rows.append([label])
    for column in columns:
      found = [(f.value, f.detail) for f in column if f.label == label]
      lines = [text for pair in found for text in pair if text]
      rows[-1].append('\n'.join(lines) or '–')
  for metric, label, unit in (
      ('response_length/mean', 'Response length, last', 'tokens'),
      ('actor/entropy', 'Entropy, last', 'nats'),
      ('actor/grad_norm', 'Gradient norm, last', ''),
  ):
    values = [number(run.last(metric), unit) for run in runs]
    if set(values) != {'–'}:
      rows.append([label, *values])
  return _table(['', *(run.name for run in runs)], rows, 'runs finals')


def _phase_table(runs: list[Run]) -> dict | None:
  """Returns the seconds of the phases, added up over each run."""
  rows = []
  phases = figures.PHASES | {'timing_s/step': ('all', 7)}
  for metric, (label, _) in phases.items():
    values = [run.finite(metric) for run in runs]
    if any(v.sum() > 0.05 for v in values):
      cells = [duration(float(v.sum())) if v.size else '–' for v in values]
      rows.append([label, *cells])
  head = ['time by phase, whole run', *(run.name for run in runs)]
  return _table(head, rows, 'runs') if rows else None
