"""Refuses to start a run whose rollout rounds elsewhere than its training.

A flow that is declared mixed starts, and how its two graphs differ is logged.
The graphs come from the functions that the run compiles: the engine's decode
step, its prefill, and the objective as `accumulate` differentiates it. They are
traced on shapes, so nothing is computed and no memory is taken.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging

from jetrl_jax.core.sharding import Axes
from jetrl_jax.fp8 import flow
from jetrl_jax.models.policy import Policy, PolicyParams
from jetrl_jax.optim.types import TrainState
from jetrl_jax.rl.rollout import decode_state as decode_states
from jetrl_jax.rl.rollout import decode_step
from jetrl_jax.rl.rollout.decode_state import DecodeState, EngineConfig
from jetrl_jax.rl.rollout.kv_pages import PagesConfig
from jetrl_jax.rl.run import gradients, mixed_flow
from jetrl_jax.rl.types import TrainBatch

# Rows are interchangeable in the graph: the fewest that the dots allow.
_SLOTS = 16


def check_flow(
    policy: Policy,
    loss_function: Any,
    config: EngineConfig,
    state: TrainState,
) -> None:
  """Raises unless training computes all that the rollout computes.

      G_infer (decode and prefill) is a subgraph of G_train_forward

  Args:
    policy: the functions, as one device sees them: sharding adds movement.
    loss_function: the objective, see `train_step.UpdatePrograms`.
    config: the engine's sampler.
    state: concrete or of shapes.

  Raises:
    ValueError: names the first operation that differs, and both sides.

  References:
    Jet-RL, arXiv:2601.14243: the two graphs of its unified precision flow.
  """
  train = train_graph(policy, loss_function, state)
  flow.require_subgraph(decode_graph(policy, config, state), train)
  flow.require_subgraph(prefill_graph(policy, state), train)


def report_mixed_flow(
    policy: Policy,
    rollout_policy: Policy,
    loss_function: Any,
    config: EngineConfig,
    state: TrainState,
    *,
    moved: tuple[str, ...] = (),
) -> None:
  """Says how rollout and training differ in a flow that is meant to be mixed.

  Args:
    policy: training's functions.
    rollout_policy: the rollout's functions.
    loss_function: the objective.
    config: the engine's sampler.
    state: with a rollout's side; concrete or of shapes.
    moved: dots that the guard has put into high precision on both sides.

  Raises:
    ValueError: they do not differ, and not because of the guard: nothing is
      mixed.
  """
  differences = mixed_differences(
      policy, rollout_policy, loss_function, config, state
  )
  names = f'{rollout_policy.recipe.name} rollout, {policy.recipe.name} training'
  if not differences and moved:
    logging.info(
        'Mixed flow (%s): no dot is left that is quantised on one side only;'
        ' the guard has put into high precision: %s',
        names,
        ', '.join(moved),
    )
    return
  if not differences:
    raise ValueError(
        f'the flow is declared mixed ({names}), but the rollout computes what'
        ' training computes: no dot is quantised on one side only. Look at'
        ' precision.high_precision_layers, or leave precision.rollout_recipe'
        ' empty'
    )
  # Casts and scales surround the dots: these say it all, layer by layer.
  dots = [d for d in differences if d.node.kind == 'dot'] or differences
  logging.info(
      'Mixed flow (%s): a decode step has %d operations that the training'
      ' forward has not, in the first layer\n%s',
      names,
      len(differences),
      '\n'.join(f'  {difference}' for difference in dots[:4]),
  )


def mixed_differences(
    policy: Policy,
    rollout_policy: Policy,
    loss_function: Any,
    config: EngineConfig,
    state: TrainState,
) -> list[flow.Difference]:
  """Returns what a decode step does and training does not, in its order."""
  return flow.check_subgraph(
      decode_graph(rollout_policy, config, mixed_flow.as_rollout(state)),
      train_graph(policy, loss_function, state),
  )


def decode_graph(
    policy: Policy, config: EngineConfig, state: TrainState
) -> flow.FlowGraph:
  """Returns the flow of one step of the engine."""
  policy = _on_one_device(policy)

  def step(params, base_key, slots, temperature):
    # A rollout has one temperature. An argument per slot would count as
    # another granularity than training's scalar.
    shared = jnp.broadcast_to(temperature, slots.temperature.shape)
    slots = dataclasses.replace(slots, temperature=shared)
    return decode_step.step(policy, config, params, base_key, slots)

  key = jax.eval_shape(lambda: jax.random.key(0, impl='threefry2x32'))
  return flow.extract(
      jax.make_jaxpr(policy.bound(step))(
          _params(state), key, _slots(policy), _shape(jnp.float32)
      )
  )


def prefill_graph(policy: Policy, state: TrainState) -> flow.FlowGraph:
  """Returns the flow of a prompt on its way into the caches."""
  policy = _on_one_device(policy)
  tokens, lengths = _shape(jnp.int32, 1, policy.tile), _shape(jnp.int32, 1)
  return flow.extract(
      jax.make_jaxpr(policy.bound(policy.prefill))(
          _params(state), tokens, lengths
      )
  )


def train_graph(
    policy: Policy, loss_function: Any, state: TrainState
) -> flow.FlowGraph:
  """Returns the flow of one micro-batch's forward, under differentiation."""
  # Recomputing the blocks repeats the forward, and costs time here.
  policy = dataclasses.replace(_on_one_device(policy), remat='none')
  batch = TrainBatch.of_shapes(1, policy.tile)

  def forward(state, batch, temperature):
    # Differentiated, so that what is traced are the forward rules; the
    # backward pass is left out.
    loss, _, aux = jax.vjp(
        gradients.objective(policy, loss_function, state, batch, temperature),
        state.trainable,
        state.fp8_state,
        has_aux=True,
    )
    return loss, aux

  shapes = _shapes_of(state)
  return flow.extract(
      jax.make_jaxpr(policy.bound(forward))(shapes, batch, _shape(jnp.float32))
  )


def _on_one_device(policy: Policy) -> Policy:
  """Nor fused: a kernel counts as the operations that it stands for."""
  return dataclasses.replace(policy.separately(), axes=Axes())


# Any: shapes stand where the records name arrays.
def _shape(dtype, *shape: int) -> Any:
  return jax.ShapeDtypeStruct(shape, dtype)


def _shapes_of(tree):
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def _params(state: TrainState) -> PolicyParams:
  return _shapes_of(PolicyParams(state.weights, state.fp8_state))


def _slots(policy: Policy) -> DecodeState:
  """A state of the engine, as small as it can be."""
  config = EngineConfig(
      num_slots=_SLOTS, max_prompt_length=1, max_response_length=2, stop_ids=()
  )
  pages = PagesConfig(
      num_slots=_SLOTS,
      num_devices=1,
      pages_per_device=_SLOTS,
      page_size=policy.tile,
      pages_per_slot=1,
  )
  return jax.eval_shape(lambda: decode_states.idle(policy, config, pages))
