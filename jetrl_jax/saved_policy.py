"""A trained policy, from where it is kept: a run's workdir or a checkpoint.

A run's workdir gives exactly what the run sampled with: its recipe, and the
FP8 weights and activation scales of the step. A Hugging Face checkpoint holds
no activation scales and is read in bfloat16.
"""

import dataclasses
import functools
import pathlib

import jax
import optax
from jax.sharding import Mesh, NamedSharding

from jetrl_jax import checkpoint, fp8, models, sharding
from jetrl_jax import config as configs
from jetrl_jax.data import ChatFormat, PlainFormat, PromptFormat, Tokenizer
from jetrl_jax.rl import state as states
from jetrl_jax.rl.policy import Policy, PolicyParams

# For a checkpoint, which does not say; a run knows its own.
_PROMPT_TOKENS = 1024
_RESPONSE_TOKENS = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedPolicy:
  """All that sampling needs.

  Attributes:
    policy: decoder and recipe.
    mesh: devices.
    params: compute weights and scales.
    tokenizer: of the checkpoint.
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


def load(path: str, *, step: int | None = None) -> SavedPolicy:
  """Loads a policy.

  Args:
    path: a run's workdir, a Hugging Face checkpoint's folder, or its id.
    step: of a run's checkpoints; by default the newest good one.

  Raises:
    ValueError: the path is neither, or what is there cannot be read; `step`
      was given for a checkpoint that has none, or is not in the workdir.
  """
  folder = pathlib.Path(path).expanduser()
  if (folder / 'checkpoints').is_dir():
    return _of_run(folder, step)
  if step is not None:
    raise ValueError(
        f'step {step} was asked for, but {path} is no workdir of a run (it has'
        ' no folder checkpoints/); leave the step out'
    )
  return _of_checkpoint(models.resolve_checkpoint(path))


def _of_run(workdir: pathlib.Path, step: int | None) -> SavedPolicy:
  config = configs.read(workdir / 'config.json')
  policy, mesh, folder = configs.build_policy(config)
  tokenizer = configs.build_tokenizer(config, folder)
  _, shapes = configs.parameters(config, policy, mesh, folder)
  # Its schedule is not part of its state: any number of steps will do.
  optimizer = configs.optimizer_config(config, 1).build()
  like = states.abstract(
      policy, shapes, optimizer, mesh, tuple(config.model.freeze)
  )
  restored = checkpoint.restore(
      workdir / 'checkpoints', states.without_weights(like), step
  )
  if restored is None:
    raise ValueError(
        f'{workdir}/checkpoints holds no step; let the run save one'
        ' (trainer.save_freq)'
    )
  state = states.with_weights(
      policy, dataclasses.replace(like, **restored.state), mesh, record=False
  )
  return SavedPolicy(
      policy=policy,
      mesh=mesh,
      params=PolicyParams(state.weights, state.fp8_state),
      tokenizer=tokenizer,
      prompt_format=configs.prompt_format(config.data),
      max_prompt_length=config.data.max_prompt_length,
      max_response_length=config.rollout.max_response_length,
      origin=f'step {restored.step} of {workdir}',
  )


def _of_checkpoint(folder: pathlib.Path) -> SavedPolicy:
  model = models.load_config(folder)
  mesh = sharding.make_mesh()
  policy = Policy(
      model=model,
      recipe=fp8.Recipe(name='bf16'),
      axes=sharding.axes_of(mesh),
  )
  tokenizer = Tokenizer(folder)
  masters = models.load_checkpoint(
      folder,
      model,
      # What the recipe computes in; float32 masters would round to the same.
      dtype='bfloat16',
      sharding_of=functools.partial(_whole, mesh),
  )
  state = states.create(policy, masters, optax.identity(), mesh)
  prompt_tokens = min(_PROMPT_TOKENS, model.max_position // 2)
  return SavedPolicy(
      policy=policy,
      mesh=mesh,
      params=PolicyParams(state.weights, state.fp8_state),
      tokenizer=tokenizer,
      prompt_format=ChatFormat() if tokenizer.chat_template else PlainFormat(),
      max_prompt_length=prompt_tokens,
      max_response_length=min(
          _RESPONSE_TOKENS, model.max_position - prompt_tokens
      ),
      origin=f'checkpoint {folder}',
  )


def _whole(mesh: Mesh, path: str) -> NamedSharding:
  del path
  return NamedSharding(mesh, jax.sharding.PartitionSpec())
