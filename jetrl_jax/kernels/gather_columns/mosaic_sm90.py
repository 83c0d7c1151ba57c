"""A gather of columns between the GPUs of a process, in Pallas' Mosaic form.

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
* It is never copied. A device makes a copy when it gets there, and the others
  may have pushed before. So it is donated, and goes through no program that
  does not gather.
* It serves one form. Then gathers of several shapes may take it in turn, since
  a unit belongs to the same program whatever the shape.

Two forms:

* 'packets': 8 bytes travel with the number twice, as 16 bytes, and a receiver
  looks at them until both numbers are right. Nobody waits for a write to have
  arrived, so it takes about one passage of NVLink, but twice the bytes. Halves
  of 8 bytes must arrive whole, as in NCCL's protocol LL.
* 'flags': 16 bytes travel as they are. Then a program waits until its writes
  have arrived (a fence) and sends the number.

A program is a warpgroup of 128 threads. A thread moves units of 8 or 16 bytes
through its registers, a few at a time, and never through shared memory; the
programs, at most one a multiprocessor, take units in turn. There is no sum: the
bits are those that were sent. Lower bound of the time: what a device sends, at
NVLink's 450 GB/s, as packets twice; and one passage, with flags two. On two
H200 the gathers of a layer of a 7B (what o reads, down reads and down adds)
take 3.7, 5.3 and 4.0 us with 32 rows, as packets, of which the bytes are 0.3,
1.3 and 1.0; with 256 rows, as flags, 7.3, 14.7 and 10.6, of which 1.0, 5.4 and
4.1.

Both are PTX, because Pallas promises neither how wide a store is nor that a
load looks at memory again. tests/kernels/test_gather_columns.py runs it without
a GPU.
"""

# jax 0.10, which the types are checked with, lacks some of it.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from jetrl_jax.kernels import mosaic_tools as tools
from jetrl_jax.kernels.calls import lowered_once

# Form -> bytes that a thread moves at a time. They travel as a packet.
_UNITS = {'packets': 8, 'flags': 16}
FORMS = tuple(_UNITS)
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
  """

  form: str
  devices: int
  rows: int
  row_bytes: int
  capacity: int
  programs: int = 132
  batch: int = 8

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

  @property
  def unit(self) -> int:
    """Bytes that a thread moves at a time."""
    return _UNITS[self.form]

  @property
  def units(self) -> int:
    """Units of a device's part."""
    return self.rows * self.row_bytes // self.unit

  @property
  def grid(self) -> int:
    """Programs that there are."""
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
      mad.lo.u32 first, cta, {tools.THREADS}, tid;
      mov.u32 end, {self.units};
      mul.wide.u32 at, cta, 4;
      add.u64 at, at, $2;
      ld.volatile.global.u32 epoch, [at];
      add.u32 epoch, epoch, 1;
      and.b32 parity, epoch, 1;
      mov.u32 looks, 0;"""
    return '\n'.join(['{', head, *lines, '}'])

  @property
  def _header(self) -> int:
    return _LINE * (1 + self.devices)

  def _slot(self, source: str) -> str:
    """Where the part of a device lies in a workspace."""
    size = self.capacity // self.unit * _PACKET
    return f"""
      mad.lo.u32 part, parity, {self.devices}, {source};
      mov.u64 slot, {self._header};
      mad.wide.u32 slot, part, {size}, slot;"""

  def _batches(self) -> list[list[int]]:
    """Offsets of the units of a thread, from its first one."""
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


def workspace_words(form: str, devices: int, capacity: int) -> int:
  """Returns the length of a device's workspace, int32.

  Args:
    form: one of `FORMS`.
    devices: that gather.
    capacity: bytes of a device's part, a multiple of 16.
  """
  slots = 2 * devices * capacity * _PACKET // _UNITS[form]
  return (_LINE * (1 + devices) + slots) // 4


def _capacity(form: str, devices: int, words: int) -> int:
  """Returns the bytes that a workspace of so many words has room for."""
  slots = 4 * words - _LINE * (1 + devices)
  return slots * _UNITS[form] // (2 * devices * _PACKET)


def _run(x_ref, work_ref, y_ref, *, plan: Form, axis: str) -> None:
  """Gathers, in a program of a kernel."""
  me = lax.axis_index(axis)
  size = jnp.int32(plan.devices)
  next_ones: list[Any] = [
      {axis: lax.rem(me + k, size)} for k in range(1, plan.devices)
  ]
  others = [plgpu.remote_ref(work_ref, device) for device in next_ones]
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


@lowered_once('axis', 'form', 'programs', 'batch')
def gather_columns(
    x_MC: jax.Array,
    words: jax.Array,
    *,
    axis: str,
    form: str,
    programs: int = 132,
    batch: int = 8,
) -> tuple[jax.Array, jax.Array]:
  """Returns whole rows and the workspace; runs within `shard_map`.

  Args:
    x_MC: this device's columns, of any dtype.
    words: the workspace, int32 [workspace_words], or with axes of length 1
      before.
    axis: of the mesh. The other axes do not matter; ids of the mesh's devices
      must be 0, 1 and so on, in its order.
    form: one of `FORMS`, of this workspace always the same.
    programs: at most, of this workspace always as many.
    batch: see `Form`.

  Returns:
    ([M, devices * C]; the workspace)

  Raises:
    ValueError: rows that are no multiple of the form's unit, or too many.
  """
  rows, columns = x_MC.shape
  devices = lax.axis_size(axis)
  plan = Form(
      form=form,
      devices=devices,
      rows=rows,
      row_bytes=columns * x_MC.dtype.itemsize,
      capacity=_capacity(form, devices, words.size),
      programs=programs,
      batch=batch,
  )
  plan.check()
  result = jax.ShapeDtypeStruct((rows, devices * columns), x_MC.dtype)
  kernel = plgpu.kernel(
      tools.named(f'gather_{form}', _run, plan=plan, axis=axis),
      out_type=result,
      grid=(plan.grid,),
      grid_names=('program',),
      compiler_params=plgpu.CompilerParams(
          approx_math=True,
          unsafe_no_auto_barriers=True,
          skip_device_barrier=True,
      ),
  )
  y, (words,) = tools.in_place(kernel, (x_MC,), (words,), result)
  return y, words
