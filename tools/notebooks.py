"""Runs the notebooks and writes their outputs beside their code.

python -m tools.notebooks [notebooks/01_fp8_by_hand.ipynb ...]

Needs the extra `notebooks`. What a machine adds (times, paths, versions of the
kernel) is left out. The hash of the code is kept with the outputs:
tests/test_notebooks.py fails where somebody changed one and not the other.
"""

import base64
import hashlib
import io
import json
import os
import pathlib
import sys
from typing import Any

FOLDER = pathlib.Path(__file__).parent.parent / 'notebooks'
_METADATA = {
    'kernelspec': {
        'display_name': 'Python 3',
        'language': 'python',
        'name': 'python3',
    },
    'language_info': {'name': 'python'},
}
_TIMEOUT_S = 3600


# It downloads a checkpoint and is for a GPU: no outputs are kept.
WITHOUT_OUTPUTS = ('05_small_real_run',)


def paths() -> list[pathlib.Path]:
  """Lists the notebooks."""
  return sorted(FOLDER.glob('*.ipynb'))


def read(path: pathlib.Path) -> Any:
  """Returns a notebook as JSON."""
  return json.loads(path.read_text(encoding='utf-8'))


def code_cells(notebook: Any) -> list[Any]:
  """Returns the code cells in order."""
  return [cell for cell in notebook['cells'] if cell['cell_type'] == 'code']


def source(cell: Any) -> str:
  """Returns a cell's text."""
  return ''.join(cell['source'])


def source_hash(notebook: Any) -> str:
  """Returns the SHA-256 of the code, which the outputs belong to."""
  text = '\0'.join(source(cell) for cell in code_cells(notebook))
  return hashlib.sha256(text.encode()).hexdigest()


def _small_png(text: str) -> str:
  """Returns a base64 picture with a palette of 128 colours: a third."""
  from PIL import Image

  picture = Image.open(io.BytesIO(base64.b64decode(text))).convert('RGB')
  out = io.BytesIO()
  small = picture.quantize(128, dither=Image.Dither.NONE)
  small.save(out, 'PNG', optimize=True)
  return base64.b64encode(out.getvalue()).decode()


def run(path: pathlib.Path) -> None:
  """Executes a notebook in a fresh kernel and writes it back.

  Raises:
    RuntimeError: a cell wrote to stderr, other than a warning of our own: it
      is not worth looking at, and often holds a path of the machine.
  """
  # Not in the development environment: the tests run the cells themselves.
  import nbclient  # pyright: ignore[reportMissingImports]
  import nbformat  # pyright: ignore[reportMissingImports]

  os.environ['PYTHONPATH'] = str(FOLDER.parent)
  os.environ['JAX_PLATFORMS'] = 'cpu'
  notebook = nbformat.read(path, as_version=4)
  nbclient.NotebookClient(
      notebook,
      timeout=_TIMEOUT_S,
      coalesce_streams=True,
      resources={'metadata': {'path': str(FOLDER)}},
  ).execute()
  for cell in code_cells(notebook):
    cell.metadata.pop('execution', None)
    for output in cell.outputs:
      if output.get('name') == 'stderr' and not all(
          line.startswith('WARNING:absl:') for line in output.text.splitlines()
      ):
        raise RuntimeError(f'{path.name} wrote to stderr: {output.text}')
      if 'image/png' in output.get('data', {}):
        output.data['image/png'] = _small_png(output.data['image/png'])
  notebook.metadata = _METADATA
  # As written and read again: nbformat joins lines in its own way.
  lines = json.loads(nbformat.writes(notebook))
  lines['metadata']['source_sha256'] = source_hash(lines)
  text = json.dumps(lines, indent=1, ensure_ascii=False, sort_keys=True)
  path.write_text(text + '\n', encoding='utf-8')


if __name__ == '__main__':
  for chosen in [pathlib.Path(p) for p in sys.argv[1:]] or paths():
    if chosen.stem in WITHOUT_OUTPUTS:
      continue
    run(chosen.resolve())
    print(f'{chosen.name}: {chosen.stat().st_size / 1024:.0f} KiB')
