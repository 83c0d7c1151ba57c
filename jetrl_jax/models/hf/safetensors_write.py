"""Writes tensors to safetensors files, one at a time.

The same entries give the same bytes. The library cannot write such files: it
wants all tensors of a file in host memory at once, 5 GB of them, and sorts them
by dtype and name.
"""

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import jax
import numpy as np

from jetrl_jax.models.hf.files import INDEX_FILE, SINGLE_FILE
from jetrl_jax.models.hf.safetensors_index import DTYPES

# A tensor is cast and written in pieces of about this size.
_PIECE_BYTES = 64 * 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
  """One tensor to write.

  Attributes:
    name: in the file.
    dtype: a key of `DTYPES`.
    shape: [rows] or [rows, columns].
    array: its rows, or an array that they are part of.
    first: index of its first row in `array`.
  """

  name: str
  dtype: str
  shape: tuple[int, ...]
  array: Any
  first: int = 0

  @property
  def num_elements(self) -> int:
    """Numbers in the tensor."""
    return math.prod(self.shape)

  @property
  def num_bytes(self) -> int:
    """Bytes in the file."""
    return self.num_elements * DTYPES[self.dtype].itemsize


def write_tensors(
    folder: pathlib.Path, entries: Sequence[Entry], max_shard_bytes: int
) -> None:
  """Writes model.safetensors, or numbered shards and their index.

  Args:
    folder: exists already.
    entries: in the order of the files.
    max_shard_bytes: tensor bytes per file, unless one tensor is larger.

  Raises:
    ValueError: a value is not finite in its dtype.
  """
  shards, filled = [[]], 0
  for entry in entries:
    if shards[-1] and filled + entry.num_bytes > max_shard_bytes:
      shards.append([])
      filled = 0
    shards[-1].append(entry)
    filled += entry.num_bytes
  if len(shards) == 1:
    _write_shard(folder / SINGLE_FILE, shards[0])
    return
  weight_map = {}
  for number, shard in enumerate(shards, start=1):
    file = f'model-{number:05d}-of-{len(shards):05d}.safetensors'
    _write_shard(folder / file, shard)
    weight_map.update((entry.name, file) for entry in shard)
  metadata = {
      'total_parameters': sum(entry.num_elements for entry in entries),
      'total_size': sum(entry.num_bytes for entry in entries),
  }
  write_json(
      folder / INDEX_FILE,
      {'metadata': metadata, 'weight_map': dict(sorted(weight_map.items()))},
  )


def write_json(path: pathlib.Path, content: dict[str, Any]) -> None:
  """Writes a JSON file and flushes it to the disk."""
  with open(path, 'wb') as file:
    file.write((json.dumps(content, indent=2) + '\n').encode())
    sync(file)


def sync(file: BinaryIO) -> None:
  """Flushes a file to the disk."""
  file.flush()
  os.fsync(file.fileno())


def _write_shard(path: pathlib.Path, shard: list[Entry]) -> None:
  # Without this mark transformers 4 refuses the file.
  header: dict[str, Any] = {'__metadata__': {'format': 'pt'}}
  end = 0
  for entry in shard:
    start, end = end, end + entry.num_bytes
    header[entry.name] = {
        'dtype': entry.dtype,
        'shape': list(entry.shape),
        'data_offsets': [start, end],
    }
  text = json.dumps(header, separators=(',', ':')).encode()
  # The payload starts at a multiple of 8; the format pads with spaces.
  text += b' ' * (-len(text) % 8)
  with open(path, 'wb') as file:
    file.write(len(text).to_bytes(8, 'little'))
    file.write(text)
    for entry in shard:
      for piece in _host_pieces(entry):
        bad = piece.size - int(np.count_nonzero(np.isfinite(piece)))
        if bad:
          raise ValueError(
              f'{entry.name} holds {bad} values or more that are not finite in '
              f'{DTYPES[entry.dtype].name}; nothing was exported'
          )
        file.write(piece.view(np.uint8).data)
    sync(file)


def _host_pieces(entry: Entry) -> Iterator[np.ndarray]:
  """Fetches a tensor and casts it piece by piece."""
  rows = _host_rows(entry)
  step = max(1, _PIECE_BYTES // max(1, rows.nbytes // len(rows)))
  for start in range(0, len(rows), step):
    with np.errstate(over='ignore', invalid='ignore'):
      piece = rows[start : start + step].astype(DTYPES[entry.dtype])
    yield np.ascontiguousarray(piece)


def _host_rows(entry: Entry) -> np.ndarray:
  """Fetches the rows of an array that make up one tensor.

  Slices are taken on the devices first: fetching a jax.Array itself would
  keep its host copy for as long as the array lives, a second model in the end.
  """
  array, first = entry.array, entry.first
  last = first + entry.shape[0]
  if not isinstance(array, jax.Array):
    return array[first:last]
  rows = np.empty(entry.shape, array.dtype)
  for shard in array.addressable_shards:
    begin, end, _ = shard.index[0].indices(array.shape[0])
    low, high = max(begin, first), min(end, last)
    if shard.replica_id == 0 and low < high:
      where = (slice(low - first, high - first), *shard.index[1:])
      rows[where] = jax.lax.dynamic_slice_in_dim(
          shard.data, low - begin, high - low, axis=0
      )
  return rows
