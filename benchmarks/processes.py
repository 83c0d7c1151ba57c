"""The same run as one process and as several: equal bits, and seconds a step.

    python -m benchmarks.processes --output=benchmarks/results/NAME

A layout is PROCESSES x DEVICES of each. All layouts of a case have the same
mesh. Each is a run of `jetrl_jax.main` in a workdir of its own, one after
another, on the GPUs at hand, or on CPU devices where JAX_PLATFORMS=cpu. All
that a run leaves is hashed and compared with that of the first layout: every
token, log-prob and score of every rollout, masters, moments and scales of
every checkpoint, held-out samples, metrics apart from clocks and memory.

A case is 'quickstart' (a learning run of 0.8 M parameters) or a model.shape
with random weights, seeded rewards and one checkpoint less; with '+fsdp' its
mesh is fsdp=N and not data=N. Exits 1 if anything differs or a run fails.

With --at_once all runs share the GPUs and the time to compile. Their seconds
then mean nothing; a second call with the same --keep finds all compiled.
"""

import hashlib
import json
import os
import pathlib
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent import futures
from typing import Any

# This process only reads files; the runs have the GPUs.
_PLATFORMS = os.environ.get('JAX_PLATFORMS')
os.environ['JAX_PLATFORMS'] = 'cpu'

import jax  # noqa: E402
import numpy as np  # noqa: E402
from absl import app, flags  # noqa: E402
from jax.sharding import SingleDeviceSharding  # noqa: E402

from benchmarks import common  # noqa: E402
from jetrl_jax.checkpoint import folder as checkpoint_folder  # noqa: E402
from jetrl_jax.checkpoint import restore  # noqa: E402
from jetrl_jax.core import device_memory, processes  # noqa: E402
from jetrl_jax.metrics.console import show_own_sentences  # noqa: E402

_LAYOUTS = flags.DEFINE_list(
    'layouts', ['1x2', '2x1'], 'Processes x devices of each process.'
)
_CASES = flags.DEFINE_list(
    'cases', ['quickstart', 'qwen2.5-0.5b+fsdp'], 'See above.'
)
_STEPS = flags.DEFINE_integer('steps', 4, 'Training steps of each run.')
_KEEP = flags.DEFINE_string('keep', '', 'Folder for the workdirs, kept.')
_AT_ONCE = flags.DEFINE_bool(
    'at_once', False, 'All runs at the same time, on the same GPUs: bits only.'
)
_LIMIT = flags.DEFINE_float('limit_s', 600, 'Seconds of one run.')

_ROOT = pathlib.Path(__file__).parents[1]
_EXAMPLE = 'examples/quickstart'
# Clocks, what is divided by them, and memory.
_NOT_COMPARED = re.compile(r'timing_s/|perf/(?!total_num|packing)')
_COLUMNS = (
    ('case', 'case', ''),
    ('layout', 'processes x devices', ''),
    ('hardware', 'hardware', ''),
    ('step_s', 'step s', '.3f'),
    ('gen_s', 'gen s', '.3f'),
    ('update_s', 'update s', '.3f'),
    ('start_s', 'start to end s', '.0f'),
    ('mismatch', 'mismatch', '.2g'),
    ('entries', 'entries compared', ''),
    ('differ', 'differ', ''),
    ('digest', 'SHA-256 of all', ''),
)


def overrides(case: str, devices: int) -> dict[str, Any]:
  """Returns what a case sets in configs/quickstart.py."""
  name, _, axis = case.partition('+')
  settings: dict[str, Any] = {
      f'mesh.{axis or "data"}': devices,
      'trainer.total_training_steps': _STEPS.value,
      'trainer.test_freq': _STEPS.value,
      'trainer.save_freq': max(1, _STEPS.value // 2),
  }
  if common.TINY.value:
    settings |= {
        'trainer.train_batch_size': 8,
        'trainer.mini_batch_size': 4,
        'rollout.num_generations': 4,
        'rollout.num_slots': 16,
        'data.val_max_samples': 8,
    }
  if name == 'quickstart':
    return settings
  return settings | {
      'model.path': '',
      'model.init': 'random',
      'model.shape': name,
      'model.attention_tile': 64,
      'model.remat': 'full',
      'data.tokenizer': f'{_EXAMPLE}/model_init',
      'data.val_files': (),
      'rollout.max_response_length': 256,
      'rollout.num_generations': 8,
      'rollout.num_slots': 256,
      'trainer.synthetic': True,
      'trainer.train_batch_size': 32,
      'trainer.mini_batch_size': 16,
      'trainer.micro_batch_size': 64,
      'trainer.save_freq': 0,
      'trainer.test_freq': 0,
  }


def run(case: str, layout: str, workdir: pathlib.Path, cache: str) -> float:
  """Trains; returns seconds from the start of all processes to their end."""
  count, devices = map(int, layout.split('x'))
  settings = overrides(case, count * devices) | {'compile_cache_dir': cache}
  command = [
      sys.executable,
      '-m',
      'jetrl_jax.main',
      '--config=configs/quickstart.py',
      f'--workdir={workdir}',
      *(f'--config.{name}={value}' for name, value in settings.items()),
  ]
  with socket.socket() as found:
    found.bind(('127.0.0.1', 0))
    port = found.getsockname()[1]
  start, started = time.monotonic(), []
  workdir.mkdir(parents=True)
  for rank in range(count):
    paths = [str(_ROOT), *filter(None, [os.environ.get('PYTHONPATH')])]
    env = os.environ | {'PYTHONPATH': os.pathsep.join(paths)}
    env.pop('JAX_PLATFORMS')
    # JAX refuses both names of this share.
    share = env.pop('XLA_PYTHON_CLIENT_MEM_FRACTION', None)
    share = env.get('XLA_CLIENT_MEM_FRACTION', share)
    env['XLA_CLIENT_MEM_FRACTION'] = share or str(device_memory.USABLE)
    if _AT_ONCE.value:
      runs = len(_CASES.value) * len(_LAYOUTS.value)
      env['XLA_CLIENT_MEM_FRACTION'] = f'{0.88 / runs:.2f}'
    if _PLATFORMS is not None:
      env['JAX_PLATFORMS'] = _PLATFORMS
    if _PLATFORMS == 'cpu':
      env['XLA_FLAGS'] = f'--xla_force_host_platform_device_count={devices}'
    else:
      all_of_them = range(count * devices)
      visible = env.get('CUDA_VISIBLE_DEVICES') or ','.join(
          map(str, all_of_them)
      )
      mine = visible.split(',')[rank * devices : (rank + 1) * devices]
      env['CUDA_VISIBLE_DEVICES'] = ','.join(mine)
    if count > 1:
      env |= {
          processes.ADDRESS: f'127.0.0.1:{port}',
          processes.COUNT: str(count),
          processes.RANK: str(rank),
      }
    with open(workdir / f'log_{rank}.txt', 'w') as log:
      started.append(
          subprocess.Popen(command, cwd=_ROOT, env=env, stdout=log, stderr=log)
      )
  try:
    codes = [one.wait(_LIMIT.value) for one in started]
  finally:
    for one in started:
      one.kill()
  if any(codes):
    logs = [
        f'--- process {rank}\n' + log.read_text()[-3000:]
        for rank, log in enumerate(sorted(workdir.glob('log_*.txt')))
    ]
    said = '\n'.join(logs)
    raise RuntimeError(f'{case} {layout} ended with {codes}\n{said}')
  return time.monotonic() - start


def outcome(workdir: pathlib.Path) -> dict[str, str]:
  """Returns what a run has left, as name -> SHA-256 or text."""
  found: dict[str, str] = {}
  checkpoints = workdir / 'checkpoints'
  for step, manifest in checkpoint_folder.manifests(checkpoints).items():
    state = restore.restore(checkpoints, _like(manifest.leaves), step)
    assert state is not None
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.state):
      name = jax.tree_util.keystr(path)
      found[f'checkpoint {step} {name}'] = _sha(np.asarray(leaf))
    found[f'checkpoint {step} host'] = json.dumps(manifest.host_state)
  for file in sorted((workdir / 'rollouts').glob('*.npz')):
    with np.load(file) as arrays:
      for name in arrays.files:
        found[f'{file.name} {name}'] = _sha(arrays[name])
  for file in sorted((workdir / 'samples').glob('*')):
    found[file.name] = file.read_text()
  for file in sorted((workdir / 'export').glob('*')):
    found[f'export {file.name}'] = hashlib.sha256(file.read_bytes()).hexdigest()
  for record in _lines(workdir):
    for name, value in record.items():
      if not _NOT_COMPARED.match(name):
        found[f'step {record["step"]} {name}'] = json.dumps(value)
  return found


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


def _sha(array: np.ndarray) -> str:
  return hashlib.sha256(
      f'{array.dtype}{array.shape}'.encode() + array.tobytes()
  ).hexdigest()


def _lines(workdir: pathlib.Path) -> list[dict]:
  text = (workdir / 'metrics.jsonl').read_text()
  return [json.loads(line) for line in text.splitlines()]


def _row(case: str, layout: str, workdir: pathlib.Path, spent: float) -> dict:
  # The first step compiles.
  steps = [line for line in _lines(workdir) if line['step'] > 1]

  def median(name: str) -> float:
    return statistics.median(line.get(name, 0.0) for line in steps)

  (start,) = (workdir / 'starts.jsonl').read_text().splitlines()
  facts = json.loads(start)
  return {
      'case': case,
      'layout': layout,
      'hardware': f'{facts["num_devices"]} x {facts["device"]}',
      'processes': facts.get('processes', 1),
      'step_s': median('timing_s/step'),
      'gen_s': median('timing_s/gen'),
      'update_s': median('timing_s/update_actor'),
      'start_s': spent,
      'mismatch': max(line['training/mismatch_token_frac'] for line in steps),
      'steps': [line['timing_s/step'] for line in steps],
  }


def main(argv: list[str]) -> None:
  """Runs every case in every layout and compares what they leave."""
  if argv[1:]:
    raise app.UsageError(f'unexpected arguments {argv[1:]}')
  show_own_sentences()
  home = pathlib.Path(_KEEP.value or tempfile.mkdtemp(prefix='processes_'))
  home = home.resolve()
  wanted = [(case, one) for case in _CASES.value for one in _LAYOUTS.value]
  rows: list[dict] = []
  first: dict[str, dict[str, str]] = {}

  def measured(of: tuple[str, str]) -> tuple[dict[str, str], dict]:
    case, layout = of
    workdir = home / f'{case}_{layout}'
    shutil.rmtree(workdir, ignore_errors=True)
    spent = run(case, layout, workdir, str(home / 'compiled'))
    return outcome(workdir), _row(case, layout, workdir, spent)

  failed = False
  try:
    workers = len(wanted) if _AT_ONCE.value else 1
    with futures.ThreadPoolExecutor(workers) as pool:
      for (case, _), done in zip(
          wanted, [pool.submit(measured, of) for of in wanted], strict=True
      ):
        try:
          found, row = done.result()
        except (RuntimeError, subprocess.TimeoutExpired) as error:
          print(error, flush=True)
          failed = True
          continue
        row |= _compared(first.setdefault(case, found), found)
        rows.append(row)
        print(json.dumps(row), flush=True)
        # After every run, so that one that is cut off leaves what it found.
        common.write(
            rows,
            _summary(rows),
            common.table(rows, _COLUMNS),
            rows[0]['hardware'],
        )
  finally:
    if not _KEEP.value:
      shutil.rmtree(home, ignore_errors=True)
  sys.exit(failed or any(row['differ'] for row in rows))


def _compared(first: dict[str, str], found: dict[str, str]) -> dict:
  differ = sorted(
      name
      for name in first.keys() | found.keys()
      if first.get(name) != found.get(name)
  )
  text = json.dumps(found, sort_keys=True)
  return {
      'entries': len(found),
      'differ': len(differ),
      'names_that_differ': differ[:20],
      'digest': hashlib.sha256(text.encode()).hexdigest()[:16],
  }


def _summary(rows: list[dict]) -> dict:
  """Returns each run's seconds of a step beside those of the first layout."""
  if _AT_ONCE.value:
    return {}
  base: dict[str, float] = {}
  found = {}
  for row in rows:
    seconds = base.setdefault(row['case'], row['step_s'])
    found[f'{row["case"]} {row["layout"]}, step beside the first'] = round(
        row['step_s'] / seconds, 4
    )
  return found


if __name__ == '__main__':
  common.run(main)
