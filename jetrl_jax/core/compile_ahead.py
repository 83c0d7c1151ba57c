"""Compiles programs on other threads before they are first called.

JAX compiles a function when it is first called, so a start would compile one
program after another, with one or two cores. The programs of a run are known
when it starts. A program that is compiled ahead is the one that the call would
have compiled, so no bit depends on it.

XLA compiles without Python. Tracing and lowering are Python's work, of which
one thread does some at a time: what is needed soon is lowered at once, and the
rest on another thread, while this one waits for a device.
"""

import concurrent.futures
import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jetrl_jax.core.typing import PyTree

# XLA uses more than one core for a part of its work.
_CORES_A_THREAD = 2
_MOST_THREADS = 6


class Program:
  """A jitted function that another thread may compile before it is called.

  On several devices of a process, the first call waits until its arguments are
  computed. In the first execution kernels are loaded, device by device and
  under locks that all devices share (jaxlib/mosaic/gpu/custom_call.cc). A
  device that is still busy may have to finish before, and if it waits in a
  collective for another one, which waits for the lock, none ever goes on.

  Args:
    jitted: what `jax.jit` returned, or calls it; its methods, such as `lower`,
      are the program's too.
    on_several: whether it runs on several devices.
    check: is called with the arguments of each call first, on the host; raises
      what a device could not say.
  """

  def __init__(
      self,
      jitted: Any,
      *,
      on_several: bool = False,
      check: Callable[..., None] | None = None,
  ):
    self._jitted, self._on_several = jitted, on_several
    self._check = check
    self._executed: set[tuple] = set()
    # With the arguments' shapes, as other shapes are another program.
    self._ahead: list[tuple[list, concurrent.futures.Future]] = []

  def __call__(self, *args, **kwargs) -> Any:
    """Calls the function; waits for a thread that compiles it."""
    if self._check is not None:
      self._check(*args, **kwargs)
    self._ahead = [entry for entry in self._ahead if not entry[1].done()]
    if self._ahead:
      wanted = _key(args)
      for shapes, started in self._ahead:
        # This thread compiles what no other one has begun.
        if shapes == wanted and not started.cancel():
          concurrent.futures.wait([started])
    if self._on_several and (key := tuple(_key(args))) not in self._executed:
      jax.block_until_ready(args)
      self._executed.add(key)
    return self._jitted(*args, **kwargs)

  def __getattr__(self, name: str) -> Any:
    return getattr(self._jitted, name)


class CompileAhead:
  """Threads that compile programs, in the order in which they are given.

  Args:
    threads: how many compile; by default as many as there are cores to spare.
      With 0 nothing is compiled ahead.

  Attributes:
    is_on: whether there are threads.
  """

  def __init__(self, threads: int | None = None):
    if threads is None:
      spare = (os.cpu_count() or 1) // _CORES_A_THREAD - 1
      threads = min(spare, _MOST_THREADS)
    self.is_on = threads > 0
    self._started: list[concurrent.futures.Future] = []
    self._pool = self._lowering = None
    if self.is_on:
      self._pool = concurrent.futures.ThreadPoolExecutor(threads, 'compile')
      self._lowering = concurrent.futures.ThreadPoolExecutor(1, 'lower')

  def __call__(self, program: Program, *args: PyTree) -> PyTree:
    """Traces and lowers a program for arguments like these, here and now.

    Another thread then compiles it.

    Args:
      program: what `Policy.jit` returned.
      *args: arrays or shapes. A shape that stands for an array on devices has
        its sharding.

    Returns:
      The shapes of what the program will return.
    """
    # The arrays themselves may be donated, or freed, in the meantime.
    shapes = jax.tree.map(_shape, args)
    if self._pool is None:
      return program.eval_shape(*shapes)
    with _without_garbage_collection():
      lowered = program.lower(*shapes)
    self._started.append(self._pool.submit(lowered.compile))
    program._ahead.append((_key(shapes), self._started[-1]))
    return lowered.out_info

  def later(self, program: Program, *args: PyTree) -> None:
    """Leaves tracing and lowering to another thread, too.

    It begins at once, and takes turns with this thread's Python. If it has not
    come to the program when that is called, the call does it all.

    Args:
      program: what `Policy.jit` returned.
      *args: arrays or shapes, see above.
    """
    if self._lowering is None:
      return
    shapes, compiled = jax.tree.map(_shape, args), concurrent.futures.Future()
    self._started.append(compiled)
    program._ahead.append((_key(shapes), compiled))
    self._lowering.submit(self._lower, program, shapes, compiled)

  def _lower(
      self,
      program: Program,
      shapes: PyTree,
      compiled: concurrent.futures.Future,
  ) -> None:
    if not compiled.set_running_or_notify_cancel():
      return
    try:
      with _without_garbage_collection():
        lowered = program.lower(*shapes)
      assert self._pool is not None
      started = self._pool.submit(lowered.compile)
    except Exception as error:  # The call of the program raises it again.
      compiled.set_exception(error)
      return

    def tell(done: concurrent.futures.Future) -> None:
      if done.cancelled():
        compiled.set_exception(concurrent.futures.CancelledError())
      elif (error := done.exception()) is not None:
        compiled.set_exception(error)
      else:
        compiled.set_result(done.result())

    started.add_done_callback(tell)

  def wait(self) -> None:
    """Waits until all is compiled; raises what failed."""
    for started in self._started:
      started.result()

  def close(self) -> None:
    """Gives up what no thread has begun and waits for the rest."""
    for pool in (self._lowering, self._pool):
      if pool is not None:
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
  """Lets Python look for no cycles.

  What is traced are millions of small objects, nearly all of which stay in use.
  Looking through them again and again takes a tenth of the time.
  """
  was_enabled = gc.isenabled()
  gc.disable()
  try:
    yield
  finally:
    if was_enabled:
      gc.enable()


def _key(args: PyTree) -> list[tuple[int, ...]]:
  """Returns what tells the arguments of a function's programs apart."""
  # Numbers have no shape; np.shape would take most of the time here.
  return [getattr(leaf, 'shape', ()) for leaf in jax.tree.leaves(args)]


def _shape(leaf: Any) -> Any:
  """Returns the shape of an array on devices; other things as they are."""
  if not isinstance(leaf, jax.Array):
    return leaf
  return jax.ShapeDtypeStruct(
      leaf.shape,
      leaf.dtype,
      sharding=leaf.sharding if leaf.committed else None,
      weak_type=jnp.issubdtype(leaf.dtype, jnp.number) and leaf.weak_type,
  )
