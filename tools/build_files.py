"""Writes the BUILD files from the imports, so that nobody keeps deps by hand.

A room is a package of jetrl_jax or a module at its top; a top module whose
name continues another's (`checkpoint_arrays`) belongs to that room. The order
of the rooms is `ORDER`, and tests/test_tree.py holds both the imports and the
BUILD files against it. After a change of imports:

    python tools/build_files.py
"""

import ast
import pathlib

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / 'jetrl_jax'

# Each row may import the rows above it, and no other room of its own row.
ORDER = (
    ('typing',),
    ('compilation', 'metrics', 'provenance', 'rng', 'sharding'),
    ('checkpoint',),
    ('fp8',),
    ('models',),
    ('data', 'rewards'),
    ('rl',),
    ('config', 'report'),
    ('saved_policy',),
    ('main', 'sft'),
)
RANK = {room: rank for rank, rooms in enumerate(ORDER) for room in rooms}

_HEAD = """\
# Written by tools/build_files.py. Third-party packages are in pyproject.toml.
load("@rules_python//python:defs.bzl", "py_library")

package(default_visibility = ["//visibility:public"])
"""
_TESTS = """\
# Written by tools/build_files.py. pytest runs the tests (make test), not
# Bazel: the switches are in conftest.py.
load("@rules_python//python:defs.bzl", "py_library")

py_library(
    name = "tests",
    testonly = True,
    srcs = glob(["**/*.py"]),
    data = glob(
        ["**/*"],
        exclude = ["**/*.py"],
    ) + [
        "//:configs",
        "//:quickstart_data",
    ],
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
  """
  files, needed = {}, {}
  for path in source_files():
    room = room_of(path)
    if room != '__init__':
      files.setdefault(room, []).append(path)
      needed.setdefault(room, set()).update(rooms_imported(path))
  if unknown := sorted(set(needed) - set(RANK)):
    raise ValueError(
        f'rooms {unknown} have no place in the import order; name them in'
        ' ORDER in tools/build_files.py, or move them into a room'
    )
  rooms = sorted(needed, key=lambda room: (RANK[room], room))
  top_targets, texts = [], {}
  for room in rooms:
    if (PACKAGE / room).is_dir():
      target = _target(room, 'glob(["*.py"])', needed[room])
      texts[PACKAGE / room / 'BUILD'] = f'{_HEAD}\n{target}'
    else:
      sources = _list([path.name for path in files[room]])
      top_targets.append(_target(room, sources, needed[room]))
  texts[PACKAGE / 'BUILD'] = '\n'.join([_HEAD, *top_targets])
  labels = _list(sorted(map(_label, rooms)))
  texts[ROOT / 'tests' / 'BUILD'] = f'{_TESTS}    deps = {labels},\n)\n'
  return texts


def _target(room: str, sources: str, deps: set[str]) -> str:
  text = f'py_library(\n    name = "{room}",\n    srcs = {sources},\n'
  if deps:
    text += f'    deps = {_list(sorted(map(_label, deps)))},\n'
  return text + ')\n'


def _label(room: str) -> str:
  if (PACKAGE / room).is_dir():
    return f'//jetrl_jax/{room}'
  return f'//jetrl_jax:{room}'


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
