"""FP8 checkpoints: config.json's quantization_config, and the two scales.

One layout is written and read: compressed-tensors' "float-quantized" with one
static scale per tensor, which transformers and vLLM both read. Next to
`<module>.weight` (float8_e4m3fn) lie `<module>.weight_scale` and
`<module>.input_scale`, float32 [1], with our meaning of scale: x ~ values *
scale. A stacked dot of ours is several modules there. They get the same two
scales, so a reader that fuses them again, and takes the largest scale of the
parts, changes no value.

Left out on purpose: scales per channel, block or token, which no recipe here
trains on.

References:
  github.com/vllm-project/compressed-tensors, quant_config.py, quant_args.py.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jetrl_jax.models.hf.files import list_names
from jetrl_jax.models.hf.layout import OUTPUT, Row
from jetrl_jax.models.hf.safetensors_index import StoredTensor

KEY = 'quantization_config'
FP8_DTYPE = 'F8_E4M3'
WEIGHT_SCALE = 'weight_scale'
INPUT_SCALE = 'input_scale'

_METHOD = 'compressed-tensors'
_FORMATS = ('float-quantized', 'naive-quantized')
_LINEAR = 'Linear'
# vLLM and SGLang count the head among the linear modules only where it is
# named.
_HEAD = 're:.*lm_head$'
# Required settings of weights and inputs, and the meaning of absent keys.
_TENSOR = {
    'num_bits': 8,
    'type': 'float',
    'strategy': 'tensor',
    'symmetric': True,
    'dynamic': False,
}
_ABSENT = {'symmetric': True, 'dynamic': False, 'strategy': 'tensor'}

# Most characters and choices of a pattern in `ignore`. Python tries all ways to
# match, so a stranger's pattern with repeated groups or many choices might
# never end.
_PATTERN_CHARACTERS, _PATTERN_CHOICES = 200, 4
_CHOICE, _REPEATED_GROUP = re.compile(r'[*+?{|]'), re.compile(r'\)[*+?{]')


def is_dot(row: Row) -> bool:
  """Whether a leaf is a kernel that a recipe may quantise."""
  return row.path.endswith('/kernel')


def scale_names(part_name: str) -> tuple[str, str]:
  """Returns the names of a weight's own scale and of its input's."""
  module = part_name.removesuffix('.weight')
  return f'{module}.{WEIGHT_SCALE}', f'{module}.{INPUT_SCALE}'


def is_scale(name: str) -> bool:
  """Whether a tensor's name is that of a scale, see `scale_names`."""
  return name.endswith((f'.{WEIGHT_SCALE}', f'.{INPUT_SCALE}'))


def quantization_section(
    high_precision: Iterable[str], *, with_head: bool
) -> dict[str, Any]:
  """Returns the section of config.json about an FP8 checkpoint.

  Args:
    high_precision: names of the weights of linear modules that are not FP8.
    with_head: the head is FP8.
  """
  modules = [name.removesuffix('.weight') for name in high_precision]
  return {
      'quant_method': _METHOD,
      'format': _FORMATS[0],
      'quantization_status': 'compressed',
      'config_groups': {
          'group_0': {
              'targets': [_LINEAR, _HEAD] if with_head else [_LINEAR],
              'weights': dict(_TENSOR),
              'input_activations': dict(_TENSOR),
              'output_activations': None,
          }
      },
      'ignore': modules,
      'kv_cache_scheme': None,
  }


def check_section(hf: Mapping[str, Any]) -> None:
  """Refuses a quantisation that is not the one written here.

  Args:
    hf: a whole config.json.

  Raises:
    ValueError: names what differs and what is allowed.
  """
  section = hf.get(KEY)
  if section is None:
    return
  problems = list(_problems(section))
  if problems:
    raise ValueError(
        f'config.json: {KEY} is not supported: {"; ".join(problems)[:500]}.'
        ' Allowed are none, and FP8 with one static scale per tensor'
        f' ({_METHOD}, {_FORMATS[0]}), as jetrl_jax.export writes it'
    )


def _problems(section: Any):
  if not isinstance(section, dict):
    yield 'it is no object'
    return
  method, kind = _at(section, 'quant_method'), _at(section, 'format')
  if method != _METHOD:
    yield f'quant_method {method!r}'
    return
  if kind not in _FORMATS:
    yield f'format {kind!r}'
  if _at(section, 'kv_cache_scheme') is not None:
    yield 'kv_cache_scheme is set'
  groups = _at(section, 'config_groups')
  if not isinstance(groups, dict) or len(groups) != 1:
    yield 'config_groups has not exactly one group'
    return
  (group,) = groups.values()
  if _at(group, 'targets') not in ([_LINEAR], [_LINEAR, _HEAD]):
    yield f'targets {_at(group, "targets")!r}'
  if _at(group, 'output_activations') is not None:
    yield 'output_activations is set'
  for name in ('weights', 'input_activations'):
    found = _at(group, name)
    for key, value in _TENSOR.items():
      said = _at(found, key)
      if (_ABSENT[key] if said is None and key in _ABSENT else said) != value:
        yield f'{name}.{key} is {said!r}, not {value!r}'


def _at(node: Any, key: str) -> Any:
  return node.get(key) if isinstance(node, dict) else None


def quantized_parts(
    rows: Iterable[Row], tensors: Mapping[str, StoredTensor]
) -> dict[str, bool]:
  """Says which dots are FP8 in the files.

  Args:
    rows: the rows of `hf_layout.layout`.
    tensors: what the headers say.

  Returns:
    For every row that `is_dot`: its path, and whether all its parts are FP8.

  Raises:
    ValueError: some parts of a stacked dot are FP8 and others are not.
  """
  found, mixed = {}, []
  for row in rows:
    if not is_dot(row):
      continue
    dtypes = [tensors[p.name].dtype for p in row.parts if p.name in tensors]
    eight = [dtype == FP8_DTYPE for dtype in dtypes]
    if any(eight) and not all(eight):
      mixed.append(row.path)
    found[row.path] = any(eight)
  if mixed:
    raise ValueError(
        'a stacked dot must be FP8 in all its parts or in none; mixed are'
        f' {list_names(mixed)}'
    )
  return found


def check_ignored(
    hf: Mapping[str, Any], rows: Iterable[Row], quantized: Mapping[str, bool]
) -> None:
  """Refuses a config.json that says something else than the files.

  Args:
    hf: a whole config.json, see `check_section`.
    rows: the rows of `hf_layout.layout`.
    quantized: see `quantized_parts`.

  Raises:
    ValueError: names the modules.
  """
  section = hf.get(KEY)
  if section is None and any(quantized.values()):
    raise ValueError(
        f'config.json: {KEY} is missing, but {sum(quantized.values())} dots are'
        ' stored in FP8'
    )
  if section is None:
    return
  ignore = _at(section, 'ignore') or []
  if not isinstance(ignore, list) or not all(
      isinstance(name, str) for name in ignore
  ):
    raise ValueError(f'config.json: {KEY}.ignore is not a list of names')
  is_ignored = _matcher(ignore)
  wrong = [
      part.name
      for row in rows
      if row.path in quantized
      for part in row.parts
      if quantized[row.path] == is_ignored(part.name.removesuffix('.weight'))
      # A head that is not FP8 need not be named.
      and (quantized[row.path] or part.name != OUTPUT)
  ]
  if wrong:
    raise ValueError(
        f'config.json: {KEY}.ignore and the dtypes of the files disagree on'
        f' {list_names(wrong)}'
    )


def _matcher(ignore: list[str]) -> Callable[[str], bool]:
  """Returns whether a module is named, or matched from its beginning."""
  names = {name for name in ignore if not name.startswith('re:')}
  patterns = [_pattern(name[3:]) for name in ignore if name.startswith('re:')]
  return lambda module: (
      module in names or any(pattern.match(module) for pattern in patterns)
  )


def _pattern(text: str) -> re.Pattern[str]:
  where = f'config.json: {KEY}.ignore: {text!r:.200}'
  if (
      len(text) > _PATTERN_CHARACTERS
      or len(_CHOICE.findall(text)) > _PATTERN_CHOICES
      or _REPEATED_GROUP.search(text)
  ):
    raise ValueError(
        f'{where} could take for ever to match; allowed are'
        f' {_PATTERN_CHARACTERS} characters and {_PATTERN_CHOICES} of * + ? {{'
        ' |, none after a group. Name the modules instead'
    )
  try:
    return re.compile(text)
  except (re.error, OverflowError) as error:
    raise ValueError(f'{where} is no regular expression ({error})') from error
