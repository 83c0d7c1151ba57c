"""The tree itself: who may import whom, and what no file may hold."""

import ast
import os
import pathlib
import re
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).parent.parent
_PACKAGE = _ROOT / 'jetrl_jax'

# Each row may import the rows above it, and no other room of its own row.
_ORDER = (
    {'typing'},
    {'metrics', 'rng', 'sharding', 'compilation'},
    {'checkpoint'},
    {'fp8'},
    {'models'},
    {'data', 'rewards'},
    {'rl'},
    {'config'},
    {'main', 'sft'},
)
_WITHOUT_JAX = {'data', 'rewards'}
_RANK = {room: rank for rank, rooms in enumerate(_ORDER) for room in rooms}
_FILES = sorted(_PACKAGE.rglob('*.py'))
_BUILT = {'build', 'dist', 'runs', '__pycache__'}
_TEXT = {'', '.py', '.md', '.toml', '.json', '.jsonl', '.sh', '.txt', '.ipynb'}


def _name(path: pathlib.Path) -> str:
  return path.relative_to(_ROOT).as_posix()


def _room(parts: tuple[str, ...]) -> str:
  """Maps ('checkpoint_arrays',) to 'checkpoint' and ('fp8', 'dot') to 'fp8'.

  A module at the top whose name continues a room's name belongs to that room.

  Args:
    parts: a module's path below jetrl_jax.

  Returns:
    A name in `_RANK`, or the first part when there is none.
  """
  top = parts[0]
  if len(parts) == 1 and top not in _RANK:
    for room in _RANK:
      if top.startswith(room + '_'):
        return room
  return top


def _room_of_file(path: pathlib.Path) -> str:
  return _room(path.relative_to(_PACKAGE).with_suffix('').parts)


def _imports(path: pathlib.Path) -> set[tuple[str, ...]]:
  """Lists what a file imports, anywhere in it, as tuples of names."""
  found = set()
  for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
    if isinstance(node, ast.Import):
      found |= {tuple(alias.name.split('.')) for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f'{_name(path)}: a relative import'
      module = tuple((node.module or '').split('.'))
      found |= {(*module, alias.name) for alias in node.names}
  return found


def _rooms_imported(path: pathlib.Path) -> set[str]:
  ours = (m for m in _imports(path) if m[0] == 'jetrl_jax' and len(m) > 1)
  rooms = set()
  for module in ours:
    # In `from jetrl_jax.rng import key` the name is not part of the module.
    top_module = (_PACKAGE / f'{module[1]}.py').exists()
    rooms.add(_room(module[1:2] if top_module else module[1:]))
  return rooms - {_room_of_file(path)}


@pytest.mark.parametrize('path', _FILES, ids=_name)
def test_a_room_imports_only_the_rooms_before_it(path):
  room = _room_of_file(path)
  if room == '__init__':
    return  # The package's front page may export any room.
  assert room in _RANK, f'{room} has no place in the import order'
  later = {r for r in _rooms_imported(path) if _RANK[r] >= _RANK[room]}
  assert not later, f'{room} may not import {sorted(later)}'


@pytest.mark.parametrize('path', _FILES, ids=_name)
def test_no_file_uses_the_private_part_of_jax(path):
  private = {m for m in _imports(path) if m[:2] == ('jax', '_src')}
  assert not private
  assert 'jax._src' not in path.read_text(encoding='utf-8')


@pytest.mark.parametrize('room', sorted(_WITHOUT_JAX))
def test_a_worker_process_of_this_room_starts_without_jax(room):
  modules = [
      '.'.join(path.relative_to(_ROOT).with_suffix('').parts)
      for path in _FILES
      if _room_of_file(path) == room and path.name != '__init__.py'
  ]
  assert modules
  code = '; '.join(
      ['import sys', *(f'import {m}' for m in modules)]
      + ['sys.exit(f"{__name__} imported jax" if "jax" in sys.modules else 0)']
  )
  done = subprocess.run(
      [sys.executable, '-c', code], cwd=_ROOT, capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr


def _build_targets() -> dict[str, set[str]]:
  """Reads the py_library targets of the BUILD files: room -> rooms it needs."""
  targets = {}
  for build in sorted(_PACKAGE.rglob('BUILD')):
    folder = build.parent.relative_to(_PACKAGE).as_posix()
    for node in ast.walk(ast.parse(build.read_text(encoding='utf-8'))):
      if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        continue
      if node.func.id != 'py_library':
        continue
      fields = {k.arg: k.value for k in node.keywords}
      name = ast.literal_eval(fields['name'])
      assert folder in ('.', name), f'{_name(build)}: target {name}'
      deps = ast.literal_eval(fields['deps']) if 'deps' in fields else []
      targets[name] = {re.split('[:/]', dep)[-1] for dep in deps}
      if folder == '.':
        srcs = ast.literal_eval(fields['srcs'])
        files = [p.name for p in _FILES if _room_of_file(p) == name]
        assert srcs == files, f'{_name(build)}: srcs of {name}'
  return targets


def test_the_build_files_name_exactly_the_rooms_that_are_imported():
  needed = {}
  for path in _FILES:
    room = _room_of_file(path)
    if room != '__init__':
      needed.setdefault(room, set()).update(_rooms_imported(path))
  found = _build_targets()
  wrong = {
      room: f'found {sorted(found.get(room, ()))}, needed {sorted(rooms)}'
      for room, rooms in needed.items()
      if found.get(room) != rooms
  }
  assert not wrong
  assert sorted(found) == sorted(needed), 'targets without files'


def test_every_room_has_tests():
  rooms = {p.parent.name for p in _PACKAGE.rglob('*.py')} - {'jetrl_jax'}
  without = [r for r in rooms if not list((_ROOT / 'tests' / r).glob('test_*'))]
  assert not without


def _text_files() -> list[pathlib.Path]:
  """Lists the project's own files, less what tools and builds leave."""
  files = []
  for folder, folders, names in os.walk(_ROOT):
    folders[:] = [
        f
        for f in folders
        if f not in _BUILT and (f == '.ci' or not f.startswith('.'))
    ]
    paths = (pathlib.Path(folder, name) for name in names)
    files += [p for p in paths if p.suffix in _TEXT]
  return sorted(files)


def test_no_file_holds_a_path_of_somebodys_machine():
  # `/(?:` keeps this file from finding itself.
  path_of_a_machine = re.compile(r'(?<![\w.])/(?:work|root|home|Users)/')
  found = []
  for path in _text_files():
    text = path.read_text(encoding='utf-8', errors='replace')
    if path_of_a_machine.search(text):
      found.append(_name(path))
  assert not found
