"""Builds the parts of a run from a ConfigDict, which goes no further.

Everything is checked here, before any compute: unknown names, values out of
range, missing files, and settings that contradict each other.
"""

import contextlib
import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import ml_collections
import numpy as np
from absl import logging

from jetrl_jax.config import compatibility
from jetrl_jax.config import model as config_model
from jetrl_jax.config import presets as config_presets
from jetrl_jax.config.sections import Config, naming_settings, take
from jetrl_jax.core.files import user_path
from jetrl_jax.core.typing import PyTree
from jetrl_jax.data import Prompt, PromptDataset, Tokenizer, load_examples
from jetrl_jax.data.dataset import columns_of
from jetrl_jax.data.settings import DataConfig
from jetrl_jax.metrics.wandb import WandbConfig
from jetrl_jax.models.hf.files import check_format
from jetrl_jax.models.hf.save import check_carried
from jetrl_jax.models.policy import Policy
from jetrl_jax.optim.adamw import OptimizerConfig
from jetrl_jax.rewards import RewardPool, RewardSpec
from jetrl_jax.rewards.functions import check_references
from jetrl_jax.rewards.pool import check_limits
from jetrl_jax.rewards.types import RewardConfig
from jetrl_jax.rl.objective import LossConfig
from jetrl_jax.rl.rollout import buckets
from jetrl_jax.rl.rollout.engine import EngineConfig
from jetrl_jax.rl.rollout.environment import (
    EnvironmentConfig,
    EnvironmentSource,
    load_environment,
)
from jetrl_jax.rl.run.spec import RunSpec
from jetrl_jax.rl.settings import (
    GUARD_MAX_K3,
    AlgorithmConfig,
    FilterGroups,
    GuardConfig,
    OverlongBuffer,
    RunConfig,
)

# Most tokens of a prompt for a checkpoint without a run, which does not say.
PROMPT_TOKENS = 1024


def read(file: pathlib.Path) -> Config:
  """Reads the resolved config that a run left in its workdir.

  Raises:
    ValueError: the file is missing or is no config.
  """
  try:
    content = json.loads(file.read_text(encoding='utf-8'))
    if not isinstance(content, dict):
      raise ValueError(f'it holds a {type(content).__name__}, no object')
    return ml_collections.ConfigDict(content).lock()
  except (OSError, ValueError, TypeError) as error:
    raise ValueError(f'{file} is not the config of a run: {error}') from error


def build_tokenizer(config: Config, folder: pathlib.Path | None) -> Tokenizer:
  """Returns the tokenizer of data.tokenizer, by default of the checkpoint."""
  source = config.data.tokenizer or folder
  if not source:
    raise ValueError(
        'data.tokenizer is empty and there is no checkpoint; name a folder'
        ' with tokenizer.json'
    )
  return Tokenizer(user_path(source))


def build_dataset(
    data: DataConfig, files, tokenizer: Tokenizer, limit: int = 0
) -> PromptDataset:
  """Returns tokenised prompts, over-long ones left out and counted."""
  examples = load_examples(
      files,
      prompt_key=data.prompt_key,
      answer_key=data.answer_key,
      source_key=data.source_key,
  )
  examples = examples[:limit] if limit else examples
  return PromptDataset(
      examples,
      tokenizer,
      prompt_format=data.prompt_format,
      max_prompt_length=data.max_prompt_length,
  )


def check_enough(
    name: str, size: int, train_set: PromptDataset, advice: str = ''
) -> None:
  """Refuses a batch of more different prompts than there are.

  Args:
    name: the setting, for the sentence.
    size: prompts of a batch.
    train_set: the prompts to draw from.
    advice: the end of the sentence.

  Raises:
    ValueError: there are fewer; says how many were too long to be kept.
  """
  if size <= len(train_set):
    return
  left_out = ''
  if train_set.num_filtered:
    left_out = (
        f' ({train_set.num_filtered} more are left out, as longer than'
        ' data.max_prompt_length; raise it to keep them)'
    )
  raise ValueError(
      f'{name} is {size}; the training data has {len(train_set)}'
      f' prompts{left_out}{advice}'
  )


def data_config(
    config: Config | None, tokenizer: Tokenizer, max_prompt_length: int
) -> DataConfig:
  """Returns how rows become prompts of a policy.

  Args:
    config: the config of the run that made a policy; None for a checkpoint.
    tokenizer: the policy's.
    max_prompt_length: for a checkpoint: `PROMPT_TOKENS`, or fewer.
  """
  if config is not None:
    return take(DataConfig, config)
  return DataConfig(
      template='chat' if tokenizer.chat_template else '{prompt}',
      max_prompt_length=max_prompt_length,
  )


def check_ids(
    tokenizer: Tokenizer, token_lists: Iterable[np.ndarray], vocab_size: int
) -> None:
  """Refuses a tokenizer whose ids in use the model's embedding lacks.

  A gather would take the last row for each of them, without a word. Of the
  vocabulary only what is used counts: a toy tokenizer dry-runs a large model.

  Args:
    tokenizer: the tokenizer of the run.
    token_lists: all that is fed: prompts, or prompts with their answers.
    vocab_size: rows of the model's embedding.

  Raises:
    ValueError: an id of a prompt, of a stop token or of padding is too large.
  """
  used = {
      'the data': max(int(tokens.max()) for tokens in token_lists),
      'a stop token': max(tokenizer.eos_ids),
      'the padding token': tokenizer.pad_id,
  }
  for what, largest in used.items():
    if largest >= vocab_size:
      raise ValueError(
          f'the tokenizer of {tokenizer.folder} gives {what} the id {largest};'
          f" allowed: 0 to {vocab_size - 1}, the rows of the model's embedding."
          ' Name the tokenizer that belongs to the model (data.tokenizer; the'
          " checkpoint's own where that is empty)"
      )


def _datasets(
    data: DataConfig, tokenizer: Tokenizer
) -> tuple[PromptDataset, PromptDataset | None]:
  """Returns the prompts to learn from, and those held out, if any."""
  with config_model.naming('data.train_files'):
    train_set = build_dataset(data, data.train_files, tokenizer)
  if not data.val_files:
    return train_set, None
  with config_model.naming('data.val_files'):
    val_set = build_dataset(
        data, data.val_files, tokenizer, data.val_max_samples
    )
  _warn_of_shared(train_set, val_set)
  return train_set, val_set


def _warn_of_shared(train_set: PromptDataset, val_set: PromptDataset) -> None:
  """Warns of held-out prompts that are trained on."""
  if shared := train_set.shared_with(val_set):
    logging.warning(
        '%d of %d held-out prompts (%.1f%%) are among the training prompts, the'
        ' first is prompt %d of %s: accuracy on them shows what was learnt by'
        ' heart. Leave them out of data.train_files or data.val_files',
        len(shared),
        len(val_set),
        100 * len(shared) / len(val_set),
        shared[0].id,
        shared[0].source,
    )


def reward_specs(rewards: RewardConfig) -> list[RewardSpec]:
  """Returns the terms of the score."""
  count = len(rewards.functions)
  lists = [
      rewards.functions,
      # The defaults hold for any number of terms.
      rewards.weights if rewards.weights != (1.0,) else (1.0,) * count,
      rewards.kwargs if rewards.kwargs != ('',) else ('',) * count,
  ]
  if len({len(values) for values in lists}) != 1 or not count:
    raise ValueError(
        'reward.functions, reward.weights and reward.kwargs have'
        f' {[len(v) for v in lists]} entries; they need the same number, at'
        ' least one'
    )
  specs = []
  for function, weight, kwargs in zip(*lists, strict=True):
    parsed = _json_object(kwargs, f'reward.kwargs of {function!r}')
    specs.append(
        RewardSpec(function=function, weight=float(weight), kwargs=parsed)
    )
  return specs


def _json_object(text: str, what: str) -> dict[str, Any]:
  """Returns keyword arguments; '' is none."""
  try:
    parsed = json.loads(text) if text else {}
  except json.JSONDecodeError as error:
    raise ValueError(f'{what} is no JSON object: {error}') from error
  if not isinstance(parsed, dict):
    raise ValueError(
        f'{what} is {text!r}; allowed: a JSON object, such as \'{{"name": 1}}\''
    )
  return parsed


def environment_config(
    config: Config, tokenizer: Tokenizer
) -> EnvironmentConfig | None:
  """Returns the run's environment, None for turns of one."""
  source = take(EnvironmentSource, config)
  if not source.name:
    return None
  environment = load_environment(source.name)
  kwargs = _json_object(source.kwargs, 'environment.kwargs')
  try:
    make = functools.partial(environment, **kwargs)
    make()
  # Whatever a user's code raises, a KeyError of os.environ for example.
  except (Exception, SystemExit) as error:
    raise ValueError(
        f'environment {source.name!r} cannot be made with environment.kwargs'
        f' {source.kwargs!r}: {type(error).__name__}: {error}'
    ) from error
  return take(EnvironmentConfig, config, make=make, tokenizer=tokenizer)


def _reward_pool(
    rewards: RewardConfig, prompts: Iterable[Prompt]
) -> Callable[[], RewardPool]:
  """Returns what starts the pool.

  Args:
    rewards: the terms and their limits.
    prompts: whose columns the terms must do with.
  """
  check_limits(**rewards.limits)
  return functools.partial(
      RewardPool,
      reward_specs(rewards),
      columns=columns_of(prompts),
      **rewards.limits,
  )


def engine_config(config: Config, tokenizer: Tokenizer) -> EngineConfig:
  """Returns the rollout engine's sizes and sampler."""
  return take(
      EngineConfig,
      config,
      max_prompt_length=config.data.max_prompt_length,
      # A run with seeded lengths must not stop on its own.
      stop_ids=() if config.trainer.synthetic else tuple(tokenizer.eos_ids),
  )


def algorithm_config(config: Config) -> AlgorithmConfig:
  """Returns how scores become the objective's weights."""
  return take(
      AlgorithmConfig,
      config,
      filter_groups=take(FilterGroups, config),
      overlong_buffer=take(
          OverlongBuffer,
          config,
          max_response_length=config.rollout.max_response_length,
      ),
  )


def optimizer_config(config: Config, total_steps: int) -> OptimizerConfig:
  """Returns AdamW's settings; decay runs over `total_steps` updates."""
  settings = take(
      OptimizerConfig,
      config,
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
  run_config = json.loads(config.to_json_best_effort())
  return take(WandbConfig, config, run_config=run_config)


def _check_fits(
    policy: Policy,
    engine: EngineConfig,
    environment: EnvironmentConfig | None,
    run: RunConfig,
) -> None:
  """Refuses lengths the model lacks, and turns that would never end."""
  with naming_settings(EngineConfig, ['max_prompt_length']):
    engine.check_positions(policy.model.max_position)
  if environment and run.synthetic:
    raise ValueError(
        'trainer.synthetic has no stop tokens, so no turn would end; leave'
        ' environment.name empty'
    )


def _check_recipes(
    policy: Policy,
    rollout_policy: Policy,
    val_recipes: tuple[str, ...],
    shapes: PyTree,
) -> None:
  """Refuses a recipe that cannot quantise this model's kernels."""
  for setting, one in (
      ('precision.recipe', policy),
      ('precision.rollout_recipe', rollout_policy),
      *(
          ('trainer.val_recipes', config_model.renamed(policy, name))
          for name in val_recipes
      ),
  ):
    with config_model.naming(setting):
      config_model.check_kernels(one, shapes)


def _check_combinations(
    loss: LossConfig,
    algorithm: AlgorithmConfig,
    engine: EngineConfig,
    run: RunConfig,
    guard: GuardConfig,
) -> None:
  """Refuses settings that contradict each other, by their names in a config."""
  others = [
      field.name
      for record in (algorithm, engine)
      for field in dataclasses.fields(record)
  ]
  with naming_settings(LossConfig, others):
    compatibility.check(loss, algorithm, engine, run)
    compatibility.check_guard(guard, loss, algorithm, run)


def build(config: Config) -> RunSpec:
  """Builds all parts of a training run.

  Raises:
    ValueError: anything that cannot work, with the value found, what is
      allowed and the fix.
  """
  config = config_presets.resolve(config)
  policy, mesh, folder = config_model.build_policy(config)
  tokenizer = build_tokenizer(config, folder)
  if folder is not None:  # The run will end with an export.
    check_carried(tokenizer.folder)
    if config.model.init == 'checkpoint':
      # Reading the weights says so as well, but then the workdir is begun.
      with config_model.naming('model.path'):
        check_format(folder)
  environment = environment_config(config, tokenizer)
  algorithm = algorithm_config(config)
  run = take(RunConfig, config)
  updates = algorithm.ppo_epochs * (run.train_batch_size // run.mini_batch_size)
  optimizer = optimizer_config(config, run.total_training_steps * updates)
  guard = take(GuardConfig, config)
  loss = take(LossConfig, config)
  rewards = take(RewardConfig, config)
  engine = engine_config(config, tokenizer)
  _check_combinations(loss, algorithm, engine, run, guard)
  if guard.max_k3 is None and not loss.reads_mu:
    guard = dataclasses.replace(guard, max_k3=GUARD_MAX_K3)
  compatibility.check_rate(optimizer.lr)
  compatibility.warn_of_updates(policy.recipe.name, updates)
  data = take(DataConfig, config)
  compatibility.warn_of_template(data)
  _check_fits(policy, engine, environment, run)
  with naming_settings(EngineConfig, ['max_prompt_length']):
    buckets.pages_config(engine, policy.axes.size, policy.tile)
  train_set, val_set = _datasets(data, tokenizer)
  prompts = [*train_set, *(val_set or ())]
  vocab_size = policy.model.vocab_size
  check_ids(tokenizer, (prompt.tokens for prompt in prompts), vocab_size)
  check_enough(
      'trainer.train_batch_size',
      run.train_batch_size,
      train_set,
      '; lower it, and trainer.mini_batch_size with it, or add rows',
  )
  if not environment and not run.synthetic:
    references = ((prompt.answer, prompt.source) for prompt in prompts)
    check_references(reward_specs(rewards), references)
  make_params, shapes = config_model.parameters(config, policy, mesh, folder)
  sampling = config_model.rollout_policy(config, policy)
  compatibility.warn_of_mixed_flow(
      policy.recipe.name, sampling.recipe.name, loss
  )
  if sampling.recipe.name == policy.recipe.name:
    compatibility.warn_of_inexact_flow(policy.recipe.name, policy.exact, loss)
  config_model.check_patterns(policy, shapes, tuple(config.model.freeze))
  _check_recipes(policy, sampling, run.val_recipes, shapes)
  return RunSpec(
      policy=policy,
      rollout_policy=sampling,
      mesh=mesh,
      initial_params=make_params,
      initial_checkpoint=folder if config.model.init == 'checkpoint' else None,
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
      else _reward_pool(rewards, () if run.synthetic else prompts),
      config_text=config.to_json_best_effort(indent=2, sort_keys=True),
      export_source=folder,
      wandb=wandb_config(config),
  )
