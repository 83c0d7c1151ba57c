"""Tools that every Mosaic kernel uses: options, layouts, instructions.

Only `kernels/*/mosaic*.py` import this file, because it imports Pallas' Mosaic
backend, which JAX has from 0.11 on.

A program is a few warpgroups of 128 threads. In a warp-specialised program the
last warpgroup only loads tiles: Hopper's bulk copies bring them to shared
memory while the other warpgroups compute. Barriers say which tile has come and
which was used.
"""

# jax 0.10, which the types are checked with, lacks some of it.
# pyright: reportAttributeAccessIssue=false

import functools
import itertools
import os
import struct
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir

from jetrl_jax.fp8 import formats
from jetrl_jax.fp8.quantization import quantize

# Rows of a warpgroup's product, and bytes of a row in Hopper's widest swizzle:
# its instructions read 8 rows of so many bytes as one piece.
ROWS = 64
SWIZZLE = 128
# Of a warpgroup.
THREADS, WARPS, LANES = 128, 4, 32
# By what jaxlib names the files to which it dumps a kernel, if it does. Unless
# it is set, it becomes the name with a number, see `named`.
_DUMP_NAME = 'mosaic_gpu.dump_basename'
# Registers of a warpgroup that only asks for copies.
MEMORY_REGISTERS = 40


def kernel_options(
    interpret: bool,
    *,
    overlap: bool = False,
    barriers: bool = True,
    approximate: bool = True,
) -> dict:
  """Returns keywords of `plgpu.kernel`.

  Args:
    interpret: run on a CPU, for tests, with races detected.
    overlap: two programs write the same results to one place; else that is a
      race.
    barriers: the warps of a warpgroup wait for each other around every store. A
      program does not need it if it reads nothing that it writes.
    approximate: exponentials and logarithms are instructions of the device.
  """
  if interpret:
    races = plgpu.InterpretGPUParams(detect_races=not overlap)
    return {'interpret': races}
  params = plgpu.CompilerParams(
      approx_math=approximate, unsafe_no_auto_barriers=not barriers
  )
  return {'compiler_params': params}


def in_place(kernel, operands, changed, result: jax.ShapeDtypeStruct):
  """Runs a kernel that writes into some of its operands.

  Args:
    kernel: of `plgpu.kernel`, with one result.
    operands: that it reads.
    changed: the arrays that follow them. Copied first, if they live on.
    result: of the kernel.

  Returns:
    (the result, the changed arrays)
  """

  def run(refs):
    *changed_refs, result_ref = refs
    result_ref[...] = kernel(*operands, *changed_refs)

  # It costs nothing when compiled.
  start = jnp.zeros(result.shape, result.dtype)
  *changed, found = cast(Any, pl.run_state(run)((*changed, start)))
  return found, changed


def pieces(dtype, columns: int = SWIZZLE) -> tuple:
  """Returns a tile's layout in shared memory, as the tensor core reads it.

  Args:
    dtype: of its values.
    columns: its columns, if they may be less than `SWIZZLE` bytes.
  """
  itemsize = jnp.dtype(dtype).itemsize
  swizzle = min(SWIZZLE, columns * itemsize)
  return (
      plgpu.TilingTransform((8, swizzle // itemsize)),
      plgpu.SwizzleTransform(swizzle),
  )


def named(name: str, kernel, *, is_interpreted: bool = False, **static):
  """Returns a kernel of references alone, under the name in profiles.

  jaxlib 0.11 would number the kernels of a process as they are lowered, and the
  number would be part of the kernel's text. (0.12.0.1 leaves it out.) But
  jaxlib compiles a text once a process, one at a time, and the compile cache
  finds a program by its text. So a text depends on its kernel alone: programs
  share what is compiled of it, and their order does not matter.

  Args:
    name: of the kernel.
    kernel: takes references and `static`.
    is_interpreted: `interpret`, of a kernel that does not take it.
    **static: arguments that are no references.
  """

  def run(*refs):
    if not (is_interpreted or static.get('interpret')):
      _without_number(name)
    kernel(*refs, **static)

  run.__name__ = name
  return run


def _without_number(name: str) -> None:
  """Keeps the number of kernels lowered before out of this one's text."""
  # Files of kernels with one name would replace each other.
  if any(key.startswith('MOSAIC_GPU_DUMP') for key in os.environ):
    return

  @plgpu.inline_mgpu()
  def set_name(context):
    # No operation is added: the attribute is the whole kernel's.
    attributes = context.module.operation.attributes
    attributes[_DUMP_NAME] = ir.StringAttr.get(name)

  set_name()  # pyright: ignore[reportCallIssue]


def rows_in_warps(vector: int, warps: int = WARPS):
  """Returns a layout [rows, columns]: a row is within a warp.

  Args:
    vector: neighbouring columns of a lane.
    warps: that share the rows, 1, 2 or 4; the others repeat them.
  """
  repeats = plgpu.Replicated(WARPS // warps)
  # The tile's dimensions that the warps share; none if only one warp has rows.
  among = {1: (repeats,), 2: (-3, repeats), 4: (-3,)}[warps]
  return plgpu.Layout.TILED(
      plgpu.Tiling(((warps, LANES * vector), (vector,))),
      warp_dims=among,
      lane_dims=(-2,),
      vector_dim=-1,
  )


def sums(rows: int, columns: int):
  """Returns what the tensor core adds to, in registers: float32, zeros."""
  return plgpu.WGMMAAccumulatorRef((rows, columns), jnp.float32)


def loaded(ref, axis: int):
  """Returns a vector, to be one of a product's rows (axis 0) or columns."""
  return load(ref, plgpu.Layout.WGMMA.reduce(axis))


def load(ref, layout):
  """Returns what shared memory holds, in registers."""
  return plgpu.load(ref, layout=layout)  # pyright: ignore[reportCallIssue]


def read(ref, layout):
  """Returns what the GPU's memory holds, in registers; no copy brings it."""
  # JAX's `optimized` loads are for shared memory.
  load = functools.partial(plgpu.load, optimized=False)
  return load(ref, layout=layout)  # pyright: ignore[reportCallIssue]


def write(ref, x) -> None:
  """Writes to memory, shared or the GPU's, as the layout of `x` has it."""
  # From 0.12 on JAX refuses what it finds slow, such as less than four bytes a
  # lane, unless it is told. Before, it has no such function and no objection.
  if store := getattr(plgpu, 'store', None):
    store(ref, x, optimized=False)
  else:
    ref[...] = x


def asked_for_all(interpret: bool) -> None:
  """Keeps what a program has read until here from being read later.

  A compiler that spares registers moves reads to where they are used, and then
  the memory is waited for a few times. The assembler does so as well, unless a
  branch follows.
  """
  if interpret:
    return

  @plgpu.inline_mgpu()
  def barrier(context):
    del context
    utils.warp_barrier()

  barrier()  # pyright: ignore[reportCallIssue]


def quantized(x, scale, interpret: bool):
  """Returns `fp8.quantize(x, scale, E4M3)`."""
  if interpret:
    return quantize(x, scale, formats.E4M3)
  # A cast on a GPU saturates.
  return (x.astype(jnp.float32) * (1.0 / scale)).astype(formats.E4M3)


def power_of_2(x):
  """Returns 2^x of float32: with `kernel_options`, ex2.approx.ftz.f32."""
  return jnp.exp2(x)


def instruction(
    name: str, x, *more, literals: tuple[str, ...] = (), layout: Any = None
):
  """Returns one instruction of the device, of float32 in one layout.

  Such an instruction is rounded by itself: one with a rounding in its name is
  not fused with a following addition, as a compiler may do with others.

  Args:
    name: in PTX, with its type, for example 'div.full.f32'.
    x: the first operand.
    *more: further operands like it.
    literals: operands after those, in PTX.
    layout: of all operands; None is what a tensor core's product has.
  """
  layout = layout or plgpu.Layout.WGMMA
  arrays = (f'${i}' for i in range(len(more) + 2))
  operands = ', '.join([*arrays, *literals])

  @plgpu.inline_mgpu(
      arg_types=(layout,) * (len(more) + 1),
      return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=layout),
  )
  def inlined(context, values, *others):
    del context
    columns = [[] for _ in others]
    for column, other in zip(columns, others, strict=True):
      other.foreach(lambda value, index, to=column: to.append(value))
    rest = zip(*columns, strict=True) if others else itertools.repeat(())

    def of_one(value, index):
      del index
      return utils.inline_ptx(
          f'{name} {operands};', value, *next(rest), result_types=value.type
      )

    return values.foreach(of_one, create_array=True)

  return inlined(x, *more)


def literal(number: float) -> str:
  """Returns a float32 in PTX."""
  return '0f' + struct.pack('>f', number).hex()


def reciprocal(x, interpret: bool, layout=None):
  """Returns 1 / x of float32; for the layout see `instruction`."""
  if interpret:
    return 1.0 / x
  return instruction('rcp.approx.ftz.f32', x, layout=layout)


def scaled(x, factor: float, interpret: bool):
  """Returns x * factor of float32, rounded whatever follows."""
  if interpret:
    return x * factor
  return instruction('mul.rn.f32', x, literals=(literal(factor),))


def ratio(x, y, interpret: bool):
  """Returns x / y of float32."""
  return x / y if interpret else instruction('div.full.f32', x, y)


def multiply_add(x, y, z, interpret: bool, layout: Any = plgpu.Layout.WGMMA):
  """Returns x * y + z of float32, rounded once."""
  if interpret:
    return x * y + z
  return instruction('fma.rn.f32', x, y, z, layout=layout)


def product(x, y, interpret: bool, layout: Any = plgpu.Layout.WGMMA):
  """Returns x * y of float32, rounded whatever follows."""
  return x * y if interpret else instruction('mul.rn.f32', x, y, layout=layout)


def has_read() -> None:
  """Lets a copy write over what this warpgroup loaded from a tile.

  What the tensor core read needs no such fence before the barrier.
  """
  plgpu.commit_smem()


class Stream(NamedTuple):
  """Tiles that are loaded to shared memory, a few ahead.

  Attributes:
    tiles: [stages, ...] of each operand.
    there: barriers, one a stage: its tiles have come.
    used: the same: all warpgroups are done with them.
  """

  tiles: Any
  there: Any
  used: Any

  @classmethod
  def types(cls, stages: int, groups: int, **tiles) -> 'Stream':
    """Returns what to allocate for warpgroups that read the same tiles."""
    return cls(
        tiles=tiles,
        there=plgpu.Barrier(num_arrivals=len(tiles), num_barriers=stages),
        used=plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
    )


def ask(
    begin,
    end,
    stages: int,
    streams,
    registers: int = MEMORY_REGISTERS,
    *,
    interpret: bool,
) -> None:
  """Asks for the tiles of a loop, in a warpgroup that does nothing else.

  Args:
    begin: number of the first one.
    end: the tile after the last one.
    stages: the number of stages of the streams.
    streams: (stream, function from a number to the operands' places in memory).
    registers: that this warpgroup keeps.
    interpret: run on a CPU.
  """
  plgpu.set_max_registers(registers, action='decrease')

  def step(i, _, is_first: bool):
    slot = lax.rem(i - begin, jnp.int32(stages))
    for stream, places_of in streams:
      if not is_first:
        plgpu.barrier_wait(stream.used.at[slot])
      for name, place in places_of(i).items():
        plgpu.copy_gmem_to_smem(
            place, stream.tiles[name].at[slot], stream.there.at[slot]
        )

  filled = jnp.minimum(begin + stages, end)
  for bounds, is_first in (((begin, filled), True), ((filled, end), False)):
    lax.fori_loop(*bounds, functools.partial(step, is_first=is_first), None)
  if not interpret:
    return

  # The interpreter wants every arrival at a barrier to be awaited.
  def see(i, _):
    for stream, _ in streams:
      plgpu.barrier_wait(stream.used.at[lax.rem(i - begin, jnp.int32(stages))])

  lax.fori_loop(jnp.maximum(begin, end - stages), end, see, None)


def take_registers(groups: int, kept: int = MEMORY_REGISTERS) -> None:
  """Gives a multiplying warpgroup, one of some, the registers that are left.

  Args:
    groups: that multiply.
    kept: by the one that asks.
  """
  each = (512 - kept) // groups // 8 * 8
  plgpu.set_max_registers(min(each, 240), action='increase')
