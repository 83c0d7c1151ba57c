"""Tensor parallelism that keeps the bits: outputs are split, never sums.

    qkv        by heads; keys and values, and their pages, by key head, of which
               some devices have copies where there are fewer than devices
    o, down    by columns of their result; their rows are gathered before, and
               their results after. A rollout computes o whole on every device:
               for few rows that takes less time than to gather its result
    gate_up    by columns of gate and of up
    embedding  by tokens; one device has a token's row
    head       by tokens; devices exchange logits for whole rows, a share each
               (`logprobs.py`, `rl/rollout/decode_step.py`)

A device takes the log-sum-exp of its rows and draws their tokens, and the
devices gather these numbers. Every device of the axis `tensor` computes all
else (residual stream, norms) alike. So each number of the forward is a sum that
one device computes, in the order of one device. In the backward, the gradient
of the rows of a split dot is a sum over devices: it repeats to the bit on one
mesh and has other bits on another mesh. Where `kernels/mlp` is one operation,
down's is not: each device computes the columns that it has, from all of the
output's gradient.

`core/collectives.py` has the collectives; `decoder.py` calls them. In a decode
step on the GPUs of one process a kernel can gather (`kernels/gather_columns`).

References:
  Shoeybi et al. 2019, arXiv:1909.08053, which splits the sums of o and of down.
"""

import dataclasses
import re
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jetrl_jax.core.collectives import Axes, Pieces
from jetrl_jax.core.sharding import TENSOR
from jetrl_jax.core.typing import PyTree
from jetrl_jax.fp8 import QTensor, Recipe
from jetrl_jax.fp8.recipes import BLOCK
from jetrl_jax.models.layers import gather_quantized
from jetrl_jax.models.types import ModelConfig

# A device's columns of a dot are a multiple of this: a GPU's FP8 dots need it,
# and a CPU's dots then add in the order of a wider dot.
_COLUMNS = 16


def on_device(model: ModelConfig, tensor: int) -> ModelConfig:
  """Returns the model with the heads and the ffn of one device."""
  if tensor == 1:
    return model
  return dataclasses.replace(
      model,
      num_heads=model.num_heads // tensor,
      num_kv_heads=max(model.num_kv_heads // tensor, 1),
      ffn_dim=model.ffn_dim // tensor,
  )


def pieces(model: ModelConfig, axes: Axes, path: str) -> Pieces:
  """Returns how devices share the rows of a module's kernel and bias.

  Args:
    model: its shape.
    axes: devices.
    path: the path of the module: 'embed', 'lm_head', or within a layer,
      'attn/qkv'.
  """
  tensor = axes.tensor
  if tensor == 1 or (axes.placed and path == 'attn/o'):
    return ()
  queries = model.num_heads * model.head_dim, tensor
  keys = model.num_kv_heads * model.head_dim, min(tensor, model.num_kv_heads)
  return {
      'embed': ((model.vocab_size, tensor),),
      'lm_head': ((model.vocab_size, tensor),),
      'attn/qkv': (queries, keys, keys),
      'attn/o': ((model.model_dim, tensor),),
      'mlp/gate_up': ((model.ffn_dim, tensor),) * 2,
      'mlp/down': ((model.model_dim, tensor),),
  }.get(path, ())


def check(model: ModelConfig, recipe: Recipe, axes: Axes) -> None:
  """Raises a ValueError if these devices cannot share the model."""
  tensor = axes.tensor
  if tensor == 1:
    return
  heads, kv_heads = model.num_heads, model.num_kv_heads
  if heads % tensor or (kv_heads % tensor and tensor % kv_heads):
    allowed = [
        n
        for n in range(2, heads + 1)
        if not heads % n and not (kv_heads % n and n % kv_heads)
    ]
    raise ValueError(
        f'mesh.tensor is {tensor}; the model has {heads} query heads on'
        f' {kv_heads} KV heads, which can be shared by'
        f' {", ".join(map(str, [1, *allowed]))} devices'
    )
  for name, size in (
      ('hidden_size', model.model_dim),
      ('intermediate_size', model.ffn_dim),
      ('vocab_size', model.vocab_size),
      ('num_attention_heads x head_dim', heads * model.head_dim),
  ):
    if size % (tensor * _COLUMNS):
      raise ValueError(
          f'mesh.tensor is {tensor}; {name} is {size}, and must be a multiple'
          f' of {tensor * _COLUMNS}: {_COLUMNS} columns for each device. Lower'
          ' mesh.tensor and raise mesh.fsdp'
      )
  if recipe.name != 'fp8_block':
    return
  for path, names in _DOTS.items():
    for rows, parts in pieces(model, axes, path):
      if recipe.quantizes(path) and rows // parts % BLOCK:
        raise ValueError(
            f'mesh.tensor is {tensor}; recipe fp8_block quantises in blocks of'
            f' {BLOCK} rows, but each device has {rows // parts} of the'
            f' {rows} rows of {names}. Lower mesh.tensor, or use fp8_token'
        )


# A dot's path within a layer -> what the devices share of it, as messages name
# it.
_DOTS = {
    'attn/qkv': 'queries or keys in attn/qkv',
    'attn/o': 'attn/o',
    'mlp/gate_up': 'gate in mlp/gate_up',
    'mlp/down': 'mlp/down',
    'lm_head': 'lm_head',
}


def most_row_bytes(model: ModelConfig, recipe: Recipe, axes: Axes) -> int:
  """Returns the bytes of a device's part of a row, at most, in a decode step.

  What o and down read may travel in 8 bits; what down adds may be float32.
  """
  here = on_device(model, axes.tensor)
  read = max(here.num_heads * here.head_dim, here.ffn_dim)
  itemsize = jnp.dtype(recipe.dtype).itemsize
  return max(read * itemsize, 4 * model.model_dim // axes.tensor)


def place(axes: Axes, model: ModelConfig, weights: PyTree) -> PyTree:
  """Returns stored weights as this device's dots read them.

  Args:
    axes: devices.
    model: its shape.
    weights: compute weights, the parts that are stored here.
  """
  placed = dataclasses.replace(axes, placed=True)

  def one(path, leaf):
    full_dim = sum(rows for rows, _ in pieces(model, axes, path))
    parts = pieces(model, placed, path)
    if not full_dim:
      return leaf
    if isinstance(leaf, QTensor):
      return gather_quantized(axes, leaf, full_dim, parts)
    return axes.gather(leaf, full_dim, parts)

  return _map(one, weights)


def placed_specs(model: ModelConfig, axes: Axes, weights: PyTree) -> PyTree:
  """Returns the PartitionSpec of every leaf that `place` makes."""
  axes = dataclasses.replace(axes, placed=True)

  def one(path, leaf):
    spec: Any = P(TENSOR) if pieces(model, axes, path) else P()
    if isinstance(leaf, QTensor):
      whole: Any = P()
      return QTensor(values=spec, scale=spec if leaf.scale.ndim else whole)
    return spec

  return _map(one, weights)


def _map(function, node: PyTree, path: str = '') -> PyTree:
  """Applies `function(path of the module without its layer, leaf)`."""
  if not isinstance(node, dict):
    module = path.rpartition('/')[0]
    return function(re.sub(r'^layers_\d+/', '', module), node)
  return {
      key: _map(function, child, f'{path}/{key}' if path else key)
      for key, child in node.items()
  }
