"""One kernel that decodes, updates and encodes a leaf (Pallas, Triton backend).

AdamW with moments in 8 bits reads a gradient, a master and two encoded moments
and writes the last three. XLA needs four passes, because an encoding depends on
the extremes of its group: it writes the new moments in float32, reads them for
the extremes, and reads them again to encode. In this kernel a group of 128
values stays in registers from the read to the write. With bfloat16 masters it
moves 10.4 bytes a value.

The arithmetic is that of `formula.py`. Masters and moments are updated in
place. A step that is skipped writes nothing.

A program takes up to 16 groups, a tile of [16, 128] values, with one warp for
each four groups. All of it is in registers; nothing goes through shared memory.
A group's two extremes and the leaf's largest master are maxima and minima,
which have no order, so no sum is taken over values.

Lower bound of the time: 83 instructions a value, 11 of them of the special
function unit, which limit it: 24 ms for the 7.6e9 values of a 7B on an H200,
where the bytes take 18 (docs/performance_log.md).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jetrl_jax.core.typing import Array
from jetrl_jax.kernels.adamw import formula, groups
from jetrl_jax.kernels.adamw.reference import GROUP, EncodedMoment
from jetrl_jax.kernels.triton_tools import instruction, kernel_options

_GROUPS_PER_WARP = 4  # 16 values a thread


def _across(numbers: Array, like: Array) -> Array:
  del like
  return numbers[:, None]


# Off by 2^-22 of the result or so; the logarithm between 1/2 and 2 by 2^-22.
_FAST = formula.Maths(
    log2=instruction('lg2.approx.ftz.f32'),
    exp2=instruction('ex2.approx.ftz.f32'),
    sqrt=instruction('sqrt.approx.ftz.f32'),
    inverse=instruction('rcp.approx.ftz.f32'),
    floor=jnp.floor,
    across=_across,
)
_PLAIN = formula.Maths(
    log2=jnp.log2,
    exp2=jnp.exp2,
    sqrt=jnp.sqrt,
    inverse=lambda x: 1.0 / x,
    floor=jnp.floor,
    across=_across,
)


def _kernel(*refs, at_random: bool, maths: formula.Maths, **how):
  """Moves a few groups of one leaf; see `update`."""
  numbers_ref, *refs = refs
  words_ref, *refs = refs if at_random else (None, *refs)
  gradient_ref, master_ref, *refs = refs
  mu_refs, nu_refs, refs = refs[:4], refs[4:8], refs[8:]
  master_out, *outs, amax_out = refs
  ok, *numbers = (numbers_ref[i] for i in range(5))
  block = pl.program_id(0)

  # What is not written stays, because outputs are the inputs' buffers.
  @pl.when(ok > 0)
  def _():
    mu, nu = ([ref[...] for ref in refs] for refs in (mu_refs, nu_refs))
    moved, mu, nu = formula.step(
        gradient_ref[...], master_ref[...], mu, nu, numbers, maths, **how
    )
    stored = formula.rounded(
        moved,
        block.astype(jnp.uint32) * jnp.uint32(moved.size),
        None if words_ref is None else [words_ref[i] for i in range(3)],
        master_out.dtype,
        functools.partial(lax.broadcasted_iota, jnp.uint32, moved.shape),
    )
    master_out[...] = stored
    amax_out[...] = jnp.max(jnp.abs(stored.astype(jnp.float32)))
    for moment, refs, signed in ((mu, outs[:4], True), (nu, outs[4:], False)):
      new = formula.encoded(moment, maths, signed=signed)
      for ref, array in zip(refs, new, strict=True):
        ref[...] = array


def update(
    master: Array,
    gradient: Array,
    mu: EncodedMoment,
    nu: EncodedMoment,
    numbers: Array,
    rounding_keys: Array | None,
    *,
    b1: float,
    b2: float,
    eps: float,
    decay: float,
    interpret: bool = False,
) -> tuple[Array, EncodedMoment, EncodedMoment, Array]:
  """See the package's `update`; `interpret` runs on a CPU, for tests."""
  rows = groups.of_program(master.shape)
  programs = master.size // GROUP // rows
  whole = pl.BlockSpec((rows, GROUP), lambda i: (i, 0))
  each = pl.BlockSpec((rows,), lambda i: (i,))
  small = [numbers] if rounding_keys is None else [numbers, rounding_keys]
  arguments = groups.flat(gradient, master, mu, nu)
  specs = [whole, whole, *[whole, each, each, each] * 2]
  first = len(small) + 1
  *out, amax = pl.pallas_call(
      functools.partial(
          _kernel,
          b1=b1,
          b2=b2,
          eps=eps,
          decay=decay,
          at_random=rounding_keys is not None,
          maths=_PLAIN if interpret else _FAST,
      ),
      grid=(programs,),
      in_specs=[
          *[pl.BlockSpec(a.shape, lambda i: (0,)) for a in small],
          *specs,
      ],
      out_specs=[*specs[1:], pl.BlockSpec((None,), lambda i: (i,))],
      out_shape=[
          *[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arguments[1:]],
          jax.ShapeDtypeStruct((programs,), jnp.float32),
      ],
      input_output_aliases={first + i: i for i in range(len(arguments) - 1)},
      name='adam',
      **kernel_options(interpret, max(rows // _GROUPS_PER_WARP, 1)),
  )(*small, *arguments)
  return *groups.unflattened(out, master, mu), jnp.max(amax)
