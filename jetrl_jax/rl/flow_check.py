"""Refuses to start a run whose rollout rounds elsewhere than its training.

The three graphs come from the functions that the run will compile: the
engine's decode loop, its prefill, and `accumulate` with its backward pass. They
are traced on shapes, so nothing is computed and no memory is taken.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jetrl_jax import fp8
from jetrl_jax.fp8 import flow, slots
from jetrl_jax.metrics import Mean
from jetrl_jax.rl import engine, train_step
from jetrl_jax.rl.engine import DecodeState, EngineConfig
from jetrl_jax.rl.policy import Policy, PolicyParams
from jetrl_jax.rl.train_step import Gradients
from jetrl_jax.rl.types import TrainBatch, TrainState
from jetrl_jax.sharding import Axes

# Rows are interchangeable in the graph: the fewest that the dots allow.
_ROWS = 16


def check_flow(
    policy: Policy, loss_function: Any, config: EngineConfig
) -> None:
  """Raises unless all that the rollout computes, training computes too.

      G_infer (decode and prefill) is a subgraph of G_train_forward

  Args:
    policy: the functions. Looked at as one device sees them: what sharding
      adds is movement.
    loss_function: the objective, see `TrainStep`.
    config: the engine's sampler.

  Raises:
    ValueError: names the first operation that differs, and both sides.

  References:
    Jet-RL, arXiv:2601.14243.
  """
  train = train_graph(policy, loss_function)
  flow.require_subgraph(decode_graph(policy, config), train)
  flow.require_subgraph(prefill_graph(policy), train)


def decode_graph(policy: Policy, config: EngineConfig) -> flow.FlowGraph:
  """Returns the flow of the engine's decode loop."""
  policy = dataclasses.replace(policy, axes=Axes())

  def generate(params, state, temperature, base_key, steps):
    # A rollout has one temperature. As an argument per slot it would be
    # another granularity than training's scalar.
    shared = jnp.broadcast_to(temperature, state.temperature.shape)
    state = dataclasses.replace(state, temperature=shared)
    return engine._generate(policy, config, params, state, base_key, steps)

  traced = jax.make_jaxpr(generate)(
      _params(policy), _decode_state(policy), _float(), _shape_of_key(), _int()
  )
  return flow.extract(traced)


def prefill_graph(policy: Policy) -> flow.FlowGraph:
  """Returns the flow of a prompt on its way into the cache."""
  policy = dataclasses.replace(policy, axes=Axes())
  traced = jax.make_jaxpr(policy.prefill)(
      _params(policy), _int(1, policy.tile), _int(1)
  )
  return flow.extract(traced)


def train_graph(policy: Policy, loss_function: Any) -> flow.FlowGraph:
  """Returns the flow of one micro-batch, forward and backward."""
  policy = dataclasses.replace(policy, axes=Axes())
  masters = _masters(policy)
  weights, fp8_state = _params(policy)
  state = TrainState(
      trainable=masters,
      frozen={},
      fp8_state=fp8_state,
      opt_state=(),
      weights=weights,
      opt_step=_int(),
  )
  batch = TrainBatch(**{
      field.name: _int(1, policy.tile)
      if field.name in _INTEGERS
      else _float(1, policy.tile)
      for field in dataclasses.fields(TrainBatch)
  })
  per_token = _float(1, policy.tile)
  _, metrics = jax.eval_shape(loss_function, batch, per_token, per_token)
  gradients = Gradients(
      trainable=masters,
      fp8=fp8_state,
      metrics={name: Mean(sum=_float(), weight=_float()) for name in metrics},
  )
  traced = jax.make_jaxpr(
      lambda *args: train_step._accumulate(policy, loss_function, *args)
  )(state, gradients, batch, _float())
  return flow.extract(traced)


_INTEGERS = ('tokens', 'positions', 'segment_ids', 'weight_version')


def _int(*shape):
  return jax.ShapeDtypeStruct(shape, jnp.int32)


def _float(*shape):
  return jax.ShapeDtypeStruct(shape, jnp.float32)


def _shape_of_key():
  return jax.eval_shape(lambda: jax.random.key(0, impl='threefry2x32'))


def _masters(policy):
  return jax.eval_shape(policy.init, _shape_of_key())


def _params(policy) -> PolicyParams:
  masters = _masters(policy)
  fp8_state = jax.eval_shape(
      lambda tree: slots.init_state(tree, policy.recipe), masters
  )
  weights = jax.eval_shape(
      lambda tree, state: fp8.prepare_weights(tree, state, policy.recipe),
      masters,
      fp8_state,
  )
  return PolicyParams(weights, fp8_state)


def _decode_state(policy) -> DecodeState:
  flags = jax.ShapeDtypeStruct((_ROWS,), jnp.bool_)
  cache = policy.cache_shape(_ROWS, policy.tile)
  return DecodeState(
      caches=[(cache, cache)] * policy.model.num_layers,
      token=_int(_ROWS),
      position=_int(_ROWS),
      address=jax.ShapeDtypeStruct((_ROWS, 2), jnp.uint32),
      emitted=_int(_ROWS),
      limit=_int(_ROWS),
      temperature=_float(_ROWS),
      active=flags,
      stopped=flags,
      tokens=_int(_ROWS, 2),
      log_mu=_float(_ROWS, 2),
      logprobs=_float(_ROWS, 2),
  )
