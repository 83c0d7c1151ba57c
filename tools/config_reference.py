"""Writes docs/configuration.md from the dataclasses that own the settings.

A setting's meaning is its entry under `Attributes:` in the docstring of its
dataclass (`jetrl_jax/config/sections.py` says which); a section's introduction
is the text above them, of its first dataclass. After a change of either:

    python -m tools.config_reference
"""

import inspect
import pathlib
import re

from jetrl_jax.config.sections import SECTIONS, Setting

OUTPUT = pathlib.Path(__file__).parent.parent / 'docs' / 'configuration.md'
_HEAD = """\
# Configuration

<!-- Written by tools/config_reference.py from the dataclasses that
jetrl_jax/config/sections.py lists. -->

A config file starts from `configs/base.py` and sets differences; the command
line overrides both: `--config.optim.lr=2e-6`. Lists are Python literals:
`--config.data.train_files="('a.jsonl', 'b.jsonl')"`. Of a flag that is given
twice the last one holds. A name that is not in this table is refused. Units are
in the meanings; batch sizes count prompts unless they say rows.
"""


def meaning(setting: Setting) -> str:
  """Returns what a setting means; '' where its dataclass does not say."""
  text = inspect.getdoc(setting.owner) or ''
  _, _, attributes = text.partition('Attributes:\n')
  entry = re.search(
      rf'^  {setting.field.name}: (.*(?:\n {{4}}.*)*)', attributes, re.M
  )
  words = ' '.join(entry.group(1).split()) if entry else ''
  return words[:1].upper() + words[1:]


def introduction(section: str) -> str:
  """Returns what the docstring of a section's first dataclass begins with."""
  first = next(iter(SECTIONS[section].values()))
  text = inspect.getdoc(first.owner) or ''
  return text.partition('Attributes:')[0].strip()


def _table(section: str) -> str:
  rows = ['| name | default | meaning |', '|---|---|---|']
  for name, setting in SECTIONS[section].items():
    # Outside code spans these two would be read as HTML and as a column.
    words = re.sub('<([^>]*)>', r'&lt;\1&gt;', meaning(setting))
    words = words.replace('|', r'\|')
    rows.append(f'| `{name}` | `{setting.default!r}` | {words} |')
  return '\n'.join(rows)


def render() -> str:
  """Returns the text of docs/configuration.md."""
  parts = [_HEAD]
  for section in SECTIONS:
    if section:
      parts.append(f'\n## {section}\n\n{introduction(section)}\n')
    parts.append(_table(section))
  return '\n'.join(parts) + '\n'


if __name__ == '__main__':
  OUTPUT.write_text(render(), encoding='utf-8')
