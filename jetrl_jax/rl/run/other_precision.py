"""Evaluation in a recipe that the rollout does not use.

A policy that learnt with a quantised rollout is exported in high precision. A
policy that learnt in high precision may be served in 8 bits. This evaluation
measures how accurate the policy is in that other precision. The masters are
quantised with the other recipe for the evaluation only, and answer the same
prompts with the same noise.
"""

import dataclasses
from collections.abc import Iterable

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jetrl_jax import fp8, kernels
from jetrl_jax.core import sharding
from jetrl_jax.core.compile_ahead import CompileAhead
from jetrl_jax.fp8 import scaling_state
from jetrl_jax.models.policy import PolicyParams
from jetrl_jax.optim.types import TrainState, merge
from jetrl_jax.rl.rollout.engine import Engine
from jetrl_jax.rl.run.spec import RunSpec


def recipe_of(spec: RunSpec, name: str) -> fp8.Recipe:
  """Returns the recipe `name`, with the run's other recipe settings."""
  return dataclasses.replace(spec.policy.recipe, name=name, min_sqnr_db=0.0)


class OtherPrecision:
  """An engine whose recipe is `name`, and its weights.

  Args:
    spec: the run's specification.
    name: a recipe that needs no calibration.
    state: an example.
  """

  def __init__(self, spec: RunSpec, name: str, state: TrainState):
    recipe = recipe_of(spec, name)
    policy = dataclasses.replace(spec.policy, recipe=recipe)
    self.name = name
    self.engine = Engine(policy, spec.engine, spec.mesh)

    def prepare(trainable, frozen):
      return kernels.prepare_weights(merge(trainable, frozen), {}, recipe)

    shapes = jax.eval_shape(prepare, state.trainable, state.frozen)
    masters = sharding.tree_specs((state.trainable, state.frozen), spec.mesh)
    out = sharding.tree_specs(shapes, spec.mesh)
    self._prepare = policy.jit_per_device(prepare, spec.mesh, masters, out)
    empty = scaling_state.init_state(state.masters, recipe)
    self._fp8_state = jax.device_put(empty, NamedSharding(spec.mesh, P()))

  def compile_ahead(
      self, ahead: CompileAhead, state: TrainState, lengths: Iterable[int]
  ) -> None:
    """Compiles what an evaluation calls, on other threads.

    Args:
      ahead: the threads.
      state: arrays, or shapes with their shardings.
      lengths: tokens of each prompt of the test.
    """
    weights = ahead(self._prepare, state.trainable, state.frozen)
    params = PolicyParams(weights, self._fp8_state)
    self.engine.compile_ahead(ahead, params, lengths, is_needed_soon=False)

  def params(self, state: TrainState) -> PolicyParams:
    """Returns the params that this recipe makes from the state's masters."""
    weights = self._prepare(state.trainable, state.frozen)
    return PolicyParams(weights, self._fp8_state)

  def renamed(self, metrics: dict[str, float]) -> dict[str, float]:
    """Returns held-out metrics under this recipe's names."""
    prefix = 'val-core/'
    return {
        f'val-{self.name}/{key.removeprefix(prefix)}': value
        for key, value in metrics.items()
    }
