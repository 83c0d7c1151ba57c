"""AdamW of one part of the model, by the kernel, leaf by leaf."""

from typing import Any

import jax
import jax.numpy as jnp

from jetrl_jax.core.sharding import Axes
from jetrl_jax.core.typing import Array, PyTree
from jetrl_jax.kernels import adamw
from jetrl_jax.kernels.adamw.reference import AdamW
from jetrl_jax.optim import partition


def move_part(
    optimizer: AdamW,
    join: Any,
    axes: Axes,
    is_split: PyTree,
    part: tuple[PyTree, list[PyTree], list],
    gradients: PyTree,
    step_control: tuple[Array, Array, Array | dict],
) -> tuple[PyTree, list[PyTree], list, PyTree]:
  """Moves a part of the model that `fits`, unless the step is skipped.

  Args:
    optimizer: what `reference.adamw` returned.
    join: an `partition.OptStatePartition` of its state.
    axes: of the mesh.
    is_split: tree of whether each device holds rows of its own.
    part: masters, [first moments, second moments] and what the optimiser keeps
      that is not like the masters.
    gradients: like the masters, before clipping.
    step_control: whether the step counts, the gradients' factor and the words
      of `rounding.rounding_keys` for this part, {} to round to the nearest.

  Returns:
    What `part` becomes, but for the shared state of a skipped step: that is as
    if it counted. And the amax of each moved master, see `move`.
  """
  masters, moments, shared = part
  ok, shrink, rounding_keys = step_control
  # Two empty moments: what is left of the state is the shared.
  state = join([{}, {}], shared)
  numbers = [ok.astype(jnp.float32), shrink, *optimizer.rates(state)]
  numbers = jnp.pad(jnp.stack(numbers), (0, 8 - len(numbers)))
  _, state = optimizer.update({}, state, {})
  mask = optimizer.mask(masters) if callable(optimizer.mask) else optimizer.mask
  if mask is None:
    mask = jax.tree.map(lambda _: True, masters)
  leaves, tree = jax.tree.flatten(masters)
  like = [tree.flatten_up_to(t) for t in (gradients, *moments, is_split, mask)]
  moved = []
  for i, (leaf, gradient, mu, nu, split, decays) in enumerate(
      zip(leaves, *like, strict=True)
  ):
    leaf_key = None
    if not isinstance(rounding_keys, dict):
      first = axes.first_row(leaf.shape[0]) if split else 0
      start = jnp.asarray(first, jnp.uint32) * jnp.uint32(
          leaf.size // leaf.shape[0] % 2**32
      )
      leaf_key = jnp.stack([*rounding_keys[i], start, jnp.uint32(0)])
    moved.append(
        adamw.move(
            leaf,
            gradient,
            mu,
            nu,
            numbers,
            leaf_key,
            b1=optimizer.b1,
            b2=optimizer.b2,
            eps=optimizer.eps,
            decay=optimizer.weight_decay if decays else 0.0,
        )
    )
  trainable, mu, nu, amax = (
      tree.unflatten(column) for column in zip(*moved, strict=True)
  )
  return trainable, [mu, nu], partition.split(state, set())[1], amax
