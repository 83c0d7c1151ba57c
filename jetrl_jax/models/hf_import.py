"""Hugging Face checkpoint to parameter tree, one leaf at a time.

All names, shapes and dtypes are checked before a byte of payload is read. Then
each leaf is read in pieces into one host array of the target dtype, put on
its devices and dropped, so that the host never holds more than one leaf.
"""

import math
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jetrl_jax.models.hf_files import list_names
from jetrl_jax.models.hf_layout import (
    EMBEDDING,
    OUTPUT,
    Row,
    build_tree,
    is_ignored,
    layout,
)
from jetrl_jax.models.safetensors_index import (
    DTYPES,
    StoredTensor,
    read_index,
    read_rows,
)
from jetrl_jax.models.types import ModelConfig

_TARGETS = ('float32', 'bfloat16')


def load_checkpoint(
    folder: pathlib.Path,
    config: ModelConfig,
    *,
    dtype: str,
    sharding_of: Callable[[str], jax.sharding.Sharding | None] | None = None,
) -> dict[str, Any]:
  """Loads the master weights from safetensors files.

  Args:
    folder: the checkpoint, see `resolve_checkpoint`.
    config: its shape, see `load_config`.
    dtype: of every leaf, 'float32' or 'bfloat16'; rounded to nearest even.
    sharding_of: from a leaf's path ('layers_0/attn/qkv/kernel') to where it
      goes; None, for a leaf or for all, is JAX's default device.

  Returns:
    The parameters, a nested dict of jax.Arrays (see `hf_layout`).

  Raises:
    ValueError: the files do not hold exactly the tensors of `config`, are
      broken or lead outside of the folder, or a value is not finite in
      `dtype`. The message lists the names.
  """
  if dtype not in _TARGETS:
    raise ValueError(f'dtype {dtype!r}: allowed are {", ".join(_TARGETS)}')
  tensors = read_index(folder)
  check_tensors(tensors, config, folder)
  target = np.dtype(jax.numpy.dtype(dtype))
  not_finite = {}

  def make_leaf(row: Row) -> jax.Array:
    leaf = _read_leaf(row, tensors, target, not_finite)
    sharding = sharding_of(row.path) if sharding_of else None
    return _to_device(leaf, sharding)

  tree = build_tree(config, make_leaf)
  if config.tied_embeddings and OUTPUT in tensors:
    _check_tied(tensors[EMBEDDING], tensors[OUTPUT])
  if not_finite:
    named = [f'{name} ({count})' for name, count in not_finite.items()]
    raise ValueError(
        f'{folder}: {len(named)} tensors hold values that are not finite in '
        f'{dtype} (with their number): {", ".join(named[:10])}'
        + (f' and {len(named) - 10} more' if len(named) > 10 else '')
    )
  return tree


def check_tensors(
    tensors: dict[str, StoredTensor],
    config: ModelConfig,
    folder: pathlib.Path,
) -> None:
  """Checks that the files hold the config's tensors and no others.

  Args:
    tensors: what the headers say, see `read_index`.
    config: the shape the files should have.
    folder: for the message.

  Raises:
    ValueError: tensors missing, unexpected, of another shape or dtype; all
      kinds of trouble in one message.
  """
  # Before a table is built that a mistyped number would make endless.
  if config.num_layers > len(tensors):
    raise ValueError(
        f'{folder}: config.json says {config.num_layers} layers, but the '
        f'files hold only {len(tensors)} tensors'
    )
  parts = {part.name: part for row in layout(config) for part in row.parts}
  if config.tied_embeddings and OUTPUT in tensors:
    parts[OUTPUT] = parts[EMBEDDING]
  found = {n: t for n, t in tensors.items() if not is_ignored(n)}
  both = [name for name in parts if name in found]
  shapes = [
      f'{name} is {list(found[name].shape)}, not {list(parts[name].shape)}'
      for name in both
      if found[name].shape != parts[name].shape
  ]
  dtypes = [
      f'{name} is {found[name].dtype}'
      for name in both
      if found[name].dtype not in DTYPES
  ]
  sizes = [
      f'{name} has {tensor.num_bytes} bytes'
      for name, tensor in ((n, found[n]) for n in both)
      if tensor.dtype in DTYPES
      and tensor.num_bytes != _num_bytes(tensor.dtype, tensor.shape)
  ]
  problems = [
      f'{len(names)} {what}: {list_names(names)}'
      for what, names in (
          ('missing', [name for name in parts if name not in found]),
          ('unexpected', [name for name in found if name not in parts]),
          ('of the wrong shape', shapes),
          (f'of a dtype other than {"/".join(DTYPES)}', dtypes),
          ('whose size does not fit dtype and shape', sizes),
      )
      if names
  ]
  if problems:
    raise ValueError(
        f'{folder}: tensors do not fit the config.json; ' + '; '.join(problems)
    )


def _num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
  return DTYPES[dtype].itemsize * math.prod(shape)


def _read_leaf(
    row: Row,
    tensors: dict[str, StoredTensor],
    target: np.dtype,
    not_finite: dict[str, int],
) -> np.ndarray:
  """Stacks a leaf's tensors in `target`; counts what is not finite there."""
  leaf = np.empty(row.shape, target)
  first = 0
  for part in row.parts:
    for piece in read_rows(tensors[part.name]):
      rows = leaf[first : first + len(piece)]
      first += len(piece)
      # A number too large for the target becomes infinite, and is counted.
      with np.errstate(over='ignore', invalid='ignore'):
        rows[...] = piece.astype(target)
      bad = rows.size - int(np.count_nonzero(np.isfinite(rows)))
      if bad:
        not_finite[part.name] = not_finite.setdefault(part.name, 0) + bad
  return leaf


def _to_device(
    leaf: np.ndarray, sharding: jax.sharding.Sharding | None
) -> jax.Array:
  if sharding is None:
    array = jax.device_put(leaf)
  else:
    array = jax.make_array_from_callback(
        leaf.shape, sharding, lambda index: leaf[index]
    )
  # Otherwise host copies pile up behind the transfers.
  return array.block_until_ready()


def _check_tied(embedding: StoredTensor, output: StoredTensor) -> None:
  """A tied output projection may be stored, if it says the same."""
  pairs = zip(read_rows(embedding), read_rows(output), strict=False)
  if embedding.dtype != output.dtype or any(
      a.tobytes() != b.tobytes() for a, b in pairs
  ):
    raise ValueError(
        f'{embedding.folder}: config.json ties the embeddings, but '
        f'{OUTPUT} differs from {EMBEDDING}; set tie_word_embeddings to false '
        'or drop one of them'
    )
