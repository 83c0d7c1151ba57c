"""Hooks of the documentation site (mkdocs.yml): what docs/ does not hold.

A page in docs/ links to the repository's files relatively, which works on a
code host and in a clone. On the site such a link becomes absolute, below
`repo_url`; without one it stays text, as there is nowhere to lead to. The page
of changes is CHANGELOG.md itself.
"""

import os
import pathlib
import posixpath
import re
from typing import Any

# [text](../path), also with an anchor; pictures are files of docs/.
_LINK = re.compile(r'(?<!!)\[([^\]]*)\]\((\.\./[^)\s]+)\)')
_CHANGES = pathlib.Path(__file__).parents[1] / 'CHANGELOG.md'


def on_config(config: Any) -> Any:
  """Takes the repository's address from where CI has it."""
  server = os.environ.get('GITHUB_SERVER_URL')
  name = os.environ.get('GITHUB_REPOSITORY')
  if not config.repo_url and server and name:
    config.repo_url = f'{server}/{name}'
  return config


def on_page_markdown(text: str, *, page: Any, config: Any, files: Any) -> str:
  """Returns a page's text with absolute links to the repository's files."""
  del files
  if page.file.src_uri == 'changelog.md':
    text = seen_from_docs(_CHANGES.read_text(encoding='utf-8'))
  return absolute(text, page.file.src_uri, config.repo_url)


def seen_from_docs(text: str) -> str:
  """Returns Markdown of the repository's root as a page in docs/ has it."""

  def of(match: re.Match) -> str:
    path = match.group(1)
    inside = path.startswith('docs/')
    return f']({path.removeprefix("docs/") if inside else f"../{path}"})'

  return re.sub(r'\]\((?!#|https?:)([^)\s]+)\)', of, text)


def absolute(text: str, page: str, repo_url: str | None) -> str:
  """Returns Markdown whose links out of docs/ are absolute.

  Args:
    text: Markdown.
    page: its path below docs/.
    repo_url: the repository's address; None or '' if there is none.
  """
  folder = posixpath.dirname(posixpath.join('docs', page))

  def of(match: re.Match) -> str:
    words, target = match.groups()
    path = posixpath.normpath(posixpath.join(folder, target))
    if path.startswith('docs/'):
      return match.group(0)
    if not repo_url:
      return words
    return f'[{words}]({repo_url.rstrip("/")}/blob/main/{path})'

  return _LINK.sub(of, text)
