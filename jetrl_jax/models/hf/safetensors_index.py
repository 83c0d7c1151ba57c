"""Locates every tensor of a checkpoint before any of it is read.

The safetensors library checks the headers. It does not read the tensors, for
three reasons. For a part of a tensor it reads the whole (`pread`). Or it maps
the file into memory, and if the file is cut short meanwhile, that kills the
process. And it has no FP8 in NumPy. `read_rows` reads any rows with plain
reads.

References:
  The format: huggingface.co/docs/safetensors, "Format".
"""

import dataclasses
import math
import os
import pathlib
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import safetensors

from jetrl_jax.core.files import POINTER_BYTES, check_pointer
from jetrl_jax.models.hf.files import (
    INDEX_FILE,
    SINGLE_FILE,
    check_format,
    has_file,
    list_names,
    list_problems,
    open_inside,
    parse_json,
    read_inside,
)

# Rows are read both ways: the name in a header, the dtype (little-endian).
DTYPES = {
    'BF16': np.dtype(ml_dtypes.bfloat16),
    'F16': np.dtype('<f2'),
    'F32': np.dtype('<f4'),
    'F8_E4M3': np.dtype(ml_dtypes.float8_e4m3fn),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredTensor:
  """One tensor in a file, located but not read.

  Attributes:
    name: its name in the header.
    folder: the checkpoint.
    file: name of the file within the folder.
    dtype: as the header says, e.g. 'BF16'; a key of `DTYPES` if loadable.
    shape: as the header says.
    start: offset of the first byte within the file.
  """

  name: str
  folder: pathlib.Path
  file: str
  dtype: str
  shape: tuple[int, ...]
  start: int


def read_index(folder: pathlib.Path) -> dict[str, StoredTensor]:
  """Locates the tensors of model.safetensors or of the shards of an index.

  Args:
    folder: the checkpoint.

  Returns:
    Tensor by name.

  Raises:
    ValueError: see `check_format`; two ways to read the folder; an index
      that names files elsewhere, or that does not agree with the headers; a
      broken header.
  """
  check_format(folder)
  single, index = has_file(folder, SINGLE_FILE), has_file(folder, INDEX_FILE)
  if not single and not index:
    names = sorted(os.listdir(folder))
    holds = f'it holds {list_names(names, 5)}' if names else 'it is empty'
    raise ValueError(
        f'{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; {holds}. Allowed'
        ' is a folder as save_pretrained of transformers writes it. Download or'
        ' copy the weights there, under one of these names (shards need the'
        ' index), or name the folder that has them'
    )
  if not index:
    return read_header(folder, SINGLE_FILE)
  weight_map = _weight_map(folder)
  files = sorted(set(weight_map.values()))
  if single and SINGLE_FILE not in files:
    raise ValueError(
        f'{folder}: holds both {SINGLE_FILE} and an {INDEX_FILE} that does not '
        'name it; remove the one that is out of date'
    )
  tensors, twice = {}, []
  for file in files:
    for name, tensor in read_header(folder, file).items():
      if name in tensors:
        twice.append(f'{name} (in {tensors[name].file} and {file})')
      tensors[name] = tensor
  if twice:
    raise ValueError(f'{folder}: duplicated tensors: {list_names(twice)}')
  elsewhere = [
      f'{n} (in {tensors[n].file}, not {file})'
      for n, file in weight_map.items()
      if n in tensors and tensors[n].file != file
  ]
  problems = list_problems(
      {
          'missing from the files': [n for n in weight_map if n not in tensors],
          'in the files and not in the index': [
              n for n in tensors if n not in weight_map
          ],
          'in another file than the index says': elsewhere,
      }
  )
  if problems:
    raise ValueError(
        f'{folder / INDEX_FILE} does not describe its files; tensors {problems}'
    )
  return tensors


def read_header(folder: pathlib.Path, file: str) -> dict[str, StoredTensor]:
  """Reads one file's header, once the library has checked it.

  The library accepts no entry of a wrong type, no size that differs from dtype
  and shape, and no byte that is in no tensor or in two. It does accept a
  header that names a tensor twice, and takes one of the two; `parse_json` does
  not.

  Args:
    folder: the checkpoint.
    file: name of the file within the folder.

  Returns:
    Tensor by name.

  Raises:
    ValueError: the file is truncated, malformed, a pointer of Git LFS or
      outside of the folder.
  """
  where = folder / file
  with open_inside(folder, file) as handle:
    check_pointer(where, handle.read(POINTER_BYTES))
    handle.seek(0)
    try:
      # By its file descriptor, because the name could lead to another file by
      # now.
      with safetensors.safe_open(f'/dev/fd/{handle.fileno()}', 'np'):
        pass
    except safetensors.SafetensorError as error:
      raise ValueError(f'{where} is truncated or malformed: {error}') from error
    # 8 bytes of length, then JSON, then the tensors.
    length = int.from_bytes(handle.read(8), 'little')
    header = parse_json(handle.read(length), str(where))
  header.pop('__metadata__', None)
  return {
      name: StoredTensor(
          name=name,
          folder=folder,
          file=file,
          dtype=entry['dtype'],
          shape=tuple(entry['shape']),
          start=8 + length + entry['data_offsets'][0],
      )
      for name, entry in header.items()
  }


def read_rows(
    tensor: StoredTensor, max_bytes: int = 64 * 2**20
) -> Iterator[np.ndarray]:
  """Reads a tensor in pieces of whole rows.

  Args:
    tensor: located by `read_index`, of a dtype in `DTYPES`.
    max_bytes: size of a piece, unless one row is larger.

  Yields:
    Consecutive rows, in the stored dtype.

  Raises:
    ValueError: the file is shorter than it was.
  """
  dtype = DTYPES[tensor.dtype]
  rows, tail = tensor.shape[0], tensor.shape[1:]
  step = max(1, max_bytes // (dtype.itemsize * math.prod(tail)))
  with open_inside(tensor.folder, tensor.file) as handle:
    handle.seek(tensor.start)
    for first in range(0, rows, step):
      shape = (min(step, rows - first), *tail)
      piece = np.fromfile(handle, dtype, math.prod(shape))
      if piece.size < math.prod(shape):
        raise ValueError(
            f'{tensor.folder / tensor.file}: ends within {tensor.name!r}; '
            'the file is truncated'
        )
      yield piece.reshape(shape)


def _weight_map(folder: pathlib.Path) -> dict[str, str]:
  where = folder / INDEX_FILE
  index = parse_json(read_inside(folder, INDEX_FILE), str(where))
  found = index.get('weight_map') if isinstance(index, dict) else None
  if not isinstance(found, dict) or not found:
    raise ValueError(f'{where}: no weight_map from tensor names to files')
  wrong = [
      value
      for value in found.values()
      if not isinstance(value, str) or not value.endswith('.safetensors')
  ]
  if wrong:
    raise ValueError(
        f'{where}: weight_map names {list_names(wrong)}: allowed are '
        'safetensors files of the folder itself'
    )
  return found
