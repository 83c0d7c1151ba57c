"""Splits an optimiser's state into parameter groups.

An optax state mixes trees that are structured like the masters (moments) with
leaves that do not depend on them (step counts). The optimiser step updates one
parameter group at a time. It splits the first kind by group and passes the
second kind to every group.
"""

import jax

from jetrl_jax.core.typing import PyTree


class OptStatePartition:
  """Rebuilds an optimiser state from `split`'s lists, for any group.

  Args:
    opt_state: an example.
    keys: keys of the masters' outermost dict.
  """

  def __init__(self, opt_state: PyTree, keys: set[str]):
    nodes, self._tree = jax.tree.flatten(
        opt_state, is_leaf=lambda x: _is_masters(x, keys)
    )
    self._like = [_is_masters(node, keys) for node in nodes]

  def __call__(self, like: list, rest: list) -> PyTree:
    """Returns the optimiser state that consists of `split`'s two lists."""
    masters, others = iter(like), iter(rest)
    return self._tree.unflatten(
        [next(masters if of else others) for of in self._like]
    )


def split(opt_state: PyTree, keys: set[str]) -> tuple[list, list]:
  """Returns (an optimiser's trees like the masters, its other leaves).

  Args:
    opt_state: the state of any optax transformation.
    keys: keys of the masters' outermost dict.
  """
  nodes = jax.tree.leaves(opt_state, is_leaf=lambda x: _is_masters(x, keys))
  like = [node for node in nodes if _is_masters(node, keys)]
  return like, [node for node in nodes if not _is_masters(node, keys)]


def _is_masters(node: PyTree, keys: set[str]) -> bool:
  return isinstance(node, dict) and set(node) == keys
