"""Operations whose kernels a test wants, on a machine that has none."""

import contextlib
import functools
import importlib

import jax
import pytest

from jetrl_jax.core.compilation import on_gpu
from jetrl_jax.kernels import dispatch

# What runs a kernel, by module: each can be interpreted.
_ENTRIES = {
    'add_norm_quantize.mosaic_sm90': ['forward'],
    'adamw.mosaic_sm90': ['update'],
    'attention.mosaic_sm90': ['forward'],
    'attention.mosaic_backward_sm90': ['backward'],
    'block_scaled_dot.mosaic_sm90': ['block_dot'],
    'decode_attention.mosaic_sm90': ['decode'],
    'gate_up.mosaic_sm90': ['hidden'],
    'log_sum_exp.mosaic_sm90': ['row_stats'],
    'quantize_transpose.mosaic_sm90': ['quantize_and_transpose', 'transpose'],
    'quantize_transpose.mosaic_per_block_sm90': [
        'quantize_both_ways',
        'regroup_and_transpose',
    ],
    'requantize.mosaic_sm90': ['requantize_kernel'],
    'rope_append.mosaic_sm90': ['rotate_and_append'],
    'sample_token.mosaic_sm90': ['draw'],
    'swiglu.mosaic_sm90': ['swiglu_of'],
    'swiglu.mosaic_backward_sm90': ['backward'],
}

_UNMARKED = 'a test of kernels is marked with needs_mosaic'

# The primitive that calls a kernel.
CALL = 'mpmd_map'
# Of each test that has a kernel interpreted, traced or lowered: `make kernels`
# runs those, and where this jax has no backend for them they are skipped.
needs_mosaic = pytest.mark.mosaic
HOPPER = dispatch.Hardware('gpu', (9, 0), has_mosaic=True)


def as_on_hopper(monkeypatch) -> None:
  """Lets programs be traced as for a Hopper GPU; nothing can run."""
  assert dispatch.has_mosaic(), _UNMARKED
  kernels = dispatch.select(hardware=HOPPER)
  monkeypatch.setattr(dispatch, 'automatic', lambda: kernels)
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')


def choose(*operations: str) -> dispatch.Kernels:
  """Returns a kernel of some operations, of all others the reference.

  Of all operations the reference where this jax has no backend for kernels.
  """
  place = 0 if dispatch.has_mosaic() else -1
  return dispatch.select('reference').replace(
      **{
          operation: dispatch.TABLE[operation][place]
          for operation in operations
      }
  )


def use(monkeypatch, *operations: str) -> dispatch.Kernels:
  """Lets operations run a kernel, see `choose`, all others the reference.

  Where there is no GPU the kernels must be interpreted, see `interpret`.
  """
  kernels = choose(*operations)
  assert dispatch.REFERENCE not in map(kernels.of, operations), _UNMARKED
  monkeypatch.setattr(dispatch, 'automatic', lambda: kernels)
  return kernels


def interpret(monkeypatch) -> None:
  """Lets kernels run on a CPU, those that an operation chooses itself too."""
  for module_name, names in _ENTRIES.items() if dispatch.has_mosaic() else ():
    module = importlib.import_module(f'jetrl_jax.kernels.{module_name}')
    for name in names:
      kernel = functools.partial(getattr(module, name), interpret=True)
      monkeypatch.setattr(module, name, kernel)


@contextlib.contextmanager
def run(kernels: dispatch.Kernels):
  """Operations that are traced inside run these, interpreted without a GPU."""
  with pytest.MonkeyPatch.context() as patch, dispatch.using(kernels):
    if not on_gpu():
      interpret(patch)
    yield
