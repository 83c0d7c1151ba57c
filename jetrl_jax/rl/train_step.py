"""The update: accumulate micro-batches, then apply once.

`accumulate` runs forward and backward of one micro-batch and adds to a
`Gradients` record; `apply` clips, moves the masters, and quantises the
compute weights that the next forward and the next rollout read. Micro-batches
are differentiated one by one, so that amaxes combine by max (see
`fp8/linear.py`). What is not finite never reaches the state: `apply` then
returns it as it was.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jetrl_jax import fp8, sharding
from jetrl_jax.fp8 import QTensor, slots
from jetrl_jax.metrics import Mean
from jetrl_jax.rl.policy import Policy, PolicyParams
from jetrl_jax.rl.types import TrainBatch, TrainState
from jetrl_jax.typing import Array, PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Gradients:
  """What the micro-batches of one mini-batch have added up to.

  Attributes:
    trainable: gradients of the masters, in their dtypes.
    fp8: cotangents of the delayed-scaling slots: amax by max, health by sum.
    metrics: name to `Mean`.
  """

  trainable: PyTree
  fp8: PyTree
  metrics: dict[str, Mean]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateInfo:
  """What one optimiser step did.

  Attributes:
    grad_norm: float32, global L2 norm before clipping.
    lr: float32, learning rate of this step.
    applied: bool, False when anything was not finite and the step was skipped.
    changed_bytes: per quantised kernel the share of FP8 weight bytes that
      changed, nested like the slots.
    metrics: name to `Mean`, see `Gradients`.
  """

  grad_norm: Array
  lr: Array
  applied: Array
  changed_bytes: PyTree
  metrics: dict[str, Mean]


def merge(trainable: PyTree, frozen: PyTree) -> PyTree:
  """Joins two nested dicts with disjoint leaves."""
  merged = dict(trainable)
  for key, value in frozen.items():
    merged[key] = merge(merged[key], value) if key in merged else value
  return merged


def objective(
    policy: Policy,
    loss_function: Any,
    state: TrainState,
    batch: TrainBatch,
    temperature: Array,
):
  """Returns the function of (trainable, fp8_state) that is differentiated.

  It returns (loss, (metrics, log-probs, entropy)).
  """

  def loss_of(trainable, fp8_state):
    logprobs_BT, entropy_BT = policy.score(
        PolicyParams(state.weights, fp8_state),
        batch,
        temperature,
        masters=merge(trainable, state.frozen),
    )
    loss, metrics = loss_function(batch, logprobs_BT, entropy_BT)
    return loss, (metrics, logprobs_BT, entropy_BT)

  return loss_of


def _accumulate(policy, loss_function, state, gradients, batch, temperature):
  """Adds one micro-batch; returns (gradients, log-probs, entropy)."""
  loss_of = objective(policy, loss_function, state, batch, temperature)
  (new, new_fp8), (metrics, logprobs_BT, entropy_BT) = jax.grad(
      loss_of, argnums=(0, 1), has_aux=True
  )(state.trainable, state.fp8_state)
  axes = policy.axes
  added = Gradients(
      trainable=jax.tree.map(jnp.add, gradients.trainable, new),
      fp8=slots.combine(
          gradients.fp8, slots.reduce_over_devices(new_fp8, axes)
      ),
      metrics={
          name: gradients.metrics[name] + axes.psum(value)
          for name, value in metrics.items()
      },
  )
  return added, logprobs_BT, entropy_BT


def _global_norm(gradients: PyTree, is_split: PyTree, axes) -> Array:
  """L2 norm over all leaves; split leaves add over devices."""
  squares = jax.tree.map(
      lambda g: jnp.sum(jnp.square(g.astype(jnp.float32))), gradients
  )
  pairs = zip(jax.tree.leaves(squares), jax.tree.leaves(is_split), strict=True)
  whole, split = jnp.zeros(()), jnp.zeros(())
  for square, splits in pairs:
    if splits:
      split = split + square
    else:
      whole = whole + square
  if axes.size > 1:
    # Every device of the data axis holds the same reduced gradient.
    split = axes.psum(split) / axes.data
  return jnp.sqrt(whole + split)


def changed_share(old: PyTree, new: PyTree, axes) -> PyTree:
  """Returns the share of 8-bit weight bytes that differ, by kernel."""

  def walk(a, b):
    if isinstance(a, QTensor):
      differs = jnp.mean((a.values != b.values).astype(jnp.float32))
      return axes.psum(differs) / axes.size
    if not isinstance(a, dict):
      return None
    children = {key: walk(a[key], b[key]) for key in a}
    return {k: v for k, v in children.items() if v is not None} or None

  return walk(old, new) or {}


def _apply(policy, optimizer, config, is_split, state, gradients):
  """Returns (next state, emptied gradients, UpdateInfo)."""
  axes, recipe = policy.axes, policy.recipe
  norm = _global_norm(gradients.trainable, is_split, axes)
  loss = gradients.metrics['actor/pg_loss'].sum
  ok = jnp.isfinite(norm) & jnp.isfinite(loss)
  shrink = jnp.minimum(1.0, config.grad_clip / (norm + 1e-6))
  shrink = jnp.where(ok, shrink, 0.0)
  clipped = jax.tree.map(
      lambda g: jnp.where(ok, g * shrink.astype(g.dtype), 0),
      gradients.trainable,
  )
  updates, opt_state = optimizer.update(
      clipped, state.opt_state, state.trainable
  )

  def keep(new, old):
    return jnp.where(ok, new, old)

  trainable = jax.tree.map(
      keep, optax.apply_updates(state.trainable, updates), state.trainable
  )
  params = merge(trainable, state.frozen)
  fp8_state = slots.observe(state.fp8_state, gradients.fp8)
  fp8_state = slots.roll(fp8_state, recipe, operands=('output_grad',))
  fp8_state = slots.observe_kernels(fp8_state, params, recipe, axes)
  fp8_state = jax.tree.map(keep, fp8_state, state.fp8_state)
  weights = fp8.prepare_weights(params, fp8_state, recipe)
  # A skipped step leaves the kernels' health as it was, too.
  fp8_state = jax.tree.map(
      keep,
      slots.measure_kernels(fp8_state, params, weights, axes),
      fp8_state,
  )
  one = Mean(sum=jnp.zeros(()), weight=jnp.ones(()))
  metrics = dict(gradients.metrics)
  metrics['actor/pg_loss'] = metrics['actor/pg_loss'] + one
  info = UpdateInfo(
      grad_norm=norm,
      lr=jnp.asarray(config.learning_rate(state.opt_step), jnp.float32),
      applied=ok,
      changed_bytes=changed_share(state.weights, weights, axes),
      metrics=metrics,
  )
  next_state = dataclasses.replace(
      state,
      trainable=trainable,
      fp8_state=fp8_state,
      opt_state=jax.tree.map(keep, opt_state, state.opt_state),
      weights=weights,
      opt_step=state.opt_step + ok.astype(jnp.int32),
  )
  # Handed back empty, so that the accumulator's buffers are used in place.
  return next_state, jax.tree.map(jnp.zeros_like, gradients), info


class TrainStep:
  """Compiles the update for one policy, objective and optimiser.

  Args:
    policy: the functions; its recipe is the flow's.
    loss_function: (batch, log-probs, entropy) to (loss, metrics), for example
      `functools.partial(policy_loss, LossConfig())`.
    optimizer: moves the trainable masters.
    config: `OptimizerConfig` (learning rate and clip).
    mesh: devices.
    state: an example, concrete or of shapes.
  """

  def __init__(
      self,
      policy: Policy,
      loss_function: Any,
      optimizer: optax.GradientTransformation,
      config: Any,
      mesh: Mesh,
      state: TrainState,
  ):
    self.policy, self.mesh = policy, mesh
    specs = sharding.tree_specs(state, mesh)
    self._metric_names = self._names_of(loss_function, state)
    grad_specs = Gradients(
        trainable=specs.trainable,
        fp8=specs.fp8_state,
        metrics=jax.tree.map(
            lambda _: P(),
            {n: Mean(sum=0.0, weight=0.0) for n in self._metric_names},
        ),
    )
    rows = sharding.ROWS

    def compiled(function, in_specs, out_specs, **options):
      return policy.jit(
          sharding.per_device(function, mesh, in_specs, out_specs),
          out_shardings=sharding.named(out_specs, mesh),
          **options,
      )

    self.accumulate = compiled(
        functools.partial(_accumulate, policy, loss_function),
        (specs, grad_specs, rows, P()),
        (grad_specs, rows, rows),
        donate_argnums=(1,),
    )
    # Decided on the whole shapes: inside, a split leaf looks smaller.
    is_split = jax.tree.map(
        lambda leaf: sharding.leaf_spec(leaf.shape, mesh) != P(),
        state.trainable,
    )
    self.apply = compiled(
        functools.partial(_apply, policy, optimizer, config, is_split),
        (specs, grad_specs),
        (specs, grad_specs, P()),
        donate_argnums=(0, 1),
    )
    self.score = compiled(
        policy.score,
        (PolicyParams(specs.weights, specs.fp8_state), rows, P()),
        (rows, rows),
    )
    self.roll_inputs = policy.jit(
        functools.partial(
            slots.roll, recipe=policy.recipe, operands=('input',)
        ),
        out_shardings=sharding.named(specs.fp8_state, mesh),
    )
    self._zeros = policy.jit(
        self._make_zeros, out_shardings=sharding.named(grad_specs, mesh)
    )

  def zero_gradients(self, state: TrainState) -> Gradients:
    """Returns an empty accumulator, sharded like the masters."""
    return self._zeros(state.trainable, state.fp8_state)

  def _make_zeros(self, trainable, fp8_state):
    scalar = functools.partial(jnp.zeros, (), jnp.float32)
    return Gradients(
        trainable=jax.tree.map(jnp.zeros_like, trainable),
        fp8=jax.tree.map(jnp.zeros_like, fp8_state),
        metrics={
            n: Mean(sum=scalar(), weight=scalar()) for n in self._metric_names
        },
    )

  def _names_of(self, loss_function, state) -> list[str]:
    """Metric names the loss reports, found without computing anything."""
    del state
    ints = jax.ShapeDtypeStruct((1, 16), jnp.int32)
    floats = jax.ShapeDtypeStruct((1, 16), jnp.float32)
    integer = ('tokens', 'positions', 'segment_ids', 'weight_version')
    shapes: dict[str, Any] = {
        field.name: ints if field.name in integer else floats
        for field in dataclasses.fields(TrainBatch)
    }
    batch = TrainBatch(**shapes)
    _, metrics = jax.eval_shape(loss_function, batch, floats, floats)
    return list(metrics)
