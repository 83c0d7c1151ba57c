"""Checks whether a device has the 8-bit floats that a run computes in.

On a GPU without them our kernels do not compile. Without this check the user
would see a compiler error, after the weights have been loaded.
"""

import dataclasses
from collections.abc import Mapping

import jax

from jetrl_jax.core.compilation import on_gpu
from jetrl_jax.models.policy import Policy
from jetrl_jax.rl.run import flops
from jetrl_jax.rl.run.spec import RunSpec

# Compute capability of Ada; Hopper has 9.0.
_FIRST = (8, 9)
# Recipes that only evaluations use; a run can do without them.
_EVALUATED = 'trainer.val_recipes'


def why_not(
    policies: Mapping[str, Policy], moments: str = 'float32', device: str = ''
) -> str | None:
  """Returns why a device cannot run these policies; None if it can.

  Args:
    policies: config key that names the recipe -> policy.
    moments: see `OptimizerConfig`.
    device: a name in `flops.PEAK_TFLOPS`; '' for this machine's device.
  """
  asked = {}
  for setting, policy in policies.items():
    if 'float8' in flops.precisions(policy.recipe):
      fix = '()' if setting == _EVALUATED else 'bf16'
      asked[f'{setting}={policy.recipe.name!r}'] = f'{setting}={fix}'
    if policy.has_fp8_keys:
      asked[f'precision.kv_cache_dtype={policy.kv_cache_dtype!r}'] = (
          'precision.kv_cache_dtype=compute'
      )
  if moments == 'fp8':
    asked["optim.moments='fp8'"] = 'optim.moments=float32'
  lacking = _lacks(device) if asked else None
  if lacking is None:
    return None
  fixes = dict.fromkeys(asked.values())
  return (
      f'{", ".join(asked)} need{"s" * (len(asked) == 1)} 8-bit floats, which'
      f' {lacking} lacks; allowed are GPUs of compute capability'
      f' {_FIRST[0]}.{_FIRST[1]} and above (Ada, Hopper). Set'
      f' {", ".join(fixes)}'
  )


def of_run(spec: RunSpec, device: str = '') -> str | None:
  """Returns `why_not` for a run's training, rollout and evaluations."""
  policies = {'precision.recipe': spec.policy}
  if spec.is_mixed:
    policies['precision.rollout_recipe'] = spec.rollout_policy
  for name in spec.run.val_recipes:
    recipe = dataclasses.replace(spec.policy.recipe, name=name)
    if 'float8' in flops.precisions(recipe):
      policies[_EVALUATED] = dataclasses.replace(spec.policy, recipe=recipe)
  return why_not(policies, spec.optimizer.moments, device)


def check(policies: Mapping[str, Policy], moments: str = 'float32') -> None:
  """Raises an error if this machine's device cannot run these policies.

  Args:
    policies: see `why_not`.
    moments: see `why_not`.

  Raises:
    ValueError: the device has no 8-bit floats, but they are needed.
  """
  if problem := why_not(policies, moments):
    raise ValueError(problem)


def _lacks(device: str) -> str | None:
  """Returns the device's description if it is a GPU without 8-bit floats."""
  if device:
    return None if flops.peak_flops(device, 'float8') else device
  if not on_gpu():
    return None  # XLA supports 8-bit floats on a CPU.
  found = jax.devices()[0]
  capability = str(getattr(found, 'compute_capability', 'unknown'))
  numbers = capability.split('.')
  if all(n.isdecimal() for n in numbers) and (*map(int, numbers),) >= _FIRST:
    return None
  return f'{found.device_kind} (compute capability {capability})'
