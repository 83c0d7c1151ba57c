"""The precision-flow graph as data: what it holds and how it is shown.

A graph is a set of nodes and a set of edges, each in program order of its first
appearance. Shapes and multiplicities are left out on purpose: a decode loop and
a teacher-forced forward run the same operation on other numbers of rows and
another number of times.
"""

import dataclasses
import re

_NO_SCOPE = '(no scope)'


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
    return self.path or _NO_SCOPE

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


@dataclasses.dataclass(frozen=True, kw_only=True, order=True)
class FlowKernel:
  """A kernel, in whose place the graph has the nodes of its reference.

  Attributes:
    path: named scopes around it.
    operation: a row of `kernels.dispatch.TABLE`.
    implementation: its name there.
  """

  path: str
  operation: str
  implementation: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlowGraph:
  """The precision flow of one function.

  Attributes:
    nodes: all different, in program order.
    edges: all different, between `nodes`.
    kernels: that compute some of the nodes, in program order; XLA computes the
      others.
  """

  nodes: tuple[FlowNode, ...]
  edges: tuple[FlowEdge, ...]
  kernels: tuple[FlowKernel, ...] = ()

  def by_path(self) -> dict[str, list[FlowNode]]:
    """Returns the nodes of each path, both in program order."""
    paths = {}
    for node in self.nodes:
      paths.setdefault(node.path, []).append(node)
    return paths

  def implementations(self) -> str:
    """Says what computes each dot with a weight, and which kernels run.

    Layers that compute alike are one, as in 'layers_*/attn/qkv: dot e4m3 x e4m3
    -> bf16; layers_*/attn/attention: decode_attention by mosaic_sm90'.
    """
    said = {_any_layer(node.path): {} for node in self.nodes}
    for kernel in self.kernels:
      by = f'{kernel.operation} by {kernel.implementation}'
      said.setdefault(_any_layer(kernel.path), {})[by] = None
    for node in self.nodes:
      # The names of sums and of attention contain their precision.
      if node.op == 'dot_general' and not node.backward:
        formats = f'dot {" x ".join(node.inputs)} -> {node.outputs[0]}'
        said[_any_layer(node.path)][formats] = None
    return '; '.join(f'{at}: {", ".join(by)}' for at, by in said.items() if by)

  def to_text(self) -> str:
    """Returns a listing, layer by layer."""
    lines = [f'{len(self.nodes)} operations, {len(self.edges)} edges']
    kernels = {}
    for kernel in self.kernels:
      by = f'{kernel.operation} by {kernel.implementation}'
      kernels.setdefault(kernel.path, []).append(by)
    paths = self.by_path()
    for path in dict.fromkeys([*paths, *kernels]):
      lines.append(path or _NO_SCOPE)
      lines += [f'  {"kernel":<15} {by}' for by in kernels.get(path, ())]
      nodes = paths.get(path, ())
      lines += [f'  {node.kind:<15} {node.signature()}' for node in nodes]
    return '\n'.join(lines) + '\n'


def _any_layer(path: str) -> str:
  path = re.sub(r'layers_\d+', 'layers_*', path)
  return path.removeprefix('Decoder/') or _NO_SCOPE
