"""Starts runs as one process or several, and hashes what they leave."""

import hashlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from jetrl_jax.checkpoint import arrays, restore
from jetrl_jax.checkpoint import folder as checkpoint_folder
from jetrl_jax.checkpoint import manifest as checkpoint_manifest
from jetrl_jax.core import device_memory, launchers
from jetrl_jax.core.typing import PyTree

ROOT = pathlib.Path(__file__).parents[1]
EXAMPLE = 'examples/quickstart'
# Clocks, what is divided by them, and memory.
NOT_COMPARED = re.compile(r'timing_s/|perf/(?!total_num|packing)')


_started: list[subprocess.Popen] = []


def leave_gpus() -> None:
  """Keeps this process on a CPU: it starts runs, and they have the GPUs.

  A SIGTERM, of `timeout` for example, ends these runs as well.
  """
  jax.config.update('jax_platforms', 'cpu')
  signal.signal(signal.SIGTERM, _end)


def _end(number: int, frame: Any) -> None:
  del frame
  for one in _started:
    one.kill()
  sys.exit(128 + number)


def start(
    command: Sequence[str],
    layout: tuple[int, int],
    logs: pathlib.Path,
    share: float = 0,
    only_compiles: bool = False,
) -> list[subprocess.Popen]:
  """Starts `python -m COMMAND`, as several processes if the layout says so.

  Args:
    command: module and arguments.
    layout: (processes, devices of each); the first devices are taken.
    logs: folder for log_<rank>.txt.
    share: of a GPU's memory, for runs at the same time; 0 for most of it.
    only_compiles: takes no memory of a GPU, but may have as much as a run: XLA
      compiles another program where it sees less.
  """
  count, devices = layout
  with socket.socket() as found:
    found.bind(('127.0.0.1', 0))
    port = found.getsockname()[1]
  logs.mkdir(parents=True, exist_ok=True)
  started = []
  for rank in range(count):
    env = _environment(rank, layout, share)
    if only_compiles:
      env['XLA_PYTHON_CLIENT_PREALLOCATE'] = 'false'
    if count > 1:
      env |= {
          launchers.ADDRESS: f'127.0.0.1:{port}',
          launchers.COUNT: str(count),
          launchers.RANK: str(rank),
      }
    with open(logs / f'log_{rank}.txt', 'w') as log:
      started.append(
          subprocess.Popen(
              [sys.executable, '-m', *command],
              cwd=ROOT,
              env=env,
              stdout=log,
              stderr=log,
          )
      )
  _started.extend(started)
  return started


def _environment(
    rank: int, layout: tuple[int, int], share: float
) -> dict[str, str]:
  count, devices = layout
  paths = [str(ROOT), *filter(None, [os.environ.get('PYTHONPATH')])]
  env = os.environ | {'PYTHONPATH': os.pathsep.join(paths)}
  # JAX refuses both names of this share.
  given = env.pop('XLA_PYTHON_CLIENT_MEM_FRACTION', None)
  given = env.get('XLA_CLIENT_MEM_FRACTION', given) or device_memory.USABLE
  env['XLA_CLIENT_MEM_FRACTION'] = str(share or given)
  if env.get('JAX_PLATFORMS') == 'cpu':
    env['XLA_FLAGS'] = f'--xla_force_host_platform_device_count={devices}'
    # As many threads in every layout: the order of a CPU's sums may depend on
    # them, and XLA takes one for each device of the process at least.
    env.setdefault('NPROC', str(max(os.cpu_count() or 1, count * devices)))
    return env
  visible = env.get('CUDA_VISIBLE_DEVICES')
  ids = (
      visible.split(',') if visible else list(map(str, range(count * devices)))
  )
  mine = ids[rank * devices : (rank + 1) * devices]
  return env | {'CUDA_VISIBLE_DEVICES': ','.join(mine)}


def finish(
    started: list[subprocess.Popen], logs: pathlib.Path, seconds: float
) -> None:
  """Waits until all have ended, and kills what has not.

  Raises:
    RuntimeError: one failed, with what all have said last.
    subprocess.TimeoutExpired: it took longer.
  """
  try:
    codes = [one.wait(seconds) for one in started]
  finally:
    for one in started:
      one.kill()
      one.wait()
  if any(codes):
    said = '\n'.join(
        f'--- process {rank}\n' + log.read_text()[-3000:]
        for rank, log in enumerate(sorted(logs.glob('log_*.txt')))
    )
    raise RuntimeError(f'{logs.name} ended with {codes}\n{said}')


def sha(array: np.ndarray) -> str:
  """Returns the SHA-256 of an array's dtype, shape and bytes."""
  return hashlib.sha256(
      f'{array.dtype}{array.shape}'.encode() + array.tobytes()
  ).hexdigest()


def checkpoints(
    workdir: pathlib.Path,
) -> dict[int, checkpoint_manifest.Manifest]:
  """Returns the checkpoints of a run, by step."""
  return checkpoint_folder.manifests(workdir / 'checkpoints')


def state(workdir: pathlib.Path, step: int) -> dict[str, str]:
  """Returns the SHA-256 of every leaf of a checkpoint, by name."""
  manifest = checkpoints(workdir)[step]
  like = _like(manifest.leaves)
  found = restore.restore(workdir / 'checkpoints', like, step)
  assert found is not None
  return hashes(found.state)


def hashes(tree: PyTree) -> dict[str, str]:
  """Returns the SHA-256 of every leaf of a state, by name."""
  named = arrays.named_leaves(tree)
  return {name: sha(np.asarray(leaf)) for name, leaf in named.items()}


def _like(leaves: dict[str, tuple[str, tuple[int, ...]]]) -> dict:
  """Returns the arrays that a manifest names, as shapes on one device."""
  where = SingleDeviceSharding(jax.devices()[0])
  tree: dict[str, Any] = {}
  for name, (dtype, shape) in leaves.items():
    *parents, last = name.split('/')
    node = tree
    for parent in parents:
      node = node.setdefault(parent, {})
    node[last] = jax.ShapeDtypeStruct(
        shape, jax.numpy.dtype(dtype), sharding=where
    )
  return tree


def rollout_hashes(file: pathlib.Path) -> dict[str, str]:
  """Returns the SHA-256 of every array of a saved rollout."""
  with np.load(file) as found:
    return {name: sha(found[name]) for name in found.files}


def lines(workdir: pathlib.Path) -> list[dict]:
  """Returns the whole lines of a run's metrics."""
  file = workdir / 'metrics.jsonl'
  text = file.read_text() if file.exists() else ''
  return [json.loads(x) for x in text.splitlines() if x.endswith('}')]


def outcome(workdir: pathlib.Path) -> dict[str, str]:
  """Returns what a run has left, as name -> SHA-256 or text."""
  found: dict[str, str] = {}
  for step, manifest in checkpoints(workdir).items():
    for name, value in state(workdir, step).items():
      found[f'checkpoint {step} {name}'] = value
    found[f'checkpoint {step} host'] = json.dumps(manifest.host_state)
  for file in sorted((workdir / 'rollouts').glob('*.npz')):
    for name, value in rollout_hashes(file).items():
      found[f'{file.name} {name}'] = value
  for file in sorted((workdir / 'samples').glob('*')):
    found[file.name] = file.read_text()
  for file in sorted((workdir / 'export').glob('*')):
    found[f'export {file.name}'] = hashlib.sha256(file.read_bytes()).hexdigest()
  for record in lines(workdir):
    for name, value in record.items():
      if not NOT_COMPARED.match(name):
        found[f'step {record["step"]} {name}'] = json.dumps(value)
  return found


def digest(found: dict[str, str]) -> str:
  """Returns 16 digits that stand for all entries."""
  text = json.dumps(found, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()[:16]
