"""The one table between our tree and Hugging Face names, read both ways.

Each row is one leaf of ours and the tensors that make it up, stacked along
the out-features: qkv is q rows, then k rows, then v rows; gate_up is gate rows,
then up rows. Every other leaf is one tensor, unchanged, since both sides store
kernels [out, in].
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from jetrl_jax.core.typing import PyTree
from jetrl_jax.models.types import ModelConfig

# Conditions under which a row applies.
_ALWAYS = 'always'
_IF_BIAS = 'qkv_bias'
_IF_NORM = 'qk_norm'
_IF_UNTIED = 'untied'

# Rows: our path, the file's names, the shape of each in letters, the condition.
# The letters are those of core/typing.py, and n = N H (all query heads), k = K
# H (all key heads).
_TABLE = (
    ('embed/embedding', ('model.embed_tokens.weight',), ('VD',), _ALWAYS),
    (
        'layers_{i}/attn_norm/scale',
        ('model.layers.{i}.input_layernorm.weight',),
        ('D',),
        _ALWAYS,
    ),
    (
        'layers_{i}/attn/qkv/kernel',
        (
            'model.layers.{i}.self_attn.q_proj.weight',
            'model.layers.{i}.self_attn.k_proj.weight',
            'model.layers.{i}.self_attn.v_proj.weight',
        ),
        ('nD', 'kD', 'kD'),
        _ALWAYS,
    ),
    (
        'layers_{i}/attn/qkv/bias',
        (
            'model.layers.{i}.self_attn.q_proj.bias',
            'model.layers.{i}.self_attn.k_proj.bias',
            'model.layers.{i}.self_attn.v_proj.bias',
        ),
        ('n', 'k', 'k'),
        _IF_BIAS,
    ),
    (
        'layers_{i}/attn/q_norm/scale',
        ('model.layers.{i}.self_attn.q_norm.weight',),
        ('H',),
        _IF_NORM,
    ),
    (
        'layers_{i}/attn/k_norm/scale',
        ('model.layers.{i}.self_attn.k_norm.weight',),
        ('H',),
        _IF_NORM,
    ),
    (
        'layers_{i}/attn/o/kernel',
        ('model.layers.{i}.self_attn.o_proj.weight',),
        ('Dn',),
        _ALWAYS,
    ),
    (
        'layers_{i}/mlp_norm/scale',
        ('model.layers.{i}.post_attention_layernorm.weight',),
        ('D',),
        _ALWAYS,
    ),
    (
        'layers_{i}/mlp/gate_up/kernel',
        (
            'model.layers.{i}.mlp.gate_proj.weight',
            'model.layers.{i}.mlp.up_proj.weight',
        ),
        ('FD', 'FD'),
        _ALWAYS,
    ),
    (
        'layers_{i}/mlp/down/kernel',
        ('model.layers.{i}.mlp.down_proj.weight',),
        ('DF',),
        _ALWAYS,
    ),
    ('final_norm/scale', ('model.norm.weight',), ('D',), _ALWAYS),
    ('lm_head/kernel', ('lm_head.weight',), ('VD',), _IF_UNTIED),
)

# A tied checkpoint may also hold the output projection.
EMBEDDING = 'model.embed_tokens.weight'
OUTPUT = 'lm_head.weight'

# Buffers that old versions of transformers saved and every version recomputes.
_IGNORED = re.compile(
    r'model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq', re.ASCII
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
  """One tensor of theirs.

  Attributes:
    name: the name in the safetensors files.
    shape: [rows] or [rows, columns].
  """

  name: str
  shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """One leaf of ours and the tensors that it is stacked from.

  Attributes:
    path: the leaf's path, joined with '/'.
    parts: in the order of their rows.
  """

  path: str
  parts: tuple[Part, ...]

  @property
  def shape(self) -> tuple[int, ...]:
    """The leaf's shape: the rows of all parts, and their columns."""
    rows = sum(part.shape[0] for part in self.parts)
    return (rows, *self.parts[0].shape[1:])


def layout(config: ModelConfig) -> tuple[Row, ...]:
  """Lists the tree's leaves in the order of the forward.

  Args:
    config: the shape of the decoder.

  Returns:
    One row per leaf; no path and no tensor name comes twice.
  """
  sizes = {
      'V': config.vocab_size,
      'D': config.model_dim,
      'H': config.head_dim,
      'F': config.ffn_dim,
      'n': config.num_heads * config.head_dim,
      'k': config.num_kv_heads * config.head_dim,
  }
  wanted = {
      _ALWAYS: True,
      _IF_BIAS: config.qkv_bias,
      _IF_NORM: config.qk_norm,
      _IF_UNTIED: not config.tied_embeddings,
  }
  table = [row[:3] for row in _TABLE if wanted[row[3]]]

  def expand(rows, layer):
    return [
        Row(
            path=path.format(i=layer),
            parts=tuple(
                Part(
                    name=name.format(i=layer),
                    shape=tuple(sizes[letter] for letter in letters),
                )
                for name, letters in zip(names, shapes, strict=True)
            ),
        )
        for path, names, shapes in rows
    ]

  per_layer = [row for row in table if '{i}' in row[0]]
  first, last = table.index(per_layer[0]), table.index(per_layer[-1]) + 1
  rows = expand(table[:first], 0)
  for layer in range(config.num_layers):
    rows += expand(per_layer, layer)
  return tuple(rows + expand(table[last:], 0))


def is_ignored(name: str) -> bool:
  """Whether a tensor of theirs is a buffer that no loader needs."""
  return _IGNORED.fullmatch(name) is not None


def build_tree(
    config: ModelConfig, make_leaf: Callable[[Row], Any]
) -> dict[str, Any]:
  """Builds the nested dict of the parameters, leaf by leaf in layout order."""
  tree = {}
  for row in layout(config):
    *parents, last = row.path.split('/')
    node = tree
    for parent in parents:
      node = node.setdefault(parent, {})
    node[last] = make_leaf(row)
  return tree


def flatten_tree(tree: PyTree, prefix: str = '') -> dict[str, Any]:
  """Maps '/'-joined paths to the leaves of a nested dict."""
  flat = {}
  for key, value in tree.items():
    path = f'{prefix}{key}'
    if isinstance(value, Mapping):
      flat.update(flatten_tree(value, f'{path}/'))
    else:
      flat[path] = value
  return flat
