"""The update: accumulate micro-batches, then apply once.

`accumulate` runs the forward and backward of one micro-batch and adds to a
`Gradients` record. `apply` clips the gradients, updates the masters, and
quantises the compute weights that the next forward and the next rollout read.
Devices of `mesh.data` keep the sums of their own micro-batches, and add them up
once, in `apply`. Each micro-batch is differentiated on its own, so that amaxes
combine by max (see `kernels/quantized_dot/linear.py`). If a gradient is not
finite, `apply` returns the state unchanged.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jetrl_jax.core import sharding
from jetrl_jax.core.compile_ahead import CompileAhead, Program
from jetrl_jax.core.typing import Array, PyTree
from jetrl_jax.fp8 import scaling_state
from jetrl_jax.models.policy import Policy, PolicyParams
from jetrl_jax.optim.adamw import OptimizerConfig
from jetrl_jax.optim.apply import Apply, Gradients
from jetrl_jax.optim.types import TrainState, merge
from jetrl_jax.rl import packing
from jetrl_jax.rl.objective import LossFunction, with_loss_metric
from jetrl_jax.rl.types import TrainBatch


def differentiable_loss(
    policy: Policy,
    loss_function: LossFunction,
    state: TrainState,
    batch: TrainBatch,
    temperature: Array,
) -> Callable[[PyTree, PyTree], tuple[Array, tuple[Any, Array, Array]]]:
  """Returns the function of (trainable, fp8_state) that is differentiated.

  It returns (loss, (metrics, log-probs, entropy)).
  """

  def loss_of(trainable, fp8_state):
    logprobs_BT, entropy_BT = policy.logprobs(
        PolicyParams(state.weights, fp8_state),
        batch,
        temperature,
        masters=merge(trainable, state.frozen),
    )
    loss, metrics = loss_function(batch, logprobs_BT, entropy_BT)
    return loss, (metrics, logprobs_BT, entropy_BT)

  return loss_of


def _accumulate(
    policy: Policy,
    loss_function: LossFunction,
    state: TrainState,
    gradients: Gradients,
    batch: TrainBatch,
    temperature: Array,
) -> tuple[Gradients, Array, Array]:
  """Adds one micro-batch; returns (gradients, log-probs, entropy)."""
  loss_of = differentiable_loss(
      policy, loss_function, state, batch, temperature
  )
  axes, masters = policy.axes, state.trainable
  if axes.apart and axes.whole_gradients:
    # Their shapes alone count, see `grad_sink`: here those of whole leaves.
    masters = jax.tree.map(
        lambda g: jnp.zeros(g.shape[1:], g.dtype), gradients.trainable
    )
  (new, new_fp8), (metrics, logprobs_BT, entropy_BT) = jax.grad(
      loss_of, argnums=(0, 1), has_aux=True
  )(masters, state.fp8_state)
  if axes.apart:
    new = jax.tree.map(lambda leaf: leaf[None], new)
  added = Gradients(
      trainable=jax.tree.map(jnp.add, gradients.trainable, new),
      fp8=scaling_state.combine(
          gradients.fp8,
          scaling_state.reduce_over_devices(
              scaling_state.stack_observations(new_fp8), axes
          ),
      ),
      metrics={
          name: gradients.metrics[name] + axes.psum(value)
          for name, value in metrics.items()
      },
  )
  return added, logprobs_BT, entropy_BT


def compile_logprobs(policy: Policy, mesh: Mesh, state: TrainState) -> Program:
  """Compiles the forward pass: log-probs and entropy of packed rows.

  The program is (params, batch, temperature) -> (log-probs [B, T], entropy
  [B, T]), in nats. It refuses rows that were packed with a tile that is not the
  policy's, see `packing.check_tile`.

  Args:
    policy: the functions.
    mesh: devices.
    state: an example with this policy's weights, arrays or shapes.
  """
  specs = sharding.tree_specs(
      PolicyParams(state.weights, state.fp8_state), mesh
  )
  rows = sharding.ROWS
  return policy.jit_per_device(
      policy.logprobs,
      mesh,
      (specs, rows, P()),
      (rows, rows),
      check=lambda params, batch, temperature: packing.check_tile(
          batch, policy.tile
      ),
  )


class UpdatePrograms:
  """The compiled functions of the update, for one policy and one objective.

  Attributes:
    accumulate: (state, gradients, batch, temperature) to (gradients, log-probs,
      entropy); `gradients` is donated.
    apply: the optimiser step, (state, gradients) to (next state, `UpdateInfo`),
      see `optim.apply.Apply`. Both arguments are donated: their arrays are gone
      afterwards, so go on with the state that it returns.
    logprobs: (params, batch, temperature) to (log-probs, entropy), the forward
      without a backward. It and `accumulate` refuse rows that were packed with
      a tile that is not the policy's, see `packing.check_tile`.
    roll_inputs: moves the input scales after the last mini-batch.

  Args:
    policy: the functions; its recipe is the flow's.
    loss_function: the objective, for example `functools.partial(policy_loss,
      LossConfig())`, or a function of your own: see `objective.LossFunction`.
    optimizer: updates the trainable masters.
    config: learning rate, clip and rounding.
    mesh: devices.
    state: an example, arrays or shapes.

  Raises:
    ValueError: `loss_function` returns something else than a loss and metrics.
  """

  def __init__(
      self,
      policy: Policy,
      loss_function: LossFunction,
      optimizer: optax.GradientTransformation,
      config: OptimizerConfig,
      mesh: Mesh,
      state: TrainState,
  ):
    specs = sharding.tree_specs(state, mesh)
    loss_function, self._metrics = with_loss_metric(loss_function)
    axes = policy.axes
    # These devices are added when all micro-batches are.
    names = axes.gradient_sums
    count = math.prod(mesh.shape[name] for name in names)
    self._apart = (count,) if names else ()
    backward = dataclasses.replace(
        policy, axes=dataclasses.replace(axes, apart=bool(names))
    )
    masters = state.trainable
    grad_specs = Gradients(
        trainable=(
            sharding.apart_specs(masters, mesh, names)
            if names
            else specs.trainable
        ),
        fp8=jax.tree.map(
            lambda _: P(),
            jax.eval_shape(scaling_state.stack_observations, state.fp8_state),
        ),
        metrics=jax.tree.map(lambda _: P(), self._metrics),
    )
    self._grad_shardings = sharding.named(grad_specs, mesh)
    rows = sharding.ROWS
    self.accumulate = policy.jit_per_device(
        functools.partial(_accumulate, backward, loss_function),
        mesh,
        (specs, grad_specs, rows, P()),
        (grad_specs, rows, rows),
        donate_argnums=(1,),
        in_order=policy.axes.devices > 1 and not policy.axes.overlaps,
        check=lambda state, gradients, batch, temperature: packing.check_tile(
            batch, policy.tile
        ),
    )
    self.logprobs = compile_logprobs(policy, mesh, state)
    self.roll_inputs = policy.jit(
        functools.partial(
            scaling_state.roll, recipe=policy.recipe, operands=('input',)
        ),
        out_shardings=sharding.named(specs.fp8_state, mesh),
    )
    self._zeros = policy.jit(
        self._make_zeros, out_shardings=self._grad_shardings
    )
    self.apply = Apply(policy, optimizer, config, mesh, state)

  def compile_ahead(
      self,
      ahead: CompileAhead,
      state: TrainState,
      batches: list[TrainBatch],
      *,
      logprobs: bool,
  ) -> None:
    """Compiles what an update calls, on other threads.

    Args:
      ahead: the threads.
      state: arrays, or shapes with their shardings.
      batches: shapes of micro-batches, of all sizes that there are.
      logprobs: whether `logprobs` is called too.
    """
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    gradients = self.gradient_shapes(state)
    for batch in batches:
      ahead(self.accumulate, state, gradients, batch, scalar)
    for _, _, program, arguments in self.apply.calls(state, gradients):
      ahead(program, *arguments)
    if logprobs:
      params = PolicyParams(state.weights, state.fp8_state)
      for batch in batches:
        ahead(self.logprobs, params, batch, scalar)

  def zero_gradients(self, state: TrainState) -> Gradients:
    """Returns an empty accumulator, sharded like the masters.

    Where devices have sums of their own (`Axes.gradient_sums`), a leaf has one
    more axis, the first one.
    """
    return self._zeros(state.trainable, state.fp8_state)

  def gradient_shapes(self, state: TrainState) -> Gradients:
    """Returns the shapes of an accumulator, with shardings."""
    found = jax.eval_shape(self._make_zeros, state.trainable, state.fp8_state)
    return jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=where
        ),
        found,
        self._grad_shardings,
    )

  def _make_zeros(self, trainable, fp8_state):
    return Gradients(
        trainable=jax.tree.map(
            lambda leaf: jnp.zeros((*self._apart, *leaf.shape), leaf.dtype),
            trainable,
        ),
        fp8=jax.tree.map(
            jnp.zeros_like, scaling_state.stack_observations(fp8_state)
        ),
        metrics=jax.tree.map(
            lambda _: jnp.zeros((), jnp.float32), self._metrics
        ),
    )
