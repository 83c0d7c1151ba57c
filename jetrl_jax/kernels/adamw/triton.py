"""One kernel that decodes, updates and encodes a leaf (Pallas, Triton backend).

AdamW with moments in 8 bits reads a gradient, a master and two encoded moments
and writes the last three. XLA needs four passes, because an encoding depends on
the extremes of its group: it writes the new moments in float32, reads them for
the extremes, and reads them again to encode. In this kernel a group of 128
values stays in registers from the read to the write. With bfloat16 masters it
moves 10.4 bytes a value.

The formulas are those of `kernels/adamw/reference.py`. They are written for few
instructions, because instructions and not bytes are the limit. Logarithm, power
of two, root and inverse are the device's own: they are good for 22 bits, and 4
are stored. Bias corrections are multiplied by their inverse. Work that is the
same for a whole group is done once per group. So float32 numbers differ from
XLA's by a few of their last bits, and fewer than one stored value in five
hundred differs by one step. A group that spans 2^252 or more loses its smallest
values.

Masters and moments are updated in place. A step that is skipped writes nothing.

A program takes up to 16 groups, a tile of [16, 128] values, with one warp for
each four groups. All of it is in registers; nothing goes through shared memory.
A group's two extremes and the leaf's largest master are maxima and minima,
which have no order, so no sum is taken over values.

Lower bound of the time: 83 instructions a value, 11 of them of the special
function unit, which limit it: 24 ms for the 7.6e9 values of a 7B on an H200,
where the bytes take 18 (docs/performance_log.md).
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jetrl_jax.core.typing import Array, PyTree
from jetrl_jax.fp8 import formats
from jetrl_jax.kernels.adamw import random_bits
from jetrl_jax.kernels.adamw import reference as adamw_reference
from jetrl_jax.kernels.adamw.reference import GROUP
from jetrl_jax.kernels.triton_tools import instruction, kernel_options

_MOST_GROUPS = 16  # of a program
_LEAST_GROUPS = 4
_GROUPS_PER_WARP = 4  # 16 values a thread


def _groups_of_program(shape: tuple[int, ...]) -> int:
  """Largest power of two that divides the groups, at most `_MOST_GROUPS`."""
  groups = math.prod(shape) // GROUP
  return min(groups & -groups, _MOST_GROUPS)


def fits(
    optimizer: Any, masters: PyTree, gradients: PyTree, moments: list[PyTree]
) -> bool:
  """Whether the kernel takes a parameter group, see the package's `fits`."""
  leaves, tree = jax.tree.flatten(masters)
  if (
      not isinstance(optimizer, adamw_reference.AdamW)
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
  """Whether the kernel can move a leaf: whole groups, and some to share."""
  shape = master.shape
  if not shape or shape[-1] % GROUP or not 0 < math.prod(shape) < 2**31:
    return False
  groups = (*shape[:-1], shape[-1] // GROUP)
  return (
      _groups_of_program(shape) >= _LEAST_GROUPS
      and all(
          a.dtype in (jnp.float32, jnp.bfloat16) for a in (master, gradient)
      )
      and all(
          isinstance(moment, adamw_reference.EncodedMoment)
          and moment.c.shape == groups
          for moment in moments
      )
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Maths:
  """How four functions are computed.

  Attributes:
    log2: logarithm of what is not negative; of 0 minus infinity.
    exp2: power of two.
    sqrt: root of what is not negative.
    inverse: the inverse of a positive number.
  """

  log2: Callable[[Array], Array]
  exp2: Callable[[Array], Array]
  sqrt: Callable[[Array], Array]
  inverse: Callable[[Array], Array]


# Off by 2^-22 of the result or so; the logarithm between 1/2 and 2 by 2^-22.
_FAST = _Maths(
    log2=instruction('lg2.approx.ftz.f32'),
    exp2=instruction('ex2.approx.ftz.f32'),
    sqrt=instruction('sqrt.approx.ftz.f32'),
    inverse=instruction('rcp.approx.ftz.f32'),
)
_PLAIN = _Maths(
    log2=jnp.log2, exp2=jnp.exp2, sqrt=jnp.sqrt, inverse=lambda x: 1.0 / x
)


def _with_sign(magnitude: Array, like: Array) -> Array:
  """Gives float32 magnitudes the signs of others, in one instruction."""
  bits = functools.partial(lax.bitcast_convert_type, new_dtype=jnp.uint32)
  word = bits(magnitude) | (bits(like) & jnp.uint32(0x80000000))
  return lax.bitcast_convert_type(word, jnp.float32)


def _decoded(refs, decay: float, maths: _Maths, signed: bool) -> Array:
  """Returns decayed values of the groups that four references hold."""
  values = refs[0][...].astype(jnp.float32)
  scale, k, c = (ref[...] for ref in refs[1:])
  log = maths.log2(jnp.abs(values) * scale[:, None])
  magnitude = maths.exp2(log * (1.0 / k)[:, None]) * (decay * c)[:, None]
  return _with_sign(magnitude, values) if signed else magnitude


def _encode(x: Array, refs, maths: _Maths, signed: bool) -> None:
  """Writes encoded groups; values below float32's normal range become 0."""
  magnitude = jnp.abs(x) if signed else x
  largest = jnp.max(magnitude, axis=1)
  counts = jnp.where(magnitude < adamw_reference.TINY, jnp.inf, magnitude)
  scale, k, c = adamw_reference.expansion(
      largest, jnp.min(counts, axis=1), maths.log2
  )
  # In powers of two, the division by the scale is a subtraction.
  shift, inverse = -maths.log2(scale), 1.0 / c
  log = maths.log2(magnitude * inverse[:, None])
  stored = maths.exp2(log * k[:, None] + shift[:, None])
  stored = _with_sign(stored, x) if signed else stored
  new = stored.astype(formats.E4M3), scale, k, c
  for ref, array in zip(refs, new, strict=True):
    ref[...] = array


def _rounded(x: Array, block: Array, words_ref, dtype) -> Array:
  """Rounds what program `block` moved, to the nearest without words."""
  if words_ref is None:
    return x.astype(dtype)
  index = lax.broadcasted_iota(jnp.uint32, x.shape, 0) * jnp.uint32(GROUP)
  index += lax.broadcasted_iota(jnp.uint32, x.shape, 1)
  index += words_ref[2] + block.astype(jnp.uint32) * jnp.uint32(x.size)
  bits = random_bits.bits_of(index, words_ref[0], words_ref[1])
  return random_bits.stochastic_bfloat16(x, bits)


def _kernel(*refs, b1, b2, eps, decay, at_random, maths):
  """Moves a few groups of one leaf; see `move`."""
  numbers_ref, *refs = refs
  words_ref, *refs = refs if at_random else (None, *refs)
  gradient_ref, master_ref, *refs = refs
  mu_refs, nu_refs, refs = refs[:4], refs[4:8], refs[8:]
  master_out, *outs, amax_out = refs
  ok, clip_factor, rate, inverse1, inverse2 = (numbers_ref[i] for i in range(5))
  block = pl.program_id(0)

  # What is not written stays, because outputs are the inputs' buffers.
  @pl.when(ok > 0)
  def _():
    g = gradient_ref[...].astype(jnp.float32) * clip_factor
    master = master_ref[...].astype(jnp.float32)
    mu = (1 - b1) * g + _decoded(mu_refs, b1, maths, signed=True)
    nu = (1 - b2) * (g * g) + _decoded(nu_refs, b2, maths, signed=False)
    root = maths.sqrt(nu) * jnp.sqrt(inverse2) + eps
    update = mu * maths.inverse(root) * inverse1
    if decay:
      update = update + decay * master
    moved = master - rate * update
    stored = _rounded(moved, block, words_ref, master_out.dtype)
    master_out[...] = stored
    amax_out[...] = jnp.max(jnp.abs(stored.astype(jnp.float32)))
    _encode(mu, outs[:4], maths, signed=True)
    _encode(nu, outs[4:], maths, signed=False)


def update(
    master: Array,
    gradient: Array,
    mu: adamw_reference.EncodedMoment,
    nu: adamw_reference.EncodedMoment,
    numbers: Array,
    rounding_keys: Array | None,
    *,
    b1: float,
    b2: float,
    eps: float,
    decay: float,
    interpret: bool = False,
) -> tuple[
    Array, adamw_reference.EncodedMoment, adamw_reference.EncodedMoment, Array
]:
  """See the package's `update`; `interpret` runs on a CPU, for tests."""
  rows = _groups_of_program(master.shape)
  groups = master.size // GROUP
  whole = pl.BlockSpec((rows, GROUP), lambda i: (i, 0))
  each = pl.BlockSpec((rows,), lambda i: (i,))
  small = [numbers] if rounding_keys is None else [numbers, rounding_keys]
  moments = [
      a for moment in (mu, nu) for a in (moment.values, *_numbers_of(moment))
  ]
  moved = [master, *moments]
  arguments = [
      a.reshape(-1, GROUP) if a.shape == master.shape else a.reshape(-1)
      for a in (gradient, *moved)
  ]
  specs = [whole, whole, *[whole, each, each, each] * 2]
  first = len(small) + 1
  out = pl.pallas_call(
      functools.partial(
          _kernel,
          b1=b1,
          b2=b2,
          eps=eps,
          decay=decay,
          at_random=rounding_keys is not None,
          maths=_PLAIN if interpret else _FAST,
      ),
      grid=(groups // rows,),
      in_specs=[
          *[pl.BlockSpec(a.shape, lambda i: (0,)) for a in small],
          *specs,
      ],
      out_specs=[*specs[1:], pl.BlockSpec((None,), lambda i: (i,))],
      out_shape=[
          *[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arguments[1:]],
          jax.ShapeDtypeStruct((groups // rows,), jnp.float32),
      ],
      input_output_aliases={first + i: i for i in range(len(moved))},
      name='adam',
      **kernel_options(interpret, max(rows // _GROUPS_PER_WARP, 1)),
  )(*small, *arguments)
  *out, amax = out
  out = [a.reshape(b.shape) for a, b in zip(out, moved, strict=True)]
  return out[0], _moment(*out[1:5]), _moment(*out[5:]), jnp.max(amax)


def _moment(values, scale, k, c) -> adamw_reference.EncodedMoment:
  return adamw_reference.EncodedMoment(values=values, scale=scale, k=k, c=c)


def _numbers_of(
    moment: adamw_reference.EncodedMoment,
) -> tuple[Array, Array, Array]:
  return moment.scale, moment.k, moment.c
