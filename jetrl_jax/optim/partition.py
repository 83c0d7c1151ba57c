"""An optimiser's state by parts of the model: what is like the masters.

Optax nests trees of the masters' structure (moments) among what does not depend
on them (step counts). An optimiser step that moves one part of the model at a
time takes the first apart, and hands the second to every part.
"""

import jax

from jetrl_jax.core.typing import PyTree


class OptStatePartition:
  """Puts together what `split` took apart, for any part of the tree.

  Args:
    opt_state: an example.
    keys: of the masters' outermost dict.
  """

  def __init__(self, opt_state: PyTree, keys: set[str]):
    nodes, self._tree = jax.tree.flatten(
        opt_state, is_leaf=lambda x: _is_masters(x, keys)
    )
    self._like = [_is_masters(node, keys) for node in nodes]

  def __call__(self, like: list, rest: list) -> PyTree:
    """Returns the state of `split`'s two lists."""
    masters, others = iter(like), iter(rest)
    return self._tree.unflatten(
        [next(masters if of else others) for of in self._like]
    )


def split(opt_state: PyTree, keys: set[str]) -> tuple[list, list]:
  """Returns an optimiser's trees like the masters, and the rest.

  Args:
    opt_state: of any optax transformation.
    keys: of the masters' outermost dict.
  """
  nodes = jax.tree.leaves(opt_state, is_leaf=lambda x: _is_masters(x, keys))
  like = [node for node in nodes if _is_masters(node, keys)]
  return like, [node for node in nodes if not _is_masters(node, keys)]


def _is_masters(node: PyTree, keys: set[str]) -> bool:
  return isinstance(node, dict) and set(node) == keys
