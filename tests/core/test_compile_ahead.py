"""Programs that other threads compile: once each, and waited for."""

import concurrent.futures
import contextlib
import gc
import threading
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.core import compile_ahead
from jetrl_jax.core.compile_ahead import CompileAhead, Program
from tests import compilations


@pytest.fixture
def compiled() -> Iterator[list[compilations.Compilation]]:
  """What was compiled, in order."""
  with compilations.noted() as found:
    yield found


def _program() -> Program:
  def function(x, y):
    return {'sum': x['a'] + y}

  return Program(jax.jit(function, donate_argnums=(0,)))


def test_a_call_finds_what_another_thread_has_compiled(compiled):
  program, one = _program(), {'a': jnp.ones(3)}
  expected = np.asarray(one['a']) + 2
  compiled.clear()
  with contextlib.closing(CompileAhead(1)) as ahead:
    ahead(program, one, np.float32(2))
    while not ((started := program._ahead[0][1]).running() or started.done()):
      time.sleep(0.001)
    found = program(one, np.float32(2))['sum']
  np.testing.assert_array_equal(found, expected)
  assert [one.thread.split('_')[0] for one in compiled] == ['compile']
  assert one['a'].is_deleted()


class _Computed:
  """An argument that says when it is waited for."""

  def __init__(self, shape: tuple[int, ...] = ()):
    self.shape, self.waits = shape, 0

  def __array__(self, *args, **kwargs):
    return np.zeros(self.shape)

  def block_until_ready(self):
    self.waits += 1
    return self


@pytest.mark.parametrize('on_several', [True, False])
def test_on_several_devices_a_first_call_waits_for_its_arguments(on_several):
  program = Program(lambda *args: None, on_several=on_several)
  small, large = _Computed((2,)), _Computed((3,))
  for _ in range(2):
    program(small)
    program(large)
  assert small.waits == large.waits == on_several


def test_a_call_compiles_what_no_thread_has_begun(compiled):
  program, one = _program(), {'a': jnp.ones(3)}
  compiled.clear()
  with contextlib.closing(CompileAhead(1)) as ahead:
    assert ahead._pool is not None
    ahead._pool.submit((busy := threading.Event()).wait)
    ahead(program, one, np.float32(2))
    program(one, np.float32(2))
    busy.set()
  assert [one.thread for one in compiled] == [threading.current_thread().name]


def test_a_call_leaves_what_is_compiled_for_other_shapes(compiled):
  program, one = _program(), {'a': jnp.ones(3)}
  compiled.clear()
  with contextlib.closing(CompileAhead(1)) as ahead:
    assert ahead._pool is not None
    ahead._pool.submit((busy := threading.Event()).wait)
    ahead(program, {'a': np.ones(4, np.float32)}, np.float32(2))
    ahead(program, one, np.float32(2))
    program(one, np.float32(2))
    busy.set()
    ahead._started[0].result()
  assert [one.thread.split('_')[0] for one in compiled] == [
      'MainThread',
      'compile',
  ]


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


def test_nothing_looks_for_cycles_while_a_program_is_traced():
  enabled = []
  program = Program(jax.jit(lambda x: enabled.append(gc.isenabled()) or x))
  with contextlib.closing(CompileAhead(1)) as ahead:
    ahead(program, np.float32(2))
    assert enabled == [False] and gc.isenabled()
    failing = Program(jax.jit(lambda x: x + jnp.ones(2) @ jnp.ones(3)))
    with pytest.raises(TypeError):
      ahead(failing, np.float32(2))
  assert gc.isenabled()


def test_what_is_left_for_later_is_traced_on_another_thread_too(compiled):
  traced = []

  def function(x):
    traced.append(threading.current_thread().name.split('_')[0])
    return x + 1

  program = Program(jax.jit(function))
  with contextlib.closing(CompileAhead(1)) as ahead:
    ahead.later(program, np.float32(2))
    ahead.wait()
    assert np.asarray(program(np.float32(2))) == 3
  assert traced == ['lower']
  assert [one.thread.split('_')[0] for one in compiled] == ['compile']


@pytest.mark.parametrize('is_closed', [False, True])
def test_a_call_traces_what_was_left_and_nobody_has_begun(compiled, is_closed):
  program = _program()
  with contextlib.closing(CompileAhead(1)) as ahead:
    assert ahead._lowering is not None
    ahead._lowering.submit((busy := threading.Event()).wait)
    ahead.later(program, {'a': np.ones(3)}, np.float32(2))
    if is_closed:
      threading.Timer(0.1, busy.set).start()
      ahead.close()
    program({'a': np.ones(3)}, np.float32(2))
    busy.set()
  assert [one.thread for one in compiled] == [threading.current_thread().name]


def test_a_call_does_not_wait_for_a_thread_that_has_ended():
  program = _program()
  ahead = CompileAhead(1)
  assert ahead._lowering is not None and ahead._pool is not None
  ahead._pool.shutdown()
  ahead.later(program, {'a': np.ones(3)}, np.float32(2))
  ahead._lowering.shutdown()
  assert program({'a': np.ones(3)}, np.float32(2))['sum'].tolist() == [3, 3, 3]
  with pytest.raises(RuntimeError):
    ahead.wait()


def test_what_fails_on_another_thread_fails_where_it_is_called():
  program = Program(jax.jit(lambda x: x + jnp.ones(2) @ jnp.ones(3)))
  with contextlib.closing(CompileAhead(1)) as ahead:
    ahead.later(program, np.float32(2))
    with pytest.raises(TypeError):
      program(np.float32(2))
    with pytest.raises(TypeError):
      ahead.wait()


def test_who_waits_for_all_hears_what_failed():
  program = _program()
  with contextlib.closing(CompileAhead(1)) as ahead:
    ahead(program, {'a': jnp.ones(3)}, np.float32(2))
    ahead.wait()
    assert program._ahead[0][1].result() is not None
    ahead._started[0] = concurrent.futures.Future()
    ahead._started[0].set_exception(RuntimeError('no memory'))
    with pytest.raises(RuntimeError, match='no memory'):
      ahead.wait()
