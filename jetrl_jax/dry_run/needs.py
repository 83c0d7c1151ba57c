"""Estimates the memory of a micro-batch's forward and backward, from shapes.

This is for a device for which nothing can be compiled here. docs/dry_run.md
compares such estimates with XLA's numbers.
"""

import jax
import jax.numpy as jnp

from jetrl_jax.core.typing import PyTree
from jetrl_jax.models import logprobs, tensor_parallel
from jetrl_jax.models.policy import Policy
from jetrl_jax.rl.run.spec import RunSpec

# XLA's CPU program keeps this many times the insides of the blocks, whatever
# model.remat is: 3.1 for the quickstart, 3.4 for a model of 135 M parameters.
_CPU_COPIES = 3.5
# So many times the insides of a block are alive in its backward, with their
# gradients, by model.remat ('none' keeps one of them anyway): compiled for an
# H200, 7B, 8B and 14B, 8192 to 32768 tokens (docs/dry_run.md).
_INSIDES = {'none': 1.0, 'selective': 1.4, 'full': 1.6}


def accumulate_needs(
    spec: RunSpec, masters: PyTree, *, attention: str = 'kernel'
) -> dict[str, int]:
  """Returns what a forward and backward need in addition, bytes by name.

  The sizes follow from the shapes. The compiler decides what is alive at the
  same time, so this is an estimate: what is kept of all blocks, plus the larger
  of two things: the insides of one block with their gradients, or a chunk of
  logits with the head's gradient.

  Args:
    spec: the run's specification.
    masters: shapes of the trained masters.
    attention: 'kernel'; 'reference', whose backward pass makes the whole score
      matrix of a layer; or 'cpu', the reference in XLA's CPU program, which
      orders operations for concurrency and keeps what all layers make.
  """
  policy, model = spec.policy, spec.policy.model
  width = policy.recipe.dtype.itemsize
  rows, length = spec.batch_shape
  tokens = rows * length // policy.axes.size
  inside = tokens * inside_of_token(policy)
  chunk = logprobs.chunk_of(tokens, policy.logit_chunk_rows)
  match policy.remat:
    case 'none':
      kept, block = 'insides', tokens * _insides_kept(policy)
    case 'selective':
      kept, block = 'inputs and attention', tokens * _kept_of_token(policy)
    case _:
      kept, block = 'inputs', tokens * width * model.model_dim
  of_blocks = {k: v for k, v in masters.items() if k.startswith('layers_')}
  of_head = {k: v for k, v in masters.items() if k not in of_blocks}
  in_block = {
      'activations: insides of one block, and gradients': int(
          _INSIDES[policy.remat] * inside
      ),
      'its largest gradient, in float32': largest(of_blocks, 4),
  }
  # Probabilities and their gradient, in float32.
  scores = 8 * model.num_heads * (tokens // length) * length**2
  if attention == 'reference':
    in_block['attention: scores of one block'] = scores
  in_head = {
      f'logits: {chunk} rows in float32': 4 * model.vocab_size * chunk,
      "the head's gradient, in float32": largest(of_head, 4),
      'hidden rows and their gradient': 2 * width * tokens * model.model_dim,
  }
  if model.tied_embeddings:
    in_head['the gradient of tokens read'] = largest(of_head)
  if attention == 'cpu':
    return {
        f'activations: insides of {model.num_layers} blocks, with copies': int(
            _CPU_COPIES * inside * model.num_layers
        ),
        f'attention: scores of {model.num_layers} blocks': (
            scores * model.num_layers
        ),
    } | in_head
  overlapping = {}
  if policy.axes.overlaps:
    # Compiled for four H200: 2.7 GiB of a 7B, whatever the number of layers.
    overlapping['a layer whose weights and gradients are on their way'] = (
        3 * 4 * sum(x.size for x in jax.tree.leaves(masters['layers_0']))
    )
  return (
      {
          f'activations: {kept} of {model.num_layers} blocks': (
              model.num_layers * block
          )
      }
      | max(in_block, in_head, key=lambda needs: sum(needs.values()))
      | overlapping
  )


def inside_of_token(policy: Policy) -> int:
  """Returns the bytes per token of what a block computes.

  These are two norms, qkv, attention's output, gate_up and its product, and two
  residuals.
  """
  whole, tensor = policy.model, policy.axes.tensor
  model = tensor_parallel.on_device(whole, tensor)
  heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
  numbers = 4 * model.model_dim + 2 * heads + 3 * model.ffn_dim
  if tensor > 1:  # The rows of o and of down are gathered.
    numbers += whole.num_heads * whole.head_dim + whole.ffn_dim
  return policy.recipe.dtype.itemsize * numbers


def _insides_kept(policy: Policy) -> int:
  """Returns the bytes per block and token that 'none' keeps.

  In 'fp8_delayed', norms and SwiGLU write the dots' 8-bit operands. In 'bf16',
  XLA keeps about one more row of float32.
  """
  model, recipe = policy.model, policy.recipe
  kept = inside_of_token(policy)
  if recipe.is_delayed:
    numbers = 2 * model.model_dim + model.ffn_dim
    kept -= (recipe.dtype.itemsize - 1) * numbers
  elif recipe.name == 'bf16':
    kept += 4 * model.model_dim
  return kept


def _kept_of_token(policy: Policy) -> int:
  """Returns the bytes per block and token that 'selective' keeps.

  These are the block's input and the sum after attention, queries and
  attention's output, keys and values as stored, and a float32 log-sum-exp per
  head. With norms on heads, also queries and keys before their norms.
  """
  model = tensor_parallel.on_device(policy.model, policy.axes.tensor)
  width = policy.recipe.dtype.itemsize
  queries = model.num_heads * model.head_dim
  keys = model.num_kv_heads * model.head_dim
  rows = 2 * (model.model_dim + queries)
  if model.qk_norm:
    rows += queries + keys
  stored = 2 * keys * jnp.dtype(policy.kv_dtype).itemsize
  return width * rows + stored + 4 * model.num_heads


def largest(tree: PyTree, width: int | None = None) -> int:
  """Returns the bytes of the largest leaf, `width` or its own a number."""
  return max(
      (x.size * (width or x.dtype.itemsize) for x in jax.tree.leaves(tree)),
      default=0,
  )
