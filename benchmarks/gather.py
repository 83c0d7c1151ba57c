"""Times gathers of columns between the GPUs of a process, as in decode.

    python -m benchmarks.gather --output=benchmarks/results/NAME

It needs two or more Hopper GPUs (--devices) with NVLink between them, jax
0.11.2, no option of XLA and no NVSHMEM.

With `mesh.tensor` a decode step gathers three small arrays a layer: rows in FP8
before o and before down, and what down adds, in float32. Here one program
has many such gathers, each of what was made of the last one, within a loop, as
decode steps are: by XLA (NCCL, and a kernel that puts columns next to each
other) and by both forms of `kernels/gather_columns`. First all bits are
compared with XLA's: after one pass, after all, from other bytes each time, and
with devices that in turn come late, so that something that is read too early or
written too early shows. Then the passes are timed. 'nothing' has no gathers,
only what lies between them; its time is taken from the others'. With a norm
that includes a kernel of its own, which repeats a device's part.

A variant is a name of `_NAMES` or one with options: 'packets:programs=66'.
JAX's own `all_gather_mgpu` is not here: it stores through NVLink multicast,
which not every host allows. NCCL is told to leave that alone as well, unless
NCCL_NVLS_ENABLE says otherwise.

--compile_only compiles for GPUs that are not there, as deviceless.py does, and
prints the kernels of a pass. On a CPU only 'nothing' and 'xla' run:
JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=2, --tiny.
"""

import faulthandler
import functools
import json
import os
import time
import traceback
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import absent_gpus, common
from jetrl_jax.core import collectives, sharding
from jetrl_jax.core.compilation import exact_jit, on_gpu
from jetrl_jax.fp8.products import DeferredScale
from jetrl_jax.kernels import dispatch
from jetrl_jax.kernels.add_norm_quantize import forward as add_norm_quantize

_DEVICES = flags.DEFINE_integer('devices', 2, 'See mesh.tensor.')
_SLOTS = flags.DEFINE_list('slots', ['32', '64', '256'], 'Of a decode step.')
_ARRAYS = flags.DEFINE_list(
    'arrays',
    [
        'float32:3584:norm',
        'float32:3584',
        'float8_e4m3fn:3584',
        'float8_e4m3fn:18944',
    ],
    "Dtype and columns of whole rows. These are a 7B's: what down adds, with"
    " the norm that reads it and without; o's rows; down's rows.",
)
_VARIANTS = flags.DEFINE_list(
    'variants',
    ['nothing', 'xla', 'packets', 'flags'],
    "What is timed; 'xla' comes before what is compared with it.",
)
_GATHERS = flags.DEFINE_integer('gathers', 28, 'Of a pass.')
_REPEATS = flags.DEFINE_integer('repeats', 20, 'Passes of a program.')
_CHECKS = flags.DEFINE_integer('checks', 5, 'Other bytes that are compared.')
_COMPILE_ONLY = flags.DEFINE_bool('compile_only', False, 'For absent GPUs.')
_PATIENCE_S = 120  # For a variant, compiling included.
_NVLINK = 450e9  # bytes/s of an H200, in one direction
_COLUMNS = (
    ('slots', 'slots', 'd'),
    ('dtype', 'dtype', ''),
    ('columns', 'columns', 'd'),
    ('norm', 'norm', ''),
    ('variant', 'variant', ''),
    ('us', 'us a gather', '.2f'),
    ('pass_us', 'with what lies between', '.2f'),
    ('wire_us', 'of the bytes at 450 GB/s', '.2f'),
    ('differ', "runs unlike XLA's", ''),
    ('right', "bits are numpy's", ''),
    ('compile_s', 'compiled in s', '.0f'),
    ('error', 'error', ''),
)
_NAMES = 'nothing', 'xla', 'packets', 'flags'
_EPS = 1e-6


class _Case(NamedTuple):
  """What is gathered.

  Attributes:
    slots: M.
    dtype: of its values.
    columns: of whole rows.
    devices: that gather.
    norm: whether they are added, normed and quantised.
  """

  slots: int
  dtype: str
  columns: int
  devices: int
  norm: bool

  @property
  def part_bytes(self) -> int:
    """Of a device's part."""
    size = jnp.dtype(self.dtype).itemsize
    return self.slots * self.columns // self.devices * size

  @property
  def word(self) -> Any:
    """Unsigned integers as wide as the values."""
    return jnp.dtype(f'uint{8 * jnp.dtype(self.dtype).itemsize}')

  def words(self, variant: str) -> int:
    """Length of a device's workspace."""
    name, _ = _parsed(variant)
    if name in ('nothing', 'xla'):
      return 1
    from jetrl_jax.kernels.gather_columns import mosaic_sm90

    return mosaic_sm90.workspace_words(name, self.devices, self.part_bytes)


def _gather(variant: str, case: _Case, x, work):
  """Returns whole rows and the workspace."""
  name, settings = _parsed(variant)
  axis = sharding.TENSOR
  if name == 'nothing':
    return jnp.tile(x, (1, case.devices)), work
  if name == 'xla':
    axes = collectives.Axes(tensor=case.devices)
    return axes.gather_inputs(x), work
  from jetrl_jax.kernels.gather_columns import mosaic_sm90

  return mosaic_sm90.gather_columns(x, work, axis=axis, form=name, **settings)


def _parsed(variant: str) -> tuple[str, dict[str, int]]:
  """Returns a variant's name and its options."""
  name, *options = variant.split(':')
  if name not in _NAMES:
    raise ValueError(f'variant {variant!r}; allowed are {_NAMES}, with options')
  pairs = (option.split('=') for option in options)
  return name, {key: int(value) for key, value in pairs}


def _read(variant: str, case: _Case, x, work):
  """Returns the bits of what is made of whole rows, and the workspace."""
  if not case.norm:
    y, work = _gather(variant, case, x, work)
    if variant != 'nothing':
      # Whoever reads rows in a decode step is a kernel of its own.
      y = lax.optimization_barrier(y)
    return lax.bitcast_convert_type(y, case.word), work
  numbers = jnp.arange(case.slots * case.columns, dtype=jnp.int32)
  residual = (numbers % 251).reshape(case.slots, case.columns) / 128
  residual = residual.astype(jnp.bfloat16)
  gain = (1 + numbers[: case.columns] % 7 / 8).astype(jnp.bfloat16)
  scale, out_scale = jnp.float32(0.5), jnp.float32(2.0**-4)
  y, work = _gather(variant, case, x, work)
  added = DeferredScale(values=y, scales=(scale,))
  total, _, fp8 = add_norm_quantize(residual, gain, _EPS, out_scale, added)
  assert fp8 is not None
  bits = lax.bitcast_convert_type(total, jnp.uint16).astype(jnp.uint32)
  eight = lax.bitcast_convert_type(fp8, jnp.uint8).astype(jnp.uint32)
  bits = (bits << 16) ^ (eight * jnp.uint32(0x01010101))
  return bits, work


def _mixed(case: _Case, bits, number, me, np=jnp):
  """Returns the bits of a device's next part, of all that it received."""
  word, width = case.word.type, 8 * case.word.itemsize
  parts = bits.reshape(case.slots, case.devices, -1)
  mixed = parts[:, 0]
  for t in range(1, case.devices):
    turn = 1 + (t - 1) % (width - 1)
    part = parts[:, t]
    mixed = mixed ^ (part << word(turn)) ^ (part >> word(width - turn))
  step = (2 * me + 3) * (2 * number + 1) % 251
  mixed = mixed + np.asarray(step).astype(word)
  return _tame(case, mixed)


def _tame(case: _Case, bits):
  """Returns bits of which none is a NaN that a CPU would change."""
  word, width = case.word.type, 8 * case.word.itemsize
  if case.norm:  # float32 of 2^-7 to 2, as a product has.
    return (bits & word(0x83FFFFFF)) | word(0x3C000000)
  return bits if width == 8 else bits & word(~(1 << (width - 2)) % (1 << width))


def _late(x, turns):
  """Returns x after a loop of so many turns."""

  def turn(_, total):
    return total + jnp.sin(total).sum()

  total = lax.fori_loop(0, turns, turn, jnp.zeros((1024,), jnp.float32))
  # Nothing can tell that it is not above 2.
  return jnp.where(total[0] > 2.0, jnp.zeros_like(x), x)


def _passes(case: _Case, variant: str, gathers: int, late: bool, *arguments):
  """Runs passes of gathers; returns the last part, its rows, the workspace."""
  x, work, repeats, turns = arguments
  me = lax.axis_index(sharding.TENSOR)

  def one_pass(index, state):
    x, bits, work = state
    for k in range(gathers):
      if late:
        comes_late = (index + k) % case.devices == me
        x = _late(x, jnp.where(comes_late, turns, 0))
      bits, work = _read(variant, case, x, work)
      x = _mixed(case, bits, index * gathers + k, me)
      x = lax.bitcast_convert_type(x, jnp.dtype(case.dtype))
    return x, bits, work

  bits = jnp.zeros((case.slots, case.columns), case.word)
  x, bits, work = lax.fori_loop(0, repeats, one_pass, (x, bits, work))
  return x, bits[None], work


def _expected(case: _Case, x: np.ndarray, gathers: int) -> np.ndarray:
  """Returns the bits of the last of some gathers, on every device."""
  whole = x
  for number in range(gathers - 1):
    parts = [
        _mixed(case, whole, number, me, np=np) for me in range(case.devices)
    ]
    whole = np.concatenate(parts, axis=1)
  return np.stack([whole] * case.devices)


_SPECS = P(None, sharding.TENSOR), P(sharding.TENSOR), P(), P()


def _compiled(case: _Case, variant: str, mesh: Mesh, gathers: int, late=False):
  """Returns the executable."""
  made = P(None, sharding.TENSOR), P(sharding.TENSOR), P(sharding.TENSOR)
  run = functools.partial(_passes, case, variant, gathers, late)
  shapes = (
      ((case.slots, case.columns), case.dtype),
      ((case.devices, case.words(variant)), jnp.int32),
      ((), jnp.int32),
      ((), jnp.int32),
  )
  arguments = (
      jax.ShapeDtypeStruct(*shape, sharding=NamedSharding(mesh, spec))
      for shape, spec in zip(shapes, _SPECS, strict=True)
  )
  program = exact_jit(
      sharding.per_device(run, mesh, _SPECS, made),
      out_shardings=sharding.named(made, mesh),
      donate_argnums=(1,),
  )
  return program.lower(*arguments).compile()


class _Runner:
  """Runs a program over and over on the same workspace."""

  def __init__(self, case: _Case, variant: str, mesh: Mesh):
    self._case, self._mesh = case, mesh
    words = case.words(variant)
    zeros = jax.jit(
        lambda: jnp.zeros((case.devices, words), jnp.int32),
        out_shardings=NamedSharding(mesh, _SPECS[1]),
    )
    # All devices have written theirs before one pushes to another.
    self._work = jax.block_until_ready(zeros())

  def rows(self, seed: int):
    """Returns random bytes."""
    random = np.random.default_rng(seed)
    shape = self._case.slots, self._case.columns
    word = self._case.word
    values = random.integers(0, 2 ** (8 * word.itemsize), shape, dtype=word)
    return _tame(self._case, values)

  def put(self, bits: np.ndarray):
    """Returns an array of these bits on the devices."""
    values = bits.view(jnp.dtype(self._case.dtype))
    return jax.device_put(values, NamedSharding(self._mesh, _SPECS[0]))

  def __call__(self, program, x, repeats: int, turns: int = 0):
    """Returns the bits of each device's last rows.

    Raises:
      RuntimeError: the workspace has been copied, see `gather_columns`.
    """
    before = _addresses(self._work)
    _, bits, self._work = program(
        x, self._work, jnp.int32(repeats), jnp.int32(turns)
    )
    if on_gpu() and _addresses(self._work) != before:
      raise RuntimeError('the workspace lies elsewhere after a program')
    return bits


def _addresses(array) -> list[int]:
  return [
      part.data.unsafe_buffer_pointer() for part in array.addressable_shards
  ]


def _check(case, run, program, late) -> tuple[list[np.ndarray], bool | None]:
  """Returns the bits of several runs, and whether the first are as expected."""
  found, right = [], None
  for seed in range(_CHECKS.value):
    bits = run.rows(seed)
    x = run.put(bits)
    for repeats in (1, 3, _REPEATS.value)[: 1 if common.TINY.value else 3]:
      found.append(np.asarray(run(program, x, repeats)))
    if seed == 0 and not case.norm:
      wanted = _expected(case, bits, _GATHERS.value)
      right = np.array_equal(found[0], wanted)
    found.append(np.asarray(run(late, x, 3, 200)))
  return found, right


def _measure(case: _Case, variant: str, mesh: Mesh, first: dict) -> dict:
  """Returns a variant's row; `first` keeps what the others need of a case."""
  row: dict[str, Any] = case._asdict() | {'variant': variant}
  print(f'{time.strftime("%H:%M:%S")} {case} {variant}', flush=True)
  start = time.perf_counter()
  program = _compiled(case, variant, mesh, _GATHERS.value)
  late = None
  if variant != 'nothing':
    few = min(6, _GATHERS.value)
    late = _compiled(case, variant, mesh, few, late=True)
  row['compile_s'] = time.perf_counter() - start
  run = _Runner(case, variant, mesh)
  if variant != 'nothing':
    found, right = _check(case, run, program, late)
    row |= {} if right is None else {'right': right}
    if variant == 'xla':
      first['found'] = found
    if 'found' in first:
      pairs = zip(found, first['found'], strict=True)
      unlike = sum(not np.array_equal(a, b) for a, b in pairs)
      row['differ'] = f'{unlike} of {len(found)}'
      row['unlike'] = unlike
  x = run.put(run.rows(0))
  repeats = _REPEATS.value
  less, more = (
      common.median_seconds(lambda n=n: run(program, x, repeats * n))
      for n in (1, 4)
  )
  row['pass_us'] = (more - less) / (3 * repeats) / _GATHERS.value * 1e6
  if variant == 'nothing':
    first['between'] = row['pass_us']
  else:
    row['us'] = row['pass_us'] - first.get('between', 0.0)
    row['wire_us'] = (case.devices - 1) * case.part_bytes / _NVLINK * 1e6
  return row


def _cases() -> list[_Case]:
  cases = []
  for slots in map(int, _SLOTS.value):
    for name in _ARRAYS.value:
      dtype, columns, *then = name.split(':')
      width = 256 if common.TINY.value else int(columns)
      if width % _DEVICES.value:
        raise ValueError(
            f'{width} columns on {_DEVICES.value} devices; a multiple is needed'
        )
      slots = 4 if common.TINY.value else slots
      norm = then == ['norm']
      if norm and dtype != 'float32':
        raise ValueError(f'{name!r}: a norm is tried with float32 alone')
      cases.append(_Case(slots, dtype, width, _DEVICES.value, norm))
  return list(dict.fromkeys(cases))


def _variants() -> list[str]:
  """Returns the variants that run here."""
  chosen = list(_VARIANTS.value)
  if not (_COMPILE_ONLY.value or on_gpu()):
    chosen = [name for name in chosen if name in ('nothing', 'xla')]
  return chosen


def _show_kernels(case: _Case, variant: str, mesh: Mesh) -> dict:
  """Returns what a pass launches; compiled for GPUs that are not there."""
  program = _compiled(case, variant, mesh, _GATHERS.value)
  text = str(program.as_text())
  of = {'nothing': ' fusion(', 'xla': ' all-gather'}.get(variant, 'custom-call')
  found = absent_gpus.kernels(text, of)
  names = [row['kernel'].rstrip('.0123456789') for row in found]
  counts = {name: names.count(name) for name in dict.fromkeys(names)}
  row = case._asdict() | {'variant': variant, 'kernels': counts}
  # A copy of the workspace would be a race, see `gather_columns`.
  words = case.words(variant)
  whole = f's32[1,{words}]', f's32[{words}]'
  row['copies'] = sum(
      ' copy(' in line and any(shape in line for shape in whole)
      for line in text.splitlines()
  )
  return row


def _compile_all() -> None:
  mesh = absent_gpus.mesh_of('H200', tensor=_DEVICES.value)
  rows = []
  hopper = dispatch.Hardware('gpu', (9, 0), dispatch.has_mosaic())
  kernels = dispatch.select(hardware=hopper)
  with (
      mock.patch.object(jax, 'default_backend', lambda: 'gpu'),
      mock.patch.object(dispatch, 'automatic', lambda: kernels),
  ):
    for case in _cases():
      for variant in _variants():
        rows.append(_show_kernels(case, variant, mesh))
        print(json.dumps(rows[-1]), flush=True)
  columns = (*_COLUMNS[:5], ('kernels', 'kernels of a pass', ''))
  columns += (('copies', 'copies of the workspace', 'd'),)
  device = f'{_DEVICES.value} x {mesh.devices.flat[0].device_kind}'
  common.write(
      rows, {}, common.table(rows, columns), f'none (compiled for {device})'
  )


def main(argv: list[str]) -> None:
  """Measures all variants."""
  del argv
  if _DEVICES.value < 2:
    raise ValueError(f'--devices is {_DEVICES.value}; gathers need 2 or more')
  if _COMPILE_ONLY.value:
    _compile_all()
    return
  os.environ.setdefault('NCCL_NVLS_ENABLE', '0')
  mesh = sharding.make_mesh(tensor=_DEVICES.value)
  rows = []
  for case in _cases():
    first = {}
    for variant in _variants():
      faulthandler.dump_traceback_later(_PATIENCE_S, exit=True)
      failed = False
      try:
        row = _measure(case, variant, mesh, first)
      except Exception as error:  # What was measured must be written.
        traceback.print_exc()
        row = case._asdict() | {'variant': variant, 'error': str(error)[:300]}
        failed = 'JaxRuntimeError' in type(error).__name__
      rows.append(row)
      print(json.dumps(row), flush=True)
      faulthandler.cancel_dump_traceback_later()
      if failed:  # A kernel that trapped takes the process's GPUs with it.
        common.write(rows, {}, common.table(rows, _COLUMNS))
        return
    common.write(rows, {}, common.table(rows, _COLUMNS))


if __name__ == '__main__':
  common.run(main)
