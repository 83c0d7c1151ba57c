"""Writes docs/configuration.md from configs/base.py.

A name's meaning is the comment above it there; without one, what the docstring
of its reader says of it. After a change of either:

    python -m tools.config_reference
"""

import inspect
import pathlib
import re
from typing import Any

from configs import base
from jetrl_jax.core.sharding import Axes
from jetrl_jax.data import ChatFormat, PromptDataset, load_examples
from jetrl_jax.fp8 import Recipe
from jetrl_jax.models.policy import Policy
from jetrl_jax.optim.adamw import OptimizerConfig
from jetrl_jax.rewards import RewardPool
from jetrl_jax.rl.objective import LossConfig
from jetrl_jax.rl.rollout.engine import EngineConfig
from jetrl_jax.rl.settings import (
    AlgorithmConfig,
    FilterGroups,
    GuardConfig,
    OverlongBuffer,
    RunConfig,
)

OUTPUT = pathlib.Path(__file__).parent.parent / 'docs' / 'configuration.md'
# Who reads a section's values; the first that documents a name is quoted.
_READERS: dict[str, tuple[Any, ...]] = {
    '': (RunConfig,),
    'data': (load_examples, PromptDataset.__init__, ChatFormat),
    'reward': (RewardPool, RewardPool.__init__),
    'model': (Policy,),
    'precision': (Recipe,),
    'rollout': (EngineConfig, RunConfig),
    'algorithm': (LossConfig, AlgorithmConfig),
    'algorithm.filter_groups': (FilterGroups,),
    'reward.overlong_buffer': (OverlongBuffer,),
    'optim': (OptimizerConfig,),
    'trainer': (RunConfig,),
    'guard': (GuardConfig,),
    'mesh': (Axes,),
}
_HEAD = """\
# Configuration

<!-- Written by tools/config_reference.py from configs/base.py. -->

A config file starts from `configs/base.py` and sets differences; the command
line overrides both: `--config.optim.lr=2e-6`. Lists are Python literals:
`--config.data.train_files="('a.jsonl', 'b.jsonl')"`. A name that is not in this
table is refused. Units are in the meanings; batch sizes count prompts unless
they say rows.
"""


def comments(source: str) -> dict[str, str]:
  """Maps each assigned name of a config file to the comment above it."""
  found, pending = {}, []
  for line in source.splitlines():
    line = line.strip()
    if line.startswith('#'):
      pending.append(line.lstrip('# '))
      continue
    assigned = re.match(r'config\.([\w.]+) = ', line)
    if assigned:
      found[assigned.group(1)] = ' '.join(pending)
    pending = []
  return found


def documented(reader: Any) -> dict[str, str]:
  """Maps names to their entries under 'Attributes:' or 'Args:'."""
  text = inspect.getdoc(reader) or ''
  sections = re.findall(r'^(?:Attributes|Args):\n((?:  .*\n?|\n)*)', text, re.M)
  entries = re.findall(
      r'^  (\w+): (.*(?:\n {4}.*)*)', '\n'.join(sections), re.M
  )
  return {name: ' '.join(words.split()) for name, words in entries}


def _meaning(section: str, name: str, above: dict[str, str]) -> str:
  text = above[f'{section}.{name}' if section else name]
  for reader in _READERS.get(section, ()):
    text = text or documented(reader).get(name, '')
  text = text[:1].upper() + text[1:]
  # Outside code spans these two would be read as HTML and as a column.
  return re.sub('<([^>]*)>', r'&lt;\1&gt;', text).replace('|', r'\|')


def _table(section: str, values: dict, above: dict[str, str]) -> str:
  rows = ['| name | default | meaning |', '|---|---|---|']
  for name, value in values.items():
    meaning = _meaning(section, name, above)
    rows.append(f'| `{name}` | `{value!r}` | {meaning} |')
  return '\n'.join(rows)


def render() -> str:
  """Returns the text of docs/configuration.md."""
  above = comments(inspect.getsource(base))
  config: Any = base.get_config()
  # A ConfigDict has its names in alphabetical order; the file's order explains.
  tables: dict[str, dict[str, Any]] = {'': {}}
  for path in above:
    section, _, name = path.rpartition('.')
    value = config[section][name] if section else config[name]
    if hasattr(value, 'items'):
      tables[path] = {}
    else:
      tables[section][name] = value
  parts = [_HEAD]
  for section, values in tables.items():
    if section:
      parts.append(f'\n## {section}\n')
    if above.get(section):
      parts.append(f'{above[section]}\n')
    parts.append(_table(section, values, above))
  return '\n'.join(parts) + '\n'


if __name__ == '__main__':
  OUTPUT.write_text(render(), encoding='utf-8')
