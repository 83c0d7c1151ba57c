"""Parameter tree to Hugging Face checkpoint, one tensor at a time.

The folder appears whole or not at all: it is written under another name next to
its place, flushed, and renamed. The same tree, config and source give the same
bytes.
"""

import os
import pathlib
import shutil
import tempfile
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jetrl_jax.core.files import sync as sync_path
from jetrl_jax.core.files import user_path
from jetrl_jax.core.typing import PyTree
from jetrl_jax.fp8 import QTensor
from jetrl_jax.fp8.recipes import LM_HEAD
from jetrl_jax.models.hf.config import (
    config_from_hf,
    config_to_hf,
    read_config_json,
)
from jetrl_jax.models.hf.files import has_file, list_problems, open_inside
from jetrl_jax.models.hf.layout import OUTPUT, flatten_tree, layout
from jetrl_jax.models.hf.quantization import (
    FP8_DTYPE,
    KEY,
    is_dot,
    quantization_section,
    scale_names,
)
from jetrl_jax.models.hf.safetensors_write import (
    Entry,
    sync,
    write_json,
    write_tensors,
)
from jetrl_jax.models.types import ModelConfig

# Our name of a dtype, and its name in a safetensors header.
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


# Keys of config.json that describe the tokenizer.
_TOKEN_IDS = ('bos_token_id', 'eos_token_id', 'pad_token_id')


def save_checkpoint(
    folder: str | os.PathLike[str],
    params: PyTree,
    config: ModelConfig,
    *,
    source_folder: str | os.PathLike[str] | None = None,
    tokenizer_folder: str | os.PathLike[str] | None = None,
    dtype: str = 'bfloat16',
    max_shard_bytes: int = 5_000_000_000,
    input_scales: Mapping[str, Any] | None = None,
) -> None:
  """Writes config.json, the safetensors files and the carried files.

  A kernel that is a `QTensor` is written as it is, in FP8 with its scale and
  that of its input (see `hf_quantization`).

  Args:
    folder: where the checkpoint appears; absent or empty so far.
    params: nested dict of arrays, all addressable from this process; masters,
      or compute weights.
    config: their shape.
    source_folder: the checkpoint that training started from; its config.json
      is kept but for the dtype.
    tokenizer_folder: whose tokenizer files and generation_config.json are
      copied, by default the source's. Where it is another, config.json has its
      ids of special tokens.
    dtype: the dtype of every tensor that is not FP8, 'bfloat16' or 'float32'.
    max_shard_bytes: tensor bytes per file, unless one tensor is larger; more
      than one file brings an index.
    input_scales: from the path of every FP8 dot ('layers_0/attn/qkv') to the
      scale of its input.

  Raises:
    ValueError: the place is taken, the tree does not fit the config, the
      source has another shape, or a value is not finite in `dtype`.
    OSError: a file cannot be read or written; the message names the folder.
  """
  if dtype not in _DTYPE_NAMES:
    raise ValueError(f'dtype {dtype!r}: allowed are {", ".join(_DTYPE_NAMES)}')
  if max_shard_bytes < 1:
    raise ValueError(f'max_shard_bytes {max_shard_bytes}: allowed are >= 1')
  folder = pathlib.Path(os.path.abspath(user_path(folder)))
  source = None if source_folder is None else user_path(source_folder)
  tokenizer = (
      source if tokenizer_folder is None else user_path(tokenizer_folder)
  )
  check_target(folder)
  leaves = flatten_tree(params)
  _check_leaves(leaves, config)
  hf = _config_json(config, source, dtype)
  if tokenizer is not None and tokenizer != source:
    hf = _with_ids_of(tokenizer, hf)
  if any(isinstance(leaf, QTensor) for leaf in leaves.values()):
    hf[KEY] = quantization_section(
        _high_precision(leaves, config),
        with_head=isinstance(leaves.get(f'{LM_HEAD}/kernel'), QTensor),
    )

  partial = folder.with_name(f'.{folder.name}.partial')
  # A killed export has left it.
  shutil.rmtree(partial, ignore_errors=True)
  try:
    partial.mkdir(parents=True)
    entries = _entries(leaves, config, input_scales or {}, dtype)
    write_tensors(partial, entries, max_shard_bytes)
    write_json(partial / 'config.json', hf)
    if tokenizer is not None:
      _carry(tokenizer, partial)
    sync_path(partial)
    os.rename(partial, folder)
    sync_path(folder.parent)
  except BaseException as error:
    shutil.rmtree(partial, ignore_errors=True)
    # Of a full disk the system does not say what was written.
    if isinstance(error, OSError) and error.filename is None:
      raise OSError(
          f'{folder} cannot be written: {error.strerror or error}; nothing was'
          ' exported'
      ) from error
    raise


def check_target(folder: pathlib.Path) -> None:
  """Refuses a place that cannot be had; for before the work, too.

  Raises:
    ValueError: a file, a folder that is not empty, or one that cannot be made.
  """
  if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
    raise ValueError(f'{folder} exists already; export to a new folder')
  parent = folder.absolute().parent
  try:
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent):
      pass
  except OSError as error:
    raise ValueError(f'{folder} cannot be made: {error.strerror}') from error


def check_carried(folder: pathlib.Path) -> None:
  """Refuses a tokenizer's folder that cannot be copied; for before the work.

  Raises:
    ValueError: a file to carry is no readable file of the folder itself.
  """
  for name in CARRIED_FILES:
    if has_file(folder, name):
      open_inside(folder, name).close()


def _check_leaves(leaves: dict[str, Any], config: ModelConfig) -> None:
  shapes = {row.path: row.shape for row in layout(config)}
  leaves = {
      path: leaf.values if isinstance(leaf, QTensor) else leaf
      for path, leaf in leaves.items()
  }
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
  problems = list_problems(
      {
          'missing': [path for path in shapes if path not in leaves],
          'unexpected': [path for path in leaves if path not in shapes],
          'of the wrong shape': wrong,
          'partly on other hosts': far,
      }
  )
  if problems:
    raise ValueError(f'the parameters do not fit the config; {problems}')


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
  # The source may be in FP8 although the export is not.
  hf.pop(KEY, None)
  # transformers 4 says torch_dtype, 5 says dtype.
  keys = [key for key in ('torch_dtype', 'dtype') if key in hf]
  return {**hf, **dict.fromkeys(keys or ['torch_dtype'], dtype)}


def _with_ids_of(folder: pathlib.Path, hf: dict[str, Any]) -> dict[str, Any]:
  """Returns config.json with a tokenizer's own ids, where it says them.

  An end that the source names may be any token of another vocabulary.
  """
  said = read_config_json(folder) if has_file(folder, 'config.json') else {}
  return {
      **{key: value for key, value in hf.items() if key not in _TOKEN_IDS},
      **{key: said[key] for key in _TOKEN_IDS if key in said},
  }


def _high_precision(leaves: dict[str, Any], config: ModelConfig) -> list[str]:
  """Names the weights of linear modules that are not FP8."""
  names = [
      part.name
      for row in layout(config)
      if is_dot(row) and not isinstance(leaves[row.path], QTensor)
      for part in row.parts
  ]
  # transformers counts the head among the linear modules even where it is the
  # embedding.
  return [*names, OUTPUT] if config.tied_embeddings else names


def _entries(
    leaves: dict[str, Any],
    config: ModelConfig,
    input_scales: Mapping[str, Any],
    dtype: str,
) -> list[Entry]:
  """Lists their tensors; the parts of a stacked FP8 dot get the same scales."""
  entries, name = [], _DTYPE_NAMES[dtype]
  for row in layout(config):
    leaf, first = leaves[row.path], 0
    quantized = isinstance(leaf, QTensor)
    for part in row.parts:
      entries.append(
          Entry(
              name=part.name,
              dtype=FP8_DTYPE if quantized else name,
              shape=part.shape,
              array=leaf.values if quantized else leaf,
              first=first,
          )
      )
      first += part.shape[0]
      if quantized:
        scales = (leaf.scale, input_scales[row.path.removesuffix('/kernel')])
        for scale_name, scale in zip(
            scale_names(part.name), scales, strict=True
        ):
          array = np.asarray(jax.device_get(scale), np.float32).reshape(1)
          entries.append(
              Entry(name=scale_name, dtype='F32', shape=(1,), array=array)
          )
  return entries


def _carry(source: pathlib.Path, folder: pathlib.Path) -> None:
  for name in CARRIED_FILES:
    if has_file(source, name):
      with open_inside(source, name) as file, open(folder / name, 'wb') as out:
        shutil.copyfileobj(file, out)
        sync(out)
