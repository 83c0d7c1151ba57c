"""What the kernels share: the leaves they take, in groups of 128 values."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jetrl_jax.core.typing import Array, PyTree
from jetrl_jax.kernels.adamw import reference
from jetrl_jax.kernels.adamw.reference import GROUP, EncodedMoment

_MOST, _LEAST = 16, 4  # Groups of a program.


def of_program(shape: tuple[int, ...]) -> int:
  """Largest power of two that divides the groups, at most `_MOST`."""
  groups = math.prod(shape) // GROUP
  return min(groups & -groups, _MOST)


def fits(
    optimizer: Any, masters: PyTree, gradients: PyTree, moments: list[PyTree]
) -> bool:
  """Whether a kernel takes a parameter group, see the package's `fits`."""
  leaves, tree = jax.tree.flatten(masters)
  if (
      not isinstance(optimizer, reference.AdamW)
      or not leaves
      or len(moments) != 2
  ):
    return False
  all_fit = (
      _fits(*leaf)
      for leaf in zip(
          leaves,
          tree.flatten_up_to(gradients),
          *(tree.flatten_up_to(moment) for moment in moments),
          strict=True,
      )
  )
  return all(all_fit)


def _fits(master: Array, gradient: Array, *moments: PyTree) -> bool:
  """Whether a kernel can move a leaf: whole groups, and some to share."""
  shape = master.shape
  if not shape or shape[-1] % GROUP or not 0 < math.prod(shape) < 2**31:
    return False
  groups = (*shape[:-1], shape[-1] // GROUP)
  return (
      of_program(shape) >= _LEAST
      and all(
          a.dtype in (jnp.float32, jnp.bfloat16) for a in (master, gradient)
      )
      and all(
          isinstance(moment, EncodedMoment) and moment.c.shape == groups
          for moment in moments
      )
  )


def flat(
    gradient: Array, master: Array, mu: EncodedMoment, nu: EncodedMoment
) -> list[Array]:
  """Returns ten arrays: values [groups, 128], and numbers of groups.

  They are the gradient, the master, and of each moment values, scale, k and c.
  """
  arrays = [gradient, master]
  for moment in (mu, nu):
    arrays += [moment.values, moment.scale, moment.k, moment.c]
  return [
      a.reshape(-1, GROUP) if a.shape == master.shape else a.reshape(-1)
      for a in arrays
  ]


def unflattened(
    arrays: list[Array], master: Array, mu: EncodedMoment
) -> tuple[Array, EncodedMoment, EncodedMoment]:
  """Returns what `flat` took, but for the gradient.

  Args:
    arrays: nine.
    master: has the shape of the first, and of the values.
    mu: has those of the numbers.
  """

  def moment(values, *numbers) -> EncodedMoment:
    scale, k, c = (a.reshape(mu.c.shape) for a in numbers)
    values = values.reshape(master.shape)
    return EncodedMoment(values=values, scale=scale, k=k, c=c)

  first, second = arrays[1:5], arrays[5:]
  return arrays[0].reshape(master.shape), moment(*first), moment(*second)
