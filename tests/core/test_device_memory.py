import os

import pytest
from jaxlib import xla_client

from jetrl_jax.core import device_memory

NAMES = 'XLA_CLIENT_MEM_FRACTION', 'XLA_PYTHON_CLIENT_MEM_FRACTION'


@pytest.fixture(autouse=True)
def _no_fraction(monkeypatch):
  for name in NAMES:
    monkeypatch.setenv(name, '')


def _fraction() -> float | None:
  # What JAX passes on to a GPU when it first looks for one.
  return xla_client.generate_pjrt_gpu_plugin_options().get('memory_fraction')


def test_a_command_takes_what_a_dry_run_counts_on():
  assert _fraction() is None
  device_memory.take_most()
  assert _fraction() == device_memory.USABLE


@pytest.mark.parametrize('name', NAMES)
def test_the_users_share_stays(name):
  os.environ[name] = '0.3'
  device_memory.take_most()
  assert _fraction() == 0.3


@pytest.mark.parametrize(
    'error',
    [
        RuntimeError(
            'RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9GiB'
            '\nMore.'
        ),
        # A CPU's.
        RuntimeError(
            'INTERNAL: Error dispatching computation: Out of memory allocating'
            ' 9GiB\nMore.'
        ),
        MemoryError('Unable to allocate 9GiB for an array\nMore.'),
    ],
)
def test_a_full_memory_is_answered_with_what_helps(error):
  text = device_memory.explained(error)
  assert '9GiB' in text and '--dry_run' in text and 'More.' not in text
  assert 'trainer.packed_rows=0' in text and 'rollout.num_slots' in text


def test_an_error_of_another_kind_stays_as_it_is():
  assert device_memory.explained(ValueError('Other.\nMore.')) == 'Other.\nMore.'
  assert 'What helps' in device_memory.explained(MemoryError())
