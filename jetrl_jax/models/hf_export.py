"""Parameter tree to Hugging Face checkpoint, one tensor at a time.

The folder appears whole or not at all: it is written under another name
beside its place, flushed, and renamed. The same tree, config and source give
the same bytes.
"""

import json
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any, BinaryIO

import jax
import numpy as np

from jetrl_jax.models.hf_config import (
    config_from_hf,
    config_to_hf,
    read_config_json,
)
from jetrl_jax.models.hf_files import has_file, list_names, open_inside
from jetrl_jax.models.hf_layout import (
    Part,
    flatten_tree,
    layout,
    num_elements,
)
from jetrl_jax.models.safetensors_index import (
    DTYPES,
    INDEX_FILE,
    SINGLE_FILE,
)
from jetrl_jax.models.types import ModelConfig
from jetrl_jax.typing import PyTree

# What we call a dtype, and what a safetensors header does.
_DTYPE_NAMES = {'bfloat16': 'BF16', 'float32': 'F32'}

# Copied byte for byte where the source has them.
CARRIED_FILES = (
    'generation_config.json',
    'tokenizer.json',
    'tokenizer_config.json',
    'tokenizer.model',
    'special_tokens_map.json',
    'added_tokens.json',
    'vocab.json',
    'vocab.txt',
    'merges.txt',
    'chat_template.jinja',
    'chat_template.json',
)

# A tensor is cast and written in pieces of about this size.
_PIECE_BYTES = 64 * 2**20


def save_checkpoint(
    folder: pathlib.Path,
    params: PyTree,
    config: ModelConfig,
    *,
    source_folder: pathlib.Path | None = None,
    dtype: str = 'bfloat16',
    max_shard_bytes: int = 5_000_000_000,
) -> None:
  """Writes config.json, the safetensors files and the carried files.

  Args:
    folder: where the checkpoint appears; absent or empty so far.
    params: nested dict of arrays, all addressable from this process.
    config: their shape.
    source_folder: the checkpoint that training started from; its tokenizer
      files and generation_config.json are copied, and its config.json is
      kept but for the dtype.
    dtype: of every tensor written, 'bfloat16' or 'float32'.
    max_shard_bytes: tensor bytes per file, unless one tensor is larger; more
      than one file brings an index.

  Raises:
    ValueError: the place is taken, the tree does not fit the config, the
      source has another shape, or a value is not finite in `dtype`.
  """
  if dtype not in _DTYPE_NAMES:
    raise ValueError(f'dtype {dtype!r}: allowed are {", ".join(_DTYPE_NAMES)}')
  if max_shard_bytes < 1:
    raise ValueError(f'max_shard_bytes {max_shard_bytes}: allowed are >= 1')
  folder = pathlib.Path(os.path.abspath(folder))
  if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
    raise ValueError(f'{folder} exists already; export to a new folder')
  leaves = flatten_tree(params)
  _check_leaves(leaves, config)
  hf = _config_json(config, source_folder, dtype)

  partial = folder.with_name(f'.{folder.name}.partial')
  # Left by an export that was killed.
  shutil.rmtree(partial, ignore_errors=True)
  partial.mkdir(parents=True)
  try:
    _write_tensors(partial, leaves, config, dtype, max_shard_bytes)
    _write_json(partial / 'config.json', hf)
    if source_folder is not None:
      _carry(source_folder, partial)
    _sync_folder(partial)
    os.rename(partial, folder)
    _sync_folder(folder.parent)
  except BaseException:
    shutil.rmtree(partial, ignore_errors=True)
    raise


def _check_leaves(leaves: dict[str, Any], config: ModelConfig) -> None:
  shapes = {row.path: row.shape for row in layout(config)}
  wrong = [
      f'{path} is {list(leaves[path].shape)}, not {list(shape)}'
      for path, shape in shapes.items()
      if path in leaves and leaves[path].shape != shape
  ]
  far = [
      path
      for path, leaf in leaves.items()
      if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
  ]
  problems = [
      f'{len(names)} {what}: {list_names(names)}'
      for what, names in (
          ('missing', [path for path in shapes if path not in leaves]),
          ('unexpected', [path for path in leaves if path not in shapes]),
          ('of the wrong shape', wrong),
          ('partly on other hosts', far),
      )
      if names
  ]
  if problems:
    raise ValueError(
        'the parameters do not fit the config; ' + '; '.join(problems)
    )


def _config_json(
    config: ModelConfig, source_folder: pathlib.Path | None, dtype: str
) -> dict[str, Any]:
  """The source's config.json with our dtype, or one made from the shape."""
  if source_folder is None:
    return {**config_to_hf(config), 'torch_dtype': dtype}
  hf = read_config_json(source_folder)
  if config_from_hf(hf) != config:
    raise ValueError(
        f'{source_folder / "config.json"} describes {config_from_hf(hf)}, and '
        f'the parameters are {config}'
    )
  # transformers 4 says torch_dtype, 5 says dtype.
  keys = [key for key in ('torch_dtype', 'dtype') if key in hf]
  return {**hf, **dict.fromkeys(keys or ['torch_dtype'], dtype)}


def _write_tensors(
    folder: pathlib.Path,
    leaves: dict[str, Any],
    config: ModelConfig,
    dtype: str,
    max_shard_bytes: int,
) -> None:
  """Writes model.safetensors, or numbered shards and their index."""
  # (tensor of theirs, leaf of ours, its first row in the leaf)
  parts = []
  for row in layout(config):
    first = 0
    for part in row.parts:
      parts.append((part, leaves[row.path], first))
      first += part.shape[0]
  itemsize = DTYPES[_DTYPE_NAMES[dtype]].itemsize
  shards, filled = [[]], 0
  for item in parts:
    num_bytes = num_elements(item[0]) * itemsize
    if shards[-1] and filled + num_bytes > max_shard_bytes:
      shards.append([])
      filled = 0
    shards[-1].append(item)
    filled += num_bytes
  if len(shards) == 1:
    _write_shard(folder / SINGLE_FILE, shards[0], dtype)
    return
  weight_map = {}
  for number, shard in enumerate(shards, start=1):
    file = f'model-{number:05d}-of-{len(shards):05d}.safetensors'
    _write_shard(folder / file, shard, dtype)
    weight_map.update((part.name, file) for part, _, _ in shard)
  total = sum(num_elements(part) for part, _, _ in parts)
  metadata = {'total_parameters': total, 'total_size': total * itemsize}
  _write_json(
      folder / INDEX_FILE,
      {'metadata': metadata, 'weight_map': dict(sorted(weight_map.items()))},
  )


def _write_shard(
    path: pathlib.Path, shard: list[tuple[Part, Any, int]], dtype: str
) -> None:
  name = _DTYPE_NAMES[dtype]
  # Without this mark transformers 4 refuses the file.
  header: dict[str, Any] = {'__metadata__': {'format': 'pt'}}
  end = 0
  for part, _, _ in shard:
    start, end = end, end + num_elements(part) * DTYPES[name].itemsize
    header[part.name] = {
        'dtype': name,
        'shape': list(part.shape),
        'data_offsets': [start, end],
    }
  text = json.dumps(header, separators=(',', ':')).encode()
  # The payload starts at a multiple of 8; the format pads with spaces.
  text += b' ' * (-len(text) % 8)
  with open(path, 'wb') as file:
    file.write(len(text).to_bytes(8, 'little'))
    file.write(text)
    for part, leaf, first in shard:
      for piece in _host_pieces(leaf, first, part, DTYPES[name]):
        bad = piece.size - int(np.count_nonzero(np.isfinite(piece)))
        if bad:
          raise ValueError(
              f'{part.name} holds {bad} values or more that are not finite in '
              f'{dtype}; nothing was exported'
          )
        file.write(piece.view(np.uint8).data)
    _sync(file)


def _host_pieces(
    leaf: Any, first: int, part: Part, target: np.dtype
) -> Iterator[np.ndarray]:
  """Fetches one tensor of theirs and casts it piece by piece."""
  rows = _host_rows(leaf, first, part)
  step = max(1, _PIECE_BYTES // max(1, rows.nbytes // len(rows)))
  for start in range(0, len(rows), step):
    with np.errstate(over='ignore', invalid='ignore'):
      piece = rows[start : start + step].astype(target)
    yield np.ascontiguousarray(piece)


def _host_rows(leaf: Any, first: int, part: Part) -> np.ndarray:
  """Fetches the rows of a leaf that make up one tensor of theirs.

  Slices are taken on the devices first: fetching a jax.Array itself would
  keep its host copy for as long as the array lives, a second model in the end.
  """
  last = first + part.shape[0]
  if not isinstance(leaf, jax.Array):
    return leaf[first:last]
  rows = np.empty(part.shape, leaf.dtype)
  for shard in leaf.addressable_shards:
    begin, end, _ = shard.index[0].indices(leaf.shape[0])
    low, high = max(begin, first), min(end, last)
    if shard.replica_id == 0 and low < high:
      where = (slice(low - first, high - first), *shard.index[1:])
      rows[where] = jax.lax.dynamic_slice_in_dim(
          shard.data, low - begin, high - low, axis=0
      )
  return rows


def _carry(source: pathlib.Path, folder: pathlib.Path) -> None:
  for name in CARRIED_FILES:
    if has_file(source, name):
      with open_inside(source, name) as file, open(folder / name, 'wb') as out:
        shutil.copyfileobj(file, out)
        _sync(out)


def _write_json(path: pathlib.Path, content: dict[str, Any]) -> None:
  with open(path, 'wb') as file:
    file.write((json.dumps(content, indent=2) + '\n').encode())
    _sync(file)


def _sync(file: BinaryIO) -> None:
  file.flush()
  os.fsync(file.fileno())


def _sync_folder(folder: pathlib.Path) -> None:
  fd = os.open(folder, os.O_RDONLY)
  try:
    os.fsync(fd)
  finally:
    os.close(fd)
