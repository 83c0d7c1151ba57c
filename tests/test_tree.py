"""The tree itself: who may import whom, and what no file may hold."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from tools import build_files

_ROOT = build_files.ROOT
_FILES = build_files.source_files()
_WITHOUT_JAX = ['data', 'rewards']
_BUILT = {'build', 'dist', 'runs', '__pycache__'}
_TEXT = {'', '.py', '.md', '.toml', '.json', '.jsonl', '.sh', '.txt', '.ipynb'}


def _name(path: pathlib.Path) -> str:
  return path.relative_to(_ROOT).as_posix()


@pytest.mark.parametrize('path', _FILES, ids=_name)
def test_a_room_imports_only_the_rooms_before_it(path):
  room, rank = build_files.room_of(path), build_files.RANK
  assert not [m for m in build_files.imports(path) if m[0] == ''], 'relative'
  if room == '__init__':
    return  # The package's front page may export any room.
  assert room in rank, f'{room} has no place in the import order'
  imported = build_files.rooms_imported(path)
  later = {r for r in imported if r not in rank or rank[r] >= rank[room]}
  assert not later, f'{room} may not import {sorted(later)}'


@pytest.mark.parametrize(
    'path',
    # Says itself what it needs there.
    [path for path in _FILES if path.name != 'hopper_dot.py'],
    ids=_name,
)
def test_no_file_uses_the_private_part_of_jax(path):
  # In words too: a dynamic import is a string.
  assert ('jax', '_src') not in {m[:2] for m in build_files.imports(path)}
  assert 'jax._src' not in path.read_text(encoding='utf-8')


@pytest.mark.parametrize('room', _WITHOUT_JAX)
def test_a_worker_process_of_this_room_starts_without_jax(room):
  modules = [
      '.'.join(path.relative_to(_ROOT).with_suffix('').parts)
      for path in _FILES
      if build_files.room_of(path) == room and path.name != '__init__.py'
  ]
  assert modules
  code = '; '.join(
      [
          'import sys',
          *(f'import {module}' for module in modules),
          'sys.exit("jax was imported" if "jax" in sys.modules else 0)',
      ]
  )
  done = subprocess.run(
      [sys.executable, '-c', code], cwd=_ROOT, capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr


def test_the_build_files_name_exactly_the_rooms_that_are_imported():
  expected = build_files.build_files()
  stale = [
      _name(path)
      for path, text in expected.items()
      if not path.exists() or path.read_text(encoding='utf-8') != text
  ]
  assert not stale, 'run: python -m tools.build_files'
  folders = ('jetrl_jax', *build_files.CLONE)
  found = {p for f in folders for p in (_ROOT / f).rglob('BUILD')}
  assert found == set(expected)


def test_a_room_is_visible_to_later_rooms_only():
  labels = build_files._may_import('models')
  assert {'//jetrl_jax/rl:__pkg__', '//tests:__subpackages__'} <= labels
  # Its own row, and the row before.
  assert not {'//jetrl_jax/models:__pkg__', '//jetrl_jax/fp8:__pkg__'} & labels
  assert not build_files._may_import('serve') & {'//jetrl_jax:__pkg__'}


def test_every_room_has_tests():
  rooms = {build_files.room_of(path) for path in _FILES} - {'__init__'}
  tests = [_name(p) for p in (_ROOT / 'tests').rglob('test_*.py')]
  without = {
      room
      for room in rooms - {'typing'}  # Names only, nothing to run.
      if not any(re.match(rf'tests/({room}/|test_{room})', t) for t in tests)
  }
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
    # In a git worktree `.git` is a file, and names a path of the machine.
    paths = (pathlib.Path(folder, name) for name in names if name != '.git')
    files += [p for p in paths if p.suffix in _TEXT]
  return sorted(files)


def test_a_folder_of_the_clone_is_found_before_a_package_of_its_name():
  # google-jetstream installs a package `benchmarks`; one without __init__.py,
  # wherever it lies, is looked for last.
  for folder in build_files.CLONE:
    assert (_ROOT / folder / '__init__.py').is_file(), folder


def test_no_file_holds_a_path_of_somebodys_machine():
  # `/(?:` keeps this file from finding itself.
  path_of_a_machine = re.compile(r'(?<![\w.])/(?:work|root|home|Users)/')
  found = []
  for path in _text_files():
    text = path.read_text(encoding='utf-8', errors='replace')
    if path_of_a_machine.search(text):
      found.append(_name(path))
  assert not found
