"""Loads a trained policy from a run's workdir or from a checkpoint.

A run's workdir gives exactly what the run sampled with: its recipe, and the FP8
weights and activation scales of the step. An FP8 checkpoint that
`jetrl_jax.export` wrote gives the same, computed in the dtype of its tensors
that are not FP8. Any other Hugging Face checkpoint holds no activation scales
and is read in bfloat16.
"""

import contextlib
import dataclasses
import functools
import math
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import optax
from absl import logging
from jax.sharding import Mesh, NamedSharding

from jetrl_jax import fp8, models
from jetrl_jax.checkpoint import restore as checkpoint
from jetrl_jax.config import build as configs
from jetrl_jax.config import model as config_model
from jetrl_jax.config.sections import Config
from jetrl_jax.core import collectives, compilation, processes, sharding
from jetrl_jax.core.files import user_path
from jetrl_jax.data import PromptFormat, Tokenizer
from jetrl_jax.fp8 import scaling_state
from jetrl_jax.fp8.recipes import LM_HEAD, RECIPES, UNCALIBRATED
from jetrl_jax.metrics import provenance
from jetrl_jax.models.hf import layout as hf_layout
from jetrl_jax.models.hf import quantization as hf_quantization
from jetrl_jax.models.hf import safetensors_index
from jetrl_jax.models.policy import Policy, PolicyParams
from jetrl_jax.optim.types import TrainState
from jetrl_jax.rl.run import fp8_support, mixed_flow, train_state
from jetrl_jax.rl.run import precision as run_precision
from jetrl_jax.rl.training.guard import GuardState

# Most tokens of a response for a checkpoint without a run, which does not say.
_RESPONSE_TOKENS = 1024
# The recipe whose input scales are kept; the others need none.
_DELAYED = 'fp8_delayed'


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedPolicy:
  """A policy with everything that sampling needs.

  Attributes:
    policy: decoder and recipe.
    mesh: devices.
    params: compute weights and scales.
    tokenizer: the tokenizer of the checkpoint.
    prompt_format: from a question to the text that the policy has learnt on.
    max_prompt_length: tokens.
    max_response_length: tokens.
    origin: where it came from, in words.
  """

  policy: Policy
  mesh: Mesh
  params: PolicyParams
  tokenizer: Tokenizer
  prompt_format: PromptFormat
  max_prompt_length: int
  max_response_length: int
  origin: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored:
  """A policy with its masters.

  Attributes:
    policy: decoder and recipe.
    mesh: devices.
    state: masters, compute weights and scales; no optimiser state.
    config: the config of the run; None for a checkpoint.
    folder: the Hugging Face checkpoint it began from; None from random
      weights of a named shape.
    calibrated: False where FP8 was asked for and no activation scales are
      kept: the input scales are still 1.
    origin: where it came from, in words.
  """

  policy: Policy
  mesh: Mesh
  state: TrainState
  config: configs.Config | None
  folder: pathlib.Path | None
  calibrated: bool
  origin: str


def load(path: str, *, step: int | None = None) -> SavedPolicy:
  """Loads a policy as it was trained, to sample from it.

  Args:
    path: a run's workdir, a Hugging Face checkpoint's folder, or its id.
    step: which checkpoint of a run; by default the newest good one.

  Raises:
    ValueError: the path is neither, or what is there cannot be read; `step`
      was given for a checkpoint that has none, or is not in the workdir.
  """
  found = restore(path, step=step)
  fp8_support.check({'precision.recipe': found.policy})
  # No masters here: they would stay in the device's memory.
  params = PolicyParams(found.state.weights, found.state.fp8_state)
  tokenizer = tokenizer_of(found)
  longest = found.policy.model.max_position
  most = min(configs.PROMPT_TOKENS, longest // 2)
  data = configs.data_config(found.config, tokenizer, most)
  response_tokens = min(_RESPONSE_TOKENS, longest - data.max_prompt_length)
  if found.config is not None:
    response_tokens = found.config.rollout.max_response_length
  return SavedPolicy(
      policy=found.policy,
      mesh=found.mesh,
      params=params,
      tokenizer=tokenizer,
      prompt_format=data.prompt_format,
      max_prompt_length=data.max_prompt_length,
      max_response_length=response_tokens,
      origin=found.origin,
  )


def tokenizer_of(found: Restored) -> Tokenizer:
  """Returns the policy's tokenizer."""
  if found.config is not None:
    with _naming_origin(
        'data.tokenizer', found.config.data.tokenizer, found.origin
    ):
      return configs.build_tokenizer(found.config, found.folder)
  # Something that was restored without a run came from a checkpoint.
  assert found.folder is not None
  return Tokenizer(found.folder)


def tokenizer_folder(found: Restored) -> pathlib.Path | None:
  """Returns where an export takes the tokenizer's files from, if anywhere."""
  if found.config is not None and found.config.data.tokenizer:
    return tokenizer_of(found).folder
  return found.folder


def is_run(path: str) -> bool:
  """Whether a path is the workdir of a run."""
  return (user_path(path) / 'checkpoints').is_dir()


def restore(
    path: str, *, step: int | None = None, recipe: str | None = None
) -> Restored:
  """Restores a policy with its masters.

  Args:
    path: see `load`.
    step: see `load`.
    recipe: 'fp8_delayed' or 'bf16'; None is that of the run, and for
      a checkpoint FP8 if it holds scales.

  Raises:
    ValueError: see `load`; an unknown recipe.
  """
  if recipe is not None and recipe not in RECIPES:
    raise ValueError(f'recipe is {recipe!r}; allowed: {list(RECIPES)}')
  if is_run(path):
    return _of_run(user_path(path), step, recipe)
  if step is not None:
    raise ValueError(
        f'step {step} was asked for, but {path} is no workdir of a run (it has'
        ' no folder checkpoints/); leave the step out'
    )
  return _of_checkpoint(models.resolve_checkpoint(path), recipe)


def _parts_of_run(
    config: Config, workdir: pathlib.Path
) -> tuple[
    Policy, Mesh, pathlib.Path | None, Callable[[dict[str, Any]], TrainState]
]:
  """Returns (policy, mesh, checkpoint folder, host state -> state's shapes).

  Args:
    config: the run's config; its mesh becomes one that this machine has.
    workdir: the run's folder.
  """
  with config.unlocked():
    if not _fits(config.mesh):
      # The policy is the same on any number of devices.
      config.mesh.data, config.mesh.fsdp = _all_devices(), 1
      config.mesh.tensor = 1
  _keep_compiled(config.compile_cache_dir)
  policy, mesh, folder = config_model.build_policy(config)
  policy = run_precision.resolve(
      workdir, policy, config.precision.invariant_scale
  )
  _, shapes = config_model.parameters(config, policy, mesh, folder)
  freeze = tuple(config.model.freeze)
  # The learning rate's schedule is not part of the optimiser's state: any
  # number of steps after the warmup will do.
  steps = config.optim.lr_warmup_steps + 1
  optimizer = configs.optimizer_config(config, steps).build()

  def like(host_state: dict[str, Any]) -> TrainState:
    trained, sampling = _sides(host_state, policy, config)
    return train_state.abstract(
        trained,
        shapes,
        optimizer,
        mesh,
        freeze,
        sampling.recipe if sampling != trained else None,
    )

  return policy, mesh, folder, like


def _read_config(workdir: pathlib.Path) -> Config:
  """Returns the run's config; what it names is found from any folder."""
  config = configs.read(workdir / 'config.json')
  found = functools.partial(provenance.path_of_run, workdir)

  def found_function(text: str) -> str:
    file, colon, name = text.rpartition(':')
    return f'{found(file)}:{name}' if colon else text

  with config.unlocked():
    config.model.path = found(config.model.path)
    config.data.tokenizer = found(config.data.tokenizer)
    config.reward.functions = [*map(found_function, config.reward.functions)]
  return config


@contextlib.contextmanager
def _naming_origin(setting: str, path: str, origin: str) -> Iterator[None]:
  """Says of a path that leads nowhere that a run's config has it.

  Args:
    setting: its name.
    path: its value; '' is none.
    origin: the run, in words.
  """
  try:
    yield
  except ValueError as error:
    # Another error names no path, or one that is there.
    if not path or path not in str(error) or user_path(path).exists():
      raise
    raise ValueError(
        f'{str(error).rstrip(".")}. The path is {setting} of {origin}, from'
        ' its config.json; a relative one starts from the folder where the run'
        ' was started, or else from the current one. Call the command in a'
        ' folder that has it, or write another path into config.json'
    ) from error


def _of_run(
    workdir: pathlib.Path, step: int | None, recipe: str | None
) -> Restored:
  try:
    config = _read_config(workdir)
    with _naming_origin('model.path', config.model.path, str(workdir)):
      policy, mesh, folder, like = _parts_of_run(config, workdir)
  except (AttributeError, KeyError) as error:
    raise ValueError(
        f'{workdir}/config.json lacks a setting, {error}: another version wrote'
        ' it. Add the setting with the value that the run had'
        ' (docs/configuration.md)'
    ) from error
  restored = checkpoint.restore(
      workdir / 'checkpoints',
      lambda host_state: train_state.without_weights(like(host_state)),
      step,
  )
  if restored is None:
    raise ValueError(
        f'{workdir}/checkpoints holds no step; let the run save one'
        ' (trainer.save_freq)'
    )
  found = dataclasses.replace(
      like(restored.host_state), **restored.state | {'opt_state': {}}
  )
  policy, rollout_policy = _sides(restored.host_state, policy, config)
  if rollout_policy != policy and recipe != policy.recipe.name:
    # The policy that the run sampled with.
    policy, found = rollout_policy, mixed_flow.as_rollout(found)
  trained = policy.recipe.name
  policy = config_model.renamed(policy, recipe or trained)
  calibrated = policy.recipe.name in (trained, *UNCALIBRATED)
  if trained == policy.recipe.name:
    state = train_state.with_weights(policy, found, mesh, record=False)
  else:
    params = found.masters
    state = train_state.create(policy, params, optax.identity(), mesh)
  return Restored(
      policy=policy,
      mesh=mesh,
      state=state,
      config=config,
      folder=folder,
      calibrated=calibrated,
      origin=f'step {restored.step} of {workdir}',
  )


def _keep_compiled(folder: str) -> None:
  """Uses the run's compiled programs, if it is on the machine that has them."""
  try:
    compilation.keep_compiled(folder)
  except ValueError as error:
    logging.warning('Compiled programs are not kept: %s', error)


def _sides(
    host_state: dict[str, Any], policy: Policy, config: configs.Config
) -> tuple[Policy, Policy]:
  """Returns training's policy and the rollout's, at one checkpoint.

  Args:
    host_state: the host state of the checkpoint.
    policy: that the run's start settled.
    config: the config of the run.
  """
  dots = GuardState.of_checkpoint(host_state).high_precision
  policy = dataclasses.replace(
      policy, recipe=policy.recipe.with_high_precision(dots)
  )
  return policy, config_model.rollout_policy(config, policy)


def _fits(mesh: Any) -> bool:
  """Whether the devices at hand can be this mesh."""
  try:
    sharding.make_mesh(**{k: v for k, v in mesh.items() if k in sharding.AXES})
  except ValueError:
    return False
  return True


def _all_devices() -> int:
  """Returns how many devices a policy without a run uses.

  One, and with several processes all: each samples with its own.
  """
  return jax.device_count() if processes.count() > 1 else 1


def _of_checkpoint(folder: pathlib.Path, recipe: str | None) -> Restored:
  model = models.load_config(folder)
  mesh = sharding.make_mesh(data=_all_devices())
  wanted = recipe in (None, _DELAYED)
  scales = models.load_scales(folder, model) if wanted else {}
  name, dtype = recipe or (_DELAYED if scales else 'bf16'), _dtype_of(folder)
  plain = fp8.Recipe(name=name, compute_dtype=dtype)
  policy = Policy(
      model=model,
      recipe=_recipe_of(scales, model, dtype) if scales else plain,
      axes=collectives.axes_of(mesh),
  )
  masters = models.load_checkpoint(
      folder,
      model,
      # The recipe's compute dtype; float32 masters would round to the same
      # values.
      dtype=dtype,
      sharding_of=lambda _: NamedSharding(mesh, jax.sharding.PartitionSpec()),
  )
  state = train_state.create(policy, masters, optax.identity(), mesh)
  if scales:
    scaled = scaling_state.with_scales(
        scaling_state.init_state(masters, policy.recipe), scales
    )
    state = train_state.with_weights(
        policy,
        dataclasses.replace(state, fp8_state=scaled),
        mesh,
        record=False,
    )
  return Restored(
      policy=policy,
      mesh=mesh,
      state=state,
      config=None,
      folder=folder,
      calibrated=bool(scales) or name in UNCALIBRATED,
      origin=f'checkpoint {folder}',
  )


def _dtype_of(folder: pathlib.Path) -> str:
  """Returns the dtype that a checkpoint is computed in.

  That of the run for an FP8 export, where embedding and norms have it.
  """
  others, is_fp8 = set(), False
  for name, tensor in safetensors_index.read_index(folder).items():
    if tensor.dtype == hf_quantization.FP8_DTYPE:
      is_fp8 = True
    elif not hf_quantization.is_scale(name):
      others.add(tensor.dtype)
  return 'float32' if is_fp8 and others == {'F32'} else 'bfloat16'


def _recipe_of(
    scales: dict[str, tuple[float, float]],
    model: models.ModelConfig,
    dtype: str,
) -> fp8.Recipe:
  """Returns the recipe that an FP8 checkpoint was made for."""
  dots = [
      row.path.removesuffix('/kernel')
      for row in hf_layout.layout(model)
      if hf_quantization.is_dot(row)
  ]
  flat = [scale for pair in scales.values() for scale in pair]
  return fp8.Recipe(
      compute_dtype=dtype,
      high_precision_layers=tuple(
          re.escape(dot) for dot in dots if dot not in scales and dot != LM_HEAD
      ),
      quantize_lm_head=LM_HEAD in scales,
      # The setting decides where the product is rounded.
      power_of_two_scales=all(math.frexp(scale)[0] == 0.5 for scale in flat),
  )
