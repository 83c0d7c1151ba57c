"""Flows by name: one override turns a run into a published method.

`flow='flashrl'` stands for a few settings of precision and algorithm. They are
written into the config before anything is built, so that the config kept in the
workdir says what was run. A setting that contradicts its flow is refused.
"""

from collections.abc import Collection
from typing import Any

from jetrl_jax.config import sections
from jetrl_jax.config.sections import Config
from jetrl_jax.fp8.recipes import RECIPES


def _mixed(rollout_recipe: str, rollout_is: str) -> dict[str, Any]:
  """Trains in BF16, samples in 8 bits, recomputes pi_old for a correction."""
  return {
      'precision.recipe': 'bf16',
      'precision.rollout_recipe': rollout_recipe,
      'algorithm.old_logprobs': 'recompute',
      'algorithm.rollout_is': rollout_is,
  }


# Compiled with XLA's default options. pi_old is then training's own, as in
# other libraries. With the rollout's as pi_old the mismatch would be hidden in
# the ratio.
_INEXACT: dict[str, Any] = {
    'precision.exact': False,
    'algorithm.old_logprobs': 'recompute',
}
# docs/flows.md says what each flow is, and its source.
FLOWS: dict[str, dict[str, Any]] = {
    'jetrl': {'precision.rollout_recipe': ''},
    'bf16': {'precision.recipe': 'bf16', 'precision.rollout_recipe': ''},
    'jetrl_inexact': {'precision.rollout_recipe': ''} | _INEXACT,
    'bf16_inexact': {'precision.recipe': 'bf16', 'precision.rollout_recipe': ''}
    | _INEXACT,
    'fp8_rollout': _mixed('fp8_token', 'none'),
    'flashrl': _mixed('int8', 'token'),
    'qurl': _mixed('int8', 'acr') | {'precision.invariant_scale': 1.5},
}
# Recipes in which a mixed flow may sample instead of the one that is named
# above.
_ROLLOUT_RECIPES = tuple(name for name in RECIPES if name != 'bf16')


def resolve(config: Config, chosen: Collection[str] = ()) -> Config:
  """Returns a copy with the settings of its flow; the same without a flow.

  Args:
    config: the config of a run.
    chosen: names of the settings that the command line gives.

  Raises:
    ValueError: an unknown flow, or a setting that contradicts it.
  """
  if not config.flow:
    return config
  if config.flow not in FLOWS:
    raise ValueError(f'flow is {config.flow!r}; allowed: {", ".join(FLOWS)}')
  settings = {}
  for name, value in FLOWS[config.flow].items():
    section, _, key = name.partition('.')
    found = config[section][key]
    # A setting at its default may be replaced where nobody has chosen it. Of a
    # config file's settings this is not known.
    if found == value or (
        name not in chosen and found == sections.default(name)
    ):
      settings[name] = value
    elif not (
        value
        and name == 'precision.rollout_recipe'
        and found in _ROLLOUT_RECIPES
    ):
      raise ValueError(
          f'flow={config.flow!r} is a run with {name}={value!r}, and the config'
          f' has {found!r}; leave one of the two out'
      )
  resolved = config.copy_and_resolve_references()
  resolved.update_from_flattened_dict(settings)
  return resolved
