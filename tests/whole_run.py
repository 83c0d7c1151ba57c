"""Whole runs of `tests/tiny_config.py`, in this process and in others.

Compiling is what a run costs: see `_share_compiled` in tests/conftest.py.
"""

import atexit
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from typing import Any

import jax
import ml_collections
import numpy as np
import safetensors.numpy

from jetrl_jax.checkpoint import restore
from jetrl_jax.config import build as configs
from jetrl_jax.rl.run import train_state
from jetrl_jax.rl.scoring import store
from jetrl_jax.rl.training import initialize
from jetrl_jax.rl.training.guard import GuardState
from jetrl_jax.rl.training.trainer import Trainer
from tests import tiny_config

ROOT = pathlib.Path(__file__).parent.parent
# Clocks, and what is divided by them.
_TIMES = (
    'perf/throughput',
    'perf/rollout_throughput',
    'perf/cpu_memory_used_gb',
)


@functools.cache
def home() -> pathlib.Path:
  """The folder with model and data; gone at exit."""
  folder = pathlib.Path(tempfile.mkdtemp(prefix='jetrl_jax_runs_'))
  atexit.register(shutil.rmtree, folder, ignore_errors=True)
  tiny_config.files(folder)
  return folder


@functools.cache
def one_layer() -> dict[str, Any]:
  """Changes to the quickstart's config: its checkpoint's first layer alone.

  With that it solves no sum, so the rewards are those of the tiny config.
  """
  folder = home() / 'one_layer'
  shutil.copytree(ROOT / 'examples' / 'quickstart' / 'checkpoint', folder)
  path = folder / 'config.json'
  shape = json.loads(path.read_text()) | {'num_hidden_layers': 1}
  path.write_text(json.dumps(shape))
  path = folder / 'model.safetensors'
  tensors = safetensors.numpy.load_file(path)
  kept = {
      name: values
      for name, values in tensors.items()
      if '.layers.' not in name or '.layers.0.' in name
  }
  assert 0 < len(kept) < len(tensors)
  safetensors.numpy.save_file(kept, path, {'format': 'pt'})
  return {
      'model.path': str(folder),
      'reward.functions': (str(home() / tiny_config.REWARDS),),
  }


def config(**changes: Any) -> ml_collections.ConfigDict:
  """The tiny config with absolute paths; `changes` by dotted name."""
  made = tiny_config.get_config()
  paths = {
      'model.path': made.model.path,
      'data.train_files': made.data.train_files,
      'data.val_files': made.data.val_files,
      'reward.functions': made.reward.functions,
  }
  for name, value in paths.items():
    if isinstance(value, str):
      paths[name] = str(home() / value)
    else:
      paths[name] = tuple(str(home() / v) for v in value)
  made.update_from_flattened_dict(paths | changes)
  return made


def trainer(
    workdir: pathlib.Path, changes: dict[str, Any] | None = None
) -> Trainer:
  """A trainer of the tiny config."""
  return Trainer(configs.build(config(**(changes or {}))), workdir)


@functools.cache
def finished() -> pathlib.Path:
  """The workdir of one uninterrupted run of the tiny config; only read it."""
  workdir = home() / 'finished'
  trainer(workdir).train()
  return workdir


def shift_ids(folder: pathlib.Path, token: str) -> None:
  """Writes the tiny tokenizer to `folder`, this token's id 100 higher."""
  for name in ('tokenizer.json', 'tokenizer_config.json'):
    shutil.copy(home() / tiny_config.FOLDER / 'model' / name, folder)
  path = folder / 'tokenizer.json'
  content = json.loads(path.read_text())
  content['model']['vocab'][token] += 100
  for added in content['added_tokens']:
    if added['content'] == token:
      added['id'] += 100
  path.write_text(json.dumps(content))


def environment() -> dict[str, str]:
  """The variables of a process that a test starts."""
  # Beside what the tests themselves run with.
  paths = [str(ROOT), *filter(None, [os.environ.get('PYTHONPATH')])]
  return os.environ | {
      'PYTHONPATH': os.pathsep.join(paths),
      'JAX_PLATFORMS': 'cpu',
  }


def start(
    *arguments: str | os.PathLike, module: str = 'jetrl_jax.main', **options
) -> subprocess.Popen:
  """Starts a process of the command line in `home()`."""
  return subprocess.Popen(
      [sys.executable, '-m', module, *map(str, arguments)],
      cwd=home(),
      env=environment(),
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      **options,
  )


def benchmark(
    script: str, output: pathlib.Path, *arguments: str
) -> list[dict[str, Any]]:
  """Runs a script of benchmarks/ in small; returns the rows that it writes.

  Args:
    script: its name.
    output: what it writes, without the endings.
    *arguments: more of its flags.
  """
  done = subprocess.run(
      [
          *(sys.executable, '-m', f'benchmarks.{script}', '--tiny'),
          f'--output={output}',
          *arguments,
      ],
      cwd=ROOT,
      env=os.environ | {'PYTHONPATH': str(ROOT)},
      capture_output=True,
      text=True,
      check=False,
  )
  assert done.returncode == 0, done.stderr
  assert output.with_suffix('.md').exists()
  return json.loads(output.with_suffix('.json').read_text())['rows']


def start_run(
    workdir: pathlib.Path, *arguments: str, **options
) -> subprocess.Popen:
  """Starts, or resumes, the tiny run in `workdir`."""
  file = ROOT / 'tests' / 'tiny_config.py'
  return start(
      f'--config={file}', f'--workdir={workdir}', *arguments, **options
  )


def records(workdir: pathlib.Path) -> list[dict]:
  """The lines of metrics.jsonl without clocks."""
  lines = (workdir / 'metrics.jsonl').read_text().splitlines()
  return [
      {
          name: value
          for name, value in json.loads(line).items()
          if not name.startswith('timing_s/') and name not in _TIMES
      }
      for line in lines
  ]


def times(workdir: pathlib.Path) -> list[dict[str, float]]:
  """The seconds by phase of each line of metrics.jsonl."""
  lines = (workdir / 'metrics.jsonl').read_text().splitlines()
  return [
      {
          name.removeprefix('timing_s/'): value
          for name, value in json.loads(line).items()
          if name.startswith('timing_s/')
      }
      for line in lines
  ]


def restored(
    workdir: pathlib.Path,
    step: int | None = None,
    changes: dict[str, Any] | None = None,
) -> restore.Restored:
  """Reads a checkpoint of a run, by default the newest."""
  spec = configs.build(config(**(changes or {})))

  def like(host_state):
    kept = GuardState.of_checkpoint(host_state).high_precision
    return train_state.without_weights(
        initialize.abstract(spec.with_high_precision(kept))
    )

  found = restore.restore(workdir / 'checkpoints', like, step)
  assert found is not None
  return found


def digest(tree: Any) -> dict[str, str]:
  """SHA-256 of every leaf's bytes, by path."""
  return {
      jax.tree_util.keystr(path): hashlib.sha256(
          np.asarray(jax.device_get(leaf)).tobytes()
      ).hexdigest()
      for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }


def outcome(
    workdir: pathlib.Path, changes: dict[str, Any] | None = None
) -> dict[str, Any]:
  """All that a finished run leaves, to be compared with ==.

  Weights, moments, scales and data position of the last checkpoint, the
  metrics apart from clocks, every rollout, every held-out sample, the export.
  """
  last = restored(workdir, changes=changes)
  rollouts = {}
  for file in sorted((workdir / 'rollouts').iterdir()):
    completions, extra = store.load_rollouts(file)
    rollouts[file.name] = digest(
        [extra, *(dataclasses.asdict(c) for c in completions)]
    )
  export = {
      file.name: hashlib.sha256(file.read_bytes()).hexdigest()
      for file in sorted((workdir / 'export').iterdir())
  }
  samples = {
      file.name: file.read_text()
      # None without an evaluation.
      for file in sorted((workdir / 'samples').glob('*'))
  }
  return {
      'step': last.step,
      'state': digest(last.state),
      'host_state': last.host_state,
      'records': records(workdir),
      'rollouts': rollouts,
      'samples': samples,
      'export': export,
  }
