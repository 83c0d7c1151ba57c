"""Pools of few workers and short limits, and what they are asked."""

import pathlib

from jetrl_jax.rewards import RewardPool, RewardRequest, RewardSpec

FUNCTIONS = pathlib.Path(__file__).parent / 'custom_functions.py'
LIMIT = 0.5


def new_pool(*functions, num_workers=1, timeout_s=LIMIT, columns=()):
  specs = [
      f if isinstance(f, RewardSpec) else RewardSpec(function=f)
      for f in functions
  ]
  return RewardPool(
      specs,
      num_workers=num_workers,
      timeout_s=timeout_s,
      memory_limit_mb=512,
      columns=columns,
  )


def custom(name, **kwargs):
  return RewardSpec(function=f'{FUNCTIONS}:{name}', **kwargs)


def request(response, answer='18', *, prompt='Q', source='s', **extra):
  return RewardRequest(
      prompt_text=prompt,
      response_text=response,
      answer=answer,
      source=source,
      extra=extra,
  )
