"""Which implementation of each operation runs: one ordered table, read once.

`select` goes through `TABLE` for the hardware at hand and returns `Kernels`, a
static field of `Policy`. `Policy.jit` traces with it, and each operation asks
`implementation` for its own. 'reference' is plain JAX: it runs everywhere, and
the tests hold the others to it.

Some implementations do not take all shapes. For the others the operation runs
its reference, or Triton's kernel in place of Mosaic's (`fallback`), for every
number of rows. Attention also leaves to Triton the shapes for which no GPU has
run Mosaic's kernel, unless that one is named.
"""

import contextlib
import contextvars
import dataclasses
import functools
import importlib.util
from collections.abc import Iterator

import jax

from jetrl_jax.kernels import hopper_dot

REFERENCE = 'reference'
# Most 8-bit values of an array that all kernels can address. Pallas' Triton
# backend counts the values of an array of up to 4 GiB in signed 32-bit numbers,
# so it would look for later values before the start of their array.
MOST_VALUES = 2**31
# Operation -> its implementations, the preferred one first. What each needs:
# `_missing`.
TABLE: dict[str, tuple[str, ...]] = {
    'add_norm_quantize': ('triton', 'mosaic_sm90', REFERENCE),
    'adamw': ('triton', 'mosaic_sm90', REFERENCE),
    'attention': ('mosaic_sm90', 'triton', REFERENCE),
    'block_scaled_dot': ('mosaic_sm90', 'triton', REFERENCE),
    'decode_attention': ('triton', 'mosaic_sm90', REFERENCE),
    'gate_up': ('mosaic_sm90', 'triton_sm90', REFERENCE),
    'log_sum_exp': ('triton', 'mosaic_sm90', REFERENCE),
    'mlp': ('triton', 'mosaic_sm90', REFERENCE),
    'quantize_transpose': ('triton', 'mosaic_sm90', REFERENCE),
    'requantize': ('triton', 'mosaic_sm90', REFERENCE),
    'rope_append': ('triton', 'mosaic_sm90', REFERENCE),
    'sample_token': ('triton', 'mosaic_sm90', REFERENCE),
    'swiglu': ('triton', 'mosaic_sm90', REFERENCE),
}
# Implementations that no GPU has run. They run only where they are named.
_UNTRIED = {
    ('adamw', 'mosaic_sm90'),
    ('add_norm_quantize', 'mosaic_sm90'),
    ('log_sum_exp', 'mosaic_sm90'),
    ('mlp', 'mosaic_sm90'),
    ('quantize_transpose', 'mosaic_sm90'),
    ('requantize', 'mosaic_sm90'),
    ('rope_append', 'mosaic_sm90'),
    ('sample_token', 'mosaic_sm90'),
    ('swiglu', 'mosaic_sm90'),
}
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
# Pairs of `_REPEATS` whose kernels agree only if both are of one backend.
_OF_ONE_BACKEND = {'sample_token': 'log_sum_exp'}


@dataclasses.dataclass(frozen=True)
class Hardware:
  """The hardware and the JAX on which implementations depend.

  Attributes:
    backend: 'cpu' or 'gpu'.
    capability: the compute capability of a CUDA device, such as (9, 0); ()
      elsewhere.
    has_triton: this jax has Pallas' Triton backend.
    has_mosaic: this jax has Pallas' Mosaic backend as our kernels use it.
  """

  backend: str
  capability: tuple[int, ...]
  has_triton: bool
  has_mosaic: bool


@dataclasses.dataclass(frozen=True)
class Kernels:
  """The implementation of every operation, in the order of `TABLE`.

  Attributes:
    chosen: (operation, implementation) pairs.
    named: operations whose implementation the user asked for by name. Such an
      implementation runs for all shapes that it takes; any other one only for
      shapes that a GPU has run.
  """

  chosen: tuple[tuple[str, str], ...]
  named: tuple[str, ...] = ()

  def of(self, operation: str) -> str:
    """Returns the implementation of an operation."""
    return dict(self.chosen)[operation]

  def replace(self, **changes: str) -> 'Kernels':
    """Returns the table with other implementations, named ones."""
    assert changes.keys() <= TABLE.keys(), changes
    chosen = dict(self.chosen) | changes
    return Kernels(tuple(chosen.items()), (*self.named, *changes))

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
    setting: 'auto' for the first of `TABLE` that the hardware has and that some
      GPU has run; 'reference' for plain JAX alone; or
      'OPERATION=IMPLEMENTATION,...' for the named ones and all others as in
      'auto'. An operation whose bits would then differ between rollout and
      training runs its reference. A name also chooses the backend of the
      operation that has the same bits in one backend only.
    hardware: by default the one at hand.

  Raises:
    ValueError: an unknown setting, operation or implementation, one that this
      hardware or this jax does not have, or two that do not go together.
  """
  hardware = hardware or detect()
  if setting == REFERENCE:
    return Kernels(tuple((operation, REFERENCE) for operation in TABLE))
  chosen = {
      operation: next(
          name
          for name in names
          if (operation, name) not in _UNTRIED and not _missing(name, hardware)
      )
      for operation, names in TABLE.items()
  }
  wanted = {} if setting == 'auto' else _parsed(setting, hardware)
  chosen |= _followers(wanted) | wanted
  for operation, like in (_REPEATS | _REPEATED).items():
    if _agree(operation, like, chosen):
      continue
    if operation in wanted:
      raise ValueError(
          f'kernels is {setting!r}; {operation} has the bits of {like}, so'
          f' {like}={chosen[like]} goes with {operation}={chosen[like]}: leave'
          f' {operation} out'
      )
    chosen[operation] = REFERENCE
  return Kernels(tuple(chosen.items()), tuple(wanted))


def _followers(wanted: dict[str, str]) -> dict[str, str]:
  """Returns the operations that must follow a named one to its backend."""
  return {
      other: wanted[one]
      for pair in _OF_ONE_BACKEND.items()
      for one, other in (pair, pair[::-1])
      if wanted.get(one, REFERENCE) != REFERENCE and wanted[one] in TABLE[other]
  }


def _agree(operation: str, like: str, chosen: dict[str, str]) -> bool:
  """Whether an operation has the bits of another one, or no kernel."""
  mine, other = chosen[operation], chosen[like]
  if mine == REFERENCE:
    return True
  one_backend = _OF_ONE_BACKEND.get(operation) == like
  return other != REFERENCE and (mine == other or not one_backend)


def why_none(hardware: Hardware | None = None) -> str:
  """Returns why a GPU runs no kernel; '' if it runs some, and on a CPU."""
  hardware = hardware or detect()
  if hardware.backend == 'cpu' or set(
      name for _, name in select('auto', hardware).chosen
  ) != {REFERENCE}:
    return ''
  missing = _missing('triton', hardware)
  return (
      f'No kernel runs here: they need {missing}. Every operation is plain JAX'
      ' (kernels=reference), which computes the same, and slower'
  )


def fallback() -> str:
  """Returns what runs for shapes that a Mosaic kernel does not take.

  Which shapes a kernel takes must not depend on the number of rows. Rollout and
  training have different numbers of rows and must run the same implementation.
  """
  return 'triton' if has_triton() else REFERENCE


def triton_instead(operation: str, found: str, untried: str = '') -> str:
  """Returns 'triton', for shapes that only Triton's kernel takes.

  Args:
    operation: of `TABLE`.
    found: the shapes and dtypes.
    untried: another implementation that takes them, but has not run for them on
      any GPU; '' for none.

  Raises:
    ValueError: this jax does not have that backend.
  """
  if has_triton():
    return 'triton'
  takes, also = "only Triton's kernel takes", ''
  if untried:
    takes = "only Triton's kernel has run for on a GPU"
    also = f" or, not tried on a GPU, to '{operation}={untried}'"
  raise ValueError(
      f'{operation} has {found}, which {takes}, and this jax does not have'
      f" Pallas' Triton backend: set kernels to '{operation}=reference'{also}"
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
  if name.startswith('triton') and not hardware.has_triton:
    return "Pallas' Triton backend, which this jax does not have"
  if name.startswith('mosaic') and not hardware.has_mosaic:
    return "Pallas' Mosaic backend, as jax has it from 0.11 on"
  if name.endswith('_sm90') and hardware.capability != (9, 0):
    return 'a GPU of compute capability 9.0 (Hopper)'
  if name == 'triton_sm90' and not hopper_dot.is_there():
    return "what jax <= 0.12 adds a dot to Pallas' Triton backend with"
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
      has_triton=has_triton(),
      has_mosaic=has_mosaic(),
  )


def has_triton() -> bool:
  """Whether this jax has Pallas' Triton backend."""
  return _is_there('jax.experimental.pallas.triton')


def has_mosaic() -> bool:
  """Whether this jax has Pallas' Mosaic backend as our kernels use it."""
  is_new = jax.__version_info__ >= (0, 11)
  return is_new and _is_there('jax.experimental.pallas.mosaic_gpu')


def _is_there(module: str) -> bool:
  try:
    return importlib.util.find_spec(module) is not None
  except ImportError:
    return False


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


def is_named(operation: str) -> bool:
  """Whether the user asked for that implementation by name."""
  return operation in (_IN_USE.get() or automatic()).named


def has_kernel(operation: str) -> bool:
  """Whether an operation runs a kernel and not its reference."""
  return implementation(operation) != REFERENCE
