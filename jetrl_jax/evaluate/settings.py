"""The settings of an evaluation: flags over the run's config over defaults."""

import dataclasses
import functools
import pathlib
from typing import Any

from absl import flags

from jetrl_jax.config import build as configs
from jetrl_jax.config import flags as config_flags
from jetrl_jax.config import saved_policy
from jetrl_jax.config.sections import take
from jetrl_jax.core.files import user_path
from jetrl_jax.data import Prompt, Tokenizer
from jetrl_jax.data.settings import DataConfig
from jetrl_jax.rewards import RewardSpec
from jetrl_jax.rewards.functions import check_references
from jetrl_jax.rewards.types import RewardConfig
from jetrl_jax.rl.rollout.engine import EngineConfig
from jetrl_jax.rl.run import fp8_support
from jetrl_jax.rl.settings import MAX_TEMPERATURE, MIN_TEMPERATURE

# name -> its publisher's name for it, and its columns.
NAMED = {
    'gsm8k': ('hf:openai/gsm8k:main:test', 'question', 'answer'),
    'math500': ('hf:HuggingFaceH4/MATH-500:test', 'problem', 'answer'),
}
# The instruction in the prompt if no run names one; the 'math' reward reads
# such answers.
INSTRUCTION = (
    "\nLet's think step by step and put the final answer within \\boxed{}."
)
_RESPONSE_TOKENS = 2048


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """Everything an evaluation reads.

  Attributes:
    found: the policy.
    tokenizer: its tokenizer.
    prompts: tokenised, over-long ones left out.
    num_filtered: how many were left out.
    rewards: terms of the score; accuracy is that of the first that judges.
    reward_limits: see `RewardPool`.
    num_generations: samples per problem, k.
    temperature: 0 is greedy.
    top_k: 0 is off.
    top_p: 1 is off.
    min_p: 0 is off.
    seed: the seed of the samples.
    num_slots: sequences decoded at once.
    max_prompt_length: tokens.
    max_response_length: tokens.
    output: folder of the results.
  """

  found: saved_policy.Restored
  tokenizer: Tokenizer
  prompts: list[Prompt]
  num_filtered: int
  rewards: list[RewardSpec]
  reward_limits: dict[str, Any]
  num_generations: int
  temperature: float
  top_k: int
  top_p: float
  min_p: float
  seed: int
  num_slots: int
  max_prompt_length: int
  max_response_length: int
  output: pathlib.Path


# Given twice, one of the two would not be evaluated.
_ONE = functools.partial(flags.DEFINE_string, allow_overwrite=False)
# A default of None: the run decides.
FLAGS: config_flags.Table = (
    ('checkpoint', _ONE, None, 'Workdir, checkpoint or its id'),
    ('step', flags.DEFINE_integer, None, "Which of a run's checkpoints"),
    ('data', _ONE, None, f'{", ".join(NAMED)}, or a file'),
    ('data_file', _ONE, None, 'Rows of a named set, offline'),
    ('recipe', flags.DEFINE_string, None, 'By default as trained'),
    ('num_generations', flags.DEFINE_integer, 1, 'Samples per problem, k'),
    ('temperature', flags.DEFINE_float, 0.0, '0 is greedy'),
    ('top_k', flags.DEFINE_integer, 0, '0 is off'),
    ('top_p', flags.DEFINE_float, 1.0, '1 is off'),
    ('min_p', flags.DEFINE_float, 0.0, '0 is off'),
    ('seed', flags.DEFINE_integer, 0, 'Of the samples'),
    ('max_samples', flags.DEFINE_integer, 0, 'Problems used; 0 is all'),
    ('max_prompt_length', flags.DEFINE_integer, None, 'Tokens'),
    ('max_response_length', flags.DEFINE_integer, None, 'Tokens'),
    ('num_slots', flags.DEFINE_integer, None, 'Sequences decoded at once'),
    ('template', flags.DEFINE_string, None, "'chat', or text with {prompt}"),
    (
        'instruction',
        flags.DEFINE_string,
        None,
        "Follows the question, for 'chat'",
    ),
    ('system', flags.DEFINE_string, None, "For 'chat'"),
    ('prompt_key', flags.DEFINE_string, None, 'Column with the question'),
    ('answer_key', flags.DEFINE_string, None, 'Column with the answer'),
    ('reward', flags.DEFINE_string, None, 'A built-in one, or file.py:name'),
    ('output', flags.DEFINE_string, None, 'Folder of the results'),
)


def resolve(values: dict[str, Any]) -> Settings:
  """Loads the policy and the data, and settles all that no flag says.

  Args:
    values: the values of every flag, None where it was not given.

  Raises:
    ValueError: a value that cannot be, with what is allowed.
  """
  _check(values)
  files, columns = _files(values)
  found = saved_policy.restore(
      values['checkpoint'],
      step=values['step'],
      recipe=values['recipe'],
  )
  fp8_support.check({'--recipe': found.policy})
  tokenizer = saved_policy.tokenizer_of(found)
  data, known = _known(found, tokenizer, values['data'])
  given = {k: v for k, v in values.items() if v is not None}
  of_data = dataclasses.asdict(data)
  settled: dict[str, Any] = {**of_data, **known, **columns, **given}
  lengths = settled['max_prompt_length'], settled['max_response_length']
  if sum(lengths) > found.policy.model.max_position:
    raise ValueError(
        f'max_prompt_length + max_response_length is {sum(lengths)}; the model'
        f' has {found.policy.model.max_position} positions'
    )
  dataset = configs.build_dataset(
      DataConfig(**{k: settled[k] for k in of_data}),
      files,
      tokenizer,
      values['max_samples'],
  )
  prompts = list(dataset)
  configs.check_ids(
      tokenizer, (p.tokens for p in prompts), found.policy.model.vocab_size
  )
  if values['data'] in NAMED:
    name = values['data']
    prompts = [dataclasses.replace(p, source=name) for p in prompts]
  rewards, limits = _rewards(found, values['reward'])
  check_references(rewards, ((p.answer, p.source) for p in prompts))
  return Settings(
      found=found,
      tokenizer=tokenizer,
      prompts=prompts,
      num_filtered=dataset.num_filtered,
      rewards=rewards,
      reward_limits=limits,
      output=_output(values),
      **{k: settled[k] for k in _KEPT},
  )


_KEPT = (
    'num_generations',
    'temperature',
    'top_k',
    'top_p',
    'min_p',
    'seed',
    'num_slots',
    'max_prompt_length',
    'max_response_length',
)


def _check(values: dict[str, Any]) -> None:
  for name, least in (
      ('num_generations', 1),
      ('max_samples', 0),
      ('seed', 0),
      ('max_prompt_length', 1),
      ('max_response_length', 1),
      ('num_slots', 1),
  ):
    if values[name] is not None and values[name] < least:
      raise ValueError(f'--{name} is {values[name]}; it must be >= {least}')
  temperature = values['temperature']
  if temperature and not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
    raise ValueError(
        f'--temperature is {temperature}; allowed: {MIN_TEMPERATURE} to'
        f' {MAX_TEMPERATURE}, or 0 for greedy'
    )
  if values['num_generations'] > 1 and temperature == 0:
    raise ValueError(
        f'--num_generations={values["num_generations"]} at --temperature=0'
        ' would sample the same answer each time; give a temperature > 0'
    )


def _files(values: dict[str, Any]) -> tuple[tuple[str, ...], dict[str, str]]:
  """Returns the files to read, and the columns of a named set."""
  name, file = values['data'], values['data_file']
  if name not in NAMED:
    if file is not None:
      raise ValueError(
          f'--data_file is for a named set ({", ".join(NAMED)}), and --data is'
          f' {name!r}; leave one of the two out'
      )
    if ':' not in name and not user_path(name).is_file():
      raise ValueError(
          f'--data={name}: no such file, and no set of that name; allowed:'
          f' {", ".join(NAMED)}, a .jsonl, .json or .parquet file, or'
          ' hf:<repo>[:<config>]:<split>'
          + ('; several files are a call each' if ',' in name else '')
      )
    return (name,), {}
  source, prompt_key, answer_key = NAMED[name]
  # What a run calls its columns, and where it keeps sources, is of its files.
  columns = dict(prompt_key=prompt_key, answer_key=answer_key, source_key='')
  return (file or source,), columns


def _known(
    found: saved_policy.Restored, tokenizer: Tokenizer, data: str
) -> tuple[DataConfig, dict[str, Any]]:
  """Returns settings of the data and of the rollout: the run's, or defaults."""
  longest = found.policy.model.max_position
  most = min(configs.PROMPT_TOKENS, longest // 2)
  settings = configs.data_config(found.config, tokenizer, most)
  if found.config is not None:
    rollout = found.config.rollout
    return settings, {
        k: rollout[k] for k in ('max_response_length', 'num_slots')
    }
  if data in NAMED:
    settings = dataclasses.replace(settings, instruction=INSTRUCTION)
  return settings, {
      'max_response_length': min(_RESPONSE_TOKENS, longest - most),
      'num_slots': EngineConfig.num_slots,
  }


def _rewards(
    found: saved_policy.Restored, reward: str | None
) -> tuple[list[RewardSpec], dict[str, Any]]:
  settings = RewardConfig()
  if found.config is not None:
    settings = take(RewardConfig, found.config)
    if reward is None and found.config.environment.name:
      raise ValueError(
          f'the run has the environment {found.config.environment.name!r},'
          ' whose turns this command does not take; its held-out results are in'
          " the run's metrics.jsonl, and --reward scores single responses"
      )
    if reward is None:
      return configs.reward_specs(settings), settings.limits
  return [RewardSpec(function=reward or 'math')], settings.limits


def _output(values: dict[str, Any]) -> pathlib.Path:
  if values['output'] is not None:
    return user_path(values['output'])
  name = values['data'].split(':')[-1]
  stem = pathlib.Path(name).stem
  if saved_policy.is_run(values['checkpoint']):
    return user_path(values['checkpoint']) / 'evaluate' / stem
  return pathlib.Path('evaluate') / stem
