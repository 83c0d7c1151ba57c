"""The page as HTML: sections of figures, sentences, tables and answers."""

import base64
import hashlib
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jinja2
import markupsafe
import plotly.offline

from jetrl_jax.core.files import replace_text
from jetrl_jax.report import figures
from jetrl_jax.report.answers import Answers, visible
from jetrl_jax.report.facts import Fact
from jetrl_jax.report.run import Run


class Page:
  """Collects sections, and figures and answers in their order.

  Attributes:
    is_finished: whether all its runs have their last step.
    top: what the template shows above the sections.
    sections: (title, parts); a part is a dict whose `kind` names its macro.
  """

  def __init__(self, runs: list[Run], title: str, subtitle: str, **top: Any):
    self.is_finished = all(run.is_finished for run in runs)
    self.top: dict[str, Any] = {'title': title, 'subtitle': subtitle}
    self.top |= {'tiles': [], 'alarms': [], 'notes': [], 'legend': []} | top
    self.sections: list[tuple[str, list[dict]]] = []
    self._figures: list[figures.Figure] = []
    self._answers: list[dict] = []

  def add(self, title: str, *parts: dict | None) -> None:
    """Adds a section of the parts that are there."""
    if kept := [part for part in parts if part]:
      self.sections.append((title, kept))

  def panels(
      self,
      section: str,
      runs: list[Run],
      more: Sequence[figures.Panel] = (),
      *,
      first: figures.Figure | None = None,
      maps: Sequence[figures.Figure] = (),
      said: Sequence[Fact] = (),
      below: dict | None = None,
  ) -> None:
    """Adds a section of panels; what is still or missing is a sentence.

    Args:
      section: its title, which names its panels in panels.toml.
      runs: one, or several to compare.
      more: panels before these.
      first: a figure before all.
      maps: figures after them.
      said: sentences besides.
      below: a part after all.
    """
    drawn, still, missing = [first] if first else [], [], []
    for panel in [*more, *figures.PANELS[section]]:
      found = figures.draw(panel, runs)
      if isinstance(found, Fact):
        still.append(found)
      elif found is not None:
        drawn.append(found)
      elif panel.absent:
        missing.append(f'{panel.title} ({panel.absent})')
    drawn += maps
    still += said
    grid = {'kind': 'figures', 'first': len(self._figures), 'figures': drawn}
    words = {'kind': 'words', 'facts': still, 'missing': missing}
    self._figures += drawn
    has_words = bool(still or missing)
    self.add(
        section, grid if drawn else None, words if has_words else None, below
    )

  def answers(self, title: str, found: Answers, is_paired: bool) -> None:
    """Adds a section in which answers are looked through."""
    part = {'kind': 'answers', 'index': len(self._answers), 'lead': found.lead}
    part |= {'paired': is_paired, 'steps': list(found.blocks)}
    self._answers.append({'blocks': found.blocks, 'paired': is_paired})
    self.add(title, part)

  def write(self, path: pathlib.Path, reload_s: float = 0.0) -> None:
    """Writes the page.

    Args:
      path: the file.
      reload_s: seconds after which the page reads itself again; 0 is never.

    Raises:
      ValueError: it cannot be written.
    """
    try:
      replace_text(path, self.html(reload_s))
    except OSError as error:
      raise ValueError(
          f'{path} cannot be written: {error.strerror}; jetrl_jax report --out'
          ' writes the report elsewhere'
      ) from error

  def html(self, reload_s: float = 0.0) -> str:
    """Renders the page, see `write`."""
    environment = jinja2.Environment(
        autoescape=True,
        finalize=_finalize,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    source = (pathlib.Path(__file__).parent / 'page.html').read_text('utf-8')
    template = environment.from_string(source)
    block = template.blocks['script'](template.new_context())
    scripts = [plotly.offline.get_plotlyjs(), ''.join(map(str, block))]
    digests = [hashlib.sha256(script.encode()).digest() for script in scripts]
    data = json.dumps({'answers': self._answers, 'reload_s': reload_s})
    plots = [str(f.plot.to_json(engine='json')) for f in self._figures]
    return template.render(
        **self.top,
        sections=self.sections,
        digests=[base64.b64encode(digest).decode() for digest in digests],
        plotly=markupsafe.Markup(scripts[0]),
        data=_inert_json(f'{{"plots":[{",".join(plots)}],{data[1:]}'),
        reload_s=reload_s,
    )


def _finalize(value: Any) -> Any:
  """Makes all that the template prints visible; it is escaped after that."""
  is_markup = isinstance(value, markupsafe.Markup)
  return value if is_markup else visible(value)


def _inert_json(text: str) -> markupsafe.Markup:
  """Returns ASCII JSON that cannot end the script element it stands in."""
  for character in '<>&':
    text = text.replace(character, f'\\u{ord(character):04x}')
  return markupsafe.Markup(text)
