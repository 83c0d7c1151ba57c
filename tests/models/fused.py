"""A few steps of decode, as a rollout runs them and as training computes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jetrl_jax import fp8, kernels
from jetrl_jax.core.collectives import Axes
from jetrl_jax.core.compilation import exact_jit
from jetrl_jax.fp8 import Recipe, scaling_state
from jetrl_jax.kernels import dispatch
from jetrl_jax.models.policy import Policy, PolicyParams
from jetrl_jax.models.types import ModelConfig


def policy(model: ModelConfig, recipe: Recipe, kv: str) -> Policy:
  """A policy with tiles of 64."""
  return Policy(model=model, recipe=recipe, kv_cache_dtype=kv)


def separately(policy: Policy) -> Policy:
  """The policy whose decode joins no operations of training's."""
  kernels = policy.kernels.replace(
      rope_append=dispatch.REFERENCE, sample_token=dispatch.REFERENCE
  )
  return dataclasses.replace(policy, kernels=kernels)


def params(policy: Policy) -> PolicyParams:
  """Random weights with biases and gains that matter."""
  shapes = jax.eval_shape(policy.init, jax.random.key(0))
  leaves, tree = jax.tree_util.tree_flatten_with_path(shapes)

  def make(i, path, shape):
    spread = 1.0 if 'bias' in jax.tree_util.keystr(path) else 0.05
    x = spread * np.random.default_rng(i).standard_normal(shape, np.float32)
    return 1 + x if 'norm' in jax.tree_util.keystr(path) else x

  @exact_jit
  def prepared(masters):
    state = fp8.init_state(masters, policy.recipe)
    if policy.recipe.is_delayed:
      state = scaling_state.map_dot_states(
          lambda slot: slot
          | {'input': slot['input'] | {'scale': jnp.float32(2.0**-4)}},
          state,
      )
    state = fp8.observe_kernels(state, masters, policy.recipe, Axes())
    weights = kernels.prepare_weights(masters, state, policy.recipe)
    return PolicyParams(weights, state)

  return prepared(
      jax.tree.unflatten(
          tree, [make(i, p, leaf.shape) for i, (p, leaf) in enumerate(leaves)]
      )
  )


def steps(
    policy: Policy,
    params: PolicyParams,
    *,
    fused: bool,
    rows: int,
    jit=exact_jit,
):
  """Logits and caches after each of three steps; slot 1 is idle."""
  policy = policy if fused else separately(policy)
  random = np.random.default_rng(0)
  pages, size = 2 * rows, 128
  table = random.permutation(pages).reshape(rows, 2).astype(np.int32)
  start = random.integers(0, 2 * size - 3, rows).astype(np.int32)
  start[1] = -9
  shapes = policy.page_shapes(pages, size)
  caches = [
      tuple(
          jnp.asarray(random.normal(size=s.shape), jnp.bfloat16).astype(s.dtype)
          for s in shapes
      )
      for _ in range(policy.model.num_layers)
  ]
  step = jit(policy.bound(policy.decode))
  found = []
  for i in range(3):
    tokens = random.integers(0, policy.model.vocab_size, rows, np.int32)
    logits, caches, _ = step(params, tokens, start + i, table, caches)
    found.append((logits, caches))
  return found
