"""One optimiser step: check and clip all gradients, then update group by group.

A parameter group is everything under one key of the masters' tree: `embed`,
`layers_0`, ... Its program clips the gradients, updates the masters, encodes
the moments, updates the scaling state of kernels and output gradients, and
quantises the new weights. All layers have the same shapes, so they share one
compiled program that is called once per layer. A model of 28 layers therefore
compiles as fast as one of two, and a running program needs memory for one group
only. The host is not involved between the calls: whether the gradients are
finite and by how much they are clipped stays on the device.

The arithmetic is float32 for any dtype of the masters. The kernels that read
gradients and masters convert them, and the result is rounded once, to the
nearest or stochastically (`rounding.py`).
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jetrl_jax.core import rng, sharding
from jetrl_jax.core.collectives import Axes
from jetrl_jax.core.compile_ahead import Program
from jetrl_jax.core.typing import Array, PyTree
from jetrl_jax.fp8 import scaling_state
from jetrl_jax.kernels import adamw
from jetrl_jax.kernels.adamw.reference import AdamW
from jetrl_jax.kernels.requantize import requantize
from jetrl_jax.metrics.writer import Mean
from jetrl_jax.models.policy import Policy
from jetrl_jax.optim import fused_adamw, partition, rounding
from jetrl_jax.optim.adamw import OptimizerConfig
from jetrl_jax.optim.types import StepControl, TrainState, merge


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Gradients:
  """The accumulated gradients of one mini-batch's micro-batches.

  Attributes:
    trainable: gradients of the masters, in their dtypes. Where devices have
      sums of their own (`Axes.gradient_sums`) each leaf has one more axis, the
      first one.
    fp8: what the backward passes observed, see
      `scaling_state.stack_observations`.
    metrics: name -> `Mean`.
  """

  trainable: PyTree
  fp8: PyTree
  metrics: dict[str, Mean]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateInfo:
  """The result of one optimiser step, less the state.

  Attributes:
    grad_norm: float32, global L2 norm before clipping.
    lr: float32, learning rate of this step.
    applied: bool, False if anything was not finite and the step was skipped.
    changed_bytes: for each quantised kernel, the share of its FP8 weight bytes
      that changed, nested like the scaling state.
    metrics: name -> `Mean`, see `Gradients`.
  """

  grad_norm: Array
  lr: Array
  applied: Array
  changed_bytes: PyTree
  metrics: dict[str, Mean]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ParamGroup:
  """The arrays that one program of the optimiser step updates.

  Attributes:
    trainable: masters under one key.
    frozen: masters under the same key that do not train.
    fp8_state: their scaling state.
    moments: the optimiser's trees like the masters, see `partition.split`.
    weights: their compute weights.
  """

  trainable: PyTree
  frozen: PyTree
  fp8_state: PyTree
  moments: list[PyTree]
  weights: PyTree


def _global_norm(gradients: PyTree, is_split: PyTree, axes: Axes) -> Array:
  """Returns the L2 norm over all leaves; split leaves add over devices."""
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
  if axes.devices > 1:
    # All devices of the data axis hold the same reduced gradient.
    split = axes.psum_all(split) / axes.data
  return jnp.sqrt(whole + split)


def _sum_apart(axes: Axes, masters: PyTree, gradients: PyTree) -> PyTree:
  """Adds what devices have kept apart; `masters` has the shapes stored here."""
  return jax.tree.map(
      lambda g, master: axes.sum_apart(g[0], master.shape[0]),
      gradients,
      masters,
  )


def _check_and_clip(
    policy: Policy,
    config: OptimizerConfig,
    is_split: PyTree,
    trainable: PyTree,
    metrics: dict[str, Mean],
    opt_step: Array,
    rounding_root: Array | None,
) -> tuple[UpdateInfo, Array, Array, dict[str, Array]]:
  """Checks all gradients and computes the clip factor.

  Returns:
    (UpdateInfo without changed bytes, clip factor of the gradients (0 if they
     are not finite), next optimiser step, rounding keys).
  """
  norm = _global_norm(trainable, is_split, policy.axes)
  loss = metrics['actor/pg_loss']
  ok = jnp.isfinite(norm) & jnp.isfinite(loss.sum)
  clip_factor = jnp.minimum(1.0, config.grad_clip / (norm + 1e-6))
  one = Mean(sum=jnp.zeros(()), weight=jnp.ones(()))
  info = UpdateInfo(
      grad_norm=norm,
      lr=jnp.asarray(config.learning_rate(opt_step), jnp.float32),
      applied=ok,
      changed_bytes={},
      metrics=metrics | {'actor/pg_loss': loss + one},
  )
  clip_factor = jnp.where(ok, clip_factor, 0.0)
  rounding_keys = {}
  if rounding_root is not None:
    rounding_keys = rounding.rounding_keys(rounding_root, opt_step, trainable)
  return info, clip_factor, opt_step + ok.astype(jnp.int32), rounding_keys


def _widened(tree: PyTree) -> PyTree:
  return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)


def _optax_update(
    optimizer: optax.GradientTransformation,
    join: partition.OptStatePartition,
    axes: Axes,
    is_split: PyTree,
    group: ParamGroup,
    shared: list,
    gradients: PyTree,
    control: StepControl,
) -> tuple[PyTree, list[PyTree], list]:
  """Returns (new masters, new moments, new shared state) of one group.

  It does not check whether the step is skipped; the caller does.
  """
  ok, clip_factor, rounding_keys = control
  clipped = jax.tree.map(
      lambda g: jnp.where(ok, g * clip_factor, 0), _widened(gradients)
  )
  masters = _widened(group.trainable)
  updates, opt_state = optimizer.update(
      clipped, join(group.moments, shared), masters
  )
  moments, next_shared = partition.split(opt_state, set(group.trainable))
  updated = optax.apply_updates(masters, updates)
  trainable = rounding.stored(
      updated, group.trainable, is_split, rounding_keys, axes
  )
  return trainable, moments, next_shared


def _update_group(
    policy: Policy,
    optimizer: optax.GradientTransformation,
    join: partition.OptStatePartition,
    is_split: PyTree,
    group: ParamGroup,
    shared: list,
    gradients: PyTree,
    observed: PyTree,
    control: StepControl,
) -> tuple[ParamGroup, list, PyTree]:
  """Updates one parameter group.

  Args:
    policy: its recipe and axes.
    optimizer: updates the masters.
    join: rebuilds the optimiser's state.
    is_split: tree of bools: whether each device holds its own rows of a master.
    group: the group's arrays.
    shared: the optimiser's leaves that do not depend on the group.
    gradients: the gradients of the group's trainable masters, before clipping.
    observed: the array of the group's observations, see
      `scaling_state.stack_observations`; {} without any.
    control: what the step decided for all groups.

  Returns:
    (the group after the step, the shared leaves after it, share of the 8-bit
    weight bytes that changed).
  """
  axes, recipe, ok = policy.axes, policy.recipe, control.applied

  def keep(new, old):
    return jax.tree.map(lambda a, b: jnp.where(ok, a, b), new, old)

  if adamw.fits(optimizer, group.trainable, gradients, group.moments):
    assert isinstance(optimizer, AdamW)  # `fits` has checked it.
    trainable, moments, next_shared, largest = fused_adamw.update_group(
        optimizer,
        join,
        axes,
        is_split,
        (group.trainable, group.moments, shared),
        gradients,
        control,
    )
  else:
    trainable, moments, next_shared = _optax_update(
        optimizer, join, axes, is_split, group, shared, gradients, control
    )
    trainable = keep(trainable, group.trainable)
    moments = keep(moments, group.moments)
    largest = trainable
  params = merge(trainable, group.frozen)
  fp8_state = scaling_state.observe(group.fp8_state, observed)
  fp8_state = scaling_state.roll(fp8_state, recipe, operands=('output_grad',))
  # `largest` may hold amaxes instead of masters: the amax of an amax is itself.
  fp8_state = scaling_state.observe_kernels(
      fp8_state, merge(largest, group.frozen), recipe, axes
  )
  fp8_state = keep(fp8_state, group.fp8_state)
  weights, measured, changed = requantize(
      params, fp8_state, group.weights, recipe, axes
  )
  # A skipped step also keeps the kernels' health.
  fp8_state = keep(measured, fp8_state)
  next_group = ParamGroup(
      trainable=trainable,
      frozen=group.frozen,
      fp8_state=fp8_state,
      moments=moments,
      weights=weights,
  )
  return next_group, keep(next_shared, shared), changed


class Apply:
  """The compiled optimiser step: call it with (state, gradients).

  It returns (next state, `UpdateInfo`) and donates both arguments.

  Args:
    policy: its recipe and axes.
    optimizer: updates the trainable masters. Its state may hold trees like the
      masters, and leaves that do not depend on them, such as step counts.
    config: learning rate, clip and rounding.
    mesh: devices.
    state: an example, arrays or shapes.
  """

  def __init__(
      self,
      policy: Policy,
      optimizer: optax.GradientTransformation,
      config: OptimizerConfig,
      mesh: Mesh,
      state: TrainState,
  ):
    self._policy, self._mesh = policy, mesh
    self._keys = set(state.trainable)
    self._join = partition.OptStatePartition(state.opt_state, self._keys)
    self._rounding_root = None
    if config.master_rounding == 'stochastic':
      rounding.check(state.trainable)
      self._rounding_root = rng.key(config.seed, rng.ROUNDING)
    specs = sharding.tree_specs(state.trainable, mesh)
    self._check_and_clip = policy.jit_per_device(
        functools.partial(_check_and_clip, policy, config, self._splits(state)),
        mesh,
        (specs, P(), P(), P()),
        (P(), P(), P(), P()),
    )
    self._update_group = functools.partial(
        _update_group, policy, optimizer, self._join
    )
    self._group_programs: dict[Any, Callable] = {}
    self._sum_programs: dict[Any, Program] = {}

  def __call__(self, state: TrainState, gradients: Gradients):
    """Takes the optimiser step; see the class."""
    gradients = self._summed(gradients)
    info, clip_factor, opt_step, rounding_keys = self._check_and_clip(
        *self._check_arguments(state, gradients)
    )
    groups, shared, changed = {}, [], {}
    for key, update, arguments in self._group_calls(
        state, gradients, info.applied, clip_factor, rounding_keys
    ):
      # Every group returns the same shared state.
      groups[key], shared, share = update(*arguments)
      changed |= {key: share} if share else {}
    next_state = self._joined(state, groups, shared, opt_step)
    info = dataclasses.replace(info, changed_bytes=changed)
    # The accumulator is freed here, so that the rollout can use its memory.
    for leaf in jax.tree.leaves(gradients):
      leaf.delete()
    return next_state, info

  def lowered(self, state: TrainState, gradients: Gradients) -> Iterator:
    """Yields (name, number of calls, lowered) of every program.

    Args:
      state: arrays or shapes.
      gradients: the accumulator, arrays or shapes.
    """
    for name, count, program, arguments in self.calls(state, gradients):
      yield name, count, program.lower(*arguments)

  def calls(self, state: TrainState, gradients: Gradients) -> Iterator:
    """Yields (name, number of calls, program, arguments of one call).

    Args:
      state: arrays or shapes.
      gradients: the accumulator, arrays or shapes.
    """
    sums: dict[Program, list] = {}
    for key, program in self._sum_calls(gradients):
      sums.setdefault(program, []).append(key)
    for program, keys in sums.items():
      group = gradients.trainable[keys[0]]
      yield f'sum {keys[0]}', len(keys), program, (group,)
    if sums:
      found = {
          key: program.eval_shape(gradients.trainable[key])
          for key, program in self._sum_calls(gradients)
      }
      gradients = dataclasses.replace(gradients, trainable=found)
    checked = self._check_arguments(state, gradients)
    yield 'check_and_clip', 1, self._check_and_clip, checked
    info, clip_factor, _, rounding_keys = self._check_and_clip.eval_shape(
        *checked
    )
    calls: dict[Program, list] = {}
    for key, update, arguments in self._group_calls(
        state, gradients, info.applied, clip_factor, rounding_keys
    ):
      calls.setdefault(update, []).append((key, arguments))
    for update, same in calls.items():
      key, arguments = same[0]
      yield f'update {key}', len(same), update, arguments

  def programs(self) -> list:
    """Returns the compiled functions that were called so far."""
    return [
        *self._sum_programs.values(),
        self._check_and_clip,
        *self._group_programs.values(),
    ]

  def _summed(self, gradients: Gradients) -> Gradients:
    """Returns the sums over devices; takes the gradients over."""
    found = dict(gradients.trainable)
    for key, program in self._sum_calls(gradients):
      found[key] = program(gradients.trainable[key])
      # Group by group: a device need not have room for all of them twice.
      for leaf in jax.tree.leaves(gradients.trainable[key]):
        leaf.delete()
    return dataclasses.replace(gradients, trainable=found)

  def _sum_calls(self, gradients: Gradients) -> Iterator[tuple[str, Program]]:
    """Yields (key, program) of every group whose gradients are to be added."""
    axes, mesh = self._policy.axes, self._mesh
    for key, group in gradients.trainable.items():
      if not axes.gradient_sums:
        return
      leaves, tree = jax.tree.flatten(group)
      signature = tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
      if signature not in self._sum_programs:
        masters = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), group
        )
        here = jax.tree.map(
            lambda leaf, where: jax.ShapeDtypeStruct(
                where.shard_shape(leaf.shape), leaf.dtype
            ),
            masters,
            sharding.tree_shardings(masters, mesh),
        )
        self._sum_programs[signature] = self._policy.jit_per_device(
            functools.partial(_sum_apart, axes, here),
            mesh,
            (sharding.apart_specs(masters, mesh, axes.gradient_sums),),
            sharding.tree_specs(masters, mesh),
        )
      yield key, self._sum_programs[signature]

  def _check_arguments(self, state: TrainState, gradients: Gradients) -> tuple:
    return (
        gradients.trainable,
        gradients.metrics,
        state.opt_step,
        self._rounding_root,
    )

  def _group_calls(
      self,
      state: TrainState,
      gradients: Gradients,
      applied: Array,
      clip_factor: Array,
      rounding_keys: dict[str, Array],
  ) -> Iterator:
    """Yields (key, program, its arguments) of every group to update."""
    moments, shared = partition.split(state.opt_state, self._keys)
    for key in state.weights:
      if key not in state.trainable and key not in state.fp8_state:
        continue
      group = ParamGroup(
          trainable=state.trainable.get(key, {}),
          frozen=state.frozen.get(key, {}),
          fp8_state=state.fp8_state.get(key, {}),
          moments=[tree.get(key, {}) for tree in moments],
          weights=state.weights[key],
      )
      found = gradients.trainable.get(key, {}), gradients.fp8.get(key, {})
      control = StepControl(applied, clip_factor, rounding_keys.get(key, {}))
      program = self._group_program(group, *found)
      yield key, program, (group, shared, *found, control)

  def _group_program(
      self, group: ParamGroup, gradients: PyTree, observed: PyTree
  ) -> Callable:
    """Returns the program of a group; groups of equal shapes share it."""
    arguments = group, gradients, observed
    leaves, tree = jax.tree.flatten(arguments)
    signature = tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
    if signature not in self._group_programs:
      specs = sharding.tree_specs(arguments, self._mesh)
      self._group_programs[signature] = self._policy.jit_per_device(
          functools.partial(self._update_group, self._splits(group)),
          self._mesh,
          (specs[0], P(), specs[1], P(), P()),
          (specs[0], P(), P()),
          donate_argnums=(0,),
          # The old weights are not read, only replaced. Passing them lets XLA
          # reuse their buffers; otherwise both would be in memory.
          keep_unused=True,
      )
    return self._group_programs[signature]

  def _splits(self, of: TrainState | ParamGroup) -> PyTree:
    """Returns a tree of bools: which masters are split over devices."""
    return jax.tree.map(
        # This needs the whole shapes; inside shard_map a leaf looks smaller.
        lambda leaf: sharding.leaf_spec(leaf.shape, self._mesh) != P(),
        of.trainable,
    )

  def _joined(
      self,
      state: TrainState,
      groups: dict[str, ParamGroup],
      shared: list,
      opt_step: Array,
  ) -> TrainState:
    """Returns the state with all groups after the step."""

    def gathered(field: str, old: PyTree) -> PyTree:
      return old | {
          key: getattr(group, field)
          for key, group in groups.items()
          if key in old
      }

    moments = partition.split(state.opt_state, self._keys)[0]
    updated = [
        {key: groups[key].moments[i] for key in tree}
        for i, tree in enumerate(moments)
    ]
    return dataclasses.replace(
        state,
        trainable=gathered('trainable', state.trainable),
        frozen=gathered('frozen', state.frozen),
        fp8_state=gathered('fp8_state', state.fp8_state),
        weights=gathered('weights', state.weights),
        opt_state=self._join(updated, shared),
        opt_step=opt_step,
    )
