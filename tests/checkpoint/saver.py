"""A process that saves checkpoints until it is killed; see the fault tests.

usage: saver.py DIRECTORY

Reads instants from stdin, one a line: '2.35' is 35% into the save that follows
the child's second one. For each it forks a child that resumes from DIRECTORY
and saves step after step, kills the child with SIGKILL at that instant, and
answers with the last step that the child knew to be durable. Counting saves
rather than seconds keeps the kills apart on a slow machine too. Forking spares
the two seconds of imports per kill; no thread runs before the fork.
"""

import os
import signal
import sys
import time

import jax
import numpy as np

from jetrl_jax.checkpoint.manager import CheckpointManager


def state_of(step: int) -> dict[str, jax.Array]:
  """Makes the state that step `step` must have, about 600 kB."""
  generator = np.random.Generator(np.random.Philox(step))
  return {
      'kernel': jax.numpy.asarray(generator.normal(size=(300, 400)), 'float32'),
      'values': jax.numpy.asarray(
          generator.normal(size=(64, 1024)), 'float8_e4m3fn'
      ),
      'step': jax.numpy.int32(step),
  }


def host_state_of(step: int) -> dict[str, int]:
  """Makes the host state that step `step` must have."""
  return {'position': step * 7}


def _save_for_ever(directory: str, report: int) -> None:
  manager = CheckpointManager(directory, keep_latest=2, keep_best=1)
  like = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
      state_of(0),
  )
  restored = manager.restore(like)
  first = step = 0 if restored is None else restored.step + 1
  os.write(report, b'saving\n')
  while True:
    manager.save(
        step, state_of(step), host_state_of(step), metric=-abs(step % 5 - 3)
    )
    # save() has waited for the step before: it must now survive anything.
    if step > first:
      os.write(report, f'{step - 1}\n'.encode())
    step += 1


def main() -> None:
  """Kills one child per line of stdin."""
  directory = sys.argv[1]
  for line in sys.stdin:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
      os.close(reader)
      _save_for_ever(directory, writer)
    os.close(writer)
    with os.fdopen(reader) as reports:
      assert reports.readline() == 'saving\n'
      saves, fraction = divmod(float(line), 1)
      durable = ['-1']
      # Before the first save there is none to time: 0.3 s is about one.
      save_time = 0.3
      for _ in range(int(saves)):
        begin = time.monotonic()
        durable.append(reports.readline())
        save_time = time.monotonic() - begin
      time.sleep(fraction * save_time)
      os.kill(child, signal.SIGKILL)
      os.waitpid(child, 0)
      durable += reports.read().split()
    print(int(durable[-1]), flush=True)


if __name__ == '__main__':
  main()
