"""Gathers of columns between the GPUs of a process (Mosaic), an experiment.

    y[m] = x_0[m], x_1[m] ...     x_t: the columns that device t has, [M, C]

Each device pushes its part straight into the memory of the others. No other
kernel, copy or barrier of the devices is needed, before or after. A pushed part
lands in a *workspace*, an array that the caller keeps and that every gather
takes and returns in place; from there the receiver copies it to its result. It
cannot be pushed into the result itself: until the receiver's kernel begins,
other arrays may live in that memory. In the workspace nothing else ever does.

**Why one message a gather is enough.** Gather n bears the number n and uses
slot n mod 2 of the workspace. Say that program c of device A is about to push
for gather n + 2, over what it pushed for gather n. Launches of a device follow
each other, so A's gather n + 1 has ended. In it program c had the part of B's
program c. So B's launch n + 1 had begun, and B's launch n had ended, with all
that it read of slot n mod 2. One slot would not do: A may push for n + 1 while
B still reads what came for n. Two conditions: a launch begins after the one
before it has ended (no programmatic dependent launch), and all programs of a
launch have room on the device at once.

Programs count their gathers in the workspace, so no operand tells the number.
What a workspace needs:

* It begins with zeros, and all devices have written them before the first
  gather begins on any: make it in a program of its own, and wait for that.
* It is never copied within a program. A device makes a copy when it gets there,
  and the others may have pushed before. So donate it.
* It serves one form and one `programs`. Then gathers of several shapes may take
  it in turn, since a unit belongs to the same program whatever the shape; with
  `own_rows` one shape alone.

Two forms:

* 'packets': 8 bytes travel with the number twice, as 16 bytes, and a receiver
  looks at them until both numbers are right. Nobody waits for a write to have
  arrived, so it takes about one passage of NVLink, but twice the bytes. Halves
  of 8 bytes must arrive whole, as in NCCL's protocol LL.
* 'flags': 16 bytes travel as they are. Then a program waits until its writes
  have arrived (a fence) and sends the number.

Both are PTX, because Pallas promises neither how wide a store is nor that a
load looks at memory again. tests/test_gather_kernel.py runs it without a GPU.
"""

# jax 0.10, which the types are checked with, lacks some of it.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from jetrl_jax.fp8 import formats
from jetrl_jax.kernels import mosaic_tools as tools
from jetrl_jax.kernels.add_norm_quantize import mosaic_sm90 as norm
from jetrl_jax.kernels.calls import lowered_once

FORMS = 'packets', 'flags'
_PACKET = 16  # bytes
# Numbers of programs, and of what each device has sent to a program.
_LINE = 4 * 256
# Looks at memory, about half a microsecond each, before a program gives up.
_PATIENCE = 1 << 25


class Form(NamedTuple):
  """A gather's sizes, and its program.

  Attributes:
    form: one of `FORMS`.
    devices: that gather.
    rows: M.
    row_bytes: of a device's part of a row.
    capacity: bytes of a part that the workspace has room for.
    programs: at most; one a multiprocessor.
    batch: loads that a thread has on their way.
    own_rows: of a program, next to each other; 0 if programs take units in
      turn, whatever their row.
  """

  form: str
  devices: int
  rows: int
  row_bytes: int
  capacity: int
  programs: int = 132
  batch: int = 8
  own_rows: int = 0

  def check(self) -> None:
    """Raises a ValueError for what the kernel does not take."""
    if self.form not in FORMS:
      raise ValueError(f'form {self.form!r}; allowed are {FORMS}')
    if self.row_bytes % self.unit:
      raise ValueError(
          f"a device's part of a row has {self.row_bytes} bytes; {self.form}"
          f' take multiples of {self.unit}'
      )
    if self.rows * self.row_bytes > self.capacity:
      raise ValueError(
          f'{self.rows} rows of {self.row_bytes} bytes; the workspace has room'
          f' for {self.capacity} bytes of a device'
      )
    if not 1 <= self.programs <= _LINE // 4:
      raise ValueError(f'{self.programs} programs; allowed are 1 to 256')
    if self.own_rows and self.rows != self.own_rows * self.programs:
      raise ValueError(
          f'{self.rows} rows; {self.programs} programs with {self.own_rows}'
          f' each take {self.own_rows * self.programs}'
      )

  @property
  def unit(self) -> int:
    """Bytes that a thread moves at a time."""
    return _PACKET // 2 if self.form == 'packets' else _PACKET

  @property
  def units(self) -> int:
    """Units of a device's part."""
    return self.rows * self.row_bytes // self.unit

  @property
  def grid(self) -> int:
    """Programs that there are."""
    if self.own_rows:
      return self.programs
    return min(self.programs, -(-self.units // tools.THREADS))

  @property
  def steps(self) -> list[str]:
    """PTX of each thread; the threads of a program meet between two steps.

    Operands: $0 x, $1 y, $2 the workspace, $3 this device's number, and from
    $4 on the workspaces of the next devices, in turn.
    """
    if self.form == 'packets':
      return [self._push(), self._take(), self._count()]
    return [self._push(), self._signal(), self._take(), self._count()]

  # Parts of the program.

  def _block(self, *lines: str) -> str:
    count = range(self.batch)
    words = ', '.join(f'{word}{i}' for i in count for word in 'abcd')
    head = f"""
      .reg .pred over, wrong, {', '.join(f'in{i}' for i in count)};
      .reg .u32 tid, cta, epoch, parity, part, source, first, end;
      .reg .u32 unit, row, column, looks, unlike, {words};
      .reg .u64 at, to, slot;
      mov.u32 tid, %tid.x;
      mov.u32 cta, %ctaid.x;
      mad.lo.u32 first, cta, {self._share}, tid;
      {self._end}
      mul.wide.u32 at, cta, 4;
      add.u64 at, at, $2;
      ld.volatile.global.u32 epoch, [at];
      add.u32 epoch, epoch, 1;
      and.b32 parity, epoch, 1;
      mov.u32 looks, 0;"""
    return '\n'.join(['{', head, *lines, '}'])

  @property
  def _share(self) -> int:
    """From a program's first unit to the next one's."""
    if self.own_rows:
      return self.own_rows * self.row_bytes // self.unit
    return tools.THREADS

  @property
  def _end(self) -> str:
    if self.own_rows:
      return f'mad.lo.u32 end, cta, {self._share}, {self._share};'
    return f'mov.u32 end, {self.units};'

  @property
  def _header(self) -> int:
    return _LINE * (1 + self.devices)

  def _slot(self, source: str) -> str:
    """Where the part of a device lies in a workspace."""
    size = self.capacity // (_PACKET // 2) * _PACKET
    return f"""
      mad.lo.u32 part, parity, {self.devices}, {source};
      mov.u64 slot, {self._header};
      mad.wide.u32 slot, part, {size}, slot;"""

  def _batches(self) -> list[list[int]]:
    """Offsets of the units of a thread, from its first one."""
    if self.own_rows:
      offsets = list(range(0, self._share, tools.THREADS))
    else:
      offsets = list(range(0, self.units, self.grid * tools.THREADS))
    steps = range(0, len(offsets), self.batch)
    return [offsets[i : i + self.batch] for i in steps]

  def _unit(self, offset: int) -> str:
    return f'add.u32 unit, first, {offset};'

  def _inside(self, batch: list[int]) -> list[str]:
    return [
        f'{self._unit(offset)} setp.lt.u32 in{i}, unit, end;'
        for i, offset in enumerate(batch)
    ]

  def _words(self, i: int) -> str:
    """Registers of a unit."""
    return f'a{i}, b{i}' if self.unit == 8 else f'a{i}, b{i}, c{i}, d{i}'

  @property
  def _vector(self) -> str:
    return f'global.v{self.unit // 4}.u32'

  def _to_result(self, batch: list[int], source: str) -> list[str]:
    per_row = self.row_bytes // self.unit
    lines = []
    for i, offset in enumerate(batch):
      lines.append(f"""
      {self._unit(offset)}
      div.u32 row, unit, {per_row};
      mul.lo.u32 column, row, {per_row};
      sub.u32 column, unit, column;
      mad.lo.u32 row, row, {self.devices}, {source};
      mad.lo.u32 unit, row, {per_row}, column;
      mul.wide.u32 at, unit, {self.unit};
      add.u64 at, at, $1;
      @in{i} st.{self._vector} [at], {{{self._words(i)}}};""")
    return lines

  def _push(self) -> str:
    lines = [self._slot('$3')]
    for batch in self._batches():
      lines += self._inside(batch)
      for i, offset in enumerate(batch):
        lines.append(f"""
      {self._unit(offset)}
      mul.wide.u32 at, unit, {self.unit};
      add.u64 at, at, $0;
      @in{i} ld.{self._vector} {{{self._words(i)}}}, [at];""")
      for i, offset in enumerate(batch):
        sent = self._words(i)
        if self.form == 'packets':
          sent = f'a{i}, epoch, b{i}, epoch'
        lines.append(f"""
      {self._unit(offset)}
      mad.wide.u32 at, unit, {_PACKET}, slot;""")
        for k in range(self.devices - 1):
          lines.append(f"""
      add.u64 to, at, ${4 + k};
      @in{i} st.volatile.global.v4.u32 [to], {{{sent}}};""")
      lines += self._to_result(batch, '$3')
    return self._block(*lines)

  def _signal(self) -> str:
    lines = ['setp.ne.u32 over, tid, 0;', '@over bra END;']
    lines.append(f"""
      fence.acq_rel.sys;
      mul.wide.u32 at, cta, 4;
      mov.u64 slot, {_LINE};
      mad.wide.u32 slot, $3, {_LINE}, slot;
      add.u64 at, at, slot;""")
    for k in range(self.devices - 1):
      lines.append(f"""
      add.u64 to, at, ${4 + k};
      st.relaxed.sys.global.u32 [to], epoch;""")
    return self._block(*lines, 'END:')

  def _again(self, label: str) -> str:
    """Looks again, if something is wrong, but not for ever."""
    return f"""
      @!wrong bra DONE{label};
      add.u32 looks, looks, 1;
      setp.gt.u32 over, looks, {_PATIENCE};
      @over trap;
      bra AGAIN{label};
      DONE{label}:"""

  def _take(self) -> str:
    lines = []
    for k in range(1, self.devices):
      lines.append(f"""
      add.u32 source, $3, {k};
      setp.ge.u32 over, source, {self.devices};
      @over sub.u32 source, source, {self.devices};""")
      if self.form == 'flags':
        # A device may have sent the next number already.
        lines.append(f"""
      mov.u64 slot, {_LINE};
      mad.wide.u32 slot, source, {_LINE}, slot;
      mad.wide.u32 at, cta, 4, slot;
      add.u64 at, at, $2;
      AGAIN{k}:
      ld.acquire.sys.global.u32 unlike, [at];
      sub.u32 unlike, unlike, epoch;
      setp.ge.u32 wrong, unlike, {1 << 31};
      {self._again(str(k))}""")
      lines.append(self._slot('source'))
      for number, batch in enumerate(self._batches()):
        lines += self._inside(batch)
        label = f'{k}x{number}'
        if self.form == 'packets':
          lines.append(f'AGAIN{label}: mov.u32 unlike, 0;')
        for i, offset in enumerate(batch):
          lines.append(f"""
      {self._unit(offset)}
      mad.wide.u32 at, unit, {_PACKET}, slot;
      add.u64 at, at, $2;""")
          if self.form == 'flags':
            lines.append(f"""
      @in{i} ld.volatile.global.v4.u32 {{{self._words(i)}}}, [at];""")
            continue
          lines.append(f"""
      mov.u32 c{i}, epoch;
      mov.u32 d{i}, epoch;
      @in{i} ld.volatile.global.v4.u32 {{a{i}, c{i}, b{i}, d{i}}}, [at];""")
        if self.form == 'packets':
          for i in range(len(batch)):
            lines.append(f"""
      xor.b32 c{i}, c{i}, epoch;
      xor.b32 d{i}, d{i}, epoch;
      or.b32 unlike, unlike, c{i};
      or.b32 unlike, unlike, d{i};""")
          lines.append(f"""
      setp.ne.u32 wrong, unlike, 0;
      {self._again(label)}""")
        lines += self._to_result(batch, 'source')
    return self._block(*lines)

  def _count(self) -> str:
    return self._block("""
      mul.wide.u32 at, cta, 4;
      add.u64 at, at, $2;
      setp.eq.u32 over, tid, 0;
      @over st.volatile.global.u32 [at], epoch;""")


def workspace_words(devices: int, capacity: int) -> int:
  """Returns the length of a device's workspace, int32.

  Args:
    devices: that gather.
    capacity: bytes of a device's part, a multiple of 8.
  """
  slots = 2 * devices * (capacity // (_PACKET // 2)) * _PACKET
  return (_LINE * (1 + devices) + slots) // 4


def _next_device(axis: str, k: int) -> Any:
  """Returns the id of the k-th device after this one, in turn."""
  size = jnp.int32(lax.axis_size(axis))
  return {axis: lax.rem(lax.axis_index(axis) + k, size)}


def _run(x_ref, work_ref, y_ref, *, plan: Form, axis: str) -> None:
  """Gathers, in a program of a kernel."""
  me = lax.axis_index(axis)
  others = [
      plgpu.remote_ref(work_ref, _next_device(axis, k))
      for k in range(1, plan.devices)
  ]
  refs = x_ref, y_ref, work_ref

  @plgpu.inline_mgpu(
      arg_types=(
          *(plgpu.RefType() for _ in refs),
          plgpu.Layout.WG_SPLAT,
          *(plgpu.RefType() for _ in others),
      )
  )
  def run(context, x, y, work, me, *others):
    del context
    operands = [utils.memref_ptr(ref) for ref in (x, y, work)]
    operands.append(me.registers.item())
    operands += [utils.memref_ptr(ref) for ref in others]
    for step in plan.steps:
      utils.inline_ptx(step, *operands, has_side_effects=True)
      # After the last one, what this program wrote to y can be read.
      utils.warpgroup_barrier()

  run(*refs, me, *others)


def _plan_of(x_MC, work, axis: str, **options) -> Form:
  """Returns a gather's sizes; raises a ValueError for wrong ones."""
  rows, columns = x_MC.shape
  devices = lax.axis_size(axis)
  slots = 4 * work.size - _LINE * (1 + devices)
  plan = Form(
      devices=devices,
      rows=rows,
      row_bytes=columns * x_MC.dtype.itemsize,
      capacity=slots // (4 * devices),
      **options,
  )
  plan.check()
  return plan


def _options() -> dict:
  params = plgpu.CompilerParams(
      approx_math=True, unsafe_no_auto_barriers=True, skip_device_barrier=True
  )
  return {'compiler_params': params, 'grid_names': ('program',)}


@lowered_once('axis', 'form', 'programs', 'batch')
def gather_columns(
    x_MC: jax.Array,
    work: jax.Array,
    *,
    axis: str,
    form: str = 'packets',
    programs: int = 132,
    batch: int = 8,
) -> tuple[jax.Array, jax.Array]:
  """Returns whole rows and the workspace; runs within `shard_map`.

  Args:
    x_MC: this device's columns, of any dtype.
    work: int32 [workspace_words], or with axes of length 1 before.
    axis: of the mesh. The other axes do not matter; ids of the mesh's devices
      must rise in its order.
    form: one of `FORMS`.
    programs: at most.
    batch: see `Form`.

  Returns:
    (y, [M, devices * C]; work)
  """
  plan = _plan_of(x_MC, work, axis, form=form, programs=programs, batch=batch)
  rows, columns = x_MC.shape
  result = jax.ShapeDtypeStruct((rows, plan.devices * columns), x_MC.dtype)
  kernel = plgpu.kernel(
      tools.named(f'gather_{form}', _run, plan=plan, axis=axis),
      out_type=result,
      grid=(plan.grid,),
      **_options(),
  )
  y, (work,) = tools.in_place(kernel, (x_MC,), (work,), result)
  return y, work


@lowered_once('axis', 'eps', 'form', 'batch')
def gather_and_norm(
    x_MD: jax.Array,
    gain_D: jax.Array,
    out_scale: jax.Array,
    part_MC: jax.Array,
    scale: jax.Array,
    work: jax.Array,
    *,
    axis: str,
    eps: float,
    form: str = 'packets',
    batch: int = 8,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """As `gather_columns`, then `kernels/add_norm_quantize`, in one kernel.

  A program gathers its own row of the product, or its four, and goes on with
  it: no program waits for another of its device. The workspace is this
  function's alone, since units belong to other programs than there.

  Args:
    x_MD: the residual stream.
    gain_D: of the norm.
    out_scale: of the FP8 values, float32 [].
    part_MC: this device's columns of what is added, without its scale.
    scale: of the product, float32 [].
    work: see `gather_columns`.
    axis: of the mesh.
    eps: of the norm.
    form: one of `FORMS`.
    batch: see `Form`.

  Returns:
    (x + the product, their norm's FP8 values, the workspace)
  """
  own_rows = norm.rows_of_program(x_MD.shape[1])
  plan = _plan_of(
      part_MC,
      work,
      axis,
      form=form,
      programs=x_MD.shape[0] // own_rows,
      batch=batch,
      own_rows=own_rows,
  )
  results = [
      jax.ShapeDtypeStruct(x_MD.shape, part_MC.dtype),
      jax.ShapeDtypeStruct(x_MD.shape, x_MD.dtype),
      jax.ShapeDtypeStruct((1, *x_MD.shape), formats.E4M3),
  ]

  def body(*refs):
    x_ref, gain_ref, scale_ref, out_scale_ref, part_ref, work_ref, *made = refs
    product_ref, sum_ref, fp8_ref = made
    _run(part_ref, work_ref, product_ref, plan=plan, axis=axis)
    operands = x_ref, gain_ref, product_ref, scale_ref, out_scale_ref
    norm.kernel(
        *operands,
        sum_ref,
        fp8_ref,
        eps=eps,
        num_scales=1,
        adds=True,
        quantizes=True,
        interpret=False,
    )

  kernel = plgpu.kernel(
      tools.named(f'gather_{form}_and_norm', body),
      out_type=results,
      grid=(plan.grid,),
      **_options(),
  )
  operands = x_MD, gain_D, scale.reshape(1), out_scale.reshape(1), part_MC

  def run(refs):
    work_ref, *result_refs = refs
    found = kernel(*operands, work_ref)
    for ref, value in zip(result_refs, found, strict=True):
      ref[...] = value

  start = [jnp.zeros(result.shape, result.dtype) for result in results]
  work, _, total, fp8 = pl.run_state(run)((work, *start))
  return total, jnp.squeeze(fp8, 0), work


def gather_with_barrier(
    x_MC: jax.Array, *, axis: str, programs: int = 32
) -> jax.Array:
  """Returns whole rows, by what Pallas has for it; within `shard_map`.

  Each device stores its part into the results of all. So XLA starts two kernels
  before it: one writes zeros for the semaphore, in the other the devices of the
  whole mesh wait for each other.
  """
  rows, columns = x_MC.shape
  devices = lax.axis_size(axis)
  vector = 16 // x_MC.dtype.itemsize
  width = math.gcd(columns, tools.THREADS * vector)
  height = math.gcd(rows, max(1, tools.THREADS * vector // width))
  tiles = rows // height, columns // width
  layout = plgpu.Layout.WG_STRIDED(
      (height, width), vec_size=height * width // tools.THREADS
  )

  def body(x_ref, y_ref, arrived):
    me = lax.axis_index(axis)

    @plgpu.nd_loop(tiles, collective_axes='program')
    def step(info):
      row, column = info.index
      these = pl.ds(row * height, height)
      part = tools.read(x_ref.at[these, pl.ds(column * width, width)], layout)
      there = pl.ds(me * columns + column * width, width)
      y_ref[these, there] = part
      for k in range(1, devices):
        plgpu.remote_ref(y_ref, _next_device(axis, k))[these, there] = part

    del step
    for k in range(1, devices):
      pl.semaphore_signal(arrived, device_id=_next_device(axis, k))
    total = min(programs, math.prod(tiles)) * (devices - 1)
    pl.semaphore_wait(arrived, total, decrement=False)

  return plgpu.kernel(
      tools.named('gather_with_barrier', body),
      out_type=jax.ShapeDtypeStruct((rows, devices * columns), x_MC.dtype),
      scratch_types=[plgpu.SemaphoreType.REGULAR],
      grid=(min(programs, math.prod(tiles)),),
      grid_names=('program',),
      compiler_params=plgpu.CompilerParams(),
  )(x_MC)
