"""The config's sections: which fields of which dataclasses are settings.

A dataclass owns its settings: the name, the type and the default of a field,
and under `Attributes:` what it means. Nothing here repeats them; `SECTIONS`
only says in which section of the config they are. The config of a run
(`get_config`), what is built from it (`take`) and docs/configuration.md
(`tools/config_reference.py`) all come from this table.

A new setting is a new field, with its meaning, of a dataclass that is listed.
"""

import contextlib
import dataclasses
import re
import typing
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeAlias, TypeVar

import ml_collections
from ml_collections import config_dict

from jetrl_jax.config.settings import MixedFlow, ModelSource, TopLevel
from jetrl_jax.core.sharding import MeshConfig
from jetrl_jax.data.settings import DataConfig
from jetrl_jax.fp8.recipes import Recipe
from jetrl_jax.metrics.wandb import WandbConfig
from jetrl_jax.models.policy import Policy
from jetrl_jax.optim.adamw import OptimizerConfig
from jetrl_jax.rewards.types import RewardConfig
from jetrl_jax.rl.objective import LossConfig
from jetrl_jax.rl.rollout.decode_state import EngineConfig
from jetrl_jax.rl.rollout.environment import (
    EnvironmentConfig,
    EnvironmentSource,
)
from jetrl_jax.rl.settings import (
    AlgorithmConfig,
    FilterGroups,
    GuardConfig,
    OverlongBuffer,
    RunConfig,
    SftConfig,
)

# A ConfigDict: its entries have no static types.
Config: TypeAlias = Any
Record = TypeVar('Record')


@dataclasses.dataclass(frozen=True)
class Setting:
  """One name of the config.

  Attributes:
    owner: the dataclass that has it.
    field: its field there.
  """

  owner: Callable
  field: dataclasses.Field

  def __post_init__(self):
    assert self.default is not dataclasses.MISSING, self.field

  @property
  def default(self) -> Any:
    """The value that it has unless a config says otherwise."""
    return self.field.default

  @property
  def placeholder(self) -> Any:
    """The default as ConfigDict keeps it: None knows the type it stands for."""
    if self.default is not None:
      return self.default
    (kind,) = set(typing.get_args(self.field.type)) - {type(None)}
    return config_dict.placeholder(kind)


def _all(owner: Any, *, but: tuple[str, ...] = ()) -> dict[str, Setting]:
  """Returns the fields of a dataclass, less some."""
  names = [field.name for field in dataclasses.fields(owner)]
  assert set(but) <= set(names), but
  return _some(owner, *(name for name in names if name not in but))


def _some(owner: Any, *names: str, **renamed: str) -> dict[str, Setting]:
  """Returns fields of a dataclass; `renamed`: the config's name to its own."""
  fields = {field.name: field for field in dataclasses.fields(owner)}
  chosen = {name: name for name in names} | renamed
  return {name: Setting(owner, fields[own]) for name, own in chosen.items()}


def _section(*parts: dict[str, Setting]) -> dict[str, Setting]:
  """Returns a section of several dataclasses, which share no name."""
  names = [name for part in parts for name in part]
  assert len(names) == len(set(names)), names
  return {name: setting for part in parts for name, setting in part.items()}


# The order is that of docs/configuration.md, where the docstring of a section's
# first dataclass introduces the section. `but` leaves out fields that are
# computed, or that belong to another section.
SECTIONS: dict[str, dict[str, Setting]] = {
    '': _section(_some(RunConfig, 'seed'), _all(TopLevel)),
    'model': _section(
        _all(ModelSource, but=('invariant_scale',)),
        _some(Policy, 'logit_chunk_rows', 'remat', attention_tile='tile'),
    ),
    'precision': _section(
        _some(Recipe, recipe='name'),
        _all(MixedFlow),
        _some(Policy, 'exact'),
        _all(Recipe, but=('name', 'calibrating')),
        _some(ModelSource, 'invariant_scale'),
        _some(Policy, 'kv_cache_dtype', 'smooth_k'),
    ),
    'data': _all(DataConfig),
    'reward': _all(RewardConfig),
    'reward.overlong_buffer': _all(
        OverlongBuffer, but=('max_response_length',)
    ),
    'environment': _section(
        _all(EnvironmentSource),
        _all(EnvironmentConfig, but=('make', 'tokenizer')),
    ),
    'rollout': _section(
        _all(EngineConfig, but=('max_prompt_length', 'stop_ids')),
        _some(RunConfig, 'num_generations', 'temperature'),
    ),
    'algorithm': _section(
        _all(AlgorithmConfig, but=('filter_groups', 'overlong_buffer')),
        _all(LossConfig),
    ),
    'algorithm.filter_groups': _all(FilterGroups),
    'optim': _all(OptimizerConfig, but=('lr_decay_steps', 'seed')),
    'trainer': _all(RunConfig, but=('seed', 'num_generations', 'temperature')),
    'guard': _all(GuardConfig),
    'logger': _some(
        WandbConfig, wandb_project='project', wandb_entity='entity'
    ),
    'mesh': _all(MeshConfig),
    'sft': _all(SftConfig),
}


def default(name: str) -> Any:
  """Returns the default of a setting by its dotted name."""
  section, _, key = name.rpartition('.')
  return SECTIONS[section][key].default


def get_config() -> ml_collections.ConfigDict:
  """Returns every setting with its default, locked against unknown names."""
  config: dict[str, Any] = {}
  for path, settings in SECTIONS.items():
    section: Config = config
    for name in path.split('.') if path else ():
      section = section.setdefault(name, {})
    section.update({k: setting.placeholder for k, setting in settings.items()})
  return ml_collections.ConfigDict(config).lock()


def take(owner: Callable[..., Record], config: Config, **more) -> Record:
  """Builds a dataclass from the settings that it owns, wherever they are.

  Args:
    owner: the dataclass.
    config: the config of a run.
    **more: fields that are no settings of its own.

  Raises:
    KeyError: the config lacks a setting.
    ValueError: as the dataclass says it, with its fields' names as a config
      has them: 'optim.lr is -1.0'.
  """
  values = {}
  for path, settings in SECTIONS.items():
    for name, setting in settings.items():
      if setting.owner is owner:
        value = config[f'{path}.{name}' if path else name]
        # In JSON, and in a user's file, it may be a list.
        is_tuple = isinstance(setting.default, tuple)
        values[setting.field.name] = tuple(value) if is_tuple else value
  with naming_settings(owner, more):
    return owner(**values, **more)


@contextlib.contextmanager
def naming_settings(
    owner: Callable[..., Any], others: Collection[str] = ()
) -> Iterator[None]:
  """Writes the fields that an error names as a config has them.

  Args:
    owner: the dataclass that the error is about.
    others: its fields that are another dataclass' settings.

  Raises:
    ValueError: in place of another one, 'optim.lr is -1.0' for 'lr is -1.0'.
  """
  dotted = {
      name: f'{path}.{name}' if path else name
      for path, settings in SECTIONS.items()
      for name, setting in settings.items()
      if setting.owner is owner
  }
  try:
    yield
  except ValueError as error:
    raise ValueError(_as_in_config(str(error), dotted, others)) from error


def _as_in_config(
    text: str, dotted: dict[str, str], others: Collection[str]
) -> str:
  """Writes the settings that a dataclass names with their sections.

  A name without an underscore may be a word of the sentence: it counts where
  something is said about it ('lr is').

  Args:
    text: what a dataclass says.
    dotted: the dataclass' settings: name -> name with its section.
    others: more of its fields, which another dataclass may have as settings.
  """
  places = {name: [] for name in others}
  for path, settings in SECTIONS.items():
    for name in places.keys() & settings.keys():
      places[name].append(f'{path}.{name}' if path else name)
  known = {name: found[0] for name, found in places.items() if len(found) == 1}
  known |= dotted
  # 'overlong_buffer.len' of reward.overlong_buffer.len, too.
  known |= {
      full.partition('.')[2]: full
      for full in known.values()
      if full.count('.') > 1
  }
  words = '|'.join(
      re.escape(name) if '_' in name else rf'{name}(?= (?:is|are|has) |=|: )'
      for name in sorted(known, key=len, reverse=True)
  )
  return re.sub(
      rf"(?<![\w.'])(?:{words})(?![\w.'])", lambda m: known[m[0]], text
  )
