"""Where every tensor of a checkpoint lies, known before any of it is read.

The headers are parsed here and not by the safetensors library, because the
library accepts a header that names a tensor twice, and because a checked
offset allows plain reads in pieces: a file cut short after the check raises,
where a memory map would kill the process.

References:
  The format: huggingface.co/docs/safetensors, "Format".
"""

import dataclasses
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from jetrl_jax.models.hf_files import (
    INDEX_FILE,
    MAX_JSON_BYTES,
    SINGLE_FILE,
    check_format,
    has_file,
    list_names,
    list_problems,
    open_inside,
    parse_json,
    read_inside,
)

# Read both ways: the name in a header, the dtype (bytes are little-endian).
DTYPES = {
    'BF16': np.dtype(ml_dtypes.bfloat16),
    'F16': np.dtype('<f2'),
    'F32': np.dtype('<f4'),
    'F8_E4M3': np.dtype(ml_dtypes.float8_e4m3fn),
}

_MAX_RANK = 8


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
    num_bytes: length in the file.
  """

  name: str
  folder: pathlib.Path
  file: str
  dtype: str
  shape: tuple[int, ...]
  start: int
  num_bytes: int


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
    raise ValueError(
        f'{folder}: neither {SINGLE_FILE} nor {INDEX_FILE}; only safetensors '
        'checkpoints can be loaded'
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
  """Parses and checks one file's header; see `read_index`.

  A header is 8 bytes of length (little-endian), then JSON. The tensors must
  cover the rest of the file without gap or overlap, as the library demands.
  """
  where = folder / file
  with open_inside(folder, file) as handle:
    size = os.fstat(handle.fileno()).st_size
    prefix = handle.read(8)
    length = int.from_bytes(prefix, 'little')
    if len(prefix) < 8 or length > min(size - 8, MAX_JSON_BYTES):
      raise ValueError(
          f'{where}: {size} bytes are too few for its header of {length} '
          'bytes; the file is truncated or is no safetensors file'
      )
    text = handle.read(length)
  if len(text) != length or not text.startswith(b'{'):
    raise ValueError(f'{where}: no safetensors header')
  header = parse_json(text, str(where))
  metadata = header.pop('__metadata__', {})
  if not isinstance(metadata, dict) or not all(
      isinstance(value, str) for value in metadata.values()
  ):
    raise ValueError(f'{where}: __metadata__ must map text to text')
  tensors = {
      name: _entry(folder, file, name, value, base=8 + length)
      for name, value in header.items()
  }
  _check_cover(where, tensors, base=8 + length, size=size)
  return tensors


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
  row_bytes = tensor.num_bytes // rows
  step = max(1, max_bytes // row_bytes)
  with open_inside(tensor.folder, tensor.file) as handle:
    handle.seek(tensor.start)
    for first in range(0, rows, step):
      count = min(step, rows - first)
      data = bytearray(count * row_bytes)
      view, got = memoryview(data), 0
      while got < len(view):
        more = handle.readinto(view[got:])
        if not more:
          raise ValueError(
              f'{tensor.folder / tensor.file}: ends within {tensor.name!r}; '
              'the file is truncated'
          )
        got += more
      yield np.frombuffer(data, dtype).reshape(count, *tail)


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


def _entry(
    folder: pathlib.Path, file: str, name: str, value: Any, base: int
) -> StoredTensor:
  keys = {'dtype', 'shape', 'data_offsets'}
  if not isinstance(value, dict) or set(value) != keys:
    raise ValueError(
        f'{folder / file}: entry of {name!r:.200} must have dtype, shape and '
        'data_offsets'
    )
  dtype, shape, offsets = (
      value[key] for key in ('dtype', 'shape', 'data_offsets')
  )
  if (
      not isinstance(dtype, str)
      or not _counts(shape)
      or len(shape) > _MAX_RANK
      or not _counts(offsets)
      or len(offsets) != 2
      or offsets[0] > offsets[1]
  ):
    raise ValueError(
        f'{folder / file}: entry of {name!r:.200} is malformed: '
        f'{value!r:.200}'
    )
  return StoredTensor(
      name=name,
      folder=folder,
      file=file,
      dtype=dtype,
      shape=tuple(shape),
      start=base + offsets[0],
      num_bytes=offsets[1] - offsets[0],
  )


def _counts(value: Any) -> bool:
  return isinstance(value, list) and all(
      type(n) is int and 0 <= n < 2**63 for n in value
  )


def _check_cover(
    where: pathlib.Path,
    tensors: dict[str, StoredTensor],
    base: int,
    size: int,
) -> None:
  """Tensors must follow each other from `base` to the end of the file."""
  end = base
  in_order = sorted(tensors.values(), key=lambda t: (t.start, t.num_bytes))
  for tensor in in_order:
    if tensor.start != end:
      kind = 'overlaps' if tensor.start < end else 'leaves a gap before'
      raise ValueError(
          f'{where}: {tensor.name!r:.200} starts at byte {tensor.start}, not '
          f'{end}: it {kind} its neighbour'
      )
    end = tensor.start + tensor.num_bytes
  if end != size:
    raise ValueError(
        f'{where}: the tensors end at byte {end} and the file at byte {size}; '
        'it is truncated or has other data appended'
    )
