"""AdamW of one parameter group by the kernel, leaf by leaf."""

import jax
import jax.numpy as jnp

from jetrl_jax.core.collectives import Axes
from jetrl_jax.core.typing import PyTree
from jetrl_jax.kernels import adamw
from jetrl_jax.kernels.adamw.reference import AdamW
from jetrl_jax.optim import partition
from jetrl_jax.optim.types import StepControl


def update_group(
    optimizer: AdamW,
    join: partition.OptStatePartition,
    axes: Axes,
    is_split: PyTree,
    group: tuple[PyTree, list[PyTree], list],
    gradients: PyTree,
    control: StepControl,
) -> tuple[PyTree, list[PyTree], list, PyTree]:
  """Updates a parameter group that `fits`, unless the step is skipped.

  Args:
    optimizer: the result of `reference.adamw`.
    join: rebuilds the optimiser's state.
    axes: the mesh's axes.
    is_split: tree of bools: whether each device holds its own rows of a master.
    group: masters, [first moments, second moments], and the optimiser's leaves
      that do not depend on the group.
    gradients: like the masters, before clipping.
    control: what the step decided for all groups.

  Returns:
    (masters, moments, the optimiser's other leaves, amax of each new master).
    The other leaves of a skipped step are as if it counted.
  """
  masters, moments, shared = group
  ok, clip_factor, rounding_keys = control
  # With empty moments only the shared leaves are left of the state.
  state = join([{}, {}], shared)
  numbers = [ok.astype(jnp.float32), clip_factor, *optimizer.rates(state)]
  numbers = jnp.pad(jnp.stack(numbers), (0, 8 - len(numbers)))
  _, state = optimizer.update({}, state, {})
  mask = optimizer.mask(masters) if callable(optimizer.mask) else optimizer.mask
  if mask is None:
    mask = jax.tree.map(lambda _: True, masters)
  leaves, tree = jax.tree.flatten(masters)
  like = [tree.flatten_up_to(t) for t in (gradients, *moments, is_split, mask)]
  updated = []
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
    updated.append(
        adamw.update(
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
      tree.unflatten(column) for column in zip(*updated, strict=True)
  )
  return trainable, [mu, nu], partition.split(state, set())[1], amax
