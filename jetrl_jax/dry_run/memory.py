"""The memory that a run keeps and that each phase adds, without running it.

The ledger adds up the bytes of all live arrays; it is exact. If the program is
compiled for its real device, XLA reports the additional memory of a phase;
otherwise it is estimated.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jetrl_jax import fp8, kernels
from jetrl_jax.core import sharding
from jetrl_jax.core.typing import PyTree
from jetrl_jax.dry_run import needs as dry_run_needs
from jetrl_jax.fp8 import scaling_state
from jetrl_jax.models.policy import PolicyParams
from jetrl_jax.optim.apply import Gradients
from jetrl_jax.optim.types import TrainState, merge
from jetrl_jax.rl.objective import policy_loss
from jetrl_jax.rl.rollout import decode_state, decode_step
from jetrl_jax.rl.rollout.buckets import PREFILL_ROWS
from jetrl_jax.rl.rollout.engine import Engine
from jetrl_jax.rl.run import mixed_flow, other_precision
from jetrl_jax.rl.run.gradients import UpdatePrograms
from jetrl_jax.rl.run.spec import RunSpec
from jetrl_jax.rl.training import initialize
from jetrl_jax.rl.types import TrainBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shapes:
  """Shapes, dtypes and shardings of all that a run holds; no arrays.

  Attributes:
    state: with `weights`, and in a mixed flow with `rollout_weights`.
    gradients: the accumulator.
    batch: one micro-batch.
    slots: the engine's decode state.
    prefix: the caches of the largest prefill.
    step: the update's functions, not compiled yet.
    engine: the rollout's.
  """

  state: TrainState
  gradients: Gradients
  batch: TrainBatch
  slots: Any
  prefix: PyTree
  step: UpdatePrograms
  engine: Engine


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
  """The memory of one compiled program, bytes per device.

  Attributes:
    name: the name of the phase.
    resident: what is alive and no argument of the program.
    arguments: the arguments of the program.
    results: that do not take an argument's place.
    temporary: what the program needs while it runs.
  """

  name: str
  resident: int
  arguments: int
  results: int
  temporary: int

  @property
  def total(self) -> int:
    """All of it."""
    return self.resident + self.arguments + self.results + self.temporary


def shapes(spec: RunSpec) -> Shapes:
  """Returns the shapes of a run."""
  policy, mesh, rollout_policy = spec.policy, spec.mesh, spec.rollout_policy
  state, optimizer = abstract_state(spec), spec.optimizer.build()
  loss = functools.partial(policy_loss, spec.loss)
  step = UpdatePrograms(policy, loss, optimizer, spec.optimizer, mesh, state)
  engine = Engine(rollout_policy, spec.engine, mesh, abstract=True)
  rows, length = spec.batch_shape
  by_rows = jax.sharding.NamedSharding(mesh, sharding.ROWS)
  by_heads = jax.sharding.NamedSharding(mesh, rollout_policy.axes.kv_spec)
  batch = _at(TrainBatch.of_shapes(rows, length), by_rows)
  slots = jax.eval_shape(engine.init_decode_state)
  apart = {
      name: _at(getattr(slots, name), by_heads)
      for name in ('caches', 'workspace')
  }
  prefix = rollout_policy.page_shapes(*largest_prefill(engine))
  return Shapes(
      state=state,
      gradients=step.gradient_shapes(state),
      batch=batch,
      slots=dataclasses.replace(_at(slots, by_rows), **apart),
      prefix=_at([prefix] * policy.model.num_layers, by_heads),
      step=step,
      engine=engine,
  )


def abstract_state(spec: RunSpec) -> TrainState:
  """Returns a run's state as shapes, with the weights of both sides."""
  state = initialize.abstract(spec)
  weights = _compute_weights(spec.policy.recipe, state, spec.mesh)
  state = dataclasses.replace(state, weights=weights)
  if not spec.is_mixed:
    return state
  side = mixed_flow.as_rollout(state)
  weights = _compute_weights(spec.rollout_policy.recipe, side, spec.mesh)
  return dataclasses.replace(state, rollout_weights=weights)


def _compute_weights(recipe: fp8.Recipe, state: TrainState, mesh) -> PyTree:
  """Returns the shapes of the weights that one side of the flow reads."""
  weights = jax.eval_shape(
      lambda t, f, s: kernels.prepare_weights(merge(t, f), s, recipe),
      state.trainable,
      state.frozen,
      state.fp8_state,
  )
  return _placed(weights, mesh)


def _evaluated_in(spec: RunSpec, state: TrainState) -> list[PolicyParams]:
  """Returns the shapes that evaluations in `val_recipes` make, one each."""
  if spec.val_set is None or not spec.run.test_freq:
    return []
  found, state = [], dataclasses.replace(state, fp8_state={})
  for name in spec.run.val_recipes:
    if name == spec.rollout_policy.recipe.name:
      continue  # The rollout's arrays exist already.
    recipe = other_precision.recipe_of(spec, name)
    kept = jax.eval_shape(
        lambda t, f, recipe=recipe: scaling_state.init_state(
            merge(t, f), recipe
        ),
        state.trainable,
        state.frozen,
    )
    weights = _compute_weights(recipe, state, spec.mesh)
    found.append(PolicyParams(weights, kept))
  return found


def ledger(spec: RunSpec, found: Shapes) -> dict[str, int]:
  """Returns the bytes per device of everything that is alive at some time."""
  state = found.state
  reference = spec.needs_reference
  is_split = spec.rollout_policy.axes.stored > 1

  def whole(params: PolicyParams) -> int:
    if not is_split:
      return 0
    return num_bytes(spec.rollout_policy.replicated_shapes(params, spec.mesh))

  others = _evaluated_in(spec, state)
  policy_bytes = num_bytes((state.weights, state.fp8_state))
  return {
      'master weights': num_bytes((state.trainable, state.frozen)),
      'Adam moments': num_bytes(state.opt_state),
      'compute weights': num_bytes(state.weights),
      "the rollout's weights": num_bytes(state.rollout_weights),
      'scales and histories': num_bytes(
          (state.fp8_state, state.rollout_fp8_state)
      ),
      'gradients': num_bytes(found.gradients),
      'reference policy': policy_bytes if reference else 0,
      _WHOLE: whole(mixed_flow.rollout_params(state)),
      _OTHER: max((num_bytes(one) + whole(one) for one in others), default=0),
      'KV caches and slots': num_bytes(found.slots),
      'prefilled prompts': num_bytes(found.prefix),
      'a micro-batch': num_bytes(found.batch),
  }


# What a rollout holds in addition; nothing if weights are not split. With
# tensor parallelism it is a device's share of them.
_WHOLE = 'weights of a rollout, whole'
# What an evaluation in one of `val_recipes` holds in its place.
_OTHER = 'weights of an evaluation'
# The arrays that the trainer always holds.
_ALWAYS = (
    'master weights',
    'Adam moments',
    'compute weights',
    "the rollout's weights",
    'scales and histories',
    'reference policy',
)


def compiled_phases(
    spec: RunSpec, found: Shapes, sizes: dict[str, int]
) -> tuple[list[Phase], dict[str, Any]]:
  """Compiles the programs of a step, and asks XLA what they need.

  Args:
    spec: the specification of the run.
    found: see `shapes`.
    sizes: see `ledger`.

  Returns:
    (one phase per program, the compiled programs by the same names).
  """
  always = sum(sizes[name] for name in _ALWAYS)
  programs = {
      name: lowered.compile() for name, lowered in _lowered(spec, found)
  }
  phases = []
  for name, program in programs.items():
    memory = program.memory_analysis()
    if memory is None:
      raise ValueError(
          f'XLA has no memory analysis of {name} on this device; give'
          ' --dry_run_device to estimate it from shapes'
      )
    alive = always
    if name in ('prefill', 'decode'):
      alive += _rollout_weights(sizes) + sizes['KV caches and slots']
    else:
      alive += sizes['gradients']
    if name == 'decode':
      alive += sizes['prefilled prompts']
    arguments = memory.argument_size_in_bytes
    phases.append(
        Phase(
            name=name,
            # Arguments are among what is alive, but for a batch of tokens.
            resident=max(0, alive - arguments),
            arguments=arguments,
            results=memory.output_size_in_bytes - memory.alias_size_in_bytes,
            temporary=memory.temp_size_in_bytes,
        )
    )
  return _largest_of_apply(phases), programs


def _rollout_weights(sizes: dict[str, int]) -> int:
  """Returns the additional weights of rollout or evaluation (never of both)."""
  return max(sizes[_WHOLE], sizes[_OTHER])


def _largest_of_apply(phases: list[Phase]) -> list[Phase]:
  """Keeps one of the programs of an optimiser step, which run in turn."""
  others = [phase for phase in phases if not phase.name.startswith('apply')]
  applied = [phase for phase in phases if phase.name.startswith('apply')]
  largest = max(applied, key=lambda phase: phase.total)
  return [*others, dataclasses.replace(largest, name='apply')]


def _lowered(spec: RunSpec, found: Shapes):
  policy, mesh, state = spec.rollout_policy.placed(), spec.mesh, found.state
  params = spec.rollout_policy.replicated_shapes(
      mixed_flow.rollout_params(state), mesh
  )
  rows, scalar = sharding.ROWS, _shape(jnp.float32)
  by_rows = jax.sharding.NamedSharding(mesh, rows)
  count, bucket = largest_prefill(found.engine)
  by_param, caches = P(), policy.axes.kv_spec
  if policy.axes.tensor > 1:
    by_param = policy.placed_specs(params)
  slots, _ = decode_state.specs(caches)
  prefill = sharding.per_device(
      policy.prefill, mesh, (by_param, rows, rows), caches
  )
  yield (
      'prefill',
      policy.jit(prefill).lower(
          params,
          _shape(jnp.int32, count, bucket, sharding=by_rows),
          _shape(jnp.int32, count, sharding=by_rows),
      ),
  )
  decode = sharding.per_device(
      functools.partial(decode_step.step, policy, spec.engine),
      mesh,
      (by_param, P(), slots),
      slots,
  )
  key = jax.eval_shape(lambda: jax.random.key(0, impl='threefry2x32'))
  yield (
      'decode',
      policy.jit(decode, donate_argnums=(2,)).lower(params, key, found.slots),
  )
  yield (
      'accumulate',
      found.step.accumulate.lower(state, found.gradients, found.batch, scalar),
  )
  for name, _, lowered in found.step.apply.lowered(state, found.gradients):
    yield f'apply: {name}', lowered


def estimated_phases(
    spec: RunSpec,
    found: Shapes,
    sizes: dict[str, int],
    *,
    attention: str = 'kernel',
) -> list[Phase]:
  """Estimates the phases from shapes, where nothing can be compiled.

  prefill: a block's insides;  decode: logits and one copy;
  accumulate: see `dry_run_needs`, also for `attention`;
  apply: two copies of the largest leaf
  """
  policy = spec.policy
  rows, length = largest_prefill(found.engine)
  prefilled = rows * length // policy.axes.size
  slots = found.engine.num_slots // policy.axes.size
  always = sum(sizes[name] for name in _ALWAYS)
  caches = sizes['KV caches and slots'] + sizes['prefilled prompts']
  caches += _rollout_weights(sizes)
  updating, masters = always + sizes['gradients'], found.state.trainable
  needs = dry_run_needs.accumulate_needs(spec, masters, attention=attention)
  return [
      Phase(name=name, resident=r, arguments=0, results=0, temporary=t)
      for name, r, t in (
          (
              'prefill',
              always + caches,
              prefilled * dry_run_needs.inside_of_token(spec.rollout_policy),
          ),
          ('decode', always + caches, 2 * 4 * slots * policy.model.vocab_size),
          (
              'accumulate',
              updating + sizes['a micro-batch'],
              sum(needs.values()),
          ),
          ('apply', updating, 2 * dry_run_needs.largest(masters, 4)),
      )
  ]


def num_bytes(tree: PyTree) -> int:
  """Returns the bytes of a tree of shapes on one device."""
  total = 0
  for leaf in jax.tree.leaves(tree):
    where = leaf.sharding
    shape = leaf.shape if where is None else where.shard_shape(leaf.shape)
    total += math.prod(shape) * jnp.dtype(leaf.dtype).itemsize
  return total


# Any: shapes stand where the records name arrays.
def _shape(dtype, *shape: int, sharding=None) -> Any:
  return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _placed(tree: PyTree, mesh) -> Any:
  return jax.tree.map(
      lambda leaf, where: _shape(leaf.dtype, *leaf.shape, sharding=where),
      tree,
      sharding.tree_shardings(tree, mesh),
  )


def largest_prefill(engine: Engine) -> tuple[int, int]:
  """Returns (rows, tokens of each) of the largest prefill of a rollout.

  It is that of the longest prompts. If the KV pools cannot hold all slots at
  full length, it may be that of preempted sequences, with their responses.
  """
  longest, config = engine.config.max_prompt_length, engine.pages.config
  found = [
      (PREFILL_ROWS, next(b for b in engine.buckets if b >= longest)),
  ]
  if config.pages_per_device * config.num_devices < (
      config.num_slots * config.pages_per_slot
  ):
    found += [(engine.reprefill_rows(b), b) for b in engine.buckets]
  rows, tokens = max(found, key=math.prod)
  devices = engine.policy.axes.size
  return -(-rows // devices) * devices, tokens


def _at(tree: PyTree, where) -> Any:
  return jax.tree.map(
      lambda leaf: _shape(leaf.dtype, *leaf.shape, sharding=where), tree
  )
