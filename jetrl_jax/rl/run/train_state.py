"""Builds training states, and the reference policy of a KL term."""

import dataclasses
import pathlib
import re
import shutil

import jax
import jax.numpy as jnp
import optax
from flax import traverse_util
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jetrl_jax import kernels
from jetrl_jax.checkpoint import restore
from jetrl_jax.checkpoint.manager import CheckpointManager
from jetrl_jax.core import processes, sharding
from jetrl_jax.core.typing import PyTree
from jetrl_jax.fp8 import Recipe, scaling_state
from jetrl_jax.models.policy import Policy, PolicyParams
from jetrl_jax.optim.types import TrainState, merge


def partition(
    params: PyTree, frozen_patterns: tuple[str, ...]
) -> tuple[PyTree, PyTree]:
  """Splits masters into (trainable, frozen) by regular expressions.

  Args:
    params: nested dict of masters.
    frozen_patterns: matched in full against paths like 'embed/embedding'.

  Raises:
    ValueError: a pattern is not a regular expression or matches nothing, or
      every parameter is frozen.
  """
  flat = traverse_util.flatten_dict(params, sep='/')
  for pattern in frozen_patterns:
    try:
      re.compile(pattern)
    except re.error as error:
      raise ValueError(
          f'model.freeze: {pattern!r} is not a regular expression ({error})'
      ) from error
  matches = {
      pattern: {p for p in flat if re.fullmatch(pattern, p)}
      for pattern in frozen_patterns
  }
  empty = [pattern for pattern, paths in matches.items() if not paths]
  if empty:
    raise ValueError(
        f'model.freeze: {empty} match no parameter; paths look like'
        f' {sorted(flat)[:3]}'
    )
  frozen = set().union(*matches.values())
  if len(frozen) == len(flat):
    raise ValueError('model.freeze matches every parameter; nothing to train')

  def build(paths):
    kept = {p: flat[p] for p in flat if p in paths}
    return traverse_util.unflatten_dict(kept, sep='/')

  return build(set(flat) - frozen), build(frozen)


def check_high_precision(recipe: Recipe, params: PyTree) -> None:
  """Refuses patterns of dots that match none: they would change nothing.

  Args:
    recipe: its `high_precision_layers` are looked at.
    params: nested dict of masters (arrays or shapes).

  Raises:
    ValueError: a pattern matches no dot.
  """
  flat = traverse_util.flatten_dict(params, sep='/')
  dots = [p.removesuffix('/kernel') for p in flat if p.endswith('/kernel')]
  for pattern in recipe.high_precision_layers:
    if not any(re.fullmatch(pattern, dot) for dot in dots):
      raise ValueError(
          f'precision.high_precision_layers: {pattern!r} matches no dot; they'
          f' are {dots[:4]} and so on'
      )


def create(
    policy: Policy,
    params: PyTree,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    frozen_patterns: tuple[str, ...] = (),
) -> TrainState:
  """Returns the state of a cold start, in which only the kernels have scales.

  With delayed scales, those of inputs and output gradients are 1 until
  `Calibration.fill` has seen real tokens. Do that before the first rollout:
  without it most of a gradient is flushed to 0, and only the health says so.

  Args:
    policy: its recipe decides what is quantised.
    params: masters on their devices; the state takes them over.
    optimizer: its moments start at zero.
    mesh: devices of the new arrays.
    frozen_patterns: see `partition`.

  Raises:
    ValueError: see `partition` and `check_high_precision`.
  """
  check_high_precision(policy.recipe, params)
  trainable, frozen = partition(params, frozen_patterns)
  whole = NamedSharding(mesh, P())
  fp8_state = jax.device_put(
      scaling_state.init_state(params, policy.recipe), whole
  )
  opt_shapes = jax.eval_shape(optimizer.init, trainable)
  opt_state = jax.jit(
      optimizer.init, out_shardings=sharding.tree_shardings(opt_shapes, mesh)
  )(trainable)
  state = TrainState(
      trainable=trainable,
      frozen=frozen,
      fp8_state=fp8_state,
      opt_state=opt_state,
      weights={},
      opt_step=jax.device_put(jnp.zeros((), jnp.int32), whole),
  )
  return with_weights(policy, state, mesh, record=True)


def with_weights(
    policy: Policy, state: TrainState, mesh: Mesh, *, record: bool
) -> TrainState:
  """Returns the state with `weights` made from its masters.

  Args:
    policy: its recipe decides what is quantised.
    state: its `weights` are replaced.
    mesh: devices.
    record: whether to record the kernels' amaxes first, as a cold start does. A
      restored state has them already, so they would be recorded twice.
  """

  def make(trainable, frozen, fp8_state):
    params = merge(trainable, frozen)
    if record:
      fp8_state = scaling_state.observe_kernels(
          fp8_state, params, policy.recipe, policy.axes
      )
    return fp8_state, kernels.prepare_weights(params, fp8_state, policy.recipe)

  specs = [
      sharding.tree_specs(tree, mesh)
      for tree in (state.trainable, state.frozen, state.fp8_state)
  ]
  # Outside of shard_map no collective may be traced, so `make` cannot be used.
  shapes = jax.eval_shape(
      lambda t, f, s: kernels.prepare_weights(merge(t, f), s, policy.recipe),
      state.trainable,
      state.frozen,
      state.fp8_state,
  )
  out_specs = (specs[2], sharding.tree_specs(shapes, mesh))
  run = policy.jit_per_device(make, mesh, tuple(specs), out_specs)
  fp8_state, weights = run(state.trainable, state.frozen, state.fp8_state)
  return dataclasses.replace(state, fp8_state=fp8_state, weights=weights)


def abstract(
    policy: Policy,
    param_shapes: PyTree,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    frozen_patterns: tuple[str, ...] = (),
    rollout_recipe: Recipe | None = None,
) -> TrainState:
  """Returns the state's shapes, dtypes and shardings, without weights.

  Args:
    policy: its recipe decides what is quantised.
    param_shapes: shapes of the masters.
    optimizer: makes the moments.
    mesh: devices.
    frozen_patterns: see `partition`.
    rollout_recipe: the rollout's recipe in a mixed flow; None in a unified one.
  """
  trainable, frozen = partition(param_shapes, frozen_patterns)

  def scaling_state_of(recipe):
    return jax.eval_shape(
        lambda: scaling_state.init_state(param_shapes, recipe)
    )

  state = TrainState(
      trainable=trainable,
      frozen=frozen,
      fp8_state=scaling_state_of(policy.recipe),
      opt_state=jax.eval_shape(optimizer.init, trainable),
      weights={},
      opt_step=jax.eval_shape(lambda: jnp.zeros((), jnp.int32)),
      rollout_fp8_state=(
          scaling_state_of(rollout_recipe) if rollout_recipe else {}
      ),
  )
  return jax.tree.map(
      lambda leaf, where: jax.ShapeDtypeStruct(
          leaf.shape, leaf.dtype, sharding=where
      ),
      state,
      sharding.tree_shardings(state, mesh),
  )


def without_weights(state: TrainState) -> dict[str, PyTree]:
  """Returns the state as a checkpoint holds it: without compute weights."""
  return {
      field.name: getattr(state, field.name)
      for field in dataclasses.fields(state)
      if field.name not in ('weights', 'rollout_weights')
  }


def reference(
    folder: pathlib.Path, state: TrainState, *, cold: bool
) -> PolicyParams:
  """Returns the reference policy: the run's first weights and scales.

  It has its own copy of the compute weights and of the scales, which stay as
  they are, so that the KL at step 0 is exactly 0. The copy is saved in a folder
  next to the checkpoints.

  Args:
    folder: the reference policy's folder.
    state: the state of a cold start, or one of the same shapes.
    cold: whether `state` is the run's first state.
  """
  tree = {'weights': state.weights, 'fp8_state': state.fp8_state}
  if cold:
    tree = jax.tree.map(jnp.copy, tree)
    # A run that was killed before its first checkpoint may have left one.
    if processes.is_first():
      shutil.rmtree(folder, ignore_errors=True)
    manager = CheckpointManager(folder, keep_latest=1, keep_best=0)
    manager.save(0, tree, {}, metric=None)
    manager.close()
    return PolicyParams(**tree)
  like = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
      tree,
  )
  check_reference(folder)
  restored = restore.restore(folder, like)
  assert restored is not None  # `check_reference` has found one.
  return PolicyParams(**restored.state)


def check_reference(folder: pathlib.Path) -> None:
  """Raises an error if a resumed run's KL term has no reference policy.

  Raises:
    ValueError: the folder is missing.
  """
  if not (folder / '0').exists():
    raise ValueError(
        f'{folder} holds no reference policy, but the run has a KL term and is'
        ' being resumed; start again in a new workdir'
    )
