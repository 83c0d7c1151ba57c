"""Reads the precision-flow graph out of a jaxpr, for subgraph.py.

Two things are known of every value on the way: the operations it comes from,
and along which axes it varies. The second gives a multiplication its scale's
granularity however the scale was broadcast.

In the place of a kernel the walk goes through the plain JAX that it stands for
(`kernels/stands_for.py`), and notes which kernel that was.
"""

import dataclasses
import re
from typing import Any

from jax.extend import core

from jetrl_jax.fp8.flow import facts as flow_facts
from jetrl_jax.fp8.flow.facts import Address, Fact
from jetrl_jax.fp8.flow.graph import (
    FlowEdge,
    FlowGraph,
    FlowKernel,
    FlowNode,
)
from jetrl_jax.fp8.quantization import QUANTIZE

# Everything under a scope of this name is left out of the graph.
SAMPLING = 'sampling'

# Calls whose operands are, one by one, those of the jaxpr they hold. Anything
# else that holds a jaxpr (a reduction's combiner, a kernel's body) is opaque.
_CALLS = ('jaxpr', 'call_jaxpr', 'fun_jaxpr')
_SHORT = {
    'float32': 'f32',
    'float64': 'f64',
    'float16': 'f16',
    'bfloat16': 'bf16',
    'float8_e4m3fn': 'e4m3',
    'float8_e5m2': 'e5m2',
    'int8': 'i8',
    'int32': 'i32',
}


def extract(jaxpr: Any) -> FlowGraph:
  """Returns the precision-flow graph of a traced function.

  Args:
    jaxpr: what `jax.make_jaxpr(f)(...)` returns, or the jaxpr inside it.
  """
  walker = _Walker()
  facts = [flow_facts.fresh(v.aval) for v in _open(jaxpr).invars]
  results = walker.walk(jaxpr, facts, _Scope())
  return walker.graph(results)


@dataclasses.dataclass(frozen=True)
class _Scope:
  names: tuple[str, ...] = ()
  backward: bool = False
  address: Address = ()

  def part(self, index: int) -> '_Scope':
    """One of several jaxprs that an equation holds."""
    return dataclasses.replace(self, address=(*self.address, index))

  def enter(self, name_stack: str, index: int) -> '_Scope':
    """Adds the scopes of an equation, without the marks of transforms."""
    # jit(silu) names a function that was called; jvp(layers_0) wraps a scope.
    text = re.sub(
        r'\b(?:p?jit|remat\w*|checkpoint|custom_\w+|shard_map)\([^()]*\)',
        '',
        name_stack,
    )
    backward = 'transpose(' in text or 'rematted_computation' in text
    text = re.sub(r'\w+\(|\)', '', text)
    markers = (
        'while|body|cond|scan|checkpoint|remat2?|rematted_computation'
        r'|closed_call|core_call|shard_map|branch_\d+_fun|custom_\w+_call'
    )
    names = [n for n in text.split('/') if n and not re.fullmatch(markers, n)]
    return _Scope(
        (*self.names, *names),
        self.backward or backward,
        (*self.address, index),
    )


class _Walker:
  """Collects nodes and edges over a jaxpr and the jaxprs inside it."""

  def __init__(self):
    # A loop's body is visited in every round. The last visit replaces the
    # earlier ones: by then the facts of all carried values are known.
    self._nodes: dict[Address, FlowNode] = {}
    self._depends_on: dict[Address, frozenset[Address]] = {}
    # A dictionary as an ordered set: producer, consumer, dtype.
    self._edges: dict[tuple[Address, Address, str], None] = {}
    # Operations of a quantiser, and kernels.
    self._quantising: set[Address] = set()
    self._kernels: dict[Address, FlowKernel] = {}

  def graph(self, results: list[Fact]) -> FlowGraph:
    """Returns what the results depend on, equal operations as one.

    Differentiating leaves out what is not needed, so dead code must not count
    on the other side either.
    """
    live, todo = set(), set().union(*(f.depends_on for f in results))
    while todo:
      address = todo.pop()
      live.add(address)
      todo |= self._depends_on[address] - live
    self._move_quantisers()
    nodes = {n: None for at, n in self._nodes.items() if at in live}
    edges = {
        FlowEdge(
            producer=self._nodes[producer],
            consumer=self._nodes[consumer],
            dtype=dtype,
        ): None
        for producer, consumer, dtype in self._edges
        if producer in live and consumer in live
    }
    # A kernel is in the graph if something that it computes is.
    kernels = {
        kernel: None
        for at, kernel in self._kernels.items()
        if any(node[: len(at)] == at for node in live)
    }
    return FlowGraph(
        nodes=tuple(nodes), edges=tuple(edges), kernels=tuple(kernels)
    )

  def _move_quantisers(self) -> None:
    """Gives the operations that quantise a dot's operand the dot's path.

    The operation before may do it, in its kernel, or the dot itself.
    """
    readers: dict[Address, list[Address]] = {}
    for producer, consumer, _ in self._edges:
      if producer in self._quantising:
        readers.setdefault(producer, []).append(consumer)

    def dot_of(address) -> FlowNode | None:
      for reader in readers.get(address, ()):
        node = self._nodes[reader]
        found = dot_of(reader) if reader in self._quantising else node
        if found and found.kind == 'dot':
          return found
      return None

    for address in self._quantising:
      dot = dot_of(address)
      if dot is not None:
        node = self._nodes[address]
        self._nodes[address] = dataclasses.replace(node, path=dot.path)

  def walk(self, jaxpr: Any, facts: list[Fact], scope: _Scope) -> list[Fact]:
    """Walks the equations; returns facts of the results."""
    jaxpr = _open(jaxpr)
    known = dict(zip(jaxpr.invars, facts, strict=True))
    known |= {v: flow_facts.fresh(v.aval) for v in jaxpr.constvars}

    def read(atom):
      if isinstance(atom, core.Literal):
        return flow_facts.fresh(atom.aval)
      return known[atom]

    for i, eqn in enumerate(jaxpr.eqns):
      inside = scope.enter(str(eqn.source_info.name_stack), i)
      outs = self._equation(eqn, [read(v) for v in eqn.invars], inside)
      # Indices and booleans cut the flow; an INT8 dot's int32 is a number.
      counts = flow_facts.is_int8_dot(eqn)
      known |= {
          v: fact
          if counts or flow_facts.is_number(v.aval)
          else flow_facts.cut(fact)
          for v, fact in zip(eqn.outvars, outs, strict=True)
      }
    return [read(v) for v in jaxpr.outvars]

  def _equation(self, eqn, facts, scope) -> list[Fact]:
    if SAMPLING in scope.names:
      return [flow_facts.sampled(v.aval, facts) for v in eqn.outvars]
    match eqn.primitive.name:
      case 'while':
        return self._while(eqn, facts, scope)
      case 'scan':
        return self._scan(eqn, facts, scope)
      case 'cond':
        return self._cond(eqn, facts, scope)
    if eqn.primitive.name == 'stands_for':
      return self._stands_for(eqn, facts, scope)
    called = _called(eqn)
    if called is not None:
      return self.walk(called, facts, scope)
    if _is_movement(eqn, facts):
      return flow_facts.moved(eqn, facts)
    return self._node(eqn, facts, scope)

  def _stands_for(self, eqn, facts, scope) -> list[Fact]:
    if eqn.params['kernel']:
      operation, implementation = eqn.params['kernel']
      self._kernels[scope.address] = FlowKernel(
          path='/'.join(scope.names),
          operation=operation,
          implementation=implementation,
      )
    meaning = eqn.params['reference']()
    avals = meaning.in_avals
    pairs = zip(facts, avals, strict=True)
    return self.walk(
        meaning, [flow_facts.of_rank(*pair) for pair in pairs], scope
    )

  def _cond(self, eqn, facts, scope) -> list[Fact]:
    chosen_by = facts[0].depends_on
    branches = [
        self.walk(branch, facts[1:], scope.part(i))
        for i, branch in enumerate(eqn.params['branches'])
    ]
    joined = [flow_facts.join(r) for r in zip(*branches, strict=True)]
    return [flow_facts.depending(f, chosen_by) for f in joined]

  def _while(self, eqn, facts, scope) -> list[Fact]:
    # As in a scan, these are counted and not read from parameters.
    carried = len(eqn.outvars)
    skip = len(_open(eqn.params['cond_jaxpr']).invars) - carried
    split = len(facts) - carried
    test, consts, carry = facts[:skip], facts[skip:split], facts[split:]
    body = eqn.params['body_jaxpr']
    carry, _ = self._loop(body, consts, carry, [], scope.part(0))
    (again,) = self.walk(
        eqn.params['cond_jaxpr'], [*test, *carry], scope.part(1)
    )
    return [flow_facts.depending(f, again.depends_on) for f in carry]

  def _scan(self, eqn, facts, scope) -> list[Fact]:
    # The names of the parameters that count them vary between versions of
    # JAX. What is scanned over, or stacked, has an axis more outside the body.
    body = eqn.params['jaxpr']
    inner = _open(body)
    scanned = _count_reshaped(eqn.invars, inner.invars)
    carried = len(eqn.outvars) - _count_reshaped(eqn.outvars, inner.outvars)
    split = len(facts) - scanned
    first = split - carried
    rows = [
        dataclasses.replace(f, varying=f.varying[1:]) for f in facts[split:]
    ]
    carry, stacked = self._loop(
        body, facts[:first], facts[first:split], rows, scope
    )
    return carry + [
        dataclasses.replace(f, varying=(True, *f.varying)) for f in stacked
    ]

  def _loop(self, body, consts, carry, rows, scope):
    """Walks a loop's body until the facts of its carry no longer change.

    Returns:
      Facts of the carried values and of the body's other results.
    """
    state = carry
    while True:
      outs = self.walk(body, [*consts, *state, *rows], scope)
      pairs = zip(state, outs[: len(state)], strict=True)
      joined = [flow_facts.join(pair) for pair in pairs]
      if joined == state:
        return state, outs[len(state) :]
      state = joined

  def _node(self, eqn, facts, scope) -> list[Fact]:
    op = eqn.primitive.name
    names = scope.names
    varying = flow_facts.varying_axes(eqn, facts)
    granularity = ''
    if flow_facts.is_kernel(eqn):
      op = str(eqn.params.get('name') or eqn.params.get('target_name') or op)
      # A Pallas kernel is also a scope of that name.
      names = names[:-1] if names[-1:] == (op,) else names
    elif op in flow_facts.REDUCTIONS and 'axes' in eqn.params:
      kept = [i not in eqn.params['axes'] for i in range(len(facts[0].varying))]
      granularity = flow_facts.pattern(kept, facts[0].varying, facts[0].block)
    elif op not in flow_facts.DOTS and len(facts) > 1:
      granularity = flow_facts.coarsest(eqn, facts, varying)
    node = FlowNode(
        path='/'.join(n for n in names if n != QUANTIZE),
        op=_with_precision(op, eqn),
        kind=_kind(eqn, granularity),
        inputs=tuple(_dtype(v.aval) for v in eqn.invars),
        outputs=tuple(_dtype(v.aval) for v in eqn.outvars),
        granularity=granularity,
        backward=scope.backward,
    )
    self._nodes[scope.address] = node
    if QUANTIZE in scope.names:
      self._quantising.add(scope.address)
    addresses = frozenset().union(*(f.depends_on for f in facts))
    self._depends_on[scope.address] = addresses
    for v, fact in zip(eqn.invars, facts, strict=True):
      for producer in sorted(fact.sources):
        self._edges[producer, scope.address, _dtype(v.aval)] = None
    return flow_facts.made_by(scope.address, eqn, facts)


def _dtype(aval) -> str:
  name = str(aval.dtype) if hasattr(aval, 'dtype') else str(aval)
  return _SHORT.get(name, name)


def _open(jaxpr: Any) -> Any:
  """Returns the jaxpr without its constants."""
  return jaxpr.jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else jaxpr


def _count_reshaped(outer, inner) -> int:
  """How many values have another shape outside a loop's body than inside."""
  return sum(
      o.aval.shape != i.aval.shape for o, i in zip(outer, inner, strict=True)
  )


def _called(eqn) -> Any:
  """Returns the jaxpr that a call-like equation runs, or None."""
  if flow_facts.is_kernel(eqn) or eqn.primitive.name in flow_facts.REDUCTIONS:
    return None
  for name in _CALLS:
    jaxpr = eqn.params.get(name)
    if isinstance(jaxpr, core.ClosedJaxpr | core.Jaxpr):
      if len(_open(jaxpr).invars) == len(eqn.invars):
        return jaxpr
  return None


def _is_movement(eqn, facts) -> bool:
  op = eqn.primitive.name
  if flow_facts.is_int8_dot(eqn):
    return False
  if (
      not any(flow_facts.is_number(v.aval) for v in eqn.outvars)
      or op in flow_facts.MOVEMENT
  ):
    return True
  if op != 'convert_element_type':
    return False
  given = eqn.invars[0].aval
  if not flow_facts.is_number(given):
    # Here the sums of an INT8 dot are rounded; an index is not.
    return not facts[0].sources
  return given.dtype == eqn.outvars[0].aval.dtype


def _with_precision(op: str, eqn) -> str:
  """A dot of another precision is another operation."""
  precision = eqn.params.get('precision') if op in flow_facts.DOTS else None
  if precision is None:
    return op
  sides = precision if isinstance(precision, tuple) else (precision,)
  return f'{op}[{", ".join(dict.fromkeys(str(p) for p in sides))}]'


def _kind(eqn, granularity: str) -> str:
  op = eqn.primitive.name
  if flow_facts.is_kernel(eqn):
    return 'kernel'
  kinds = {
      'dot': flow_facts.DOTS,
      'cast': flow_facts.CASTS,
      'reduction': flow_facts.REDUCTIONS,
      'transcendental': flow_facts.TRANSCENDENTALS,
  }
  for kind, ops in kinds.items():
    if op in ops:
      return kind
  return 'scale' if op in ('mul', 'div') and granularity else 'arithmetic'
