"""config.json to `ModelConfig` and back.

Whatever would change the forward and is not built here is refused by name, so
that no checkpoint runs as something it is not. Keys that do not concern the
forward (token ids, dropout, initialisers) are not looked at; an export carries
them through.
"""

import contextlib
import dataclasses
import os
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from jetrl_jax.core.files import user_path
from jetrl_jax.models.hf.files import (
    CONFIG_FILE,
    check_format,
    has_file,
    list_names,
    parse_json,
    read_inside,
)
from jetrl_jax.models.hf.quantization import check_section
from jetrl_jax.models.types import FAMILY_TRAITS, Llama3RopeScaling, ModelConfig

# Rows are read both ways: entry of `architectures`, family (also the
# `model_type`).
_ARCHITECTURES = {
    'Qwen2ForCausalLM': 'qwen2',
    'Qwen3ForCausalLM': 'qwen3',
    'LlamaForCausalLM': 'llama',
    'MistralForCausalLM': 'mistral',
}

# Rows are read both ways: our field, the file's key.
_FIELDS = (
    ('vocab_size', 'vocab_size'),
    ('num_layers', 'num_hidden_layers'),
    ('model_dim', 'hidden_size'),
    ('num_heads', 'num_attention_heads'),
    ('ffn_dim', 'intermediate_size'),
    ('norm_eps', 'rms_norm_eps'),
    ('max_position', 'max_position_embeddings'),
)

# The file's names of our other fields; fields that are not listed have the same
# name.
_THEIR_NAMES = {
    **dict(_FIELDS),
    'num_kv_heads': 'num_key_value_heads',
    'tied_embeddings': 'tie_word_embeddings',
}

# The value that transformers assumes for an absent key.
_DEFAULT_THETA = 10_000.0
_QWEN3_HEAD_DIM = 128
_MAX_WINDOW_LAYERS = 28
_MISTRAL_WINDOW = 4_096
_MISTRAL_KV_HEADS = 8

# Keys that must be absent or say "not used": name, allowed values.
_MUST_BE = (
    ('hidden_act', ('silu',)),
    ('attention_bias', (False, None)),
    ('mlp_bias', (False, None)),
    ('partial_rotary_factor', (1, None)),
    ('compression_config', (None,)),
    ('num_experts', (0, None)),
    ('num_local_experts', (0, None)),
    ('n_routed_experts', (0, None)),
    ('num_experts_per_tok', (0, None)),
    ('moe_intermediate_size', (0, None)),
    ('shared_expert_intermediate_size', (0, None)),
)
_ROPE_KEYS = tuple(
    field.name for field in dataclasses.fields(Llama3RopeScaling)
)


def load_config(folder: str | os.PathLike[str]) -> ModelConfig:
  """Reads the folder's config.json; see `config_from_hf`."""
  return config_from_hf(read_config_json(user_path(folder)))


def read_config_json(folder: pathlib.Path) -> dict[str, Any]:
  """Reads the folder's config.json as it is."""
  name = CONFIG_FILE
  if not has_file(folder, name):
    check_format(folder)
    raise ValueError(
        f'{folder} has no {name}; allowed is a folder as save_pretrained of'
        ' transformers writes it'
    )
  found = parse_json(read_inside(folder, name), str(folder / name))
  if not isinstance(found, dict):
    raise ValueError(f'{folder / name}: not a JSON object')
  return found


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
  """Returns the model that a config.json describes.

  FP8 is not part of the shape: `load_checkpoint` and `load_scales` see it.

  Args:
    hf: the parsed file, in the layout of transformers 4 (`rope_theta`,
      `rope_scaling`) or 5 (`rope_parameters`).

  Returns:
    The shape of the decoder.

  Raises:
    ValueError: an architecture, activation, rope type, bias, window, expert
      or quantisation that is not supported, or a missing or odd value.
  """
  family = _family(hf)
  _refuse_unsupported(hf)
  check_section(hf)
  fields = {ours: _required(hf, theirs) for ours, theirs in _FIELDS}
  if family == 'mistral':
    _refuse_mistral_window(hf, fields['max_position'])
  else:
    _refuse_windows(hf, fields['num_layers'])
  theta, scaling = _rope(hf)
  if family == 'llama':
    kv_heads = hf.get('num_key_value_heads')
  elif family == 'mistral':
    kv_heads = hf.get('num_key_value_heads', _MISTRAL_KV_HEADS)
  else:
    kv_heads = _required(hf, 'num_key_value_heads')
  head_dim = _head_dim(hf, family)
  with _naming_theirs('config.json'):
    return ModelConfig(
        family=family,
        num_kv_heads=fields['num_heads'] if kv_heads is None else kv_heads,
        head_dim=head_dim,
        rope_theta=_as_float(theta),
        rope_scaling=scaling,
        **FAMILY_TRAITS[family]._asdict(),
        tied_embeddings=hf.get('tie_word_embeddings', False),
        **fields,
    )


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
  """Writes a config.json for the shape, in the layout of transformers 4.

  transformers 5 reads that layout too; 4 does not read the one of 5.

  Args:
    config: the shape of the decoder.

  Returns:
    What config.json says, less the dtype and the token ids.
  """
  families = {family: name for name, family in _ARCHITECTURES.items()}
  scaling = config.rope_scaling
  hf = {
      'architectures': [families[config.family]],
      'model_type': config.family,
      **{theirs: config.__dict__[ours] for ours, theirs in _FIELDS},
      'num_key_value_heads': config.num_kv_heads,
      'hidden_act': 'silu',
      'rope_theta': config.rope_theta,
      'rope_scaling': None,
      'tie_word_embeddings': config.tied_embeddings,
  }
  if scaling is not None:
    hf['rope_scaling'] = {
        'rope_type': 'llama3',
        **{key: scaling.__dict__[key] for key in _ROPE_KEYS},
    }
  if config.family == 'qwen2':
    hf['use_sliding_window'] = False
  elif config.family == 'mistral':
    hf['sliding_window'] = None
  else:
    hf['attention_bias'] = False
  if config.family == 'llama':
    hf['mlp_bias'] = False
  square = config.num_heads * config.head_dim == config.model_dim
  if config.family != 'qwen2' or not square:
    hf['head_dim'] = config.head_dim
  return hf


def _family(hf: Mapping[str, Any]) -> str:
  found = _required(hf, 'architectures')
  allowed = ', '.join(_ARCHITECTURES)
  if (
      not isinstance(found, list)
      or len(found) != 1
      or not isinstance(found[0], str)
      or found[0] not in _ARCHITECTURES
  ):
    raise ValueError(
        f'config.json: architectures {list_names([found])}: allowed is one '
        f'of {allowed}'
    )
  family = _ARCHITECTURES[found[0]]
  model_type = hf.get('model_type', family)
  if model_type != family:
    raise ValueError(
        f'config.json: model_type {model_type!r} does not go with '
        f'architecture {found[0]}: allowed is {family!r}'
    )
  return family


def _refuse_unsupported(hf: Mapping[str, Any]) -> None:
  wrong = [
      f'{key}={hf[key]!r} (allowed: {" or ".join(map(repr, allowed))})'[:300]
      for key, allowed in _MUST_BE
      if key in hf and hf[key] not in allowed
  ]
  if wrong:
    raise ValueError(
        'config.json: not supported: ' + '; '.join(wrong) + '; only dense '
        'decoders with silu, and no biases but those of Qwen2'
    )


def _refuse_windows(hf: Mapping[str, Any], num_layers: Any) -> None:
  types = hf.get('layer_types')
  if types is not None:
    if not isinstance(types, list):
      raise ValueError('config.json: layer_types: allowed are null and a list')
    other = [kind for kind in types if kind != 'full_attention']
    if other:
      raise ValueError(
          f'config.json: layer_types {list_names(other)}: allowed is '
          "'full_attention'"
      )
    return
  first = hf.get('max_window_layers', _MAX_WINDOW_LAYERS)
  ints = isinstance(first, int) and isinstance(num_layers, int)
  if (
      hf.get('use_sliding_window', False)
      and hf.get('sliding_window', 4_096) is not None
      and not (ints and first >= num_layers)
  ):
    raise ValueError(
        'config.json: use_sliding_window=True with max_window_layers='
        f'{first!r}: sliding windows are not supported, allowed is False'
    )


def _refuse_mistral_window(hf: Mapping[str, Any], max_position: Any) -> None:
  """Refuses a window that acts: Mistral's is on unless it is null."""
  window = hf.get('sliding_window', _MISTRAL_WINDOW)
  if window is None:
    return
  ints = isinstance(window, int) and isinstance(max_position, int)
  if not (ints and window >= max_position):
    said = '' if 'sliding_window' in hf else ', which an absent key stands for'
    raise ValueError(
        f'config.json: sliding_window={window!r}{said}: sliding windows are not'
        ' supported; allowed is null, or a window that is not below'
        f' max_position_embeddings, which is {max_position!r}'
    )


def _head_dim(hf: Mapping[str, Any], family: str) -> Any:
  absent = _QWEN3_HEAD_DIM if family == 'qwen3' else None
  found = hf.get('head_dim', absent)
  if found is not None:
    return found
  dim = _required(hf, 'hidden_size')
  heads = _required(hf, 'num_attention_heads')
  if not (isinstance(dim, int) and isinstance(heads, int) and heads > 0):
    raise ValueError(
        f'config.json: hidden_size {dim!r} and num_attention_heads {heads!r}: '
        'allowed are integers >= 1'
    )
  if dim % heads:
    raise ValueError(
        f'config.json: hidden_size {dim} is not a multiple of '
        f'num_attention_heads {heads}, and there is no head_dim'
    )
  return dim // heads


def _rope(hf: Mapping[str, Any]) -> tuple[Any, Llama3RopeScaling | None]:
  """Reads theta and scaling from either layout; both must not disagree."""
  thetas = [hf['rope_theta']] if 'rope_theta' in hf else []
  scalings = []
  for key in ('rope_scaling', 'rope_parameters'):
    found = hf.get(key)
    if found is None:
      continue
    if not isinstance(found, dict):
      raise ValueError(f'config.json: {key}: allowed are null and an object')
    if 'rope_theta' in found:
      thetas.append(found['rope_theta'])
    scalings.append(_scaling(found, key, hf))
  if any(scaling != scalings[0] for scaling in scalings):
    raise ValueError('config.json: rope_scaling and rope_parameters disagree')
  if any(theta != thetas[0] for theta in thetas):
    raise ValueError(f'config.json: rope_theta is given as {thetas!r:.200}')
  return (
      thetas[0] if thetas else _DEFAULT_THETA,
      scalings[0] if scalings else None,
  )


def _scaling(
    found: dict[str, Any], key: str, hf: Mapping[str, Any]
) -> Llama3RopeScaling | None:
  kind = found.get('rope_type')
  if kind is None:
    # The key's older name. If both are absent, transformers 5 takes 'default'.
    kind = found.get('type', 'default')
  if kind not in ('default', 'llama3') or any(
      isinstance(value, dict) for value in found.values()
  ):
    raise ValueError(
        f'config.json: {key} has rope_type {list_names([kind])}: allowed are '
        "'default' and 'llama3', the same for all layers"
    )
  partial = found.get('partial_rotary_factor', 1)
  if partial not in (1, None):
    raise ValueError(
        f'config.json: {key} has partial_rotary_factor {partial!r:.100}: '
        'allowed is 1'
    )
  if kind == 'default':
    return None
  absent = [name for name in _ROPE_KEYS if name not in found]
  if absent:
    raise ValueError(f'config.json: {key} lacks {list_names(absent)}')
  original = 'original_max_position_embeddings'
  if hf.get(original, found[original]) != found[original]:
    # transformers prefers the outer one. A file with both is ambiguous.
    raise ValueError(f'config.json: {key} and the file disagree on {original}')
  with _naming_theirs(f'config.json: {key}'):
    return Llama3RopeScaling(
        factor=_as_float(found['factor']),
        low_freq_factor=_as_float(found['low_freq_factor']),
        high_freq_factor=_as_float(found['high_freq_factor']),
        original_max_position_embeddings=found[original],
    )


@contextlib.contextmanager
def _naming_theirs(where: str) -> Iterator[None]:
  """Says what is wrong with a value under the name that it has in the file."""
  try:
    yield
  except ValueError as error:
    said = re.sub(
        r'\b(' + '|'.join(_THEIR_NAMES) + r')\b',
        lambda found: _THEIR_NAMES[found[0]],
        str(error),
    )
    raise ValueError(f'{where}: {said}') from error


def _as_float(value: Any) -> Any:
  """Makes 10000 the same as 10000.0; leaves oddities to the validation."""
  small = type(value) is int and abs(value) < 2**53
  return float(value) if small else value


def _required(hf: Mapping[str, Any], key: str) -> Any:
  if key not in hf:
    raise ValueError(f'config.json: {key!r} is missing')
  return hf[key]
