"""From a config to the policy: the decoder, its precision and its weights."""

import contextlib
import dataclasses
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging
from flax import traverse_util
from jax.sharding import NamedSharding

from jetrl_jax import fp8, models
from jetrl_jax.config import compatibility
from jetrl_jax.config.sections import Config, take
from jetrl_jax.config.settings import MixedFlow, ModelSource
from jetrl_jax.core import collectives, rng, sharding
from jetrl_jax.core.sharding import MeshConfig
from jetrl_jax.core.typing import PyTree
from jetrl_jax.kernels import attention, dispatch, gather_columns
from jetrl_jax.models import invariant_scaling, published
from jetrl_jax.models.hf import layout as hf_layout
from jetrl_jax.models.policy import Policy
from jetrl_jax.rl.run import train_state

SHAPES = {
    'qwen2.5-0.5b': published.QWEN2_5_0_5B,
    'qwen2.5-1.5b': published.QWEN2_5_1_5B,
    'qwen2.5-3b': published.QWEN2_5_3B,
    'qwen2.5-7b': published.QWEN2_5_7B,
    'qwen2.5-14b': published.QWEN2_5_14B,
    'qwen2.5-32b': published.QWEN2_5_32B,
    'qwen3-8b': published.QWEN3_8B,
    'llama-3.1-8b': published.LLAMA_3_1_8B,
    'llama-3.1-70b': published.LLAMA_3_1_70B,
}


@contextlib.contextmanager
def naming(setting: str) -> Iterator[None]:
  """Puts the setting in front of what is said about its value."""
  try:
    yield
  except ValueError as error:
    raise ValueError(f'{setting}: {error}') from error


def model_config(
    source: ModelSource,
) -> tuple[models.ModelConfig, pathlib.Path | None]:
  """Returns the decoder's shape and the checkpoint's folder, if any."""
  if source.shape:
    if source.init == 'checkpoint' or source.path:
      raise ValueError(
          'model.shape is for model.init=random without model.path; a'
          ' checkpoint has a shape of its own'
      )
    if source.shape not in SHAPES:
      raise ValueError(
          f'model.shape is {source.shape!r}; allowed: {sorted(SHAPES)}'
      )
    return SHAPES[source.shape], None
  if not source.path:
    raise ValueError(
        'model.path is empty; give a Hugging Face checkpoint'
        ' (--config.model.path=...), or model.init=random with model.shape'
    )
  with naming('model.path'):
    folder = models.resolve_checkpoint(source.path)
    if (folder / 'checkpoints').is_dir() and (
        folder / 'metrics.jsonl'
    ).exists():
      raise ValueError(
          f'{folder} is the workdir of a run; its policy is'
          f' {folder / "export"}, or what python -m jetrl_jax.export writes'
      )
    return models.load_config(folder), folder


def build_policy(
    config: Config,
) -> tuple[Policy, Any, pathlib.Path | None]:
  """Returns (policy, mesh, checkpoint folder)."""
  model, folder = model_config(take(ModelSource, config))
  devices = take(MeshConfig, config)
  mesh = sharding.make_mesh(
      data=devices.data, fsdp=devices.fsdp, tensor=devices.tensor
  )
  recipe = take(fp8.Recipe, config)
  if recipe.quantize_lm_head and model.tied_embeddings:
    raise ValueError(
        'precision.quantize_lm_head is True, but the model has tied'
        ' embeddings: its head is the embedding, which stays in'
        ' precision.compute_dtype. Set it to False'
    )
  policy = take(
      Policy,
      config,
      model=model,
      recipe=recipe,
      axes=collectives.axes_of(
          mesh,
          overlap=devices.overlap,
          whole_gradients=devices.whole_gradients,
      ),
      kernels=_kernels(config, model, recipe),
  )
  gather_columns.check(policy.kernels, policy.axes, mesh)
  return policy, mesh, folder


def _kernels(
    config: Config, model: Any, recipe: fp8.Recipe
) -> dispatch.Kernels:
  """Returns the implementation of every operation.

  Attention that no kernel takes is plain JAX, in rollout and in training.

  Raises:
    ValueError: the setting names a kernel of attention that does not take it.
  """
  kernels = dispatch.select(config.kernels)
  tile, dtype = config.model.attention_tile, recipe.compute_dtype
  group = model.num_heads // model.num_kv_heads
  takes = attention.fits(dtype, model.head_dim, group, tile)
  if kernels.of('attention') == dispatch.REFERENCE or takes:
    return kernels
  found = (
      f'heads of {model.head_dim} channels, {group} query heads a KV head,'
      f" model.attention_tile={tile} and {dtype}, and attention's kernels take"
      f' heads of {" and ".join(map(str, attention.HEAD_DIMS))}, at most'
      f' {attention.MOST_HEADS} query heads a KV head, a tile of'
      f' {attention.TILE} and 16-bit dtypes'
  )
  if 'attention=mosaic' in config.kernels.replace(' ', ''):
    raise ValueError(
        f'kernels is {config.kernels!r}; this run has {found}: leave attention'
        ' out'
    )
  logging.warning('Attention is plain JAX, which is slower: %s', found)
  return kernels.replace(
      attention=dispatch.REFERENCE, decode_attention=dispatch.REFERENCE
  )


def rollout_policy(config: Config, policy: Policy) -> Policy:
  """Returns the rollout's policy; `policy` itself in a unified flow.

  Warns where a choice of dots to keep in high precision is set and no dot is
  quantised.
  """
  name = take(MixedFlow, config).rollout_recipe or policy.recipe.name
  with naming('precision.rollout_recipe'):
    sampling = renamed(policy, name)
  if {name, policy.recipe.name} == {'bf16'}:
    for field in ('high_precision_layers', 'quantize_lm_head', 'min_sqnr_db'):
      if value := getattr(policy.recipe, field):
        logging.warning(
            'precision.%s is %s, which is not read: with the recipe bf16 no dot'
            ' is quantised',
            field,
            value,
        )
  return sampling


def renamed(policy: Policy, name: str) -> Policy:
  """Returns the policy in another recipe, all else of its recipe the same."""
  recipe = dataclasses.replace(policy.recipe, name=name)
  return dataclasses.replace(policy, recipe=recipe)


def parameters(config: Config, policy: Policy, mesh, folder):
  """Returns (function that makes the masters, their shapes)."""
  source = take(ModelSource, config)
  dtype = source.master_dtype
  rows = hf_layout.layout(policy.model)
  shapes = {
      row.path: jax.ShapeDtypeStruct(row.shape, jnp.dtype(dtype))
      for row in rows
  }
  shape_tree = hf_layout.build_tree(policy.model, lambda row: shapes[row.path])

  def where(path: str) -> NamedSharding:
    return NamedSharding(mesh, sharding.leaf_spec(shapes[path].shape, mesh))

  recipes = [policy.recipe]
  if name := take(MixedFlow, config).rollout_recipe:
    with naming('precision.rollout_recipe'):
      recipes.append(renamed(policy, name).recipe)

  def could_spread(path: str) -> bool:
    """Whether a master trains and a dot of either side reads it in 8 bits."""
    dot = path.removesuffix('/kernel')
    return (
        dot != path
        and any(recipe.quantizes(dot) for recipe in recipes)
        and not any(re.fullmatch(p, path) for p in source.freeze)
    )

  def load() -> PyTree:
    on_ties = []

    def spreads(path: str) -> bool:
      # Only asked about what comes from 16 bits into a float32 master.
      if not could_spread(path):
        return False
      # Other scales leave few ties.
      if policy.recipe.power_of_two_scales and not source.spread_masters:
        on_ties.append(path)
      return source.spread_masters

    loaded = models.load_checkpoint(
        folder,
        policy.model,
        dtype=dtype,
        sharding_of=where,
        spreads=spreads,
    )
    compatibility.warn_of_ties(on_ties)
    return loaded

  def random() -> PyTree:
    # One program per leaf: a program for all leaves would hold the whole tree
    # twice. Leaves of one kind and shape share a program.
    key = rng.key(config.seed, rng.INIT)
    leaves = {}
    for i, (path, leaf) in enumerate(sorted(shapes.items())):
      made = jax.jit(
          _random_leaf, static_argnums=(0, 1, 2), out_shardings=where(path)
      )
      kind = path.rpartition('/')[2]
      leaves[path] = made(kind, leaf.shape, leaf.dtype, rng.fold(key, i))
    return hf_layout.build_tree(policy.model, lambda row: leaves[row.path])

  make = random if source.init == 'random' else load

  def scaled() -> PyTree:
    return invariant_scaling.fold(make(), source.invariant_scale)

  return scaled, shape_tree


def _random_leaf(kind: str, shape: tuple[int, ...], dtype, key):
  if kind == 'scale':
    return jnp.ones(shape, dtype)
  if kind == 'bias':
    return jnp.zeros(shape, dtype)
  return (0.02 * jax.random.normal(key, shape)).astype(dtype)


def check_patterns(policy: Policy, shapes: PyTree, freeze: tuple) -> None:
  """Refuses patterns that match nothing: they would change nothing."""
  train_state.partition(shapes, freeze)
  train_state.check_high_precision(policy.recipe, shapes)


def check_kernels(policy: Policy, shapes: PyTree) -> None:
  """Refuses kernels whose shapes the recipe cannot quantise."""
  for path, shape in _dots(shapes).items():
    policy.recipe.check_kernel(path, shape, policy.axes.stored)


def _dots(shapes: PyTree) -> dict[str, tuple[int, ...]]:
  """Returns the kernels' shapes by the paths of their dots."""
  flat: dict[str, Any] = traverse_util.flatten_dict(shapes, sep='/')
  return {
      path.removesuffix('/kernel'): leaf.shape
      for path, leaf in flat.items()
      if path.endswith('/kernel')
  }
