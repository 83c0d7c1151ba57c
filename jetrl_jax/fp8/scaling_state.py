"""FP8 state: amax histories, scales and health, per fused dot.

The state lives in the Flax collection `_overwrite_with_gradient`. A dot's slot
is a dict {input, kernel, output_grad} of

    amax_history [A]  entry 0 is being filled; 0 means nothing recorded yet
    scale []          in use; changes only in `roll`
    health [5]        sums of the last step: elements, saturated, flushed to
                      zero, signal power, noise power

A dynamic recipe carries nothing from step to step. Its slots are there to be
looked at only: `amax` [], of the last step, and `health`.

New observations leave `jax.grad` as the cotangents of a slot (see
`kernels/quantized_dot/linear.py`); `combine` joins those of several
micro-batches and `observe` is the one function that puts them into the state.
Neither zero nor a non-finite amax is ever recorded, so a layer that the loss
does not reach keeps its history.
"""

import functools
import re
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jetrl_jax.core.sharding import Axes
from jetrl_jax.core.typing import Array, PyTree
from jetrl_jax.fp8 import formats, health
from jetrl_jax.fp8.quantization import is_recordable, scale_from_amax
from jetrl_jax.fp8.recipes import Recipe

COLLECTION = '_overwrite_with_gradient'
OPERANDS = ('input', 'kernel', 'output_grad')


def init_slot(history_length: int) -> PyTree:
  """Returns an empty slot: scale 1, nothing recorded."""
  return {
      operand: {
          'amax_history': jnp.zeros((history_length,), jnp.float32),
          'scale': jnp.ones((), jnp.float32),
          'health': jnp.zeros((len(health.SUMS),), jnp.float32),
      }
      for operand in OPERANDS
  }


def init_dynamic_slot() -> PyTree:
  """Returns the slot of a dot whose scales come from its own operands."""
  return {
      operand: {
          'amax': jnp.zeros((), jnp.float32),
          'health': jnp.zeros((len(health.SUMS),), jnp.float32),
      }
      for operand in OPERANDS
  }


def _is_slot(node: PyTree) -> bool:
  return isinstance(node, dict) and set(node) == set(OPERANDS)


def map_slots(function, *states: PyTree) -> PyTree:
  """Applies `function(slot, ...)` to the slots of equally built states."""
  return jax.tree.map(function, *states, is_leaf=_is_slot)


def _map_beside(function, state: PyTree, *trees: PyTree, path=()) -> PyTree:
  """Applies `function(path, slot, *nodes)`; the trees' nodes at its path."""
  if _is_slot(state):
    return function('/'.join(path), state, *trees)
  return {
      key: _map_beside(
          function, child, *(tree[key] for tree in trees), path=(*path, key)
      )
      for key, child in state.items()
  }


def init_state(params: PyTree, recipe: Recipe) -> PyTree:
  """Returns empty slots for every kernel that the recipe quantises.

  Args:
    params: nested dict of masters (arrays or shapes).
    recipe: names the layers that stay in high precision.

  Raises:
    ValueError: a kernel's shape does not fit the recipe.
  """

  def walk(node, path):
    if not isinstance(node, dict):
      return None
    if 'kernel' in node and recipe.quantizes('/'.join(path)):
      recipe.check_kernel('/'.join(path), node['kernel'].shape)
      if recipe.is_delayed:
        return init_slot(recipe.amax_history_length)
      return init_dynamic_slot()
    children = {key: walk(child, path + (key,)) for key, child in node.items()}
    return {key: child for key, child in children.items() if child} or None

  return walk(params, ()) or {}


def _join(
    largest, total, *states: PyTree, unseen=lambda scale, *_: scale
) -> PyTree:
  """Joins what was seen: amaxes by `largest`, health by `total`."""
  by_name = {'amax_history': largest, 'amax': largest, 'health': total}

  def of_entry(path, *leaves):
    return by_name.get(path[-1].key, unseen)(*leaves)

  return jax.tree_util.tree_map_with_path(of_entry, *states)


def combine(left: PyTree, right: PyTree) -> PyTree:
  """Joins the cotangents of two micro-batches: amax by max, health by sum."""
  return _join(jnp.maximum, jnp.add, left, right)


def reduce_over_devices(cotangents: PyTree, axes: Axes) -> PyTree:
  """Joins the cotangents of all devices (inside `shard_map`)."""
  return _join(axes.pmax, axes.psum, cotangents)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def spread(state: PyTree, uses: int) -> PyTree:
  """Returns the slots `uses` times over, along a new first dim.

  For a dot that is taken in pieces within one `jax.grad`: what its uses
  observe is joined as that of micro-batches.
  """
  return jax.tree.map(lambda x: jnp.broadcast_to(x, (uses, *x.shape)), state)


def _spread_fwd(state, uses):
  return spread(state, uses), None


def _spread_bwd(uses, _, cotangents):
  del uses
  largest, total = (functools.partial(f, axis=0) for f in (jnp.max, jnp.sum))
  return (_join(largest, total, cotangents, unseen=lambda scale: scale[0]),)


spread.defvjp(_spread_fwd, _spread_bwd)


def _record(entry: PyTree, amax: Array) -> PyTree:
  if 'amax' in entry:
    return entry | {'amax': amax}
  history = entry['amax_history']
  kept = jnp.where(is_recordable(amax), amax, 0.0)
  return entry | {'amax_history': history.at[0].max(kept)}


def _seen_amax(entry: PyTree) -> Array:
  return entry['amax'] if 'amax' in entry else entry['amax_history'][0]


def observe(state: PyTree, cotangents: PyTree) -> PyTree:
  """Records what the backward pass saw; scales do not change.

  Args:
    state: the collection.
    cotangents: gradient of the loss "with respect to" the collection, joined
      over micro-batches and devices.

  Returns:
    The state with `amax_history[0]` raised to the observed amax of inputs and
    output gradients (`amax` replaced by it), and their `health` replaced.
  """

  def one(slot, cotangent):
    seen = {
        operand: _record(slot[operand], _seen_amax(cotangent[operand]))
        | {'health': cotangent[operand]['health']}
        for operand in ('input', 'output_grad')
    }
    return slot | seen

  return map_slots(one, state, cotangents)


def _roll_entry(entry: PyTree, dtype, recipe: Recipe) -> PyTree:
  if 'scale' not in entry:
    return entry
  history = entry['amax_history']
  scale = scale_from_amax(jnp.max(history), dtype, **recipe.scaling)
  shifted = jnp.roll(history, 1).at[0].set(0.0)
  # Nothing recorded since the last roll: shifting would only forget, and the
  # oldest of those that the scale is made of is forgotten already.
  recorded = history[0] > 0
  return entry | {
      'amax_history': jnp.where(recorded, shifted, history),
      'scale': jnp.where(recorded, scale, entry['scale']),
  }


def roll(state: PyTree, recipe: Recipe, *, operands: tuple[str, ...]) -> PyTree:
  """Lets what was observed take effect for the named operands.

  Args:
    state: the collection.
    recipe: formats, margin and rounding of the scales.
    operands: which of `OPERANDS` to roll. Input scales roll once per rollout,
      after the last mini-batch that consumes it: otherwise later ratios
      would contain scale jumps.
  """
  formats_of = {
      'input': formats.E4M3,
      'kernel': formats.E4M3,
      'output_grad': recipe.grad_dtype,
  }

  def one(slot):
    rolled = {
        operand: _roll_entry(slot[operand], formats_of[operand], recipe)
        for operand in operands
    }
    return slot | rolled

  return map_slots(one, state)


def observe_kernels(
    state: PyTree, params: PyTree, recipe: Recipe, axes: Axes
) -> PyTree:
  """Records each kernel's amax from its master and rolls the kernel slots.

  The current amax takes part, so a kernel never saturates.
  """

  def record(_, slot, node):
    amax = axes.pmax(jnp.max(jnp.abs(node['kernel'].astype(jnp.float32))))
    return slot | {'kernel': _record(slot['kernel'], amax)}

  state = _map_beside(record, state, params)
  return roll(state, recipe, operands=('kernel',))


def measure_kernels(
    state: PyTree, params: PyTree, weights: PyTree, axes: Axes
) -> PyTree:
  """Records the health of the quantised kernels."""

  def measure(_, slot, node, quantised):
    kernel = node['kernel']
    rows = jnp.ones((kernel.shape[0],), jnp.float32)
    _, sums = health.measure(kernel, quantised['kernel'], rows)
    return slot | {'kernel': slot['kernel'] | {'health': axes.psum(sums)}}

  return _map_beside(measure, state, params, weights)


def forget(state: PyTree, *, operand: str) -> PyTree:
  """Empties an operand's histories; the scales in use stay."""

  def one(slot):
    entry = slot[operand]
    if 'amax_history' not in entry:
      return slot
    empty = {'amax_history': jnp.zeros_like(entry['amax_history'])}
    return slot | {operand: entry | empty}

  return map_slots(one, state)


def restrict(state: PyTree, recipe: Recipe) -> PyTree:
  """Returns the slots of the dots that the recipe quantises."""

  def walk(node, path):
    if _is_slot(node):
      return node if recipe.quantizes('/'.join(path)) else None
    kept = {key: walk(child, (*path, key)) for key, child in node.items()}
    return {key: child for key, child in kept.items() if child} or None

  return walk(state, ()) or {}


def slot_paths(state: PyTree) -> list[str]:
  """Returns the paths of all slots, layers in numerical order."""
  paths = []
  _map_beside(lambda path, _: paths.append(path), state)
  return sorted(
      paths,
      key=lambda p: [
          int(s) if s.isdigit() else s for s in re.split(r'(\d+)', p)
      ],
  )


def with_scales(
    state: PyTree, scales: Mapping[str, tuple[float, float]]
) -> PyTree:
  """Returns the state with known scales of kernels and inputs in use.

  Histories stay as they are: what was seen is not known. Until something is
  recorded, `roll` keeps the scales.

  Args:
    state: the collection.
    scales: from the path of each slot to the scales of its kernel and input.
  """

  def put(path, slot):
    found = zip(('kernel', 'input'), scales[path], strict=True)
    return slot | {
        operand: slot[operand] | {'scale': jnp.float32(scale)}
        for operand, scale in found
    }

  return _map_beside(put, state)
