"""Is the rollout's precision flow part of the training forward's?

`extract` (walk.py) reads a jaxpr and keeps what can change a number: dots,
casts, scale multiplications, reductions, transcendentals and other
arithmetic, on floats and INT8. A kernel counts as the plain JAX that it stands
for, if it says what that is; else it is opaque. Data movement is left out
and so are indices, booleans and everything under a scope named 'sampling',
which cut the flow: the token that was sampled is an input, as it is in
training. `check_subgraph` then lists what the rollout does and the training
forward does not: another format, another scale granularity, another place of
rounding.

A match is necessary for equal bits and not sufficient: the graph knows nothing
of the order in which a kernel adds, nor of the values of constants.

References:
  Jet-RL, arXiv:2601.14243: "G_infer is a subgraph of G_train_forward".
"""

import dataclasses

from jetrl_jax.fp8.flow.graph import FlowGraph, FlowNode


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
  """Something the rollout does and the training forward does not.

  Attributes:
    node: the rollout's operation, or the one that is fed differently.
    infer: what the rollout has, in words.
    train: what training has in its place, in words; may be empty.
  """

  node: FlowNode
  infer: str
  train: tuple[str, ...]

  def __str__(self) -> str:
    train = '; '.join(self.train) or f'no {self.node.op} there'
    return (
        f'{self.node.place}: the rollout has {self.infer}; training has {train}'
    )


def check_subgraph(g_infer: FlowGraph, g_train: FlowGraph) -> list[Difference]:
  """Returns what `g_infer` has and `g_train` lacks, in program order.

  An edge is reported only between operations that both graphs have.
  """
  train_nodes = set(g_train.nodes)
  found = [
      (order, _node_difference(node, g_infer, g_train))
      for order, node in enumerate(g_infer.nodes)
      if node not in train_nodes
  ]
  order = {node: i for i, node in enumerate(g_infer.nodes)}
  for edge in set(g_infer.edges) - set(g_train.edges):
    if edge.producer in train_nodes and edge.consumer in train_nodes:
      when = max(order[edge.producer], order[edge.consumer])
      found.append((when, _edge_difference(edge, g_train)))
  found.sort(key=lambda entry: (entry[0], str(entry[1])))
  return [difference for _, difference in found]


def _node_difference(node, g_infer, g_train) -> Difference:
  key = (node.path, node.op, node.backward)
  same = [n for n in g_train.nodes if (n.path, n.op, n.backward) == key]
  # A node that the rollout also has is the counterpart of another one.
  rest = [n for n in same if n not in set(g_infer.nodes)] or same
  return Difference(
      node=node,
      infer=node.signature(),
      train=tuple(n.signature() for n in rest),
  )


def _edge_difference(edge, g_train) -> Difference:
  return Difference(
      node=edge.consumer,
      infer=(
          f'{edge.consumer.signature()}, fed by {edge.producer} ({edge.dtype})'
      ),
      train=tuple(
          f'it fed by {e.producer} ({e.dtype})'
          for e in g_train.edges
          if e.consumer == edge.consumer
      ),
  )


def require_subgraph(g_infer: FlowGraph, g_train: FlowGraph) -> None:
  """Raises if the rollout does anything that the training forward does not.

  Raises:
    ValueError: names the first operation that differs, in program order of the
      rollout, and what each side has.
  """
  differences = check_subgraph(g_infer, g_train)
  if differences:
    raise ValueError(
        'the rollout and the training forward differ in precision, first at'
        f' {differences[0]} ({len(differences)} differences in all). Sampling'
        ' would then be off-policy: make both call the same function with the'
        ' same recipe.'
    )
