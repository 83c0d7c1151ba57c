"""The tree itself: who may import whom, and what no file may hold."""

import ast
import os
import pathlib
import re
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).parents[1]
_PACKAGE = _ROOT / 'jetrl_jax'
_FILES = sorted(_PACKAGE.rglob('*.py'))
# Each room imports only rooms above it. A room's __init__ may export what the
# rooms inside it hold. The commands in the package's root import any.
_LAYERS = [
    'core',
    'metrics',
    'checkpoint',
    'data',
    'rewards',
    'fp8',
    'fp8.flow',
    'kernels',
    'models',
    'models.hf',
    'optim',
    'rl',
    'rl.rollout',
    'rl.scoring',
    'rl.run',
    'rl.training',
    'config',
    'dry_run',
    'evaluate',
    'report',
    'mismatch',
    'serve',
    'serve.jetstream',
]
_MOST_FILES = 12  # of a package, less its __init__ and __main__
_MOST_COMMANDS = 8  # files in the package's root
_CLONE = ['benchmarks', 'configs', 'study', 'tests', 'tools']
_BUILT = {'build', 'dist', 'runs', '__pycache__'}
_TEXT = {'', '.py', '.md', '.toml', '.json', '.jsonl', '.sh', '.txt', '.ipynb'}


def _name(path: pathlib.Path) -> str:
  return path.relative_to(_ROOT).as_posix()


def _module(path: pathlib.Path) -> str:
  """Returns a file's module below jetrl_jax; '' is the package itself."""
  parts = path.relative_to(_PACKAGE).with_suffix('').parts
  return '.'.join(parts).removesuffix('__init__').rstrip('.')


def _imports(path: pathlib.Path) -> set[str]:
  """Returns what a file imports, as 'package.module.name'."""
  found = set()
  for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
    if isinstance(node, ast.Import):
      found |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      base = '.' * node.level + (node.module or '')
      found |= {f'{base}.{alias.name}' for alias in node.names}
  return found


def _room(module: str) -> str:
  """Returns the room of a module below jetrl_jax; '' is the root."""
  parts = module.split('.')
  rooms = ['.'.join(parts[:n]) for n in (2, 1)]
  return next((room for room in rooms if room in _LAYERS), '')


def _rooms_imported(path: pathlib.Path) -> set[str]:
  ours = {m for m in _imports(path) if m.split('.')[0] == 'jetrl_jax'}
  return {_room(m.removeprefix('jetrl_jax').lstrip('.')) for m in ours}


@pytest.mark.parametrize('path', _FILES, ids=_name)
def test_a_room_imports_only_the_rooms_before_it(path):
  assert not {m for m in _imports(path) if m.startswith('.')}, 'relative'
  room = _room(_module(path))
  if not room:
    return  # A command.
  later = set(_LAYERS[_LAYERS.index(room) + 1 :]) | {''}
  if path.name == '__init__.py':
    later = {other for other in later if not other.startswith(f'{room}.')}
  assert not _rooms_imported(path) & later


def test_every_package_has_a_place_in_the_order_and_says_what_it_is():
  for init in (path for path in _FILES if path.name == '__init__.py'):
    assert ast.get_docstring(ast.parse(init.read_text())), _name(init)
    assert init.parent == _PACKAGE or _room(_module(init)), _name(init)


def test_no_package_has_more_files_than_a_reader_can_hold():
  for folder in {path.parent for path in _FILES}:
    files = [p for p in folder.glob('*.py') if not p.name.startswith('__')]
    most = _MOST_COMMANDS if folder == _PACKAGE else _MOST_FILES
    assert len(files) <= most, _name(folder)


@pytest.mark.parametrize(
    'path',
    # It says itself what it needs there.
    [path for path in _FILES if _name(path) != 'jetrl_jax/core/processes.py'],
    ids=_name,
)
def test_no_file_uses_the_private_part_of_jax(path):
  # In words too: a dynamic import is a string.
  assert not {m for m in _imports(path) if m.startswith('jax._src')}
  assert 'jax._src' not in path.read_text(encoding='utf-8')


def test_only_kernels_import_pallas_and_one_backend_of_it():
  def holds_kernels(path) -> bool:
    holds = 'kernels' in (path.parent.name, path.parent.parent.name)
    return holds and path.stem.startswith('mosaic')

  for path in _FILES:
    imports = '\n'.join(_imports(path))
    # JAX has deprecated this one.
    assert 'jax.experimental.pallas.triton' not in imports, _name(path)
    if holds_kernels(path):
      continue
    assert 'jax.experimental.pallas' not in imports, _name(path)
    # These hold kernels too: an operation imports its own where it runs it.
    text = path.read_text(encoding='utf-8')
    module = r'^(from|import) jetrl_jax\.kernels\S*( import \(?\s*)?\bmosaic'
    assert not re.search(module, text, re.MULTILINE), _name(path)


def test_every_kernel_says_its_tiles_memory_order_and_lower_bound():
  found = []
  for path in _FILES:
    text = path.read_text(encoding='utf-8')
    calls = 'plgpu.kernel(' in text
    if not calls or path.parent.parent.name != 'kernels':
      continue
    said = ast.get_docstring(ast.parse(text)) or ''
    for word in ('program', 'registers', ' sum', 'Lower bound of the time'):
      assert word in said, (_name(path), word)
    found.append(path)
  assert len(found) > 12


@pytest.mark.parametrize('room', ['data', 'rewards'])
def test_a_worker_process_of_this_room_starts_without_jax(room):
  modules = [
      f'jetrl_jax.{_module(path)}'
      for path in _FILES
      if _room(_module(path)) == room and path.name != '__init__.py'
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


def test_there_is_one_build_file_and_it_has_every_room():
  text = (_ROOT / 'BUILD').read_text(encoding='utf-8')
  for room in _LAYERS:
    assert f'name = "{room.replace(".", "_")}",' in text, room
  folders = ['jetrl_jax', *_CLONE]
  assert not [p for f in folders for p in (_ROOT / f).rglob('BUILD')]


def _build_deps(name: str) -> set[str]:
  """Returns what a target of BUILD names as its deps."""
  text = (_ROOT / 'BUILD').read_text(encoding='utf-8')
  target = text[text.index(f'name = "{name}",') :].split('\n)', 1)[0]
  return set(re.findall(r'":(\w+)"', target.partition('deps = ')[2]))


_TARGETS = {
    room.replace('.', '_'): [
        path
        for path in _FILES
        # What an __init__ only exports may import the room itself.
        if _room(_module(path)) == room and path.name != '__init__.py'
    ]
    for room in _LAYERS
} | {p.stem: [p] for p in _PACKAGE.glob('[!_]*.py')}


@pytest.mark.parametrize('name', _TARGETS)
def test_a_target_depends_on_what_its_files_import(name):
  imported = {
      room.replace('.', '_')
      for path in _TARGETS[name]
      for room in _rooms_imported(path)
  }
  assert _build_deps(name) - {'jetrl_jax'} == imported - {name, ''}


def test_every_room_has_tests():
  tests = [_name(p) for p in (_ROOT / 'tests').rglob('test_*.py')]
  for room in _LAYERS:
    folder = f'tests/{room.replace(".", "/")}/'
    assert any(test.startswith(folder) for test in tests), room


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
  for folder in _CLONE:
    assert (_ROOT / folder / '__init__.py').is_file(), folder


def test_nothing_else_is_committed_beside_the_folders_of_the_project():
  done = subprocess.run(
      ['git', 'ls-files'],
      cwd=_ROOT,
      capture_output=True,
      text=True,
      check=False,
  )
  if done.returncode:
    pytest.skip('no git repository')
  folders = {name.split('/')[0] for name in done.stdout.split() if '/' in name}
  others = {'.ci', '.github', 'docs', 'examples', 'jetrl_jax', 'notebooks'}
  assert folders == {*_CLONE, *others}


def test_no_file_holds_a_path_of_somebodys_machine():
  # `/(?:` keeps this file from finding itself.
  path_of_a_machine = re.compile(r'(?<![\w.])/(?:work|root|home|Users)/')
  found = []
  for path in _text_files():
    text = path.read_text(encoding='utf-8', errors='replace')
    if path_of_a_machine.search(text):
      found.append(_name(path))
  assert not found
