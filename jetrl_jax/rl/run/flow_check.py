"""Refuses to start a run whose rollout and training round differently.

A flow that is declared mixed may start; the differences between its two graphs
are logged. The graphs come from the functions that the run compiles: the
engine's decode step, its prefill, and the objective that `accumulate`
differentiates. They are traced on shapes, so the check computes nothing and
needs no device memory.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging

from jetrl_jax.core.collectives import Axes
from jetrl_jax.fp8 import flow
from jetrl_jax.models.policy import Policy, PolicyParams
from jetrl_jax.optim.types import TrainState
from jetrl_jax.rl.objective import LossFunction
from jetrl_jax.rl.rollout import decode_state as decode_states
from jetrl_jax.rl.rollout import decode_step
from jetrl_jax.rl.rollout.decode_state import DecodeState, EngineConfig
from jetrl_jax.rl.rollout.kv_pages import PagesConfig
from jetrl_jax.rl.run import gradients, mixed_flow
from jetrl_jax.rl.types import TrainBatch

# All rows are equal in the graph, so this is the fewest that the dots allow.
_SLOTS = 16


def check_flow(
    policy: Policy,
    loss_function: LossFunction,
    config: EngineConfig,
    state: TrainState,
) -> None:
  """Raises an error unless training computes all that the rollout computes.

      G_infer (decode and prefill) is a subgraph of G_train_forward

  Args:
    policy: the functions. They are traced for one device, because sharding
      would add data movement to the graph.
    loss_function: the objective.
    config: the engine's sampler.
    state: arrays or shapes.

  Raises:
    ValueError: the message names the first operation that differs, and what
      each side computes.

  References:
    Jet-RL, arXiv:2601.14243: the two graphs of its unified precision flow.
  """
  train = train_graph(policy, loss_function, state)
  decode = decode_graph(policy, config, state)
  flow.require_subgraph(decode, train)
  flow.require_subgraph(prefill_graph(policy, state), train)
  logging.info(
      'Precision flow: decode and prefill are part of the training forward.'
      '\n  decode: %s\n  training: %s',
      decode.implementations(),
      train.implementations(),
  )


def report_mixed_flow(
    policy: Policy,
    rollout_policy: Policy,
    loss_function: LossFunction,
    config: EngineConfig,
    state: TrainState,
    *,
    moved: tuple[str, ...] = (),
) -> None:
  """Logs how rollout and training differ in a flow that is declared mixed.

  Args:
    policy: training's functions.
    rollout_policy: the rollout's functions.
    loss_function: the objective.
    config: the engine's sampler.
    state: arrays or shapes, with the rollout's weights and scales.
    moved: dots that the guard has put into high precision on both sides.

  Raises:
    ValueError: rollout and training do not differ, and the guard is not the
      reason.
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
  # The dots are enough to see the difference: casts and scales belong to them.
  dots = [d for d in differences if d.node.kind == 'dot'] or differences
  logging.info(
      'Mixed flow (%s): a decode step has %d operations that the training'
      ' forward lacks; in the first layer\n%s',
      names,
      len(differences),
      '\n'.join(f'  {difference}' for difference in dots[:4]),
  )


def mixed_differences(
    policy: Policy,
    rollout_policy: Policy,
    loss_function: LossFunction,
    config: EngineConfig,
    state: TrainState,
) -> list[flow.Difference]:
  """Returns the operations of a decode step that training lacks, in order."""
  return flow.check_subgraph(
      decode_graph(rollout_policy, config, mixed_flow.as_rollout(state)),
      train_graph(policy, loss_function, state),
  )


def decode_graph(
    policy: Policy, config: EngineConfig, state: TrainState
) -> flow.FlowGraph:
  """Returns the graph of one decode step of the engine."""
  policy = _on_one_device(policy)

  def step(params, base_key, slots, temperature):
    # A rollout has one temperature. One per slot would count as a different
    # granularity than training's scalar.
    shared = jnp.broadcast_to(temperature, slots.temperature.shape)
    slots = dataclasses.replace(slots, temperature=shared)
    return decode_step.step(policy, config, params, base_key, slots)

  key = jax.eval_shape(lambda: jax.random.key(0, impl='threefry2x32'))
  return flow.extract(
      jax.make_jaxpr(policy.bound(step))(
          _params(state), key, _idle_slots(policy), _shape(jnp.float32)
      )
  )


def prefill_graph(policy: Policy, state: TrainState) -> flow.FlowGraph:
  """Returns the graph of one prompt's prefill."""
  policy = _on_one_device(policy)
  tokens, lengths = _shape(jnp.int32, 1, policy.tile), _shape(jnp.int32, 1)
  return flow.extract(
      jax.make_jaxpr(policy.bound(policy.prefill))(
          _params(state), tokens, lengths
      )
  )


def train_graph(
    policy: Policy, loss_function: LossFunction, state: TrainState
) -> flow.FlowGraph:
  """Returns the graph of one micro-batch's forward, under differentiation."""
  # Rematerialisation would only repeat the forward and make tracing slower.
  policy = dataclasses.replace(_on_one_device(policy), remat='none')
  batch = TrainBatch.of_shapes(1, policy.tile)

  def forward(state, batch, temperature):
    # `vjp` traces the forward rules of the derivative. The backward pass is not
    # traced.
    loss, _, aux = jax.vjp(
        gradients.differentiable_loss(
            policy, loss_function, state, batch, temperature
        ),
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
  return dataclasses.replace(policy, axes=Axes())


# `Any`, because shapes replace the arrays that the records declare.
def _shape(dtype, *shape: int) -> Any:
  return jax.ShapeDtypeStruct(shape, dtype)


def _shapes_of(tree):
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def _params(state: TrainState) -> PolicyParams:
  return _shapes_of(PolicyParams(state.weights, state.fp8_state))


def _idle_slots(policy: Policy) -> DecodeState:
  """Returns the shapes of the smallest possible decode state."""
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
