"""Programs that other threads compile: once each, and waited for."""

import contextlib
import threading
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.core import compile_ahead
from jetrl_jax.core.compile_ahead import CompileAhead, Program


@pytest.fixture
def compiled() -> Iterator[list[str]]:
  """The threads in which something was compiled, in order."""
  found: list[str] = []

  def note(event: str, _: float, **__) -> None:
    if event == '/jax/core/compile/backend_compile_duration':
      found.append(threading.current_thread().name)

  jax.monitoring.register_event_duration_secs_listener(note)
  yield found
  jax.monitoring.unregister_event_duration_listener(note)


def _program(slow: threading.Event | None = None) -> Program:
  def function(x, y):
    if slow is not None:
      assert slow.wait(30)  # While it is traced.
    return {'sum': x['a'] + y}

  return Program(jax.jit(function, donate_argnums=(0,)))


def test_a_call_finds_what_another_thread_has_compiled(compiled):
  program, begun = _program(slow := threading.Event()), {'a': jnp.ones(3)}
  expected = np.asarray(begun['a']) + 2
  compiled.clear()
  with contextlib.closing(CompileAhead(1)) as ahead:
    ahead(program, begun, np.float32(2))
    threading.Timer(0.2, slow.set).start()
    # Waits for the thread, which waits for the timer.
    found = program(begun, np.float32(2))['sum']
    np.testing.assert_array_equal(found, expected)
  assert [name.split('_')[0] for name in compiled] == ['compile']
  assert begun['a'].is_deleted()


def test_a_call_compiles_what_no_thread_has_begun(compiled):
  busy, waiting = _program(slow := threading.Event()), _program()
  one = {'a': jnp.ones(3)}
  with contextlib.closing(CompileAhead(1)) as ahead:
    ahead(busy, one, np.float32(2))
    ahead(waiting, one, np.float32(2))
    compiled.clear()
    waiting(one, np.float32(2))
    assert compiled == [threading.current_thread().name]
    slow.set()
  assert len(compiled) == 2


def test_a_call_meets_the_error_of_a_thread():
  def function(x):
    raise ValueError('no such layer')

  program = Program(jax.jit(function))
  with contextlib.closing(CompileAhead(1)) as ahead:
    ahead(program, np.float32(1))
    with pytest.raises(ValueError, match='no such layer'):
      program(np.float32(1))


@pytest.mark.parametrize('cores, threads', [(1, 0), (2, 0), (4, 1), (64, 6)])
def test_as_many_threads_as_there_are_cores_to_spare(
    monkeypatch, cores, threads
):
  monkeypatch.setattr(compile_ahead.os, 'cpu_count', lambda: cores)
  ahead, program = CompileAhead(), _program()
  ahead(program, {'a': jnp.ones(3)}, np.float32(2))
  assert bool(program._ahead) == bool(threads)
  if threads:
    assert ahead._pool is not None and ahead._pool._max_workers == threads
  ahead.close()
