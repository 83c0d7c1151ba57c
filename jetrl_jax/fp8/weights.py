"""From masters to the compute weights that every forward reads."""

from jetrl_jax.fp8 import formats, slots
from jetrl_jax.fp8.quantization import QTensor, quantize
from jetrl_jax.fp8.recipes import Recipe
from jetrl_jax.typing import PyTree


def prepare_weights(params: PyTree, fp8_state: PyTree, recipe: Recipe):
  """Quantises and casts the masters; once per optimiser step.

  The result is the one tree that rollout and training forward read. It is
  a pure function of its arguments, so a checkpoint need not hold it.

  Args:
    params: nested dict of masters.
    fp8_state: slots; a kernel with a slot becomes a `QTensor` on its scale.
    recipe: the compute dtype of all other leaves.

  Returns:
    A nested dict with the paths of `params`.
  """

  def walk(node, state):
    if not isinstance(node, dict):
      return node.astype(recipe.dtype)
    prepared = {
        key: walk(child, state.get(key, {})) for key, child in node.items()
    }
    if set(state) == set(slots.OPERANDS):
      scale = state['kernel']['scale']
      values = quantize(node['kernel'], scale, formats.E4M3)
      prepared['kernel'] = QTensor(values=values, scale=scale)
    return prepared

  return walk(params, fp8_state)
