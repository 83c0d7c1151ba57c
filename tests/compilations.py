"""What JAX compiles while a test runs."""

import contextlib
import threading
from collections.abc import Iterator
from typing import NamedTuple

import jax


class Compilation(NamedTuple):
  """One program: its name, as 'jit(NAME)', and the thread that compiled it."""

  program: str
  thread: str


@contextlib.contextmanager
def noted() -> Iterator[list[Compilation]]:
  """Gives a list of what is compiled within, in order."""
  found: list[Compilation] = []

  def note(event: str, duration_secs: float, **kwargs) -> None:
    del duration_secs
    if event == '/jax/core/compile/backend_compile_duration':
      thread = threading.current_thread().name
      found.append(Compilation(kwargs['fun_name'], thread))

  jax.monitoring.register_event_duration_secs_listener(note)
  try:
    yield found
  finally:
    jax.monitoring.unregister_event_duration_listener(note)
