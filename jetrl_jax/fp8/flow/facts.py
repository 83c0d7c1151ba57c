"""What is known of a value in a jaxpr: where it comes from, where it varies.

The axes along which a value varies follow it through broadcasts, reshapes and
arithmetic, so that a scale has the same granularity whether it was multiplied
as a scalar, as a column or as an array broadcast by hand.
"""

import dataclasses
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np

MOVEMENT = frozenset(
    'all_gather all_gather_invariant all_to_all bitcast_convert_type'
    ' broadcast_in_dim concatenate copy copy_p device_put dynamic_slice'
    ' dynamic_update_slice empty expand_dims gather iota name'
    ' optimization_barrier pad pbroadcast pcast ppermute pvary reshape reshard'
    ' rev scatter select_n sharding_constraint slice sort split squeeze'
    ' stack stop_gradient tile top_k transpose unstack'.split()
)
DOTS = frozenset(
    'dot_general conv_general_dilated ragged_dot ragged_dot_general'.split()
)
CASTS = frozenset(['convert_element_type', 'reduce_precision'])
KERNELS = frozenset('custom_call ffi_call mpmd_map pallas_call'.split())
REDUCTIONS = frozenset(
    'cumlogsumexp cummax cummin cumprod cumsum pmax pmin psum psum_invariant'
    ' reduce reduce_max reduce_min reduce_prod reduce_scatter reduce_sum'
    ' reduce_window'.split()
)
TRANSCENDENTALS = frozenset(
    'acos acosh asin asinh atan atan2 atanh cbrt cos cosh digamma erf erf_inv'
    ' erfc exp exp2 expm1 integer_pow lgamma log log1p logistic pow rsqrt sin'
    ' sinh sqrt tan tanh'.split()
)


Address: TypeAlias = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Fact:
  """What is known about a value.

  An operation's address is the index of its equation in its jaxpr, that jaxpr's
  equation in the outer one, and so on.

  Attributes:
    varying: per axis, False where the value is known to be broadcast along it.
      An axis of length 1 counts as varying unless it was made by a broadcast,
      so that one row decoded looks like one of many rows trained.
    sources: operations it comes from, through data movement of numbers.
    hidden: operations it depends on through indices, booleans or sampling.
    block: length of the last axis where a reshape split it off, else 0.
  """

  varying: tuple[bool, ...]
  sources: frozenset[Address] = frozenset()
  hidden: frozenset[Address] = frozenset()
  block: int = 0

  @property
  def depends_on(self) -> frozenset[Address]:
    """All operations on which the value depends."""
    return self.sources | self.hidden


def is_number(aval) -> bool:
  """True for arrays of floats of any width, and of INT8.

  Other integers are tokens, positions and indices.
  """
  if not hasattr(aval, 'dtype'):
    return False
  return jnp.issubdtype(aval.dtype, np.floating) or aval.dtype == np.int8


def is_kernel(eqn) -> bool:
  """True for an operation whose inside is not traced."""
  return eqn.primitive.name in KERNELS


def is_int8_dot(eqn) -> bool:
  """True for a dot of INT8 numbers, whose result is int32."""
  return eqn.primitive.name in DOTS and all(
      hasattr(v.aval, 'dtype') and v.aval.dtype == np.int8 for v in eqn.invars
  )


def all_axes(aval) -> tuple[bool, ...]:
  """Varying along every axis."""
  return (True,) * len(_shape(aval))


def _shape(aval) -> tuple[int, ...]:
  return aval.shape if hasattr(aval, 'shape') else ()


def fresh(aval) -> Fact:
  """Returns the fact of an input or of an unknown value."""
  return Fact(all_axes(aval))


def of_rank(fact: Fact, aval) -> Fact:
  """Returns the fact of a value in one part, where it had equal copies."""
  rank = len(_shape(aval))
  return dataclasses.replace(fact, varying=fact.varying[-rank or None :][:rank])


def cut(fact: Fact) -> Fact:
  """Returns the fact of a value through which no numbers flow."""
  return dataclasses.replace(fact, sources=frozenset(), hidden=fact.depends_on)


def depending(fact: Fact, addresses: frozenset[Address]) -> Fact:
  """Adds operations on which it depends through control flow."""
  return dataclasses.replace(fact, hidden=fact.hidden | addresses)


def sampled(aval, facts) -> Fact:
  """Returns the fact of a value that is sampled from these values."""
  addresses = frozenset().union(*(f.depends_on for f in facts))
  return Fact(all_axes(aval), hidden=addresses)


def join(facts) -> Fact:
  """Returns the fact of a value that may be any of these, all of one shape."""
  facts = list(facts)
  return Fact(
      tuple(any(f) for f in zip(*(f.varying for f in facts), strict=True)),
      frozenset().union(*(f.sources for f in facts)),
      frozenset().union(*(f.hidden for f in facts)),
      facts[0].block if len({f.block for f in facts}) == 1 else 0,
  )


def moved(eqn, facts) -> list[Fact]:
  """Returns the facts of results of data movement."""
  if len(eqn.outvars) == len(facts) > 1:
    return facts  # Barriers and transfers have one result per operand.
  varying = varying_axes(eqn, facts)
  block = common_block(facts, varying)
  if eqn.primitive.name == 'reshape':
    given, made = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    block = block if given[-1:] == made[-1:] else 0
    if given and made and given[-1] > made[-1] > 1:
      block = made[-1]
  sources = frozenset().union(*(f.sources for f in facts))
  hidden = frozenset().union(*(f.hidden for f in facts))
  return [
      Fact(_of_rank(varying, v.aval), sources, hidden, block)
      for v in eqn.outvars
  ]


def made_by(address: Address, eqn, facts) -> list[Fact]:
  """Returns the facts of an operation's results."""
  varying = varying_axes(eqn, facts)
  block = common_block(facts, varying)
  return [
      Fact(_of_rank(varying, v.aval), frozenset([address]), block=block)
      for v in eqn.outvars
  ]


def _of_rank(varying, aval) -> tuple[bool, ...]:
  """A result of another rank than the first varies along all of its axes."""
  everything = all_axes(aval)
  return varying if len(varying) == len(everything) else everything


def common_block(facts, varying) -> int:
  """The block of the operands that are as fine as the result."""
  blocks = {f.block for f in facts if f.varying == varying}
  return blocks.pop() if len(blocks) == 1 else 0


def varying_axes(eqn, facts) -> tuple[bool, ...]:
  """Along which axes the first result varies."""
  op, params = eqn.primitive.name, eqn.params
  aval = eqn.outvars[0].aval
  everything = all_axes(aval)
  if not facts or op in DOTS or is_kernel(eqn):
    return everything
  first = facts[0].varying
  if op == 'broadcast_in_dim':
    axes = params['broadcast_dimensions']
    flags = [False] * len(everything)
    for axis, flag in zip(axes, _stretched(eqn, facts)[0], strict=True):
      flags[axis] = flag
  elif op == 'transpose':
    flags = [first[axis] for axis in params['permutation']]
  elif op == 'squeeze':
    flags = [f for i, f in enumerate(first) if i not in params['dimensions']]
  elif op in REDUCTIONS and 'axes' in params:
    flags = [f for i, f in enumerate(first) if i not in params['axes']]
  elif op == 'reshape':
    flags = _reshaped(first, eqn.invars[0].aval.shape, aval.shape)
  elif op in ('slice', 'dynamic_slice', 'dynamic_update_slice', 'split'):
    flags = first
  elif op in ('gather', 'scatter', 'concatenate', 'sort', 'pad'):
    return everything
  else:
    same_rank = [f for f in _stretched(eqn, facts) if len(f) == aval.ndim]
    if not same_rank:
      return everything
    flags = [any(f) for f in zip(*same_rank, strict=True)]
  return tuple(flags)


def _stretched(eqn, facts) -> list[tuple[bool, ...]]:
  """Along which axes of the result each operand varies.

  An operand may be 1 long where the result is longer.
  """
  shape = eqn.outvars[0].aval.shape
  axes = eqn.params.get('broadcast_dimensions', range(len(shape)))
  wide = [shape[axis] for axis in axes]
  return [
      tuple(
          f and n == w
          for f, n, w in zip(fact.varying, given, wide, strict=True)
      )
      if len(given) == len(wide)
      else fact.varying
      for fact, given in zip(
          facts, (_shape(v.aval) for v in eqn.invars), strict=True
      )
  ]


def _reshaped(flags, given, made) -> list[bool]:
  """Carries flags over a reshape, by the runs of axes with equal products."""
  if not any(flags):
    return [False] * len(made)
  if 0 in made:
    return [True] * len(made)
  # An axis of length 1 after the last run was made by this reshape.
  result = [False] * len(made)
  i = j = 0
  while i < len(given) and j < len(made):
    left, right, i0, j0 = given[i], made[j], i, j
    while left != right:
      if left < right:
        i += 1
        left *= given[i]
      else:
        j += 1
        right *= made[j]
    i, j = i + 1, j + 1
    result[j0:j] = [any(flags[i0:i])] * (j - j0)
  return result


def pattern(shared, varying, block: int) -> str:
  """Returns how a coarse operand maps to a fine one.

  Args:
    shared: per axis, True where the coarse one varies.
    varying: per axis, True where the fine one does; other axes do not count.
    block: `Fact.block` of the fine one.
  """
  flags = [s for s, v in zip(shared, varying, strict=True) if v]
  runs = [f for i, f in enumerate(flags) if i == 0 or f != flags[i - 1]]
  match runs:
    case [] | [False]:
      return 'per tensor'
    case [True]:
      return ''
    case [True, False] if block:
      return f'per block of {block}'
    case [True, False]:
      return 'per row'
    case [False, True]:
      return 'per channel'
  return 'per block ' + ''.join('x' if f else '.' for f in runs)


def coarsest(eqn, facts, varying) -> str:
  """The granularity of the operand that varies along the fewest axes."""
  block = common_block(facts, varying)
  patterns = []
  for flags in _stretched(eqn, facts):
    flags = flags or (False,) * len(varying)
    if len(flags) == len(varying):
      patterns.append((sum(flags), pattern(flags, varying, block)))
  return min(patterns)[1] if patterns else ''
