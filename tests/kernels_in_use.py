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
    'add_norm_quantize.triton': ['forward'],
    'adamw.mosaic_sm90': ['update'],
    'adamw.triton': ['update'],
    'attention.mosaic_sm90': ['forward'],
    'attention.mosaic_backward_sm90': ['backward'],
    'attention.triton': ['forward'],
    'attention.triton_backward': ['backward'],
    'block_scaled_dot.mosaic_sm90': ['block_dot'],
    'block_scaled_dot.triton': ['block_dot'],
    'decode_attention.mosaic_sm90': ['decode'],
    'decode_attention.triton': ['decode'],
    'gate_up.mosaic_sm90': ['hidden'],
    'gate_up.triton_sm90': ['hidden'],
    'log_sum_exp.mosaic_sm90': ['row_stats'],
    'log_sum_exp.triton': ['row_stats'],
    'quantize_transpose.mosaic_sm90': ['quantize_and_transpose', 'transpose'],
    'quantize_transpose.mosaic_per_block_sm90': [
        'quantize_both_ways',
        'regroup_and_transpose',
    ],
    'quantize_transpose.triton': ['quantize_and_transpose', 'transpose'],
    'quantize_transpose.triton_per_block': [
        'quantize_both_ways',
        'regroup_and_transpose',
    ],
    'requantize.mosaic_sm90': ['requantize_kernel'],
    'requantize.triton': ['requantize_kernel'],
    'rope_append.mosaic_sm90': ['rotate_and_append'],
    'rope_append.triton': ['rotate_and_append'],
    'sample_token.mosaic_sm90': ['draw'],
    'sample_token.triton': ['draw'],
    'swiglu.mosaic_sm90': ['swiglu_of'],
    'swiglu.triton': ['swiglu_of'],
    'swiglu.mosaic_backward_sm90': ['backward'],
    'swiglu.triton_backward': ['backward'],
}

_NO_TRITON = "this jax does not have Pallas' Triton backend"
needs_triton = pytest.mark.skipif(not dispatch.has_triton(), reason=_NO_TRITON)
needs_mosaic = pytest.mark.skipif(
    not dispatch.has_mosaic(), reason='this jax has no such Mosaic backend'
)
HOPPER = dispatch.Hardware(
    'gpu', (9, 0), has_triton=True, has_mosaic=dispatch.has_mosaic()
)


def as_on_hopper(monkeypatch) -> None:
  """Lets programs be traced as for a Hopper GPU; nothing can run."""
  if not dispatch.has_triton():
    pytest.skip(_NO_TRITON)
  kernels = dispatch.select(hardware=HOPPER)
  monkeypatch.setattr(dispatch, 'automatic', lambda: kernels)
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')


def choose(*operations: str) -> dispatch.Kernels:
  """Returns a kernel of some operations, of all others the reference.

  The one that is interpreted faster, Triton's, where there are two; none where
  this jax has no backend for the only one.
  """

  def kernel_of(operation: str) -> str:
    *names, last = dispatch.TABLE[operation]
    mosaic = [name for name in names if name.startswith('mosaic')]
    others = [name for name in names if name not in mosaic]
    found = others if dispatch.has_triton() else []
    return [*found, *(mosaic if dispatch.has_mosaic() else []), last][0]

  return dispatch.select('reference').replace(
      **{operation: kernel_of(operation) for operation in operations}
  )


def use(monkeypatch, *operations: str) -> dispatch.Kernels:
  """Lets operations run a kernel, see `choose`, all others the reference.

  Where there is no GPU the kernels must be interpreted, see `interpret`. A test
  of kernels that this jax does not have is skipped.
  """
  kernels = choose(*operations)
  if dispatch.REFERENCE in map(kernels.of, operations):
    pytest.skip(_NO_TRITON)
  monkeypatch.setattr(dispatch, 'automatic', lambda: kernels)
  return kernels


def interpret(monkeypatch) -> None:
  """Lets kernels run on a CPU, those that an operation chooses itself too."""
  for module_name, names in _ENTRIES.items():
    if '.mosaic' in module_name and not dispatch.has_mosaic():
      continue
    if '.triton' in module_name and not dispatch.has_triton():
      continue
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
