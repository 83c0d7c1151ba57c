"""Tiny checkpoints of each family, and files broken on purpose."""

import json
import pathlib
from typing import Any

import numpy as np

from jetrl_jax.models.hf.layout import build_tree
from jetrl_jax.models.hf.save import save_checkpoint
from jetrl_jax.models.types import (
    FAMILY_TRAITS,
    Llama3RopeScaling,
    ModelConfig,
)

# A family of each forward: Mistral's is Llama's.
FORWARDS = ('qwen2', 'qwen3', 'llama')


def config(family: str = 'qwen2', **changes) -> ModelConfig:
  """D 8, 4 heads on 2 key heads, F 12, V 16; Qwen2 is tied."""
  scaling = Llama3RopeScaling(
      factor=8.0,
      low_freq_factor=1.0,
      high_freq_factor=4.0,
      original_max_position_embeddings=32,
  )
  fields: dict[str, Any] = dict(
      family=family,
      vocab_size=16,
      num_layers=2,
      model_dim=8,
      num_heads=4,
      num_kv_heads=2,
      head_dim=6 if family in ('qwen3', 'mistral') else 2,
      ffn_dim=12,
      norm_eps=1e-6,
      rope_theta=10_000.0,
      rope_scaling=scaling if family == 'llama' else None,
      max_position=64,
      **FAMILY_TRAITS[family]._asdict(),
      tied_embeddings=family == 'qwen2',
  )
  return ModelConfig(**(fields | changes))


def params(cfg: ModelConfig, seed: int = 0) -> dict[str, Any]:
  """Random float32 leaves that bfloat16 holds exactly."""
  rng = np.random.default_rng(seed)
  return build_tree(
      cfg,
      lambda row: rng.integers(-128, 128, row.shape).astype(np.float32) / 64,
  )


def save(
    folder: pathlib.Path,
    cfg: ModelConfig,
    *,
    dtype: str = 'float32',
    **kwargs: Any,
) -> pathlib.Path:
  """Writes `params(cfg)`."""
  save_checkpoint(folder, params(cfg), cfg, dtype=dtype, **kwargs)
  return folder


def read_raw(path: pathlib.Path) -> tuple[dict[str, Any], bytes]:
  """Splits a safetensors file into header and payload."""
  data = path.read_bytes()
  length = int.from_bytes(data[:8], 'little')
  return json.loads(data[8 : 8 + length]), data[8 + length :]


def write_raw(
    path: pathlib.Path, header: dict[str, Any] | str, payload: bytes
) -> None:
  """Writes a safetensors file of any header, checked by nobody."""
  text = header if isinstance(header, str) else json.dumps(header)
  data = text.encode()
  path.write_bytes(len(data).to_bytes(8, 'little') + data + payload)


def tensors_of(path: pathlib.Path) -> dict[str, tuple[str, list[int], bytes]]:
  """Reads every tensor as (dtype, shape, bytes)."""
  header, payload = read_raw(path)
  return {
      name: (
          entry['dtype'],
          entry['shape'],
          payload[slice(*entry['data_offsets'])],
      )
      for name, entry in header.items()
      if name != '__metadata__'
  }


def write_tensors(
    path: pathlib.Path, tensors: dict[str, tuple[str, list[int], bytes]]
) -> None:
  """Writes what `tensors_of` reads."""
  header, payload = {}, b''
  for name, (dtype, shape, data) in tensors.items():
    end = len(payload) + len(data)
    header[name] = {
        'dtype': dtype,
        'shape': shape,
        'data_offsets': [len(payload), end],
    }
    payload += data
  write_raw(path, header, payload)
