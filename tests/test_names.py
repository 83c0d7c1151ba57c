"""What only a GPU runs still names what is there: its tests, the benchmarks."""

import ast
import importlib
import pathlib
import types

import pytest

_ROOT = pathlib.Path(__file__).parents[1]
_FILES = sorted(
    file
    for folder in ('tests/gpu', 'benchmarks')
    for file in (_ROOT / folder).glob('*.py')
)


def _modules(tree: ast.Module) -> dict[str, list[types.ModuleType]]:
  """Returns name -> the project's own modules that a file gives this name."""
  found: dict[str, list[types.ModuleType]] = {}
  for node in ast.walk(tree):
    if not isinstance(node, ast.ImportFrom) or node.level or not node.module:
      continue
    if node.module.split('.')[0] not in ('jetrl_jax', 'benchmarks', 'tests'):
      continue
    parent = importlib.import_module(node.module)
    for alias in node.names:
      value = getattr(parent, alias.name, None)
      if value is None:
        value = importlib.import_module(f'{node.module}.{alias.name}')
      if isinstance(value, types.ModuleType):
        found.setdefault(alias.asname or alias.name, []).append(value)
  return found


@pytest.mark.parametrize(
    'file', _FILES, ids=lambda file: file.relative_to(_ROOT).as_posix()
)
def test_all_names_of_modules_exist(file):
  tree = ast.parse(file.read_text(encoding='utf-8'))
  try:
    modules = _modules(tree)
  except ImportError as error:
    # Pallas' Mosaic backend, in an older jax.
    pytest.skip(f'{error}')
  missing = {
      f'{node.value.id}.{node.attr}'
      for node in ast.walk(tree)
      if isinstance(node, ast.Attribute)
      and isinstance(node.value, ast.Name)
      and node.value.id in modules
      and not any(hasattr(m, node.attr) for m in modules[node.value.id])
  }
  assert not missing
