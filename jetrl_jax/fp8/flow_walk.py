"""Reads the precision-flow graph out of a jaxpr; flow.py says what it is for.

Two things are known of every value on the way: the operations it comes from,
and along which axes it varies. The second gives a multiplication its scale's
granularity however the scale was broadcast.
"""

import dataclasses
import re
from typing import Any

from jax.extend import core

from jetrl_jax.fp8 import flow_facts
from jetrl_jax.fp8.flow_facts import Fact
from jetrl_jax.fp8.flow_graph import FlowEdge, FlowGraph, FlowNode

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
}


def extract(jaxpr: Any) -> FlowGraph:
  """Returns the precision-flow graph of a traced function.

  Args:
    jaxpr: what `jax.make_jaxpr(f)(...)` returns, or the jaxpr inside it.
  """
  walker = _Walker()
  facts = [flow_facts.fresh(v.aval) for v in _open(jaxpr).invars]
  walker.walk(jaxpr, facts, _Scope())
  return FlowGraph(nodes=tuple(walker.nodes), edges=tuple(walker.edges))


@dataclasses.dataclass(frozen=True)
class _Scope:
  names: tuple[str, ...] = ()
  backward: bool = False

  def enter(self, name_stack: str) -> '_Scope':
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
    return _Scope((*self.names, *names), self.backward or backward)


class _Walker:
  """Collects nodes and edges over a jaxpr and the jaxprs inside it."""

  def __init__(self):
    # Dictionaries as ordered sets.
    self.nodes: dict[FlowNode, None] = {}
    self.edges: dict[FlowEdge, None] = {}
    self._recording = True

  def walk(self, jaxpr: Any, facts: list[Fact], scope: _Scope) -> list[Fact]:
    """Walks the equations; returns facts of the results."""
    jaxpr = _open(jaxpr)
    known = dict(zip(jaxpr.invars, facts, strict=True))
    known |= {v: flow_facts.fresh(v.aval) for v in jaxpr.constvars}

    def read(atom):
      if isinstance(atom, core.Literal):
        return flow_facts.fresh(atom.aval)
      return known[atom]

    for eqn in jaxpr.eqns:
      outs = self._equation(eqn, [read(v) for v in eqn.invars], scope)
      # Integers and booleans cut the flow.
      known |= {
          v: fact
          if flow_facts.is_float(v.aval)
          else dataclasses.replace(fact, sources=frozenset())
          for v, fact in zip(eqn.outvars, outs, strict=True)
      }
    return [read(v) for v in jaxpr.outvars]

  def _equation(self, eqn, facts, scope) -> list[Fact]:
    op = eqn.primitive.name
    inside = scope.enter(str(eqn.source_info.name_stack))
    if SAMPLING in inside.names:
      return [flow_facts.fresh(v.aval) for v in eqn.outvars]
    if op == 'while':
      return self._while(eqn, facts, inside)
    if op == 'scan':
      return self._scan(eqn, facts, inside)
    if op == 'cond':
      branches = [
          self.walk(branch, facts[1:], inside)
          for branch in eqn.params['branches']
      ]
      return [
          flow_facts.join(results) for results in zip(*branches, strict=True)
      ]
    called = _called(eqn)
    if called is not None:
      return self.walk(called, facts, inside)
    if _is_movement(eqn):
      return flow_facts.moved(eqn, facts)
    return self._node(eqn, facts, inside)

  def _while(self, eqn, facts, scope) -> list[Fact]:
    # As in a scan: counted, not read from parameters.
    carried = len(eqn.outvars)
    skip = len(_open(eqn.params['cond_jaxpr']).invars) - carried
    split = len(facts) - carried
    test, consts, carry = facts[:skip], facts[skip:split], facts[split:]
    carry, _ = self._loop(eqn.params['body_jaxpr'], consts, carry, [], scope)
    self.walk(eqn.params['cond_jaxpr'], [*test, *carry], scope)
    return carry

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
    """Walks a loop's body until what is carried no longer changes.

    Returns:
      Facts of the carried values and of the body's other results.
    """

    def settle(state, follow_sources):
      while True:
        outs = self.walk(body, [*consts, *state, *rows], scope)
        pairs = zip(state, outs[: len(state)], strict=True)
        joined = [flow_facts.join(pair) for pair in pairs]
        if not follow_sources:
          joined = [flow_facts.without_sources(f) for f in joined]
        if joined == state:
          return state
        state = joined

    recording, self._recording = self._recording, False
    # What varies first: the granularity of a node, and so its identity, depends
    # on it, and a source found too early would be another node.
    shapes = settle([flow_facts.without_sources(f) for f in carry], False)
    state = settle(
        [
            dataclasses.replace(shape, sources=f.sources)
            for shape, f in zip(shapes, carry, strict=True)
        ],
        True,
    )
    self._recording = recording
    outs = self.walk(body, [*consts, *state, *rows], scope)
    return state, outs[len(state) :]

  def _node(self, eqn, facts, scope) -> list[Fact]:
    op = eqn.primitive.name
    names = scope.names
    varying = flow_facts.varying_axes(eqn, facts)
    granularity = ''
    if op in flow_facts.KERNELS:
      op = str(eqn.params.get('name') or eqn.params.get('target_name') or op)
      # A Pallas kernel is a scope of its own name too.
      names = names[:-1] if names[-1:] == (op,) else names
    elif op in flow_facts.REDUCTIONS and 'axes' in eqn.params:
      kept = [i not in eqn.params['axes'] for i in range(len(facts[0].varying))]
      granularity = flow_facts.pattern(kept, facts[0].varying, facts[0].block)
    elif op not in flow_facts.DOTS and len(facts) > 1:
      granularity = flow_facts.coarsest(eqn, facts, varying)
    node = FlowNode(
        path='/'.join(names),
        op=_with_precision(op, eqn),
        kind=_kind(eqn, granularity),
        inputs=tuple(_dtype(v.aval) for v in eqn.invars),
        outputs=tuple(_dtype(v.aval) for v in eqn.outvars),
        granularity=granularity,
        backward=scope.backward,
    )
    if self._recording:
      self.nodes[node] = None
      for v, fact in zip(eqn.invars, facts, strict=True):
        for producer in sorted(fact.sources):
          edge = FlowEdge(
              producer=producer, consumer=node, dtype=_dtype(v.aval)
          )
          self.edges[edge] = None
    block = flow_facts.common_block(facts, varying)
    return [
        Fact(
            frozenset([node]),
            varying
            if len(varying) == len(v.aval.shape)
            else flow_facts.all_axes(v.aval),
            block,
        )
        for v in eqn.outvars
    ]


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
  if eqn.primitive.name in flow_facts.KERNELS | flow_facts.REDUCTIONS:
    return None
  for name in _CALLS:
    jaxpr = eqn.params.get(name)
    if isinstance(jaxpr, core.ClosedJaxpr | core.Jaxpr):
      if len(_open(jaxpr).invars) == len(eqn.invars):
        return jaxpr
  return None


def _is_movement(eqn) -> bool:
  op = eqn.primitive.name
  if (
      not any(flow_facts.is_float(v.aval) for v in eqn.outvars)
      or op in flow_facts.MOVEMENT
  ):
    return True
  if op != 'convert_element_type':
    return False
  given = eqn.invars[0].aval
  return (
      not flow_facts.is_float(given) or given.dtype == eqn.outvars[0].aval.dtype
  )


def _with_precision(op: str, eqn) -> str:
  """A dot of another precision is another operation."""
  precision = eqn.params.get('precision') if op in flow_facts.DOTS else None
  return f'{op}[{precision}]' if precision is not None else op


def _kind(eqn, granularity: str) -> str:
  op = eqn.primitive.name
  kinds = {
      'dot': flow_facts.DOTS,
      'cast': flow_facts.CASTS,
      'kernel': flow_facts.KERNELS,
      'reduction': flow_facts.REDUCTIONS,
      'transcendental': flow_facts.TRANSCENDENTALS,
  }
  for kind, ops in kinds.items():
    if op in ops:
      return kind
  return 'scale' if op in ('mul', 'div') and granularity else 'arithmetic'
