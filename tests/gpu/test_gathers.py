"""Two GPUs gather by a kernel what XLA gathers, decode step after step."""

import jax
import numpy as np
import pytest

from jetrl_jax.core.collectives import Axes
from jetrl_jax.kernels import dispatch
from tests.models import gathers
from tests.rl import tiny_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.device_count() < 2, reason='needs two GPUs'),
]


def _addresses(state) -> list[int]:
  parts = state.workspace.words.addressable_shards
  return [part.data.unsafe_buffer_pointer() for part in parts]


@pytest.mark.parametrize(
    'recipe', [tiny_run.FP8, tiny_run.BF16], ids=['fp8', 'bf16']
)
@pytest.mark.parametrize('slots, form', [(16, 'packets'), (80, 'flags')])
def test_gathers_by_the_kernel_have_the_bits_of_xla(slots, form, recipe):
  (run, state), (by_xla, plain) = (
      gathers.ready(
          gathers.policy(dispatch.select(kernels), recipe, Axes(tensor=2)),
          slots,
      )
      for kernels in ('gather_columns=mosaic_sm90', 'auto')
  )
  assert state.workspace is not None and state.workspace.form == form
  addresses = _addresses(state)
  for _ in range(4):
    state, plain = run(state, 2), by_xla(plain, 2)
    # It was not copied.
    assert _addresses(state) == addresses
    for name in ('tokens', 'logprobs', 'log_mu', 'position'):
      a, b = (np.asarray(getattr(x, name)) for x in (state, plain))
      np.testing.assert_array_equal(tiny_run.bits(a), tiny_run.bits(b))
  assert np.unique(np.asarray(state.emitted)).tolist() == [8]
