"""What two processes of tests/core/test_processes.py do together."""

import os
import sys
import time
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jetrl_jax.core import interrupt, process_watch, processes, sharding
from jetrl_jax.core.interrupt import Interrupt, StopRequested


def _facts() -> None:
  rank = processes.rank()
  assert processes.count() == jax.process_count() == 2
  assert processes.is_first() == (rank == 0)
  apart, alike = processes.TensorGroup(), processes.TensorGroup(2)
  assert apart.share(5) == [[0, 2, 4], [1, 3]][rank]
  assert alike.share(3) == [0, 1, 2] and alike.leads == (rank == 0)
  assert alike.leaders(['a', 'b']) == ['a']
  # Also what is longer than a message.
  for size in (10, 1_100_000):
    told = alike.from_leader('sizes', lambda size=size: bytes([rank]) * size)
    assert told == bytes(size)
  # With the message, in pieces through the store, over the devices.
  for size in (10, 70_000, 900_000 + 200_000 * rank, 1_100_000 + rank):
    found = processes.together('sizes', lambda size=size: bytes([rank]) * size)
    assert found[rank] == bytes([rank]) * size
    assert [set(one) for one in found] == [{0}, {1}]
  assert processes.from_first('ranks', processes.rank) == 0

  mesh = sharding.make_mesh(data=2)
  assert sharding.spans_processes(mesh)
  assert sharding.local_mesh(mesh).size == 1
  values = np.arange(8.0, dtype=np.float32).reshape(4, 2)
  split = jax.make_array_from_callback(
      values.shape, NamedSharding(mesh, sharding.ROWS), lambda i: values[i]
  )
  np.testing.assert_array_equal(sharding.to_host(split), values)
  whole = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))(split)
  local = sharding.on_local_mesh(whole, sharding.local_mesh(mesh))
  assert local.is_fully_addressable
  np.testing.assert_array_equal(jnp.asarray(local), values)
  first = sharding.whole_in_first({'x': split})['x']
  assert first is None if rank else (first == values).all()

  # Nothing is left of it once all have met, but this meeting.
  processes.together('a meeting', lambda: None)
  group = processes._group
  assert group.stale == [f'meet/{group.turn - 1}/{rank}']
  for folder in ('told/0', 'body') if rank == 0 else ():
    assert not group.folder(folder)

  def stop():
    raise StopRequested('SIGINT')

  try:
    alike.from_leader('a visit', stop)
    raise AssertionError('not stopped')
  except StopRequested as why:
    assert str(why) == 'SIGINT'

  # A request to stop reaches the other process, and both at the same place.
  with Interrupt() as asked:
    if rank == 1:
      interrupt.ask('SIGTERM')
    try:
      processes.stop_together('a step', asked.check)
      raise AssertionError('not stopped')
    except StopRequested as stop:
      assert str(stop) == 'SIGTERM'
  if rank == 1:
    logging.warning('the disk of this host is full')


def _waits() -> None:
  """One process works for twice as long as it may do nothing.

  Processes hear of each other once a second, later on a loaded machine.
  """
  process_watch.STALLED_S = 6.0
  processes.together('the start', lambda: None)
  processes.watch_for_hangs()
  if processes.rank() == 1:
    for _ in range(120):
      processes.touch('decoding')
      time.sleep(0.1)
  processes.together('a rollout', lambda: None)


def _collective(what: str) -> None:
  """One process waits in a collective for one that is busy, or that hangs."""
  process_watch.STALLED_S = 2.0
  mesh = sharding.make_mesh(data=2)
  add = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(mesh, P()))
  x = jax.make_array_from_callback(
      (2,), NamedSharding(mesh, sharding.ROWS), lambda i: np.ones(2)[i]
  )
  add(x).block_until_ready()
  processes.together('the start', lambda: None)
  processes.watch_for_hangs()
  if processes.rank() == 1:
    with processes.slow('a report') if what == 'busy' else nullcontext():
      processes.touch('a file')
      # One that hangs is ended before.
      time.sleep(5 if what == 'busy' else 8)
  processes.touch('an update')
  assert add(x) == 2
  processes.touch()


def main() -> None:
  """Does what the first argument says."""
  if sys.argv[1] == 'alone':
    processes.COME_S, processes.MISSING_S = 5.0, 1.0
  processes.start()
  if sys.argv[1] == 'facts':
    _facts()
    processes.finish()
    print('well')
  elif sys.argv[1] == 'waits':
    _waits()
    processes.finish()
    print('well')
  elif sys.argv[1] in ('busy', 'hangs'):
    _collective(sys.argv[1])
    processes.finish()
    print('well')
  elif sys.argv[1] == 'differ':
    processes.together(f'work {processes.rank()}', lambda: None)
  elif processes.rank() == 1:
    processes.together('the start', lambda: None)
    processes.fail('a file is missing')
  else:
    processes.together('the start', lambda: None)
    processes.together('a rollout', lambda: None)
    os._exit(3)  # Not reached.


if __name__ == '__main__':
  main()
