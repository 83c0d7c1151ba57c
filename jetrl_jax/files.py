"""Text files that are written whole or not at all."""

import os
import pathlib


def replace_text(path: pathlib.Path, text: str) -> None:
  """Writes a file; a kill or a full disk leaves what was there before.

  Raises:
    OSError: it cannot be written.
  """
  partial = path.with_name(f'.{path.name}.partial')
  partial.write_text(text, encoding='utf-8')
  os.replace(partial, path)
