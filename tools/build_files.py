"""Writes the BUILD files from the imports, so that nobody keeps deps by hand.

A room is a package of jetrl_jax or a module at its top; a top module whose
name continues another's (`checkpoint_arrays`) belongs to that room. The order
of the rooms is `ORDER`, and tests/test_tree.py holds both the imports and the
BUILD files against it. A room is visible to the rooms that may import it, so
Bazel refuses what the test refuses. After a change of imports:

    python -m tools.build_files
"""

import ast
import dataclasses
import graphlib
import pathlib

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / 'jetrl_jax'

# Each row may import the rows above it, and no other room of its own row.
ORDER = (
    ('files', 'typing'),
    (
        'compilation',
        'device_memory',
        'metrics',
        'provenance',
        'rng',
        'sharding',
    ),
    ('checkpoint',),
    ('fp8',),
    ('models',),
    ('data', 'rewards'),
    ('rl',),
    ('config', 'report'),
    ('saved_policy',),
    ('room',),
    ('dry_run',),
    ('evaluate', 'export', 'main', 'mismatch', 'sft', 'serve'),
)
RANK = {room: rank for rank, rooms in enumerate(ORDER) for room in rooms}

# The folders with Python files beside the package in a clone.
CLONE = ('benchmarks', 'configs', 'study', 'tests', 'tools')

_LOAD = 'load("@rules_python//python:defs.bzl", {names})\n'
_HEAD = """\
# Written by tools/build_files.py. Third-party packages are in pyproject.toml.
"""
_TESTS = """\
# Written by tools/build_files.py. pytest runs the tests (make test), not
# Bazel: the switches are in tests/conftest.py.
"""
_DATA = """\
    data = glob(
        ["**/*"],
        allow_empty = True,
        exclude = ["**/*.py"],
    ){more},
"""


def source_files() -> list[pathlib.Path]:
  """Lists the Python files of the package."""
  return sorted(PACKAGE.rglob('*.py'))


def imports(path: pathlib.Path) -> set[tuple[str, ...]]:
  """Lists what a file imports, at its top or in a function.

  Args:
    path: a Python file.

  Returns:
    Names such as ('jax', 'numpy') for `import jax.numpy` and for
    `from jax import numpy`; relative imports start with ''.
  """
  found = set()
  for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
    if isinstance(node, ast.Import):
      found |= {tuple(alias.name.split('.')) for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      base = '.' * node.level + (node.module or '')
      found |= {(*base.split('.'), alias.name) for alias in node.names}
  return found


def room_of(path: pathlib.Path) -> str:
  """Names the room of a file; '__init__' for the package's front page."""
  return _room(path.relative_to(PACKAGE).with_suffix('').parts[0])


def rooms_imported(path: pathlib.Path) -> set[str]:
  """Names the other rooms that a file imports."""
  ours = {m[1] for m in imports(path) if m[0] == 'jetrl_jax' and len(m) > 1}
  return {_room(name) for name in ours} - {room_of(path)}


def _room(top: str) -> str:
  continued = [room for room in RANK if top.startswith(f'{room}_')]
  return continued[0] if top not in RANK and continued else top


def build_files() -> dict[pathlib.Path, str]:
  """Renders every BUILD file below the root.

  Returns:
    The text by path.

  Raises:
    ValueError: a room has no place in `ORDER`.
    graphlib.CycleError: targets depend on each other in a circle.
  """
  files: dict[str, list[pathlib.Path]] = {}
  for path in source_files():
    if (room := room_of(path)) != '__init__':
      files.setdefault(room, []).append(path)
  if unknown := sorted(set(files) - set(RANK)):
    raise ValueError(
        f'rooms {unknown} have no place in the import order; name them in'
        ' ORDER in tools/build_files.py, or move them into a room'
    )
  rooms = sorted(files, key=lambda room: (RANK[room], room))
  targets = [t for room in rooms for t in _of_room(room, files[room])]
  for folder in _clone_folders():
    targets += _of_clone(folder)
  graphlib.TopologicalSorter({t.label: t.deps for t in targets}).prepare()
  return {
      folder / 'BUILD': _render([t for t in targets if t.folder == folder])
      for folder in {t.folder for t in targets}
  }


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Target:
  """One target of a BUILD file.

  Attributes:
    folder: of its BUILD file.
    name: in that file.
    sources: Python files.
    deps: labels.
    visible: labels of the packages that may depend on it; empty for none.
    data: Bazel's text for its data, if it has any.
    main: the file that a binary runs; '' for a library.
    testonly: whether only tests may depend on it.
  """

  folder: pathlib.Path
  name: str
  sources: list[pathlib.Path]
  deps: frozenset[str]
  visible: frozenset[str] = frozenset()
  data: str = ''
  main: str = ''
  testonly: bool = False

  @property
  def label(self) -> str:
    """The target as others name it."""
    package = self.folder.relative_to(ROOT).as_posix()
    short = package.rpartition('/')[2] == self.name
    return f'//{package}' if short else f'//{package}:{self.name}'

  def render(self) -> str:
    """Returns the rule, as buildifier formats it."""
    sources = [
        path.relative_to(self.folder).as_posix() for path in self.sources
    ]
    rule = 'py_binary' if self.main else 'py_library'
    text = f'{rule}(\n    name = "{self.name}",\n'
    if self.testonly:
      text += '    testonly = True,\n'
    text += f'    srcs = {_list(sources)},\n{self.data}'
    if self.main and self.main != f'{self.name}.py':
      text += f'    main = "{self.main}",\n'
    # A target of one's own package is named by its name alone.
    own = self.label.partition(':')[0] + ':'
    deps = [dep.replace(own, ':') for dep in self.deps]
    if self.visible:
      text += f'    visibility = {_list(sorted(self.visible, key=_place))},\n'
    if deps:
      text += f'    deps = {_list(sorted(deps, key=_place))},\n'
    return text + ')\n'


def _of_room(room: str, files: list[pathlib.Path]) -> list[_Target]:
  """Returns the library of a room and the commands in it."""
  is_package = (PACKAGE / room).is_dir()
  folder = PACKAGE / room if is_package else PACKAGE
  library = _Target(
      folder=folder,
      name=room,
      sources=files,
      deps=_deps(files) - {_label(room)},
      visible=_may_import(room),
      data=_data_of(folder) if is_package else '',
  )
  commands = [
      _Target(
          folder=folder,
          # `main` is the library; the command is `main_command`.
          name=f'{room if path.stem == "__main__" else path.stem}_command',
          sources=[path],
          deps=frozenset([_label(room)]),
          main=path.name,
      )
      for path in files
      if "__name__ == '__main__'" in path.read_text(encoding='utf-8')
  ]
  return [library, *commands]


def _data_of(folder: pathlib.Path) -> str:
  """Returns Bazel's text for what a package reads besides Python."""
  kinds = ('.html', '.toml')
  names = sorted(p.name for p in folder.iterdir() if p.suffix in kinds)
  return f'    data = {_list(names)},\n' if names else ''


def _may_import(room: str) -> frozenset[str]:
  """Labels of the packages whose rooms come later, and of the clone's."""
  later = {other for other in RANK if RANK[other] > RANK[room]}
  packages = {
      f'//jetrl_jax/{other}' if (PACKAGE / other).is_dir() else '//jetrl_jax'
      for other in later
  }
  return frozenset(
      {f'{package}:__pkg__' for package in packages}
      | {f'//{folder}:__subpackages__' for folder in CLONE}
  )


def _clone_folders() -> list[pathlib.Path]:
  """Lists the folders with Python files beside the package."""
  folders = {p.parent for top in CLONE for p in (ROOT / top).rglob('*.py')}
  return sorted(folders)


def _of_clone(folder: pathlib.Path) -> list[_Target]:
  """Returns a library; of tests what they share, and the tests."""
  files = sorted(folder.glob('*.py'))
  is_test = folder.relative_to(ROOT).parts[0] == 'tests'
  everywhere = frozenset(['//visibility:public'])
  if not is_test:
    deps = _deps(files) - {f'//{folder.name}'}
    return [
        _Target(
            folder=folder,
            name=folder.name,
            sources=files,
            deps=deps,
            visible=everywhere,
        )
    ]
  tests = [path for path in files if path.name.startswith('test_')]
  shared = [path for path in files if path not in tests]
  label = f'//{folder.relative_to(ROOT).as_posix()}:shared'
  top = {'//tests:shared'} if folder.name != 'tests' else set()
  made = []
  if shared:
    made.append(
        _Target(
            folder=folder,
            name='shared',
            sources=shared,
            deps=_deps(shared) - {label},
            visible=frozenset(['//tests:__subpackages__']),
            testonly=True,
        )
    )
  if tests:
    more = '' if top else ' + ["//:examples"]'
    made.append(
        _Target(
            folder=folder,
            name='tests',
            sources=tests,
            deps=_deps(tests) | {label for _ in shared[:1]} | top,
            data=_DATA.format(more=more),
            testonly=True,
        )
    )
  return made


def _deps(files: list[pathlib.Path]) -> frozenset[str]:
  """Labels of what the files import of this project."""
  found = set()
  for path in files:
    for name in imports(path):
      match name:
        case ('jetrl_jax', part, *_) if _room(part) in RANK:
          found.add(_label(_room(part)))
        case ('tests', part, *_) if (ROOT / 'tests' / part).is_dir():
          found.add(f'//tests/{part}:shared')
        case ('tests', _, *_):
          found.add('//tests:shared')
        case ('benchmarks' | 'configs' | 'study' | 'tools' as top, *_):
          found.add(f'//{top}')
  return frozenset(found)


def _render(targets: list[_Target]) -> str:
  rules = sorted({'py_binary' if t.main else 'py_library' for t in targets})
  load = _LOAD.format(names=', '.join(f'"{rule}"' for rule in rules))
  head = _TESTS if targets[0].testonly else _HEAD
  return '\n'.join([head + load, *(target.render() for target in targets)])


def _label(room: str) -> str:
  if (PACKAGE / room).is_dir():
    return f'//jetrl_jax/{room}'
  return f'//jetrl_jax:{room}'


def _place(label: str) -> tuple[bool, str]:
  """Sorts labels as buildifier does: one's own first, ':' before '/'."""
  return not label.startswith(':'), label.replace(':', ' ')


def _list(strings: list[str]) -> str:
  if len(strings) == 1:
    return f'["{strings[0]}"]'
  return '[\n' + ''.join(f'        "{s}",\n' for s in strings) + '    ]'


def main() -> None:
  """Writes the files."""
  for path, text in build_files().items():
    path.write_text(text, encoding='utf-8')


if __name__ == '__main__':
  main()
