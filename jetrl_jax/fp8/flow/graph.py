"""The precision-flow graph as data: what it holds and how it is shown.

A graph is a set of nodes and a set of edges, each in program order of its first
appearance. Shapes and multiplicities are left out on purpose: a decode loop and
a teacher-forced forward run the same operation on other numbers of rows and
another number of times.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True, order=True)
class FlowNode:
  """One operation on floats.

  Attributes:
    path: named scopes around it, joined by '/', e.g. 'layers_0/attn/qkv'.
    op: JAX primitive, or the name of an opaque kernel.
    kind: 'dot', 'cast', 'scale', 'reduction', 'transcendental', 'arithmetic' or
      'kernel'.
    inputs: dtypes of the operands.
    outputs: dtypes of the results.
    granularity: for an elementwise operation what its coarsest operand is
      shared by ('per tensor', 'per row', 'per channel', 'per block of 128', or
      '' where all operands are as fine as the result); for a reduction what one
      result stands for.
    backward: True in the transposed part of a differentiated function.
  """

  path: str
  op: str
  kind: str
  inputs: tuple[str, ...]
  outputs: tuple[str, ...]
  granularity: str
  backward: bool

  @property
  def place(self) -> str:
    """The path, for people."""
    return self.path or '(no scope)'

  def signature(self) -> str:
    """Returns the node without its path, for people."""
    formats = f'({", ".join(self.inputs)}) -> {", ".join(self.outputs)}'
    words = [f'{self.op} {formats}', self.granularity]
    words.append('backward' if self.backward else '')
    return ', '.join(word for word in words if word)

  def __str__(self) -> str:
    return f'{self.place}: {self.signature()}'


@dataclasses.dataclass(frozen=True, kw_only=True, order=True)
class FlowEdge:
  """A result that reaches an operation, through data movement only.

  Attributes:
    producer: where the value was computed.
    consumer: where it is used.
    dtype: what flows.
  """

  producer: FlowNode
  consumer: FlowNode
  dtype: str

  def __str__(self) -> str:
    return f'{self.producer} --{self.dtype}--> {self.consumer}'


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlowGraph:
  """The precision flow of one function.

  Attributes:
    nodes: all different, in program order.
    edges: all different, between `nodes`.
  """

  nodes: tuple[FlowNode, ...]
  edges: tuple[FlowEdge, ...]

  def by_path(self) -> dict[str, list[FlowNode]]:
    """Returns the nodes of each path, both in program order."""
    paths = {}
    for node in self.nodes:
      paths.setdefault(node.path, []).append(node)
    return paths

  def to_text(self) -> str:
    """Returns a listing, layer by layer."""
    lines = [f'{len(self.nodes)} operations, {len(self.edges)} edges']
    for nodes in self.by_path().values():
      lines.append(nodes[0].place)
      lines += [f'  {node.kind:<15} {node.signature()}' for node in nodes]
    return '\n'.join(lines) + '\n'
