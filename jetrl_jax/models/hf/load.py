"""Hugging Face checkpoint to parameter tree, one leaf at a time.

FP8 kernels become masters by values * scale, which the scale's own grid takes
back to the same bytes (see `load_scales`).

All names, shapes and dtypes are checked before a byte of payload is read. Then
each leaf is read in pieces into one host array of the target dtype, put on
its devices and dropped, so that the host never holds more than one leaf.
"""

import math
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jetrl_jax.core.files import user_path
from jetrl_jax.models import spreading
from jetrl_jax.models.hf.config import read_config_json
from jetrl_jax.models.hf.files import has_file, list_names, list_problems
from jetrl_jax.models.hf.layout import (
    EMBEDDING,
    OUTPUT,
    Part,
    Row,
    build_tree,
    is_ignored,
    layout,
)
from jetrl_jax.models.hf.quantization import (
    FP8_DTYPE,
    check_ignored,
    is_dot,
    quantized_parts,
    scale_names,
)
from jetrl_jax.models.hf.safetensors_index import (
    DTYPES,
    StoredTensor,
    read_index,
    read_rows,
)
from jetrl_jax.models.types import ModelConfig

_TARGETS = ('float32', 'bfloat16')
# Dtypes of tensors that are not the kernel of a dot.
_WIDE = tuple(name for name in DTYPES if name != FP8_DTYPE)


def load_checkpoint(
    folder: str | os.PathLike[str],
    config: ModelConfig,
    *,
    dtype: str,
    sharding_of: Callable[[str], jax.sharding.Sharding | None] | None = None,
    spreads: Callable[[str], bool] = lambda path: False,
) -> dict[str, Any]:
  """Loads the master weights from safetensors files.

  Args:
    folder: the checkpoint, see `resolve_checkpoint`.
    config: its shape, see `load_config`.
    dtype: the dtype of every leaf, 'float32' or 'bfloat16'; rounded to nearest
      even.
    sharding_of: from a leaf's path ('layers_0/attn/qkv/kernel') to where it
      goes; None, for a leaf or for all, is JAX's default device.
    spreads: whether a leaf that comes from 16 bits into float32 is spread
      within its rounding cells (`spreading`). FP8 kernels never are: they stay
      on the grid that they were trained on.

  Returns:
    The parameters, a nested dict of jax.Arrays (see `hf_layout`).

  Raises:
    ValueError: the files do not hold exactly the tensors of `config`, are
      broken or lead outside of the folder, or a value is not finite in
      `dtype`. The message lists the names.
  """
  if dtype not in _TARGETS:
    raise ValueError(f'dtype {dtype!r}: allowed are {", ".join(_TARGETS)}')
  folder = user_path(folder)
  tensors = read_index(folder)
  check_tensors(tensors, config, folder)
  _check_quantization(tensors, config, folder)
  target = np.dtype(jax.numpy.dtype(dtype))
  not_finite = {}

  def make_leaf(row: Row) -> jax.Array:
    leaf, grid = _read_leaf(row, tensors, target, not_finite)
    sharding = sharding_of(row.path) if sharding_of else None
    array = _to_device(leaf, sharding)
    if dtype == 'float32' and grid is not None and spreads(row.path):
      array = spreading.spread(array, row.path, grid)
    return array

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


def load_scales(
    folder: str | os.PathLike[str], config: ModelConfig
) -> dict[str, tuple[float, float]]:
  """Reads the scales of an FP8 checkpoint.

  Args:
    folder: the checkpoint.
    config: its shape.

  Returns:
    From the path of every FP8 dot ('layers_0/attn/qkv') to the scales of its
    kernel and of its input; empty if the checkpoint is not FP8.

  Raises:
    ValueError: as `load_checkpoint`; a scale that is not positive and finite;
      parts of a stacked dot with different scales.
  """
  folder = user_path(folder)
  tensors = read_index(folder)
  check_tensors(tensors, config, folder)
  quantized = _check_quantization(tensors, config, folder)
  scales, problems = {}, []
  for row in layout(config):
    if not quantized.get(row.path):
      continue
    names = [scale_names(part.name) for part in row.parts]
    found = {
        tuple(_read_scale(tensors[name]) for name in pair) for pair in names
    }
    if len(found) > 1:
      problems.append(row.path)
    scales[row.path.removesuffix('/kernel')] = found.pop()
  if problems:
    raise ValueError(
        f'{folder}: the parts of a stacked dot have different scales in'
        f' {list_names(problems)}; one scale per stacked dot is needed to run'
        ' them as they are. Load it in BF16, or calibrate it anew'
    )
  return scales


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
  # This check comes first, because a mistyped number would make the table below
  # endless.
  if config.num_layers > len(tensors):
    raise ValueError(
        f'{folder}: config.json says {config.num_layers} layers, but the '
        f'files hold only {len(tensors)} tensors'
    )
  rows = layout(config)
  parts = {part.name: part for row in rows for part in row.parts}
  for part in _fp8_parts(rows, tensors):
    for name in scale_names(part.name):
      parts[name] = Part(name=name, shape=(1,))
  if config.tied_embeddings and OUTPUT in tensors:
    parts[OUTPUT] = parts[EMBEDDING]
  found = {n: t for n, t in tensors.items() if not is_ignored(n)}
  both = [name for name in parts if name in found]
  shapes = [
      f'{name} is {list(found[name].shape)}, not {list(parts[name].shape)}'
      for name in both
      if found[name].shape != parts[name].shape
  ]
  kernels = {p.name for row in rows if is_dot(row) for p in row.parts}
  dtypes = [
      f'{name} is {found[name].dtype}'
      for name in both
      if found[name].dtype not in (DTYPES if name in kernels else _WIDE)
  ]
  problems = list_problems(
      {
          'missing': [name for name in parts if name not in found],
          'unexpected': [name for name in found if name not in parts],
          'of the wrong shape': shapes,
          f'of a dtype other than {"/".join(_WIDE)}': dtypes,
      }
  )
  if problems:
    fix = '; take the BF16 checkpoint, or save this one so' if dtypes else ''
    raise ValueError(
        f'{folder}: tensors do not fit the config.json; {problems}{fix}'
    )


def _fp8_parts(
    rows: tuple[Row, ...], tensors: dict[str, StoredTensor]
) -> list[Part]:
  return [
      part
      for row in rows
      if is_dot(row)
      for part in row.parts
      if part.name in tensors and tensors[part.name].dtype == FP8_DTYPE
  ]


def _check_quantization(
    tensors: dict[str, StoredTensor], config: ModelConfig, folder: pathlib.Path
) -> dict[str, bool]:
  """Returns which dots are FP8, the same by the files and by config.json."""
  rows = layout(config)
  quantized = quantized_parts(rows, tensors)
  # A folder without FP8 may be loaded with a config from elsewhere.
  if any(quantized.values()) or has_file(folder, 'config.json'):
    check_ignored(read_config_json(folder), rows, quantized)
  return quantized


def _read_scale(tensor: StoredTensor) -> float:
  (rows,) = read_rows(tensor)
  scale = float(rows[0])
  if not (math.isfinite(scale) and scale > 0):
    raise ValueError(
        f'{tensor.folder}: {tensor.name} is {scale}; allowed are positive and'
        ' finite scales'
    )
  return scale


def _read_leaf(
    row: Row,
    tensors: dict[str, StoredTensor],
    target: np.dtype,
    not_finite: dict[str, int],
) -> tuple[np.ndarray, str | None]:
  """Stacks a leaf's tensors in `target`; counts what is not finite there.

  Returns:
    The leaf, and the 16-bit grid that all of its values lie on, if they do.
  """
  leaf = np.empty(row.shape, target)
  first, grids = 0, set()
  for part in row.parts:
    scale = None
    if tensors[part.name].dtype == FP8_DTYPE:
      scale = np.float32(_read_scale(tensors[scale_names(part.name)[0]]))
    for piece in read_rows(tensors[part.name]):
      rows = leaf[first : first + len(piece)]
      first += len(piece)
      grids.add(spreading.grid_of(piece))
      # A number that is too large for the target dtype becomes infinite and is
      # counted.
      with np.errstate(over='ignore', invalid='ignore'):
        if scale is not None:
          piece = piece.astype(np.float32) * scale
        rows[...] = piece.astype(target)
      bad = rows.size - int(np.count_nonzero(np.isfinite(rows)))
      if bad:
        not_finite[part.name] = not_finite.get(part.name, 0) + bad
  # If the parts of a stacked leaf differ, no cell is right for all of it.
  return leaf, grids.pop() if len(grids) == 1 else None


def _to_device(
    leaf: np.ndarray, sharding: jax.sharding.Sharding | None
) -> jax.Array:
  if sharding is None:
    array = jax.device_put(leaf)
  else:
    array = jax.make_array_from_callback(
        leaf.shape, sharding, lambda index: leaf[index]
    )
  # Otherwise host copies pile up and wait for the transfers.
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
