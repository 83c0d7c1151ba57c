"""The report as one HTML page that needs nothing besides itself."""

import base64
import hashlib
import json
from collections.abc import Sequence
from typing import Any

from jetrl_jax.report import answers as report_answers
from jetrl_jax.report import axes, draw, panels
from jetrl_jax.report import facts as report_facts
from jetrl_jax.report import heat as report_heat
from jetrl_jax.report.charts import Chart, color_class
from jetrl_jax.report.data import Run
from jetrl_jax.report.facts import Fact
from jetrl_jax.report.panels import Panel
from jetrl_jax.report.script import JS
from jetrl_jax.report.style import CSS
from jetrl_jax.report.text import duration, escape, number, script_json


class _Page:
  """Collects sections, and the charts in the order of the page."""

  def __init__(self):
    self.charts: list[Chart] = []
    self.maps: list[Chart] = []
    self.sections: list[tuple[str, str]] = []

  def section(self, title: str, body: str) -> None:
    if body:
      self.sections.append((title, body))

  def panels(
      self,
      wanted: Sequence[Panel],
      runs: list[Run],
      *,
      first: Chart | None = None,
      maps: Sequence[Chart] = (),
      facts: Sequence[Fact] = (),
  ) -> str:
    """Draws panels; what does not move or is missing becomes a sentence.

    Args:
      wanted: the panels.
      runs: one, or several to compare.
      first: a chart before them.
      maps: heat maps behind them.
      facts: sentences besides.
    """
    drawn = [first] if first is not None else []
    still, missing = [], []
    for panel in wanted:
      found = draw.draw(panel, runs)
      if isinstance(found, Fact):
        still.append(found)
      elif found is not None:
        drawn.append(found)
      elif panel.absent:
        missing.append(f'{panel.title} ({panel.absent})')
    self.charts += drawn
    self.maps += maps
    cards = [figure.html for figure in (*drawn, *maps)]
    cards.append(_in_words([*still, *facts], missing))
    return f'<div class="grid">{"".join(cards)}</div>' if any(cards) else ''


def render(runs: list[Run]) -> str:
  """Returns the page: of one run, or of several side by side."""
  page = _Page()
  if len(runs) == 1:
    run = runs[0]
    title, subtitle = run.name, _what(run)
    top = _tiles(report_facts.headline(run)) + _notes(run.notes)
    _charts(page, runs)
    page.section('Held-out answers', report_answers.heldout_html(run))
    page.section('Training answers', report_answers.group_html(run))
    page.section('Skipped and guarded', _guarded(run))
    page.section('Config', _config(run))
    page.section('Versions and checkpoints', _starts(run))
  else:
    title = ' / '.join(run.name for run in runs)
    subtitle = f'{len(runs)} runs'
    top = _legend(runs) + ''.join(_notes(r.notes, r.name) for r in runs)
    page.section('Final numbers', _final_numbers(runs))
    page.section('Differences in config', _config_differences(runs))
    _charts(page, runs)
  return _document(title, subtitle, top, page)


def _charts(page: _Page, runs: list[Run]) -> None:
  """Adds the sections of curves and heat maps."""
  single = runs[0] if len(runs) == 1 else None
  learning = [*panels.heldout_panels(runs), *panels.LEARNING]
  page.section('Learning', page.panels(learning, runs))
  page.section('One precision flow', page.panels(panels.FLOW, runs))
  page.section('The update', page.panels(panels.UPDATE, runs))
  time = draw.time_chart(single) if single else None
  speed = page.panels(panels.SPEED, runs, first=time)
  if not single:
    speed += _phase_table(runs)
  page.section('Speed and memory', speed)
  maps, zeros = draw.heat_maps(single) if single else ([], [])
  fp8 = [*panels.FP8, *(() if single else panels.FP8_WORST)]
  page.section('FP8 health', page.panels(fp8, runs, maps=maps, facts=zeros))


def _document(title: str, subtitle: str, top: str, page: _Page) -> str:
  data = {
      'frame': {
          'left': axes.LEFT,
          'right': axes.RIGHT,
          'top': axes.TOP,
          'bottom': axes.BOTTOM,
          'width': axes.WIDTH,
      },
      'charts': [chart.data for chart in page.charts],
      'maps': [heat.data for heat in page.maps],
      'ramp': report_heat.ramp(),
  }
  ids = [f's{i}' for i in range(len(page.sections))]
  links = ''.join(
      f'<a href="#{key}">{escape(name)}</a>'
      for key, (name, _) in zip(ids, page.sections, strict=True)
  )
  body = ''.join(
      f'<section><h2 id="{key}">{escape(name)}</h2>{html}</section>'
      for key, (name, html) in zip(ids, page.sections, strict=True)
  )
  colors = report_heat.ramp()[::25] + report_heat.ramp()[-1:]
  css = CSS.replace('RAMP', ','.join(f'rgb({r} {g} {b})' for r, g, b in colors))
  digest = base64.b64encode(hashlib.sha256(JS.encode()).digest()).decode()
  # Should an escape ever fail, the browser still runs no other script.
  policy = (
      "default-src 'none'; img-src data:; style-src 'unsafe-inline';"
      f" script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
  )
  return (
      '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
      f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
      '<meta name="viewport" content="width=device-width, initial-scale=1">'
      f'<title>{escape(title)}</title><style>{css}</style></head><body>'
      f'<header><h1>{escape(title)}</h1><p class="sub">{escape(subtitle)}</p>'
      f'{top}</header><nav>{links}</nav><main>{body}</main>'
      '<footer>Written by jetrl_jax.report from the files of the run.</footer>'
      f'<script type="application/json" id="data">{script_json(data)}</script>'
      f'<script>{JS}</script></body></html>\n'
  )


def _what(run: Run) -> str:
  """Says in a line what ran where."""
  words = []
  if run.config:
    name = run.config.get('model.path') or run.config.get('model.shape')
    words.append(f'{name}, {run.config.get("precision.recipe")}')
  if run.starts:
    start = run.starts[-1]
    words.append(f'{start.get("num_devices")} x {start.get("device")}')
  return ' · '.join([*words, str(run.folder)])


def _tiles(facts: list[Fact]) -> str:
  tiles = ''.join(
      f'<div class="tile {fact.tone}"><div class="label">{escape(fact.label)}'
      f'</div><div class="value">{escape(fact.value)}</div>'
      f'<div class="note">{escape(fact.detail)}</div></div>'
      for fact in facts
  )
  return f'<div class="tiles">{tiles}</div>'


def _in_words(facts: list[Fact], missing: list[str]) -> str:
  """Returns a card of what needs no picture, or has none."""
  rows = [
      f'<p><b>{escape(fact.label)}</b>: {escape(fact.value)}.'
      f' <span class="note">{escape(fact.detail)}</span></p>'
      for fact in facts
  ]
  if missing:
    said = f'Not recorded: {"; ".join(missing)}.'
    rows.append(f'<p class="missing note">{escape(said)}</p>')
  return f'<div class="card words">{"".join(rows)}</div>' if rows else ''


def _notes(notes: list[str], name: str = '') -> str:
  start = f'{name}: ' if name else ''
  return ''.join(f'<p class="note">{escape(start + n)}</p>' for n in notes)


def _legend(runs: list[Run]) -> str:
  items = ''.join(
      f'<li><i class="swatch {color_class(i)}"></i>' f'{escape(run.name)}</li>'
      for i, run in enumerate(runs)
  )
  return f'<figcaption><ul>{items}</ul></figcaption>'


def _table(head: list[str], rows: list[list[str]], style: str) -> str:
  """Returns a table of escaped cells; the first column heads its row."""
  top = ''.join(f'<th>{escape(cell)}</th>' for cell in head)
  body = ''.join(
      f'<tr><th>{escape(row[0])}</th>'
      + ''.join(f'<td>{escape(cell)}</td>' for cell in row[1:])
      + '</tr>'
      for row in rows
  )
  top = f'<thead><tr>{top}</tr></thead>' if head else ''
  return (
      f'<div class="card wide"><table class="{style}"'
      f' style="--runs:{len(head) - 1}">{top}'
      f'<tbody>{body}</tbody></table></div>'
  )


def _guarded(run: Run) -> str:
  rows = [list(row) for row in report_facts.guarded(run)]
  return _table(['what', 'how much', 'which means'], rows, 'keys')


def _config(run: Run) -> str:
  if not run.config:
    return '<p class="missing">The workdir holds no config.</p>'
  rows = [[name, _value(value)] for name, value in sorted(run.config.items())]
  return (
      f'<details><summary>{len(rows)} values</summary>'
      f'{_table([], rows, "keys")}</details>'
  )


def _value(value: Any) -> str:
  return value if isinstance(value, str) and value else json.dumps(value)


def _starts(run: Run) -> str:
  """Returns a table of the starts: versions, device, command."""
  kept = ', '.join(map(str, run.checkpoints)) or 'none'
  checkpoints = f'<p>Checkpoints in the workdir, by step: {kept}.</p>'
  if not run.starts:
    said = '<p class="missing">Versions: not recorded (no starts.jsonl).</p>'
    return said + checkpoints
  rows = []
  for start in run.starts:
    versions = start.get('versions')
    packages = versions.items() if isinstance(versions, dict) else []
    command = start.get('command')
    words = command if isinstance(command, list) else []
    rows.append(
        [
            str(start.get('time', '–')),
            f'{start.get("num_devices", "?")} x {start.get("device", "?")}',
            str(start.get('commit') or 'no clone'),
            ', '.join(f'{name} {version}' for name, version in packages),
            ' '.join(map(str, words)),
        ]
    )
  head = ['start', 'device', 'commit', 'versions', 'command']
  return _table(head, rows, 'keys') + checkpoints


def _final_numbers(runs: list[Run]) -> str:
  """Returns the headline of each run, fact by fact."""
  facts = [report_facts.headline(run) for run in runs]
  labels = list(dict.fromkeys(f.label for column in facts for f in column))
  rows = []
  for label in labels:
    cells = [
        '\n'.join(
            f'{f.value}\n{f.detail}' if f.detail else f.value
            for f in column
            if f.label == label
        )
        or '–'
        for column in facts
    ]
    rows.append([label, *cells])
  for metric, label, unit in (
      ('response_length/mean', 'Response length, last', 'tokens'),
      ('actor/entropy', 'Entropy, last', 'nats'),
      ('actor/grad_norm', 'Gradient norm, last', ''),
  ):
    values = [number(run.last(metric), unit) for run in runs]
    if any(value != '–' for value in values):
      rows.append([label, *values])
  return _table(['', *(run.name for run in runs)], rows, 'runs finals')


def _config_differences(runs: list[Run]) -> str:
  """Returns a table of the config values that differ."""
  known = sorted({name for run in runs for name in run.config})
  absent = object()
  rows = []
  for name in known:
    values = [run.config.get(name, absent) for run in runs]
    if any(value != values[0] for value in values):
      cells = ['(absent)' if v is absent else _value(v) for v in values]
      rows.append([name, *cells])
  same = f'{len(known) - len(rows)} other values are equal.'
  if not rows:
    return f'<p>None: all {len(known)} values are equal.</p>'
  table = _table(['', *(run.name for run in runs)], rows, 'runs')
  return table + f'<p class="note">{same}</p>'


def _phase_table(runs: list[Run]) -> str:
  """Returns the seconds of the phases, added up over each run."""
  rows = []
  for metric, label, _ in (*panels.PHASES, ('timing_s/step', 'all', 7)):
    values = [run.finite(metric) for run in runs]
    if any(v.sum() > 0.05 for v in values):
      cells = [duration(float(v.sum())) if v.size else '–' for v in values]
      rows.append([label, *cells])
  if not rows:
    return ''
  table = _table(['time', *(run.name for run in runs)], rows, 'runs')
  return f'<h3>Time by phase, whole run</h3>{table}'
