"""From a ConfigDict to the parts of a run: where the config stops.

The only user of ml_collections. Everything is checked here, before any
compute: unknown names, values out of range, files that are not there,
settings that contradict each other.
"""

import contextlib
import dataclasses
import functools
import json
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import ml_collections
from flax import traverse_util
from jax.sharding import NamedSharding

from jetrl_jax import config_flow, fp8, models, rng, sharding
from jetrl_jax.data import (
    ChatFormat,
    PlainFormat,
    PromptDataset,
    PromptFormat,
    Tokenizer,
    load_examples,
)
from jetrl_jax.metrics_wandb import WandbConfig
from jetrl_jax.models import families, hf_layout, invariant_scaling
from jetrl_jax.rewards import RewardPool, RewardSpec
from jetrl_jax.rewards.pool import check_limits
from jetrl_jax.rl import combinations, corrections, losses
from jetrl_jax.rl import state as states
from jetrl_jax.rl.engine import EngineConfig
from jetrl_jax.rl.environment import EnvironmentConfig, load_environment
from jetrl_jax.rl.objective import LossConfig
from jetrl_jax.rl.optimizer import OptimizerConfig
from jetrl_jax.rl.parts import Parts
from jetrl_jax.rl.policy import Policy
from jetrl_jax.rl.settings import (
    AlgorithmConfig,
    FilterGroups,
    GuardConfig,
    OverlongBuffer,
    RunConfig,
)
from jetrl_jax.typing import PyTree

# A ConfigDict or a section of one: its entries have no static types.
Config: TypeAlias = Any

SHAPES = {
    'qwen2.5-0.5b': families.QWEN2_5_0_5B,
    'qwen2.5-7b': families.QWEN2_5_7B,
    'qwen3-8b': families.QWEN3_8B,
    'llama-3.1-8b': families.LLAMA_3_1_8B,
}


def read(file: pathlib.Path) -> Config:
  """Reads the resolved config that a run left in its workdir.

  Raises:
    ValueError: the file is missing or is no config.
  """
  try:
    return ml_collections.ConfigDict(
        json.loads(file.read_text(encoding='utf-8'))
    ).lock()
  except (OSError, ValueError, TypeError) as error:
    raise ValueError(f'{file} is not the config of a run: {error}') from error


def _take(record, section, **more):
  """Builds a dataclass from the section's entries of the same names."""
  names = {field.name for field in dataclasses.fields(record)}
  values = {k: v for k, v in section.items() if k in names}
  return record(**(values | more))


@contextlib.contextmanager
def _naming(setting: str) -> Iterator[None]:
  """Puts the setting in front of what is said about its value."""
  try:
    yield
  except ValueError as error:
    raise ValueError(f'{setting}: {error}') from error


def model_config(
    section: Config,
) -> tuple[models.ModelConfig, pathlib.Path | None]:
  """Returns the decoder's shape and the checkpoint's folder, if any."""
  if section.init not in ('checkpoint', 'random'):
    raise ValueError(
        f'model.init is {section.init!r}; allowed: checkpoint, random'
    )
  if section.master_dtype not in ('float32', 'bfloat16'):
    raise ValueError(
        f'model.master_dtype is {section.master_dtype!r}; allowed: float32,'
        ' bfloat16'
    )
  if section.shape:
    if section.init == 'checkpoint' or section.path:
      raise ValueError(
          'model.shape is for model.init=random without model.path; a'
          ' checkpoint has a shape of its own'
      )
    if section.shape not in SHAPES:
      raise ValueError(
          f'model.shape is {section.shape!r}; allowed: {sorted(SHAPES)}'
      )
    return SHAPES[section.shape], None
  if not section.path:
    raise ValueError(
        'model.path is empty; give a Hugging Face checkpoint'
        ' (--config.model.path=...), or model.init=random with model.shape'
    )
  with _naming('model.path'):
    folder = models.resolve_checkpoint(section.path)
    return models.load_config(folder), folder


def build_policy(
    config: Config,
) -> tuple[Policy, Any, pathlib.Path | None]:
  """Returns (policy, mesh, checkpoint folder)."""
  model, folder = model_config(config.model)
  mesh = sharding.make_mesh(**config.mesh)
  precision = dict(config.precision)
  kv_cache_dtype = precision.pop('kv_cache_dtype')
  exact = precision.pop('exact')
  invariant_scaling.check(precision.pop('invariant_scale'))
  del precision['rollout_recipe']  # See `rollout_policy`.
  recipe = fp8.Recipe(
      name=precision.pop('recipe'),
      high_precision_layers=tuple(precision.pop('high_precision_layers')),
      **precision,
  )
  policy = Policy(
      model=model,
      recipe=recipe,
      axes=sharding.axes_of(mesh),
      tile=config.model.attention_tile,
      logit_chunk_rows=config.model.logit_chunk_rows,
      remat=config.model.remat,
      kv_cache_dtype=kv_cache_dtype,
      exact=exact,
  )
  return policy, mesh, folder


def rollout_policy(config: Config, policy: Policy) -> Policy:
  """Returns the rollout's policy; `policy` itself in a unified flow."""
  name = config.precision.rollout_recipe or policy.recipe.name
  with _naming('precision.rollout_recipe'):
    recipe = dataclasses.replace(policy.recipe, name=name)
  return dataclasses.replace(policy, recipe=recipe)


def parameters(config: Config, policy: Policy, mesh, folder):
  """Returns (function that makes the masters, their shapes)."""
  dtype = config.model.master_dtype
  rows = hf_layout.layout(policy.model)
  shapes = {
      row.path: jax.ShapeDtypeStruct(row.shape, jnp.dtype(dtype))
      for row in rows
  }
  shape_tree = hf_layout.build_tree(policy.model, lambda row: shapes[row.path])

  def where(path: str) -> NamedSharding:
    return NamedSharding(mesh, sharding.leaf_spec(shapes[path].shape, mesh))

  def load() -> PyTree:
    return models.load_checkpoint(
        folder, policy.model, dtype=dtype, sharding_of=where
    )

  def random() -> PyTree:
    # Leaf by leaf: one program for all would hold the whole tree twice.
    key = rng.key(config.seed, rng.INIT)
    leaves = {}
    for i, (path, leaf) in enumerate(sorted(shapes.items())):
      make = functools.partial(_random_leaf, path, leaf)
      leaves[path] = jax.jit(make, out_shardings=where(path))(rng.fold(key, i))
    return hf_layout.build_tree(policy.model, lambda row: leaves[row.path])

  make = random if config.model.init == 'random' else load

  def scaled() -> PyTree:
    return invariant_scaling.fold(make(), config.precision.invariant_scale)

  return scaled, shape_tree


def _random_leaf(path: str, leaf: jax.ShapeDtypeStruct, key):
  if path.endswith('/scale'):
    return jnp.ones(leaf.shape, leaf.dtype)
  if path.endswith('/bias'):
    return jnp.zeros(leaf.shape, leaf.dtype)
  return (0.02 * jax.random.normal(key, leaf.shape)).astype(leaf.dtype)


def build_tokenizer(config: Config, folder: pathlib.Path | None) -> Tokenizer:
  """Returns the tokenizer of data.tokenizer, by default of the checkpoint."""
  source = config.data.tokenizer or folder
  if not source:
    raise ValueError(
        'data.tokenizer is empty and there is no checkpoint; name a folder'
        ' with tokenizer.json'
    )
  return Tokenizer(pathlib.Path(source))


def build_dataset(
    config: Config, files, tokenizer: Tokenizer, limit: int = 0
) -> PromptDataset:
  """Returns tokenised prompts, over-long ones left out and counted."""
  data = config.data
  examples = load_examples(
      tuple(files),
      prompt_key=data.prompt_key,
      answer_key=data.answer_key,
      source_key=data.source_key,
  )
  examples = examples[:limit] if limit else examples
  return PromptDataset(
      examples,
      tokenizer,
      prompt_format=prompt_format(data),
      max_prompt_length=data.max_prompt_length,
  )


def prompt_format(section: Config) -> PromptFormat:
  """Returns how a question becomes the text that the policy sees."""
  if section.template == 'chat':
    return ChatFormat(system=section.system, instruction=section.instruction)
  return PlainFormat(template=section.template)


def reward_specs(section: Config) -> list[RewardSpec]:
  """Returns the terms of the score."""
  lists = [tuple(section[k]) for k in ('functions', 'weights', 'kwargs')]
  if len({len(values) for values in lists}) != 1 or not lists[0]:
    raise ValueError(
        'reward.functions, reward.weights and reward.kwargs have'
        f' {[len(v) for v in lists]} entries; they need the same number, at'
        ' least one'
    )
  specs = []
  for function, weight, kwargs in zip(*lists, strict=True):
    try:
      parsed = json.loads(kwargs) if kwargs else {}
    except json.JSONDecodeError as error:
      raise ValueError(
          f'reward.kwargs of {function!r} is no JSON object: {error}'
      ) from error
    specs.append(
        RewardSpec(function=function, weight=float(weight), kwargs=parsed)
    )
  return specs


def environment_config(
    section: Config, tokenizer: Tokenizer
) -> EnvironmentConfig | None:
  """Returns the run's environment, None for turns of one."""
  if not section.name:
    return None
  environment = load_environment(section.name)
  try:
    kwargs = json.loads(section.kwargs) if section.kwargs else {}
    make = functools.partial(environment, **kwargs)
    make()
  except (json.JSONDecodeError, TypeError, ValueError) as error:
    raise ValueError(
        f'environment {section.name!r} cannot be made with environment.kwargs'
        f' {section.kwargs!r}: {error}'
    ) from error
  return _take(EnvironmentConfig, section, make=make, tokenizer=tokenizer)


def _reward_pool(section: Config) -> Callable[[], RewardPool]:
  check_limits(section.num_workers, section.timeout_s, section.memory_limit_mb)
  return functools.partial(
      RewardPool,
      reward_specs(section),
      num_workers=section.num_workers,
      timeout_s=section.timeout_s,
      memory_limit_mb=section.memory_limit_mb,
  )


def engine_config(config: Config, tokenizer: Tokenizer) -> EngineConfig:
  """Returns the rollout engine's sizes and sampler."""
  return _take(
      EngineConfig,
      config.rollout,
      max_prompt_length=config.data.max_prompt_length,
      # A run with seeded lengths must not stop on its own.
      stop_ids=() if config.trainer.synthetic else tuple(tokenizer.eos_ids),
  )


def loss_config(section: Config) -> LossConfig:
  """Returns the objective; what is None gets the method's own default."""
  chosen = {}
  # Unknown names fall through to LossConfig, which refuses them.
  low, high = losses.DEFAULT_CLIP.get(section.policy_loss, (None, None))
  cap = corrections.DEFAULT_THRESHOLD.get(section.rollout_is)
  for name, default in (
      ('clip_ratio_low', low),
      ('clip_ratio_high', high),
      ('rollout_is_threshold', cap),
  ):
    if section[name] is None and default is not None:
      chosen[name] = default
  return _take(LossConfig, section, **chosen)


def optimizer_config(config: Config, total_steps: int) -> OptimizerConfig:
  """Returns AdamW's settings; decay runs over `total_steps` updates."""
  settings = _take(
      OptimizerConfig,
      config.optim,
      betas=tuple(config.optim.betas),
      lr_decay_steps=total_steps,
      seed=config.seed,
  )
  dtype = config.model.master_dtype
  if settings.master_rounding != 'nearest' and dtype != 'bfloat16':
    raise ValueError(
        f'optim.master_rounding is {settings.master_rounding!r} and'
        f' model.master_dtype {dtype}, which is never rounded; set'
        " model.master_dtype='bfloat16', or optim.master_rounding='nearest'"
    )
  return settings


def wandb_config(config: Config) -> WandbConfig | None:
  """Returns where the scalars go besides the workdir, if anywhere."""
  if not config.logger.wandb_project:
    return None
  return WandbConfig(
      project=config.logger.wandb_project,
      entity=config.logger.wandb_entity,
      run_config=json.loads(config.to_json_best_effort()),
  )


def _check_patterns(policy: Policy, shapes: PyTree, freeze: tuple) -> None:
  """Refuses patterns that match nothing: they would change nothing.

  Also kernels whose shapes the recipe cannot quantise.
  """
  states.partition(shapes, freeze)
  flat: dict[str, Any] = traverse_util.flatten_dict(shapes, sep='/')
  dots = {
      path.removesuffix('/kernel'): leaf.shape
      for path, leaf in flat.items()
      if path.endswith('/kernel')
  }
  for path, shape in dots.items():
    policy.recipe.check_kernel(path, shape, policy.axes.fsdp)
  for pattern in policy.recipe.high_precision_layers:
    if not any(re.fullmatch(pattern, dot) for dot in dots):
      raise ValueError(
          f'precision.high_precision_layers: {pattern!r} matches no dot; they'
          f' are {list(dots)[:4]} and so on'
      )


def build(config: Config) -> Parts:
  """Builds all parts of a training run.

  Raises:
    ValueError: anything that cannot work, with the value found, what is
      allowed and the fix.
  """
  config = config_flow.resolve(config)
  policy, mesh, folder = build_policy(config)
  tokenizer = build_tokenizer(config, folder)
  environment = environment_config(config.environment, tokenizer)
  algorithm = _take(
      AlgorithmConfig,
      config.algorithm,
      filter_groups=_take(FilterGroups, config.algorithm.filter_groups),
      overlong_buffer=_take(
          OverlongBuffer,
          config.reward.overlong_buffer,
          max_response_length=config.rollout.max_response_length,
      ),
  )
  run = _take(
      RunConfig,
      config.trainer,
      seed=config.seed,
      val_recipes=tuple(config.trainer.val_recipes),
      num_generations=config.rollout.num_generations,
      temperature=config.rollout.temperature,
  )
  updates = (
      run.total_training_steps
      * algorithm.ppo_epochs
      * (run.train_batch_size // run.mini_batch_size)
  )
  if environment and run.synthetic:
    raise ValueError(
        'trainer.synthetic has no stop tokens, so no turn would end; leave'
        ' environment.name empty'
    )
  optimizer = optimizer_config(config, updates)
  guard = _take(GuardConfig, config.guard, actions=tuple(config.guard.actions))
  loss = loss_config(config.algorithm)
  engine = engine_config(config, tokenizer)
  combinations.check(loss, algorithm, engine, run)
  combinations.check_guard(guard, loss, algorithm, run)
  longest = engine.max_prompt_length + engine.max_response_length
  if longest > policy.model.max_position:
    raise ValueError(
        f'max_prompt_length + max_response_length is {longest}; the model has'
        f' {policy.model.max_position} positions'
    )
  with _naming('data.train_files'):
    train_set = build_dataset(config, config.data.train_files, tokenizer)
  if run.train_batch_size > len(train_set):
    raise ValueError(
        f'train_batch_size is {run.train_batch_size}; the training data has'
        f' {len(train_set)} prompts'
    )
  val_set = None
  limit = config.data.val_max_samples
  if limit < 0:
    raise ValueError(f'data.val_max_samples is {limit}; allowed: 0 (all), > 0')
  if config.data.val_files:
    with _naming('data.val_files'):
      val_set = build_dataset(config, config.data.val_files, tokenizer, limit)
  make_params, shapes = parameters(config, policy, mesh, folder)
  sampling = rollout_policy(config, policy)
  for one in (policy, sampling):
    _check_patterns(one, shapes, tuple(config.model.freeze))
  return Parts(
      policy=policy,
      rollout_policy=sampling,
      mesh=mesh,
      initial_params=make_params,
      param_shapes=shapes,
      freeze=tuple(config.model.freeze),
      invariant_scale=config.precision.invariant_scale,
      engine=engine,
      loss=loss,
      algorithm=algorithm,
      optimizer=optimizer,
      run=run,
      guard=guard,
      tokenizer=tokenizer,
      train_set=train_set,
      val_set=val_set,
      environment=environment,
      # An environment scores its own episodes.
      make_rewards=contextlib.nullcontext
      if environment
      else _reward_pool(config.reward),
      config_text=config.to_json_best_effort(indent=2, sort_keys=True),
      export_source=folder,
      wandb=wandb_config(config),
  )
