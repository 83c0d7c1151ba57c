"""Which implementation of each operation runs: one ordered table, read once.

`select` goes through `TABLE` for the hardware at hand and returns `Kernels`, a
static field of `Policy`. `Policy.jit` traces with it, and each operation asks
`implementation` for its own. 'reference' is plain JAX: it runs everywhere, and
the tests hold the others to it.

Some kernels do not take all shapes. For the others the operation runs its
reference, for every number of rows.
"""

import contextlib
import contextvars
import dataclasses
import functools
import importlib.util
from collections.abc import Iterator

import jax

REFERENCE = 'reference'
# Most 8-bit values of an array that kernels address: a place may be a signed
# 32-bit number.
MOST_VALUES = 2**31
# Operation -> its implementations. 'auto' takes the first one that the hardware
# has; what each needs: `_missing`.
TABLE: dict[str, tuple[str, ...]] = {
    operation: ('mosaic_sm90', REFERENCE)
    for operation in (
        'add_norm_quantize',
        'adamw',
        'attention',
        'block_scaled_dot',
        'decode_attention',
        'gate_up',
        'log_sum_exp',
        'mlp',
        'quantize_transpose',
        'requantize',
        'rope_append',
        'sample_token',
        'swiglu',
    )
}
# To be asked for: one whole run on two GPUs and one on four are all so far.
TABLE['gather_columns'] = (REFERENCE, 'mosaic_sm90')
# Operation of a rollout -> the operation of training whose bits it must have.
# The first runs a kernel only where the second does.
_REPEATS = {
    'decode_attention': 'attention',
    'gate_up': 'swiglu',
    'sample_token': 'log_sum_exp',
}
# And the other way round: training's attention runs a kernel only where
# decode's does, because the bits of a kernel and of a reference differ.
_REPEATED = {'attention': 'decode_attention'}


@dataclasses.dataclass(frozen=True)
class Hardware:
  """The hardware and the JAX on which implementations depend.

  Attributes:
    backend: 'cpu' or 'gpu'.
    capability: the compute capability of a CUDA device, such as (9, 0); ()
      elsewhere.
    has_mosaic: this jax has Pallas' Mosaic backend as our kernels use it.
  """

  backend: str
  capability: tuple[int, ...]
  has_mosaic: bool


@dataclasses.dataclass(frozen=True)
class Kernels:
  """The implementation of every operation, in the order of `TABLE`.

  Attributes:
    chosen: (operation, implementation) pairs.
  """

  chosen: tuple[tuple[str, str], ...]

  def of(self, operation: str) -> str:
    """Returns the implementation of an operation."""
    return dict(self.chosen)[operation]

  def replace(self, **changes: str) -> 'Kernels':
    """Returns the table with other implementations."""
    assert changes.keys() <= TABLE.keys(), changes
    chosen = dict(self.chosen) | changes
    return Kernels(tuple(chosen.items()))

  def __str__(self) -> str:
    """Returns one line: each implementation with its operations."""
    by_name: dict[str, list[str]] = {}
    for operation, name in self.chosen:
      by_name.setdefault(name, []).append(operation)
    if len(by_name) == 1:
      return f'{next(iter(by_name))} for all operations'
    return '; '.join(f'{n}: {", ".join(ops)}' for n, ops in by_name.items())


def select(setting: str = 'auto', hardware: Hardware | None = None) -> Kernels:
  """Chooses every operation's implementation.

  Args:
    setting: 'auto' for the first of `TABLE` that the hardware has; 'reference'
      for plain JAX alone; or 'OPERATION=IMPLEMENTATION,...' for the named ones
      and all others as in 'auto'. An operation whose bits would then differ
      between rollout and training runs its reference.
    hardware: by default the one at hand.

  Raises:
    ValueError: an unknown setting, operation or implementation, one that this
      hardware or this jax does not have, or two that do not go together.
  """
  hardware = hardware or detect()
  if setting == REFERENCE:
    return Kernels(tuple((operation, REFERENCE) for operation in TABLE))
  chosen = {
      operation: next(name for name in names if not _missing(name, hardware))
      for operation, names in TABLE.items()
  }
  wanted = {} if setting == 'auto' else _parsed(setting, hardware)
  chosen |= wanted
  for operation, like in (_REPEATS | _REPEATED).items():
    if chosen[operation] == REFERENCE or chosen[like] != REFERENCE:
      continue
    if operation in wanted:
      raise ValueError(
          f'kernels is {setting!r}; {operation} has the bits of {like}, so'
          f' {like}={chosen[like]} goes with {operation}={chosen[like]}: leave'
          f' {operation} out'
      )
    chosen[operation] = REFERENCE
  return Kernels(tuple(chosen.items()))


def why_none(hardware: Hardware | None = None) -> str:
  """Returns why a GPU runs no kernel; '' if it runs some, and on a CPU."""
  hardware = hardware or detect()
  if hardware.backend == 'cpu' or set(
      name for _, name in select('auto', hardware).chosen
  ) != {REFERENCE}:
    return ''
  missing = _missing('mosaic_sm90', hardware)
  return (
      f'No kernel runs here: they need {missing}. Every operation is plain JAX'
      ' (kernels=reference): the same formulas, slower. The bit test at the'
      ' start says whether they are exact on this GPU'
  )


def _parsed(setting: str, hardware: Hardware) -> dict[str, str]:
  """Returns what 'OPERATION=IMPLEMENTATION,...' asks for."""
  wanted = {}
  for pair in setting.split(','):
    operation, _, name = (part.strip() for part in pair.partition('='))
    if operation not in TABLE or not name:
      raise ValueError(
          f'kernels is {setting!r}; allowed: auto, reference, or'
          f' OPERATION=IMPLEMENTATION,... with operations {", ".join(TABLE)}'
      )
    if name not in TABLE[operation]:
      raise ValueError(
          f'kernels is {setting!r}; {operation} has the implementations'
          f' {", ".join(TABLE[operation])}'
      )
    if missing := _missing(name, hardware):
      raise ValueError(f'kernels is {setting!r}; {name} needs {missing}')
    wanted[operation] = name
  return wanted


def _missing(name: str, hardware: Hardware) -> str:
  """Returns what an implementation needs but the hardware lacks, or ''."""
  if name == REFERENCE:
    return ''
  if hardware.backend != 'gpu' or not hardware.capability:
    return f'a CUDA GPU, and this is {hardware.backend}'
  if name.startswith('mosaic') and not hardware.has_mosaic:
    return "Pallas' Mosaic backend, as jax has it from 0.11 on"
  if name.endswith('_sm90') and hardware.capability != (9, 0):
    return 'a GPU of compute capability 9.0 (Hopper)'
  return ''


@functools.cache
def detect() -> Hardware:
  """Returns the hardware that JAX compiles for."""
  found = jax.default_backend()
  backend = 'gpu' if found in ('gpu', 'cuda', 'rocm') else found
  text = str(getattr(jax.devices()[0], 'compute_capability', ''))
  numbers = text.split('.')
  is_cuda = all(number.isdecimal() for number in numbers)
  return Hardware(
      backend=backend,
      capability=tuple(map(int, numbers)) if is_cuda else (),
      has_mosaic=has_mosaic(),
  )


def has_mosaic() -> bool:
  """Whether this jax has Pallas' Mosaic backend as our kernels use it."""
  if jax.__version_info__ < (0, 11):
    return False
  try:
    module = importlib.util.find_spec('jax.experimental.pallas.mosaic_gpu')
  except ImportError:
    return False
  return module is not None


_IN_USE: contextvars.ContextVar[Kernels | None] = contextvars.ContextVar(
    'kernels', default=None
)


@contextlib.contextmanager
def using(kernels: Kernels) -> Iterator[None]:
  """Traces the operations inside with these implementations."""
  token = _IN_USE.set(kernels)
  try:
    yield
  finally:
    _IN_USE.reset(token)


@functools.cache
def automatic() -> Kernels:
  """Returns what `select` chooses for the hardware at hand."""
  return select()


def implementation(operation: str) -> str:
  """Returns the implementation that an operation is traced with now."""
  return (_IN_USE.get() or automatic()).of(operation)


def has_kernel(operation: str) -> bool:
  """Whether an operation runs a kernel and not its reference."""
  return implementation(operation) != REFERENCE
