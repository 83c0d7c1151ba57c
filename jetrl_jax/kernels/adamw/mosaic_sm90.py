"""One kernel that decodes, updates and encodes a leaf, for Hopper (Mosaic).

It is one pass over 10.4 bytes a value with bfloat16 masters, where XLA needs
four passes, because an encoding depends on the extremes of its group. The
arithmetic is that of `formula.py`, with four instructions of the device for
logarithm, power, root and inverse.

A program is one warpgroup and has a tile of [16, 128] values in registers: each
warp four groups, and each group eight lanes, of which a lane has 16 values, in
two loads of 16 bytes with bfloat16. So what is computed once for a group, which
is about 100 instructions, is shared by 16 values of a thread. A leaf whose
groups no 16 divide has tiles of 8 or 4 groups. Everything is read straight from
memory and written straight to it, in place; there is no shared memory and no
barrier. A step that is skipped writes nothing.

No sum is taken. The extremes of a group go over a lane's 16 values and then
over lanes, and the largest master of each group is joined by XLA: maxima and
minima have no order.

Lower bound of the time: instructions, 67 a value (90 with rounding at random),
12 of them of the special function unit, which limit it: 22 ms for the 7.6e9
values of a 7B on an H200, where the bytes take 18. Compiled for an H200 a
thread has 123 to 127 registers and nothing spilled, so a multiprocessor has
four programs, which have 48 KB on their way, all asked for at their start.
"""

# jax 0.10, which the types are checked with, lacks some of it.
# pyright: reportAttributeAccessIssue=false


import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jetrl_jax.core.typing import Array
from jetrl_jax.kernels import mosaic_tools as tools
from jetrl_jax.kernels.adamw import formula, groups
from jetrl_jax.kernels.adamw.reference import GROUP, EncodedMoment

_VECTOR = 8  # Neighbouring values of a lane at most: a load of 16 bytes.


def _layout(rows: int):
  """Returns the layout of a tile of groups, some of them in each warp.

  Args:
    rows: groups, 4, 8 or 16.
  """
  of_warp = rows // tools.WARPS
  lanes = tools.LANES // of_warp
  vector = min(GROUP // lanes, _VECTOR)
  if of_warp == 1:
    return tools.rows_in_warps(vector)
  return plgpu.Layout.TILED(
      plgpu.Tiling(
          ((rows, lanes * vector), (of_warp, lanes * vector), (vector,))
      ),
      warp_dims=(-5,),
      lane_dims=(-3, -2),
      vector_dim=-1,
  )


def _maths(layout, interpret: bool) -> formula.Maths:
  """Returns the functions, of values in a layout and of groups' numbers."""

  def across(numbers, like):
    found = lax.broadcast_in_dim(numbers, like.shape, [0])
    return plgpu.layout_cast(found, layout)

  if interpret:
    return formula.Maths(
        log2=jnp.log2,
        exp2=jnp.exp2,
        sqrt=jnp.sqrt,
        inverse=lambda x: 1.0 / x,
        floor=jnp.floor,
        across=across,
    )

  def instruction(name: str):
    def call(x):
      of_x = layout if x.ndim == 2 else layout.reduce(1)
      return tools.instruction(name, x, layout=of_x)

    return call

  return formula.Maths(
      log2=instruction('lg2.approx.ftz.f32'),
      exp2=instruction('ex2.approx.ftz.f32'),
      sqrt=instruction('sqrt.approx.ftz.f32'),
      inverse=instruction('rcp.approx.ftz.f32'),
      floor=instruction('cvt.rmi.f32.f32'),
      across=across,
  )


def _kernel(*refs, rows: int, at_random: bool, interpret: bool, **how):
  """Moves a few groups of one leaf; see `update`."""
  numbers_ref, *refs = refs
  words_ref, *refs = refs if at_random else (None, *refs)
  gradient_ref, master_ref, *moment_refs, amax_ref = refs
  ok, *numbers = (numbers_ref[i] for i in range(5))
  program, layout = lax.axis_index('program'), _layout(rows)
  maths = _maths(layout, interpret)
  mine = pl.ds(program * rows, rows)

  def read(ref):
    return tools.read(
        ref.at[mine], layout if ref.ndim == 2 else layout.reduce(1)
    )

  # Even of a step that is skipped, so that no read waits for another.
  gradient, master, *moments = (
      read(ref) for ref in (gradient_ref, master_ref, *moment_refs)
  )
  tools.asked_for_all(interpret)

  # What is not written stays, because the results are the operands' buffers.
  @pl.when(ok > 0)
  def _():
    moved, mu, nu = formula.step(
        gradient, master, moments[:4], moments[4:], numbers, maths, **how
    )
    stored = formula.rounded(
        moved,
        program.astype(jnp.uint32) * jnp.uint32(moved.size),
        None if words_ref is None else [words_ref[i] for i in range(3)],
        master_ref.dtype,
        lambda axis: plgpu.broadcasted_iota(
            jnp.uint32, moved.shape, axis, layout=layout
        ),
    )
    tools.write(master_ref.at[mine], stored)
    amax = jnp.max(jnp.abs(stored), axis=1).astype(jnp.float32)
    tools.write(amax_ref.at[mine], amax)
    new = [
        *formula.encoded(mu, maths, signed=True),
        *formula.encoded(nu, maths, signed=False),
    ]
    for ref, array in zip(moment_refs, new, strict=True):
      tools.write(ref.at[mine], array)


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
  count = master.size // GROUP
  gradient, *moved = groups.flat(gradient, master, mu, nu)
  small = [numbers] if rounding_keys is None else [numbers, rounding_keys]
  result = jax.ShapeDtypeStruct((count,), jnp.float32)
  kernel = plgpu.kernel(
      tools.named(
          'adam',
          _kernel,
          rows=rows,
          b1=b1,
          b2=b2,
          eps=eps,
          decay=decay,
          at_random=rounding_keys is not None,
          interpret=interpret,
      ),
      out_type=result,
      grid=(count // rows,),
      grid_names=('program',),
      # A warp overwrites only what it has read itself: the values lane by lane,
      # a group's numbers after all its lanes have joined in the extremes.
      **tools.kernel_options(interpret, barriers=False),
  )
  amax, moved = tools.in_place(kernel, [*small, gradient], moved, result)
  return *groups.unflattened(moved, master, mu), jnp.max(amax)
