"""From masters to the compute weights that every forward reads.

This is the one place that decides how a kernel is quantised. It makes
training's weights and the rollout's, with the recipe that each side has.
"""

from jetrl_jax.core.typing import Array, PyTree
from jetrl_jax.fp8 import formats
from jetrl_jax.fp8.quantization import QTensor, quantize, quantize_groups
from jetrl_jax.fp8.recipes import BLOCK, FAKE_RECIPES, Recipe
from jetrl_jax.kernels.quantized_dot import per_row_fake, per_token


def quantize_kernel(
    kernel_OI: Array, dot_state: PyTree, recipe: Recipe
) -> QTensor:
  """Returns one kernel in the recipe's format and granularity.

  Args:
    kernel_OI: master; on several devices this device's rows of it.
    dot_state: its scale, for `fp8_delayed`; dynamic recipes do not read it.
    recipe: a recipe that quantises.
  """
  match recipe.name:
    case 'fp8_delayed':
      scale = dot_state['kernel']['scale']
      values = quantize(kernel_OI, scale, formats.E4M3)
      return QTensor(values=values, scale=scale)
    case 'fp8_token' | 'int8':
      return per_token.quantize_rows(recipe, kernel_OI)
    case 'fp8_block':
      block = BLOCK, BLOCK
      return quantize_groups(kernel_OI, formats.E4M3, block, **recipe.scaling)
    case name if name in FAKE_RECIPES:
      return per_row_fake.quantize_rows(recipe, kernel_OI)
  raise AssertionError(recipe.name)


def prepare_weights(params: PyTree, fp8_state: PyTree, recipe: Recipe):
  """Quantises and casts the masters; once per optimiser step.

  The result is the one tree that rollout and training forward read. It is
  a pure function of its arguments, so a checkpoint need not hold it.

  Args:
    params: nested dict of masters.
    fp8_state: the scaling state, for delayed scales; may be {} for a dynamic
      recipe.
    recipe: which kernels become a `QTensor`, and the dtype of all else.

  Returns:
    A nested dict with the paths of `params`.
  """

  def walk(node, state, path):
    if not isinstance(node, dict):
      return node.astype(recipe.dtype)
    quantises = 'kernel' in node and recipe.quantizes('/'.join(path))
    return {
        key: quantize_kernel(child, state, recipe)
        if quantises and key == 'kernel'
        else walk(child, state.get(key, {}), (*path, key))
        for key, child in node.items()
    }

  return walk(params, fp8_state, ())


def requantize_weights(
    params: PyTree, fp8_state: PyTree, weights: PyTree, recipe: Recipe
):
  """Makes compute weights again, from all masters or from some of them.

  Args:
    params: nested dict of masters.
    fp8_state: the scaling state, see `prepare_weights`.
    weights: the weights until now. A leaf that is a `QTensor` there becomes
      one again. Paths do not matter, so equal parts of a tree share a program.
    recipe: the recipe of `weights`.

  Returns:
    What `prepare_weights` gives, with the paths of `params`.
  """

  def walk(node, state, old):
    if isinstance(old, QTensor):
      return quantize_kernel(node, state, recipe)
    if not isinstance(node, dict):
      return node.astype(recipe.dtype)
    is_dot = 'kernel' in node
    return {
        key: walk(child, state if is_dot else state.get(key, {}), old[key])
        for key, child in node.items()
    }

  return walk(params, fp8_state, weights)
