"""A config against the defaults: its names, and the type of every value.

If a default has a type, ConfigDict refuses values of another type. But it lets
None through for any value, does not look at the entries of a tuple, and accepts
NaN and infinity, which pass every later comparison. Ranges are checked by the
dataclasses that `build.py` builds.
"""

import ast
import difflib
import re
from collections.abc import Iterator
from typing import Any

import ml_collections

# The range of JAX's int32 and float32. A number beyond it is a typing error.
_MAX_INT = 2**31 - 1
_TINY, _HUGE = 1.2e-38, 3.4e38
# Names that TRL, verl and Tunix give to settings whose names here are not spelt
# similarly, and whose values are meant alike (docs/migrating.md). Of two that a
# name ends with the longer one counts.
OURS = {
    'learning_rate': 'optim.lr',
    'max_grad_norm': 'optim.grad_clip',
    'lr_scheduler_type': 'optim.lr_decay',
    'max_steps': 'trainer.total_training_steps',
    'eval_steps': 'trainer.test_freq',
    'save_steps': 'trainer.save_freq',
    'num_iterations': 'algorithm.ppo_epochs',
    'max_completion_length': 'rollout.max_response_length',
    'reward_funcs': 'reward.functions',
    'n': 'rollout.num_generations',
    'max_num_seqs': 'rollout.num_slots',
    'tensor_model_parallel_size': 'mesh.tensor',
    'loss_mode': 'algorithm.policy_loss',
    'max_actor_ckpt_to_keep': 'trainer.keep_latest',
    'save_total_limit': 'trainer.keep_latest',
    'max_to_keep': 'trainer.keep_latest',
    'beta': 'algorithm.kl_loss_coef',
    'kl_coef': 'algorithm.kl_reward_coef',
    'epsilon': 'algorithm.clip_ratio_low',
    'epsilon_high': 'algorithm.clip_ratio_high',
    'epsilon_c': 'algorithm.clip_ratio_c',
    'delta': 'algorithm.clip_ratio_c',
    'adam_epsilon': 'optim.eps',
    'clip_grad': 'optim.grad_clip',
    'fsdp_size': 'mesh.fsdp',
    'val_kwargs.n': 'trainer.val_num_generations',
    'val_kwargs.temperature': 'trainer.val_temperature',
    'max_assistant_turns': 'environment.max_turns',
    'eval_every_n_steps': 'trainer.test_freq',
    'save_interval_steps': 'trainer.save_freq',
}
_BETAS = 'optim.betas=(0.9, 0.999) has both'
_EPOCHS = 'there are no epochs; trainer.total_training_steps counts rollouts'
_WORKDIR = 'the flag --workdir takes its place'
_LOGGER = (
    'metrics.jsonl and TensorBoard are written always, Weights & Biases with'
    ' logger.wandb_project'
)
_REWARD = "reward.functions=('file.py:function',) takes its place"
_BATCHES = (
    'batches are trainer.train_batch_size and trainer.mini_batch_size, in'
    ' prompts, and trainer.micro_batch_size, in packed rows (docs/migrating.md)'
)
# Settings of others that are not settings here, and what takes their place.
_ELSEWHERE = {
    'stop': "a response stops at the tokens that the tokenizer's folder names"
    ' (eos_token_id in generation_config.json)',
    'num_train_epochs': _EPOCHS,
    'total_epochs': _EPOCHS,
    'output_dir': _WORKDIR,
    'default_local_dir': _WORKDIR,
    'report_to': _LOGGER,
    'trainer.logger': _LOGGER,
    'custom_reward_function.path': _REWARD,
    'custom_reward_function.name': _REWARD,
    'per_device_train_batch_size': _BATCHES,
    'ppo_micro_batch_size_per_gpu': _BATCHES,
    'gradient_accumulation_steps': _BATCHES,
    'n_gpus_per_node': 'mesh.data devices have a copy of the weights each,'
    ' mesh.fsdp devices split them; both are 1 by default',
    'adam_beta1': _BETAS,
    'adam_beta2': _BETAS,
    'loss_type': 'it is algorithm.loss_agg_mode and algorithm.policy_loss here'
    ' (docs/migrating.md)',
}

# A quote, maybe after a bracket; a bracket that is never closed; names with
# commas in brackets. Not a pattern such as '(embed|lm_head)/.*'.
_MEANT_AS_LITERAL = re.compile(
    r"""\s*[(\[]?\s*['"]|[(\[][^)\]]*$|[(\[][\w./:\s-]+(,[\w./:\s-]*)+[)\]]$"""
)


def check(
    config: ml_collections.ConfigDict, base: ml_collections.ConfigDict
) -> None:
  """Refuses what the base config has no name or no type for.

  Args:
    config: the config of a run.
    base: every name with its default; an empty tuple is one of texts.

  Raises:
    ValueError: an unknown name, with its nearest neighbour; a missing name; a
      value of another type than the default's, or a number that is none.
  """
  known, found = names(base), names(config)
  for name in found:
    if name not in known:
      raise ValueError(unknown_name(name, known))
  missing = [name for name in known if name not in found]
  if missing:
    raise ValueError(
        f'the config lacks {missing[:5]}; start from configs/base.py:'
        ' get_config()'
    )
  defaults = {name: (value, kind) for name, value, kind in _flatten(base)}
  for name, value, _ in _flatten(config):
    _check_value(name, value, *defaults[name])


def names(config: ml_collections.ConfigDict) -> list[str]:
  """Returns the dotted names of all entries."""
  return [name for name, *_ in _flatten(config)]


def unknown_name(name: str, known: list[str]) -> str:
  """Says that a config name is unknown, and which ones are near."""
  section = name.rpartition('.')[0]
  beside = [k for k in known if section and k.startswith(f'{section}.')]
  # A section that both have would make any two names alike.
  near = {k.removeprefix(f'{section}.'): k for k in beside or known}
  last = name.removeprefix(f'{section}.') if beside else name
  close = difflib.get_close_matches(last, near, n=1, cutoff=0.6)
  hints = []
  if found := elsewhere(name):
    hints.append(found)
  elif ours := counterpart(name, known) or (near[close[0]] if close else None):
    hints.append(f'did you mean {ours!r}?')
  if beside:
    names_beside = ', '.join(k.removeprefix(f'{section}.') for k in beside)
    separator = ' ' if hints and hints[0].endswith('?') else '; '
    listed = f'{section}.* are {names_beside}'
    hints = [separator.join([*hints, listed])]
  if not hints:
    hints.append(
        'docs/configuration.md lists all, docs/migrating.md beside the names of'
        ' verl, TRL and Tunix'
    )
  return f'unknown config name {name!r}; {hints[0]}'


def elsewhere(name: str) -> str | None:
  """Says what is in the place of another library's setting; None if nothing."""
  return _by_end(name, _ELSEWHERE)


def counterpart(name: str, known: list[str]) -> str | None:
  """Returns our name for a setting of another library, None without one.

  Args:
    name: a dotted name, such as 'actor_rollout_ref.actor.optim.lr'.
    known: our names.
  """
  if (ours := _by_end(name, OURS)) in known:
    return ours
  *sections, last = name.split('.')
  same = [k for k in known if k.rpartition('.')[2] == last]
  if len(same) > 1:  # 'enable' has several sections; one may be named.
    same = [k for k in same if f'.{k}'.split('.')[-2] in sections]
  return same[0] if len(same) == 1 else None


def _by_end(name: str, table: dict[str, str]) -> str | None:
  """Returns the entry of the longest end of a dotted name."""
  parts = name.split('.')
  ends = ('.'.join(parts[i:]) for i in range(len(parts)))
  return next((table[end] for end in ends if end in table), None)


def _flatten(
    config: ml_collections.ConfigDict, path: str = ''
) -> Iterator[tuple[str, Any, type]]:
  """Yields name, value and type of each entry; a placeholder has one too."""
  for key, value in config.items():
    if isinstance(value, ml_collections.ConfigDict):
      yield from _flatten(value, f'{path}{key}.')
    else:
      yield f'{path}{key}', value, config.get_type(key)


def _check_value(name: str, value: Any, default: Any, kind: type) -> None:
  """Refuses a value that the setting's type does not allow."""
  if value is None and default is None:
    return
  if kind is not tuple:
    _check_one(name, value, kind, f'like the default {default!r}')
    return
  if not isinstance(value, (tuple, list)):
    raise ValueError(
        f'{name} is {value!r:.100}; allowed: a tuple like the default'
        f' {default!r}'
    )
  if len(value) == 1 and isinstance(value[0], str):
    _check_literal(name, value[0], default or ('a', 'b'))
  element = type(default[0]) if default else str
  for i, entry in enumerate(value):
    _check_one(f'{name}[{i}]', entry, element, f'in a tuple like {default!r}')


def _check_literal(name: str, text: str, example: tuple) -> None:
  """Refuses a text that was meant as a tuple and cannot be read as one.

  The command line makes an entry of what is no literal, because a name needs no
  quotes in --config.reward.functions=math.
  """
  if not _MEANT_AS_LITERAL.match(text):
    return
  try:
    ast.literal_eval(text)
  except SyntaxError as error:
    reason = error.msg
  except ValueError:
    reason = 'texts need quotes'
  else:
    return
  raise ValueError(
      f'{name} is {text!r:.100}, which cannot be read ({reason}); allowed: a'
      f' tuple, such as --config.{name}="{example!r}" on the command line'
  )


def _check_one(name: str, value: Any, kind: type, like: str) -> None:
  # To Python a bool is an int, but nobody means it as one.
  fits = isinstance(value, (int, float) if kind is float else kind)
  if not fits or (kind is not bool and isinstance(value, bool)):
    raise ValueError(
        f'{name} is {value!r:.100}; allowed: a value of type {kind.__name__},'
        f' {like}'
    )
  # NaN fails this too.
  if kind is float and value and not _TINY < abs(value) < _HUGE:
    raise ValueError(
        f'{name} is {value}; allowed: finite numbers that float32 can hold,'
        f' {like}'
    )
  if kind is int and abs(value) > _MAX_INT:
    raise ValueError(
        f'{name} is {value!r:.100}; allowed: integers up to {_MAX_INT}, {like}'
    )
