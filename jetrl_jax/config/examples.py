"""The example configs by name, and the folders of data that they start from.

In a clone they are its folders configs/ and examples/; in a wheel both lie
inside the package (pyproject.toml). `--config=qwen7b` names one of them
wherever a command is started, and a config asks here for its data.
"""

import importlib
import pathlib
import sys

_PACKAGE = pathlib.Path(__file__).parents[1]
# Names of files that are no configs: the defaults, and names that start with _.
_NO_CONFIG = ('base',)
_INSTALLED = (_PACKAGE / 'configs' / 'base.py').is_file()
_HOME = _PACKAGE if _INSTALLED else _PACKAGE.parent


def names() -> list[str]:
  """Returns the names of the example configs."""
  files = (_HOME / 'configs').glob('[!_]*.py')
  return sorted(file.stem for file in files if file.stem not in _NO_CONFIG)


def config_file(name: str) -> pathlib.Path:
  """Returns the file of an example config."""
  return _HOME / 'configs' / f'{name}.py'


def let_import_configs(file: pathlib.Path) -> None:
  """Makes `from configs import base` work in a config file.

  In a clone Python finds the folder by itself. In a wheel the package's own
  stands in for it, unless the user's file is beside another one that has a
  base.py.

  Args:
    file: the config file.
  """
  own = _HOME / 'configs' in file.resolve().parents
  if not own and any(_has_base(folder) for folder in sys.path):
    return
  if _INSTALLED:
    sys.modules['configs'] = importlib.import_module('jetrl_jax.configs')
  elif str(_HOME) not in sys.path:
    sys.path.append(str(_HOME))


def folder(name: str) -> str:
  """Returns the folder of an example's model and data.

  Args:
    name: 'quickstart', 'sums', 'calculator' or 'portfolio'.

  Returns:
    The path from the clone if the command was started there, as a run's config
    then holds on any machine; otherwise the absolute path.
  """
  relative = pathlib.Path('examples', name)
  return str(relative if relative.is_dir() else _HOME / relative)


def module(name: str) -> str:
  """Returns how an example's module is imported.

  Args:
    name: below examples, such as 'calculator.environment'.
  """
  return f'jetrl_jax.examples.{name}' if _INSTALLED else f'examples.{name}'


def _has_base(folder: str) -> bool:
  return (pathlib.Path(folder) / 'configs' / 'base.py').is_file()
