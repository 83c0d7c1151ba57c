"""What the tests of the report read back from a page."""

import base64
import html.parser
import json
import re
import zlib
from typing import Any

import numpy as np
import plotly.offline

from jetrl_jax.report import contents


class Elements(html.parser.HTMLParser):
  """Collects tags, attributes and text of a page, as a browser would.

  Plotly's own script is left out: it takes seconds.
  """

  def __init__(self, text: str):
    super().__init__()
    self.tags: list[tuple[str, dict]] = []
    self.text = ''
    self._in = ''
    self.feed(text.replace(plotly.offline.get_plotlyjs(), ''))
    self.text = re.sub(r'\s+', ' ', self.text.replace('\xa0', ' '))

  def handle_starttag(self, tag, attrs):
    """Notes a tag."""
    self.tags.append((tag, dict(attrs)))
    self._in = tag

  def handle_endtag(self, tag):
    """Notes that a tag is closed."""
    self._in = ''

  def handle_data(self, data):
    """Adds what a reader sees."""
    if self._in not in ('script', 'style'):
      self.text += data

  def all(self, tag: str) -> list[dict]:
    """The attributes of each element of a kind."""
    return [attributes for name, attributes in self.tags if name == tag]


def written(*folders, **how) -> str:
  """The page of these folders, as `write_report` renders it."""
  made, _ = contents.prepare(folders, folders[0] / 'x.html', 8.0)
  return made.html(**how)


def data(text: str) -> dict[str, Any]:
  """What the page's script reads: JSON as a browser takes it, without NaN."""
  block = re.search(r'id="data">(.*?)</script>', text, re.S)[1]
  return json.loads(block, parse_constant=_refuse)


def _refuse(name: str) -> None:
  raise ValueError(f'{name} is no JSON')


def titles(text: str) -> list[str]:
  """The headings of the figures, in order."""
  return re.findall(r'<figcaption><h3>(.*?)</h3>', text)


def plot(text: str, title: str) -> dict[str, Any]:
  """A figure's data and layout, by its heading."""
  return data(text)['plots'][titles(text).index(title)]


def array(value: Any) -> np.ndarray:
  """An array as Plotly's JSON holds it."""
  if isinstance(value, list):
    return np.asarray(value)
  found = np.frombuffer(base64.b64decode(value['bdata']), value['dtype'])
  shape = [int(n) for n in value.get('shape', '').split(',') if n.strip()]
  return found.reshape(shape or -1)


def answers(text: str, kind: int) -> dict[int, list[dict]]:
  """The answers of a page by step; kind 0 is held-out, 1 training."""
  blocks = data(text)['answers'][kind]['blocks']
  return {
      int(step): json.loads(zlib.decompress(base64.b64decode(block)))
      for step, block in blocks.items()
  }
