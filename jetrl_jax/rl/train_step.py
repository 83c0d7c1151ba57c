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
from jetrl_jax.compilation import exact_jit
from jetrl_jax.fp8 import QTensor, slots
from jetrl_jax.metrics import Mean, mean
from jetrl_jax.rl import corrections, kl, losses
from jetrl_jax.rl.policy import Policy, PolicyParams
from jetrl_jax.rl.types import TrainBatch, TrainState
from jetrl_jax.typing import Array, PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig:
  """The objective per token; `TrainBatch.loss_weight` does the averaging.

  Attributes:
    clip_ratio_low: lower clip distance.
    clip_ratio_high: upper clip distance.
    clip_ratio_c: dual clip.
    kl_loss_coef: weight of the KL term; 0 is off.
    kl_loss_type: 'k2', 'k3' or 'low_var_kl'.
    entropy_coeff: weight of the entropy bonus.
    rollout_is: 'none' or 'token' (truncated importance sampling).
    rollout_is_threshold: its cap.
  """

  clip_ratio_low: float = 0.2
  clip_ratio_high: float = 0.2
  clip_ratio_c: float = 3.0
  kl_loss_coef: float = 0.0
  kl_loss_type: str = 'k3'
  entropy_coeff: float = 0.0
  rollout_is: str = 'none'
  rollout_is_threshold: float = 2.0

  def __post_init__(self):
    if not 0 <= self.clip_ratio_low < 1:
      raise ValueError(
          f'clip_ratio_low is {self.clip_ratio_low}; allowed: [0, 1)'
      )
    if self.clip_ratio_high < 0:
      raise ValueError(
          f'clip_ratio_high is {self.clip_ratio_high}; allowed: >= 0'
      )
    if self.clip_ratio_c <= 1:
      raise ValueError(f'clip_ratio_c is {self.clip_ratio_c}; allowed: > 1')
    for name in ('kl_loss_coef', 'entropy_coeff'):
      if getattr(self, name) < 0:
        raise ValueError(f'{name} is {getattr(self, name)}; allowed: >= 0')
    kl.make_kl_loss(self.kl_loss_type)
    corrections.make_correction(
        self.rollout_is, threshold=self.rollout_is_threshold
    )


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


def policy_loss(
    config: LossConfig,
    batch: TrainBatch,
    logprobs_BT: Array,
    entropy_BT: Array,
) -> tuple[Array, dict[str, Mean]]:
  """Returns this micro-batch's part of the objective, and its metrics.

      loss = sum_t weight_t (is_t pg_t + kl_loss_coef kl_t - entropy_coeff H_t)

  Args:
    config: the objective.
    batch: one micro-batch.
    logprobs_BT: log pi, by the training forward.
    entropy_BT: entropy of pi at each token, in nats.
  """
  mask_BT = batch.loss_mask
  # Masked positions hold numbers that mean nothing; 0 * inf would be NaN.
  log_ratio_BT = jnp.where(mask_BT > 0, logprobs_BT - batch.old_logprobs, 0.0)
  pg = jax.vmap(
      functools.partial(
          losses.clipped_pg_loss,
          clip_low=config.clip_ratio_low,
          clip_high=config.clip_ratio_high,
          clip_c=config.clip_ratio_c,
      )
  )(log_ratio_BT, batch.advantages)
  correction = corrections.make_correction(
      config.rollout_is, threshold=config.rollout_is_threshold
  )
  weight_BT = jax.vmap(correction)(batch.old_logprobs, batch.log_mu)
  loss_BT = weight_BT * pg.loss_T
  metrics = {
      'actor/entropy': mean(entropy_BT, mask_BT),
      'actor/pg_clipfrac': mean(pg.clipped_T, mask_BT),
      'actor/pg_clipfrac_lower': mean(pg.clipped_lower_T, mask_BT),
      'actor/ppo_kl': mean(-log_ratio_BT, mask_BT),
  }
  if config.kl_loss_coef:
    reference_BT = jnp.where(mask_BT > 0, batch.ref_logprobs, logprobs_BT)
    kl_BT = jax.vmap(kl.make_kl_loss(config.kl_loss_type))(
        logprobs_BT, reference_BT
    )
    loss_BT = loss_BT + config.kl_loss_coef * kl_BT
    metrics['actor/kl_loss'] = mean(kl_BT, mask_BT)
  if config.entropy_coeff:
    loss_BT = loss_BT - config.entropy_coeff * entropy_BT
  loss = jnp.sum(jnp.where(mask_BT > 0, batch.loss_weight * loss_BT, 0.0))
  # A sum over the mini-batch, not an average over tokens: `apply` counts it.
  metrics['actor/pg_loss'] = Mean(sum=loss, weight=jnp.zeros(()))
  return loss, metrics


def supervised_loss(
    batch: TrainBatch, logprobs_BT: Array, entropy_BT: Array
) -> tuple[Array, dict[str, Mean]]:
  """Returns the weighted negative log-likelihood (supervised warm start)."""
  mask_BT = batch.loss_mask
  loss = -jnp.sum(jnp.where(mask_BT > 0, batch.loss_weight * logprobs_BT, 0.0))
  metrics = {
      'sft/loss': mean(-logprobs_BT, mask_BT),
      'actor/entropy': mean(entropy_BT, mask_BT),
      'actor/pg_loss': Mean(sum=loss, weight=jnp.zeros(())),
  }
  return loss, metrics


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


def _changed_share(old: PyTree, new: PyTree, axes) -> PyTree:
  """Share of FP8 weight bytes that differ, per quantised kernel."""

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
      changed_bytes=_changed_share(state.weights, weights, axes),
      metrics=metrics,
  )
  next_state = TrainState(
      trainable=trainable,
      frozen=state.frozen,
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
      return exact_jit(
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
    self.roll_inputs = exact_jit(
        functools.partial(
            slots.roll, recipe=policy.recipe, operands=('input',)
        ),
        out_shardings=sharding.named(specs.fp8_state, mesh),
    )
    self._zeros = exact_jit(
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
