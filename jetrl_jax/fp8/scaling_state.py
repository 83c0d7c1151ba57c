"""The scaling state: amax histories, scales and health of each quantised dot.

The state is the Flax collection `_overwrite_with_gradient`. A dot state is a
dict {input, kernel, output_grad} of

    amax_history [A]  entry 0 collects new values; 0 means nothing recorded yet
    scale []          the scale in use; only `roll` changes it
    health [5]        sums of the last step: elements, saturated, flushed to
                      zero, signal power, noise power

A dynamic recipe needs nothing from earlier steps. Its dot states are only for
metrics: the last step's `amax` [] and `health`.

`jax.grad` returns new observations as the cotangents of a dot state (see
`kernels/quantized_dot/linear.py`). `stack_observations` makes one array of a
parameter group's, because a GPU starts a kernel for each array:

    observed [2, dots, 6]    of inputs and of output gradients, by dot: amax,
                             then health

`combine` joins those of several micro-batches, and only `observe` writes them
to the state. An amax that is zero or not finite is never recorded, so a layer
that the loss does not reach keeps its history.
"""

import functools
import re
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jetrl_jax.core.collectives import Axes
from jetrl_jax.core.typing import Array, PyTree
from jetrl_jax.fp8 import formats, health
from jetrl_jax.fp8.quantization import is_recordable, scale_from_amax
from jetrl_jax.fp8.recipes import Recipe

COLLECTION = '_overwrite_with_gradient'
OPERANDS = ('input', 'kernel', 'output_grad')
# What a backward pass observes, in the order of `stack_observations`.
_OBSERVED = ('input', 'output_grad')


def init_dot_state(history_length: int) -> PyTree:
  """Returns an empty dot state: scale 1, nothing recorded."""
  return {
      operand: {
          'amax_history': jnp.zeros((history_length,), jnp.float32),
          'scale': jnp.ones((), jnp.float32),
          'health': jnp.zeros((len(health.SUMS),), jnp.float32),
      }
      for operand in OPERANDS
  }


def init_dynamic_dot_state() -> PyTree:
  """Returns that of a dot whose scales come from its own operands."""
  return {
      operand: {
          'amax': jnp.zeros((), jnp.float32),
          'health': jnp.zeros((len(health.SUMS),), jnp.float32),
      }
      for operand in OPERANDS
  }


def _is_dot_state(node: PyTree) -> bool:
  return isinstance(node, dict) and set(node) == set(OPERANDS)


def map_dot_states(function, *states: PyTree) -> PyTree:
  """Applies `function(dot_state, ...)` to those of equally built states."""
  return jax.tree.map(function, *states, is_leaf=_is_dot_state)


def _map_beside(function, state: PyTree, *trees: PyTree, path=()) -> PyTree:
  """Applies `function(path, dot_state, *nodes)`; nodes are those of `trees`."""
  if _is_dot_state(state):
    return function('/'.join(path), state, *trees)
  return {
      key: _map_beside(
          function, child, *(tree[key] for tree in trees), path=(*path, key)
      )
      for key, child in state.items()
  }


def init_state(params: PyTree, recipe: Recipe) -> PyTree:
  """Returns an empty dot state for every kernel that the recipe quantises.

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
        return init_dot_state(recipe.amax_history_length)
      return init_dynamic_dot_state()
    children = {key: walk(child, path + (key,)) for key, child in node.items()}
    return {key: child for key, child in children.items() if child} or None

  return walk(params, ()) or {}


def stack_observations(cotangents: PyTree) -> PyTree:
  """Returns the observations in one array of each parameter group.

  Args:
    cotangents: the loss's gradient with respect to the scaling state.

  Returns:
    key of the group -> float32 [2, dots, 6], see above; the dots are in the
    order of their paths.
  """

  def of_group(group):
    dot_states = jax.tree.leaves(group, is_leaf=_is_dot_state)
    numbers = []
    for operand in _OBSERVED:
      for dot_state in dot_states:
        numbers += [
            _seen_amax(dot_state[operand]),
            dot_state[operand]['health'],
        ]
    return jnp.concatenate(numbers).reshape(len(_OBSERVED), len(dot_states), -1)

  return {key: of_group(group) for key, group in cotangents.items()}


def _seen_amax(entry: PyTree) -> Array:
  return entry['amax'][None] if 'amax' in entry else entry['amax_history'][:1]


def combine(left: PyTree, right: PyTree) -> PyTree:
  """Joins observations of two micro-batches: amaxes by max, health by sum."""
  is_amax = jnp.arange(1 + len(health.SUMS)) == 0
  return jax.tree.map(
      lambda a, b: jnp.where(is_amax, jnp.maximum(a, b), a + b), left, right
  )


def reduce_over_devices(observed: PyTree, axes: Axes) -> PyTree:
  """Joins the observations of all devices (inside `shard_map`)."""
  if axes.devices == 1:
    return observed

  def of_group(observed):
    amax, sums = observed[..., :1], observed[..., 1:]
    # Devices of `tensor` see the same inputs, and each its own outputs.
    sums = jnp.stack([axes.psum(sums[0]), axes.psum_all(sums[1])])
    return jnp.concatenate([axes.pmax(amax), sums], axis=-1)

  return jax.tree.map(of_group, observed)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def spread(state: PyTree, uses: int) -> PyTree:
  """Returns `uses` copies of the dot states, along a new first axis.

  This is for a dot that is computed in several pieces within one `jax.grad`.
  The observations of its uses are joined like those of micro-batches.
  """
  return jax.tree.map(lambda x: jnp.broadcast_to(x, (uses, *x.shape)), state)


def _spread_fwd(state, uses):
  return spread(state, uses), None


def _spread_bwd(uses, _, cotangents):
  del uses

  def join(path, leaf):
    match path[-1].key:
      case 'amax_history' | 'amax':
        return jnp.max(leaf, axis=0)
      case 'health':
        return jnp.sum(leaf, axis=0)
      case _:
        return leaf[0]

  return (jax.tree_util.tree_map_with_path(join, cotangents),)


spread.defvjp(_spread_fwd, _spread_bwd)


def _with_amax(entry: PyTree, amax: Array) -> PyTree:
  if 'amax' in entry:
    return entry | {'amax': amax}
  history = entry['amax_history']
  kept = jnp.where(is_recordable(amax), amax, 0.0)
  return entry | {'amax_history': history.at[0].max(kept)}


def _map_observed(write, state: PyTree, observed: PyTree) -> PyTree:
  """Writes observations to their operands' entries.

  Args:
    write: function of (entry, amax [], the sums of its health [5]).
    state: the scaling state, or a part of it.
    observed: an array for each of its parameter groups, see
      `stack_observations`.
  """

  def of_group(observed, group):
    dot_states, tree = jax.tree.flatten(group, is_leaf=_is_dot_state)
    written = [
        dot_state
        | {
            operand: write(dot_state[operand], seen[i, 0], seen[i, 1:])
            for operand, seen in zip(_OBSERVED, observed, strict=True)
        }
        for i, dot_state in enumerate(dot_states)
    ]
    return tree.unflatten(written)

  return jax.tree.map(of_group, observed, state)


def observe(state: PyTree, observed: PyTree) -> PyTree:
  """Records the observations of the backward pass; scales do not change.

  Args:
    state: the scaling state, or that of one parameter group.
    observed: what `stack_observations` returned, joined over micro-batches and
      devices, or one group's array.

  Returns:
    The state, in which inputs and output gradients have new health, and
    `amax_history[0]` is raised to the observed amax (`amax` is replaced by it).
  """

  def write(entry, amax, sums):
    return _with_amax(entry, amax) | {'health': sums}

  return _map_observed(write, state, observed)


def observe_health(state: PyTree, observed: PyTree) -> PyTree:
  """Records the health that a backward pass saw; nothing else changes.

  Args:
    state: the scaling state, whose scales that pass used.
    observed: see `observe`.
  """
  return _map_observed(
      lambda entry, _, sums: entry | {'health': sums}, state, observed
  )


def _roll_entry(entry: PyTree, dtype, recipe: Recipe) -> PyTree:
  if 'scale' not in entry:
    return entry
  history = entry['amax_history']
  scale = scale_from_amax(jnp.max(history), dtype, **recipe.scaling)
  shifted = jnp.roll(history, 1).at[0].set(0.0)
  # If nothing was recorded since the last roll, the history does not shift;
  # that would only drop old entries.
  recorded = history[0] > 0
  return entry | {
      'amax_history': jnp.where(recorded, shifted, history),
      'scale': jnp.where(recorded, scale, entry['scale']),
  }


def roll(state: PyTree, recipe: Recipe, *, operands: tuple[str, ...]) -> PyTree:
  """Computes new scales from the histories of the named operands.

  Args:
    state: the scaling state.
    recipe: formats, margin and rounding of the scales.
    operands: some of `OPERANDS`. Input scales roll once per rollout, after the
      last mini-batch on it; otherwise later ratios would contain jumps of the
      scales.
  """
  formats_of = {
      'input': formats.E4M3,
      'kernel': formats.E4M3,
      'output_grad': recipe.grad_dtype,
  }

  def one(dot_state):
    rolled = {
        operand: _roll_entry(dot_state[operand], formats_of[operand], recipe)
        for operand in operands
    }
    return dot_state | rolled

  return map_dot_states(one, state)


def observe_kernels(
    state: PyTree, params: PyTree, recipe: Recipe, axes: Axes
) -> PyTree:
  """Records each kernel's amax from its master and rolls the kernels' scales.

  The current amax is included, so a kernel never saturates.
  """

  def observe_kernel(_, dot_state, node):
    amax = axes.pmax(jnp.max(jnp.abs(node['kernel'].astype(jnp.float32))))
    return dot_state | {'kernel': _with_amax(dot_state['kernel'], amax)}

  state = _map_beside(observe_kernel, state, params)
  return roll(state, recipe, operands=('kernel',))


def measure_kernels(
    state: PyTree, params: PyTree, weights: PyTree, axes: Axes
) -> PyTree:
  """Records the health of the quantised kernels."""

  def measure(_, dot_state, node, quantised):
    kernel = node['kernel']
    rows = jnp.ones((kernel.shape[0],), jnp.float32)
    _, sums = health.measure(kernel, quantised['kernel'], rows)
    sums = axes.psum_all(sums)
    return dot_state | {'kernel': dot_state['kernel'] | {'health': sums}}

  return _map_beside(measure, state, params, weights)


def forget(state: PyTree, *, operand: str) -> PyTree:
  """Clears an operand's histories; the scales in use stay."""

  def one(dot_state):
    entry = dot_state[operand]
    if 'amax_history' not in entry:
      return dot_state
    empty = {'amax_history': jnp.zeros_like(entry['amax_history'])}
    return dot_state | {operand: entry | empty}

  return map_dot_states(one, state)


def restrict(state: PyTree, recipe: Recipe) -> PyTree:
  """Returns the state of the dots that the recipe quantises."""

  def walk(node, path):
    if _is_dot_state(node):
      return node if recipe.quantizes('/'.join(path)) else None
    kept = {key: walk(child, (*path, key)) for key, child in node.items()}
    return {key: child for key, child in kept.items() if child} or None

  return walk(state, ()) or {}


def dot_paths(state: PyTree) -> list[str]:
  """Returns the paths of all dot states, layers in numerical order."""
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
  """Returns the state with given scales for kernels and inputs.

  Histories do not change. `roll` keeps these scales until something is
  recorded.

  Args:
    state: the scaling state.
    scales: path of each dot state -> scales of its (kernel, input).
  """

  def put(path, dot_state):
    found = zip(('kernel', 'input'), scales[path], strict=True)
    return dot_state | {
        operand: dot_state[operand] | {'scale': jnp.float32(scale)}
        for operand, scale in found
    }

  return _map_beside(put, state)
