"""The tail of a decode layer as one kernel (Mosaic), an experiment.

    r = x + a8 Wo^T                 o, added to the residual stream
    q8 = E4M3(rms_norm(r))
    h8 = E4M3(SwiGLU(q8 Wgu^T))     gate_up
    y = r + h8 Wdown^T              down
    n8 = E4M3(rms_norm(y))          for the next layer's qkv

Each of a GPU's multiprocessors has one program, and all run at once. Between
two phases they wait for each other at a counter in the GPU's memory. A program
is a few warpgroups: one asks for tiles of the weights, one for tiles of the
rows, and one or two multiply, 64 rows each. Only rows depend on the phase
before. So the tiles of weights go through a ring of their own, and those of the
next phase are on their way while the programs wait and normalise.

Shares: of o and down a program has 64 rows and 56 columns (32 columns if there
are 64 rows), of gate_up all rows and up to 144 columns, of a norm one row. A
multiprocessor takes about 64 bytes a cycle, so rows and columns of a tile must
be about as many: with 128 rows and 32 columns down would take 27 us to bring
its operands alone, with 64 and 56 it takes 20.

Order of the sums: that of `kernels/gate_up` and `kernels/add_norm_quantize`.
"""

# jax 0.10, which the types are checked with, lacks some of it.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from jetrl_jax.fp8 import formats
from jetrl_jax.fp8.products import times
from jetrl_jax.kernels import mosaic_tools as tools
from jetrl_jax.kernels.calls import lowered_once
from jetrl_jax.kernels.swiglu import formula

PHASES = 'o', 'norm', 'gate_up', 'down', 'next_norm'
# What each phase reads and writes.
_READS = {
    'o': ('a8', 'x', 'w_o'),
    'norm': ('r', 'gain'),
    'gate_up': ('q8', 'w_gate_up'),
    'down': ('h8', 'r', 'w_down'),
    'next_norm': ('y', 'next_gain'),
}
_WRITES = {
    'o': 'r',
    'norm': 'q8',
    'gate_up': 'h8',
    'down': 'y',
    'next_norm': 'n8',
}
# float32 numbers, in one array.
NUMBERS = (
    'a_scale',
    'o_scale',
    'q_scale',
    'gate_up_scale',
    'h_scale',
    'down_scale',
    'next_scale',
)
_UNIT = 8  # Columns of the smallest instruction.
# Tiles of 128 bytes of K that o and down have in a stage of the weights.
_CHUNKS = 4
_GATE_COPIES = 2  # of a tile of gate, and of up
_NORM_CHUNK = 512
# Counters are a line of memory apart.
_LINE = 32
COUNTERS = 4 * _LINE
# Times that the first warpgroup of a program notes with `Plan.marks`.
MARKS = (
    'start',
    "o's first tiles are there",
    'o is multiplied',
    'o is written',
    'all of o is written',
    'norm is written',
    "gate_up's first tiles are there",
    'gate_up is multiplied',
    'h is written',
    "down's first tiles are there",
    'down is multiplied',
    'y is written',
    'all of y is written',
    'end',
)
# Looks at a counter, about half a microsecond each, before a program gives up.
_PATIENCE = 1 << 22


class Plan(NamedTuple):
  """How the work is shared out.

  Attributes:
    rows: 64 or 128.
    dim: D.
    inner: columns of a8.
    ffn: F.
    programs: one a multiprocessor.
    weight_stages: tiles of weights on their way.
    row_stages: tiles of 64 rows on their way.
    ahead: whether weights are asked for before their phase begins.
    prefetch: tiles of weights behind those that are brought to the L2 cache,
      when gate_up and down begin.
    eps: of the norms.
    pairs: whether two neighbouring programs bring each other the rows that both
      read, half each.
    marks: whether programs note times.
  """

  rows: int
  dim: int
  inner: int
  ffn: int
  programs: int = 132
  weight_stages: int = 4
  row_stages: int = 8
  ahead: bool = True
  prefetch: int = 0
  eps: float = 1e-6
  pairs: bool = False
  marks: bool = False

  @property
  def groups(self) -> int:
    """Warpgroups that multiply; also parts of the rows in o and down."""
    return self.rows // tools.ROWS

  @property
  def width(self) -> int:
    """Columns of a tile of o and of down."""
    units = -(-self.dim // _UNIT)
    return -(-units // (self.programs // self.groups)) * _UNIT

  @property
  def tiles(self) -> int:
    """Tiles of o, and of down; a program has at most one."""
    return -(-self.dim // self.width) * self.groups

  @property
  def gate_width(self) -> int:
    """Columns of h that a program makes."""
    units = -(-self.ffn // (_GATE_COPIES * _UNIT))
    return -(-units // self.programs) * _GATE_COPIES * _UNIT

  @property
  def makers(self) -> int:
    """Programs that make columns of h."""
    return -(-self.ffn // self.gate_width)

  @property
  def slot_rows(self) -> int:
    """Rows of 128 bytes in a stage of the weights."""
    return max(2 * self.gate_width, _CHUNKS * self.width)

  def check(self) -> None:
    """Raises a ValueError for shapes that the kernel does not take."""
    step = _CHUNKS * tools.SWIZZLE
    wrong = [k for k in (self.dim, self.inner, self.ffn) if k % step]
    if wrong:
      raise ValueError(f'sizes {wrong}: the kernel takes multiples of {step}')
    if self.rows not in (64, 128):
      raise ValueError(f'{self.rows} rows: the kernel takes 64 and 128')
    shares = self.programs, self.makers, self.tiles // self.groups
    if self.pairs and any(count % 2 for count in shares):
      raise ValueError(
          f'programs, programs with columns of h, and tiles of columns are'
          f' {shares}; pairs take even numbers'
      )
    if 2 * self.gate_width > 288:
      raise ValueError(
          f'{self.ffn} columns of h are {self.gate_width} for each of'
          f' {self.programs} programs; registers hold 144'
      )


def plan(rows: int, dim: int, inner: int, ffn: int, **options: Any) -> Plan:
  """Returns a plan, with as many stages as there is room for."""
  options.setdefault('row_stages', 7 if rows == 128 else 9)
  found = Plan(rows, dim, inner, ffn, **options)
  found.check()
  return found


class Ring(NamedTuple):
  """Tiles in shared memory, used in turn.

  Attributes:
    tiles: [stages, rows, 128] bytes.
    there: barriers, one a stage: its copies have come.
    used: the same: all warpgroups are done with it.
  """

  tiles: Any
  there: Any
  used: Any

  @classmethod
  def types(
      cls, stages: int, rows: int, copies: int, groups: int, pairs: bool = False
  ) -> 'Ring':
    """Returns what to allocate; in pairs both programs use a tile up."""
    used = plgpu.Barrier
    if pairs:
      used = functools.partial(plgpu.ClusterBarrier, collective_axes=('pair',))
    return cls(
        tiles=plgpu.SMEM(
            (stages, rows, tools.SWIZZLE),
            formats.E4M3,
            transforms=tools.pieces(formats.E4M3),
        ),
        there=plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        used=used(num_arrivals=groups, num_barriers=stages),
    )

  @property
  def stages(self) -> int:
    """Number of stages."""
    return self.tiles.shape[0]

  def slot(self, t):
    """Returns the stage of the t-th tile."""
    return lax.rem(t, jnp.int32(self.stages))

  def ask(
      self, begin, count, places_of, *, pairs: bool = False, prefetch: int = 0
  ) -> None:
    """Asks for tiles begin, begin + 1 ... of the ring.

    Args:
      begin: number of the first one.
      count: of tiles.
      places_of: from a number below `count` to (place in memory, rows of the
        tile) of each copy.
      pairs: whether the other program of the pair asks for the other half.
      prefetch: tiles that are brought to the L2 cache once the ring is full.
    """

    def step(i, _):
      slot = self.slot(begin + i)

      @pl.when(begin + i >= self.stages)
      def _():
        plgpu.barrier_wait(self.used.at[slot])

      for place, rows in places_of(i):
        plgpu.copy_gmem_to_smem(
            place,
            self.tiles.at[slot, rows],
            self.there.at[slot],
            collective_axes='pair' if pairs else None,
        )

    def fetch(i, _):
      for place, _ in places_of(i):
        plgpu.async_prefetch(place)

    if prefetch:
      first = jnp.minimum(self.stages, count)
      lax.fori_loop(0, first, step, None)
      last = jnp.minimum(first + prefetch, count)
      lax.fori_loop(first, last, fetch, None)
      lax.fori_loop(first, count, step, None)
    else:
      lax.fori_loop(0, count, step, None)

  def await_rest(self, total) -> None:
    """Waits until the last tiles were used.

    The interpreter wants every arrival at a barrier to be awaited. A program of
    a pair must not end before the other one's last arrivals.
    """

    def step(t, _):
      plgpu.barrier_wait(self.used.at[self.slot(t)])

    lax.fori_loop(jnp.maximum(total - self.stages, 0), total, step, None)

  def wait(self, t):
    """Waits for a tile and returns it."""
    slot = self.slot(t)
    plgpu.barrier_wait(self.there.at[slot])
    return self.tiles.at[slot]

  def release(self, t, condition=None) -> None:
    """Lets a tile be written over."""
    slot = self.slot(jnp.maximum(t, 0))
    plgpu.barrier_arrive(self.used.at[slot], predicate=condition)


class Counters:
  """Counters in memory, at which the programs wait for each other.

  Number 0 counts tiles of o, 1 rows normalised, 2 warpgroups that have made h,
  3 tiles of down.
  """

  def __init__(self, ref, barriers):
    """Both are None if there is but one phase.

    Args:
      ref: int32 [COUNTERS].
      barriers: stand for the counters in the interpreter, where one program
        runs, or a pair.
    """
    self._ref, self._barriers = ref, barriers

  @property
  def _counts(self) -> bool:
    return self._ref is not None and self._barriers is None

  def _run(self, function) -> None:

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def run(context, ref):
      del context
      function(utils.memref_ptr(ref))

    run(self._ref)

  def arrive(self, number: int) -> None:
    """Adds 1; what this warpgroup wrote is seen by those who wait."""
    if self._barriers is not None:
      plgpu.barrier_arrive(self._barriers[number])

    def run(pointer):
      # Other programs' bulk copies read it.
      utils.inline_ptx('fence.proxy.async.global;', has_side_effects=True)
      utils.warpgroup_barrier()
      self._by_one_thread('red.release.gpu.global.add', pointer, number, 1)

    if self._counts:
      self._run(run)

  def _by_one_thread(self, operation, pointer, number, value) -> None:
    # Predicated: of wgmma after a branch of some threads ptxas says that it is
    # serialised.
    utils.inline_ptx(
        f'{operation}.u32 [$0+{4 * _LINE * number}], {value};',
        pointer,
        predicate=utils.single_thread_predicate(utils.ThreadSubset.WARPGROUP),
        has_side_effects=True,
    )

  def wait(self, number: int, target: int) -> None:
    """Waits until a counter has reached a number; gives up after seconds.

    All threads look: see `_by_one_thread`.
    """
    if self._barriers is not None:
      plgpu.barrier_wait(self._barriers[number])
    loop = f"""{{
      .reg .pred P, Q;
      .reg .u32 value, looks;
      mov.u32 looks, 0;
      AGAIN:
      ld.acquire.gpu.global.u32 value, [$0+{4 * _LINE * number}];
      setp.ge.u32 P, value, {target};
      @P bra.uni DONE;
      add.u32 looks, looks, 1;
      setp.gt.u32 Q, looks, {_PATIENCE};
      @Q trap;
      bra.uni AGAIN;
      DONE:
    }}"""

    def run(pointer):
      utils.inline_ptx(loop, pointer, has_side_effects=True)
      utils.inline_ptx('fence.proxy.async.global;', has_side_effects=True)

    if self._counts:
      self._run(run)

  def reset(self, *numbers: int) -> None:
    """Sets counters to 0."""

    def run(pointer):
      for number in numbers:
        self._by_one_thread('st.relaxed.gpu.global', pointer, number, 0)

    if self._counts:
      self._run(run)


def _mark(ref, name: str, condition=None) -> None:
  """Notes the time, in nanoseconds, and this multiprocessor's clock."""
  if ref is None:
    return
  place = 8 * MARKS.index(name)
  text = f"""{{
    .reg .u32 clock, time, program;
    .reg .u64 place;
    mov.u32 clock, %clock;
    mov.u32 time, %globaltimer_lo;
    mov.u32 program, %ctaid.x;
    mad.wide.u32 place, program, {8 * len(MARKS)}, $0;
    @$1 st.global.u32 [place+{place}], time;
    @$1 st.global.u32 [place+{place + 4}], clock;
  }}"""

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
  def run(context, ref):
    del context
    one = utils.single_thread_predicate(utils.ThreadSubset.WARPGROUP)
    utils.inline_ptx(text, utils.memref_ptr(ref), one, has_side_effects=True)

  def mark():
    run(ref)

  mark() if condition is None else pl.when(condition)(mark)


def _chunk(index, size: int = tools.SWIZZLE):
  return pl.ds(pl.multiple_of(index * size, size), size)


def _norm(row, source_ref, gain_ref, out_ref, scale, before, plan, interpret):
  """Normalises and quantises a row, as `kernels/add_norm_quantize` does.

  `before` is called when all is read that no program writes.
  """
  layout = plgpu.Layout.WG_STRIDED(
      (_NORM_CHUNK,), vec_size=_NORM_CHUNK // tools.THREADS
  )
  chunks = [pl.ds(i, _NORM_CHUNK) for i in range(0, plan.dim, _NORM_CHUNK)]
  gains = [tools.read(gain_ref.at[at], layout) for at in chunks]
  before()
  rows = [tools.read(source_ref.at[row, at], layout) for at in chunks]
  parts = [x.astype(jnp.float32) for x in rows]
  total = parts[0] * parts[0]
  for part in parts[1:]:
    total += part * part
  inverse = lax.rsqrt(jnp.sum(total, axis=-1) / plan.dim + plan.eps)
  for at, part, gain in zip(chunks, parts, gains, strict=True):
    out = (part * inverse).astype(gain.dtype) * gain
    out_ref[row, at] = tools.quantized(out, scale, interpret)


def _kernel(*refs, names, plan: Plan, phases, interpret: bool):
  """All phases of a program, or one."""
  *array_refs, weights, rows, staged_ref, barriers = refs
  ref = dict(zip(names, array_refs, strict=True))
  counters = Counters(ref.get('counters'), barriers)
  scale = {
      name: (lambda i=i: ref['numbers'][i]) for i, name in enumerate(NUMBERS)
  }
  groups, dim = plan.groups, plan.dim
  mark = functools.partial(_mark, ref.get('marks'))
  program, group = lax.axis_index('program'), lax.axis_index('warpgroup')
  # Of the programs of a pair, which have tiles of the same rows.
  members, member = 1, jnp.int32(0)
  if plan.pairs:
    members, member = 2, lax.axis_index('pair')
  cluster, program = program, program * members + member
  has_tile = program < plan.tiles
  has_gate = program < plan.makers
  # The tile of o and of down. The last ones repeat some columns.
  first = jnp.minimum(
      (lax.div(cluster, jnp.int32(groups)) * members + member) * plan.width,
      dim - plan.width,
  )
  columns = pl.ds(pl.multiple_of(first, _UNIT), plan.width)
  part = _chunk(lax.rem(cluster, jnp.int32(groups)), tools.ROWS)
  first = jnp.minimum(program * plan.gate_width, plan.ffn - plan.gate_width)
  gate_columns = pl.multiple_of(first, _GATE_COPIES * _UNIT)

  def steps_of(phase: str):
    """Returns the stages of weights that a phase has; 0 for a norm."""
    per_step = _CHUNKS * tools.SWIZZLE
    of_tile = {'o': plan.inner // per_step, 'down': plan.ffn // per_step}
    if phase in of_tile:
      return jnp.where(has_tile, of_tile[phase], 0)
    if phase == 'gate_up':
      return jnp.where(has_gate, dim // tools.SWIZZLE, 0)
    return jnp.int32(0)

  def rows_of(phase: str):
    """Returns the tiles of rows for each stage of weights."""
    return groups if phase == 'gate_up' else _CHUNKS

  begin, total = {}, (jnp.int32(0), jnp.int32(0))
  for phase in phases:
    begin[phase] = total
    steps = steps_of(phase)
    total = total[0] + steps, total[1] + steps * rows_of(phase)

  def wait_for(phase: str) -> None:
    """Waits for what a dot's rows need."""
    if phase == 'gate_up' and 'norm' in phases:
      counters.wait(1, plan.rows)
    if phase == 'down' and 'gate_up' in phases:
      counters.wait(2, plan.makers * groups)

  def weights_of(phase: str):
    """Returns the function for `Ring.ask`."""
    if phase == 'gate_up':
      half = plan.gate_width // _GATE_COPIES

      def of_gate(k):
        for which in range(2):
          for i in range(_GATE_COPIES):
            those = pl.ds(gate_columns + i * half, half)
            yield (
                ref['w_gate_up'].at[which, those, _chunk(k)],
                pl.ds((which * _GATE_COPIES + i) * half, half),
            )

      return of_gate

    def of_tile(k):
      for c in range(_CHUNKS):
        place = ref[f'w_{phase}'].at[columns, _chunk(k * _CHUNKS + c)]
        yield place, pl.ds(c * plan.width, plan.width)

    return of_tile

  def tiles_of_rows(phase: str):
    """Returns the function for `Ring.ask`."""
    whole = pl.ds(0, tools.ROWS)

    def of_gate(i):
      k, which = lax.div(i, jnp.int32(groups)), lax.rem(i, jnp.int32(groups))
      yield ref['q8'].at[_chunk(which, tools.ROWS), _chunk(k)], whole

    def of_tile(i):
      source = ref['a8' if phase == 'o' else 'h8']
      yield source.at[part, _chunk(i)], whole

    return of_gate if phase == 'gate_up' else of_tile

  dots = [phase for phase in phases if phase in ('o', 'gate_up', 'down')]

  @pl.when(group == groups)
  def _():
    plgpu.set_max_registers(tools.MEMORY_REGISTERS, action='decrease')
    for phase in dots:
      if not plan.ahead:
        pl.when(steps_of(phase) > 0)(functools.partial(wait_for, phase))
      weights.ask(
          begin[phase][0],
          steps_of(phase),
          weights_of(phase),
          prefetch=0 if interpret or phase == 'o' else plan.prefetch,
      )
    if interpret:
      weights.await_rest(total[0])

  @pl.when(group == groups + 1)
  def _():
    plgpu.set_max_registers(tools.MEMORY_REGISTERS, action='decrease')
    # Before the first program's tile of o, without which none comes to these.
    pl.when(program == 0)(lambda: counters.reset(2, 3))
    for phase in dots:
      steps = steps_of(phase)
      if phase != 'o':
        pl.when(steps > 0)(functools.partial(wait_for, phase))
      if phase == 'down':
        # All programs have left the first two.
        pl.when(program == 0)(lambda: counters.reset(0, 1))
      count = steps * rows_of(phase)
      places = tiles_of_rows(phase)
      rows.ask(begin[phase][1], count, places, pairs=plan.pairs)
    if interpret or plan.pairs:
      rows.await_rest(total[1])

  def tile_of(phase: str):
    """Multiplies a tile of o or down and adds it to the residual stream."""
    source, scales = {
        'o': ('x', ('a_scale', 'o_scale')),
        'down': ('r', ('h_scale', 'down_scale')),
    }[phase]
    at_w, at_x = begin[phase]
    added = tools.read(ref[source].at[part, columns], plgpu.Layout.WGMMA)

    def scope(sums):
      def step(k, _):
        w_tile = weights.wait(at_w + k)
        t = at_x + k * _CHUNKS
        for c in range(_CHUNKS):
          x_tile = rows.wait(t + c)
          if not c:
            mark(f"{phase}'s first tiles are there", k == 0)
          w_chunk = w_tile.at[pl.ds(c * plan.width, plan.width)]
          plgpu.wgmma(sums, x_tile, w_chunk.transpose((1, 0)))
          # The product in front of this one is done.
          plgpu.wgmma_wait(1)
          if c:
            rows.release(t + c - 1)
          else:
            rows.release(t - 1, k > 0)
            weights.release(at_w + k - 1, k > 0)

      steps = steps_of(phase)
      lax.fori_loop(0, steps, step, None)
      plgpu.wgmma_wait(0)
      rows.release(at_x + steps * _CHUNKS - 1)
      weights.release(at_w + steps - 1)
      mark(f'{phase} is multiplied')
      product = times(sums[...], [scale[name]() for name in scales])
      out = (added.astype(jnp.float32) + product).astype(added.dtype)
      ref[_WRITES[phase]][part, columns] = out

    pl.run_scoped(scope, tools.sums(tools.ROWS, plan.width))
    counters.arrive(0 if phase == 'o' else 3)
    mark('o is written' if phase == 'o' else 'y is written')

  def pass_by(phase: str) -> None:
    """Uses the tiles that only the first warpgroup reads."""
    at_w, at_x = begin[phase]

    def step(k, _):
      weights.wait(at_w + k)
      for c in range(_CHUNKS):
        rows.wait(at_x + k * _CHUNKS + c)
        rows.release(at_x + k * _CHUNKS + c)
      weights.release(at_w + k)

    lax.fori_loop(0, steps_of(phase), step, None)

  def norm_of(phase: str) -> None:
    source, gain = _READS[phase]
    name = 'q_scale' if phase == 'norm' else 'next_scale'
    number, before = (0, 'o') if phase == 'norm' else (3, 'down')

    def wait(start):
      if start == 0 and before in phases:
        counters.wait(number, plan.tiles)
        mark(f'all of {"o" if number == 0 else "y"} is written')

    def one(start, row):
      _norm(
          row,
          ref[source],
          ref[gain],
          ref[_WRITES[phase]],
          scale[name](),
          functools.partial(wait, start),
          plan,
          interpret,
      )
      if phase == 'norm':
        counters.arrive(1)
        if start == 0:
          mark('norm is written')

    for start in range(0, plan.rows, plan.programs):
      row = start + program
      pl.when(row < plan.rows)(functools.partial(one, start, row))

  def of_gate(gate):
    reciprocal = functools.partial(tools.reciprocal, interpret=interpret)
    return formula.sigmoid(gate, tools.power_of_2, reciprocal)

  def gate_up() -> None:
    at_w, at_x = begin['gate_up']
    width = plan.gate_width

    def scope(*sums):
      def step(k, _):
        w_tile = weights.wait(at_w + k)
        for i in range(groups):
          rows.wait(at_x + k * groups + i)
        mark("gate_up's first tiles are there", (k == 0) & (group == 0))
        x_tile = rows.tiles.at[rows.slot(at_x + k * groups + group)]
        for which, total in enumerate(sums):
          half = w_tile.at[pl.ds(which * width, width)]
          plgpu.wgmma(total, x_tile, half.transpose((1, 0)))
        plgpu.wgmma_wait(0)
        for i in range(groups):
          rows.release(at_x + k * groups + i)
        weights.release(at_w + k)

      lax.fori_loop(0, dim // tools.SWIZZLE, step, None)
      mark('gate_up is multiplied', group == 0)
      gate, up = (total[...].astype(jnp.bfloat16) for total in sums)
      mine = _chunk(group, tools.ROWS)
      staged_ref[mine] = formula.hidden(
          gate,
          up,
          [scale['q_scale'](), scale['gate_up_scale']()],
          scale['h_scale'](),
          of_gate,
          saturates=not interpret,
      )
      plgpu.commit_smem()
      those = pl.ds(gate_columns, width)
      plgpu.copy_smem_to_gmem(staged_ref.at[mine], ref['h8'].at[mine, those])
      plgpu.wait_smem_to_gmem(0)

    pl.run_scoped(scope, *[tools.sums(tools.ROWS, width)] * 2)
    counters.arrive(2)
    mark('h is written', group == 0)

  @pl.when(group < groups)
  def _():
    tools.take_registers(groups, 2 * tools.MEMORY_REGISTERS)

    def alone(condition, run, *args) -> None:
      pl.when((group == 0) & condition)(functools.partial(run, *args))

    mark('start', group == 0)
    for phase in phases:
      if phase == 'gate_up':
        pl.when(has_gate)(gate_up)
      elif phase in ('o', 'down'):
        alone(has_tile, tile_of, phase)
        if groups > 1:
          pl.when(has_tile & (group > 0))(functools.partial(pass_by, phase))
      else:
        alone(True, norm_of, phase)
    mark('end', group == 0)


def _launch(arrays: dict, plan: Plan, phases, interpret: bool) -> dict:
  """Runs phases as one kernel; returns what they write and the counters."""
  written = [_WRITES[phase] for phase in phases]
  counts = len(phases) > 1
  read = dict.fromkeys(name for phase in phases for name in _READS[phase])
  inputs = [*(name for name in read if name not in written), 'numbers']
  shapes: dict[str, Any] = {
      'r': ((plan.rows, plan.dim), jnp.bfloat16),
      'q8': ((plan.rows, plan.dim), formats.E4M3),
      'h8': ((plan.rows, plan.ffn), formats.E4M3),
      'y': ((plan.rows, plan.dim), jnp.bfloat16),
      'n8': ((plan.rows, plan.dim), formats.E4M3),
  }
  if plan.marks and counts:
    written.append('marks')
    shapes['marks'] = (plan.programs, len(MARKS), 2), jnp.int32
  results = [jax.ShapeDtypeStruct(*shapes[name]) for name in written]
  names = [*inputs, *['counters'] * counts, *written]
  options: dict = {
      'compiler_params': plgpu.CompilerParams(
          approx_math=True, reduction_scratch_bytes=512
      )
  }
  pairs = {'cluster': (2,), 'cluster_names': ('pair',)} if plan.pairs else {}
  barriers = None
  if interpret:
    options = tools.kernel_options(True, overlap=True)
    if counts:
      arrivals = plan.tiles, plan.rows, plan.makers * plan.groups, plan.tiles
      barriers = [plgpu.Barrier(num_arrivals=n) for n in arrivals]
      if plan.pairs:
        of_pair = functools.partial(
            plgpu.ClusterBarrier, collective_axes=('pair',)
        )
        barriers = [of_pair(num_arrivals=n // 2) for n in arrivals]
  kernel = plgpu.kernel(
      tools.named(
          'layer_tail' if counts else f'tail_{phases[0]}',
          _kernel,
          names=names,
          plan=plan,
          phases=phases,
          interpret=interpret,
      ),
      out_type=results,
      scratch_types=[
          Ring.types(plan.weight_stages, plan.slot_rows, _CHUNKS, plan.groups),
          Ring.types(plan.row_stages, tools.ROWS, 1, plan.groups, plan.pairs),
          plgpu.SMEM((plan.rows, plan.gate_width), formats.E4M3),
          barriers,
      ],
      grid=(plan.programs // 2 if plan.pairs else plan.programs,),
      grid_names=('program',),
      num_threads=plan.groups + 2,
      thread_name='warpgroup',
      **pairs,
      **options,
  )
  operands = [arrays[name] for name in inputs]
  if not counts:
    found = kernel(*operands)
    return dict(zip(written, found, strict=True))

  def run(refs):
    counters_ref, *result_refs = refs
    found = kernel(*operands, counters_ref)
    for ref, value in zip(result_refs, found, strict=True):
      ref[...] = value

  start = [jnp.zeros(result.shape, result.dtype) for result in results]
  counters, *found = pl.run_state(run)((arrays['counters'], *start))
  return dict(zip(written, found, strict=True)) | {'counters': counters}


@lowered_once('plan', 'apart', 'phases', 'interpret')
def layer_tail(
    arrays: dict,
    *,
    plan: Plan,
    apart: bool = False,
    phases: tuple[str, ...] = PHASES,
    interpret: bool = False,
) -> dict:
  """Returns arrays that are added to those given, see the module docstring.

  Args:
    arrays: 'a8' [M, I] E4M3, 'x' [M, D] bfloat16, 'w_o' [D, I], 'gain' [D],
      'w_gate_up' [2, F, D], 'w_down' [D, F], 'next_gain' [D], 'numbers' of
      `NUMBERS`, and 'counters', int32 zeros [COUNTERS] before the first call
      and afterwards those that the last call returned.
    plan: how the work is shared out.
    apart: each phase is a kernel of its own.
    phases: which of them, in order.
    interpret: run on a CPU, where phases must be apart, or one program or pair
      has all the work.
  """
  made = {}
  launches = [(phase,) for phase in phases] if apart else [phases]
  for launched in launches:
    made |= _launch(arrays | made, plan, launched, interpret)
  return made
