"""Quantises masters again in plain JAX, then measures what was lost."""

import jax.numpy as jnp

from jetrl_jax.core.collectives import Axes
from jetrl_jax.core.typing import PyTree
from jetrl_jax.fp8 import scaling_state
from jetrl_jax.fp8.quantization import QTensor
from jetrl_jax.fp8.recipes import Recipe
from jetrl_jax.kernels.quantized_dot.weights import requantize_weights


def changed_share(old: PyTree, new: PyTree, axes: Axes) -> PyTree:
  """Returns the share of 8-bit weight bytes that differ, by kernel."""

  def walk(a, b):
    if isinstance(a, QTensor):
      differs = jnp.mean((a.values != b.values).astype(jnp.float32))
      return axes.psum_all(differs) / axes.devices
    if not isinstance(a, dict):
      return None
    children = {key: walk(a[key], b[key]) for key in a}
    return {k: v for k, v in children.items() if v is not None} or None

  return walk(old, new) or {}


def requantize(
    params: PyTree,
    fp8_state: PyTree,
    weights: PyTree,
    recipe: Recipe,
    axes: Axes,
) -> tuple[PyTree, PyTree, PyTree]:
  """See the package's `requantize`."""
  weights_now = requantize_weights(params, fp8_state, weights, recipe)
  measured = scaling_state.measure_kernels(fp8_state, params, weights_now, axes)
  return weights_now, measured, changed_share(weights, weights_now, axes)
