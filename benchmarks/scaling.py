"""A host of several GPUs: what N of them do beside one, in ten minutes.

    python -m benchmarks.scaling --output=benchmarks/results/NAME

    prepare      compiles what the runs of all meshes compile, several at once
    step         whole GRPO steps of --shape on one GPU, then on N: data=N,
                 fsdp=N, data=N/2 x tensor=2, by one process and by several;
                 each GPU has the work of one (weak scaling)
    decode       a decode step with mesh.tensor, --slots slots a GPU
    collectives  what devices send each other for a weight of --shape
    large_dry    compiles what a run of --large_shape with --large_axis=N does
    large        two of these steps
    bits         a small learning run by one process and by N: all it leaves
    kill         one rank of a small run is killed; N/2 GPUs resume

Every unit of a part is one or more processes with a time limit: one that fails
or runs out of memory is a row that says so. The record is written after each
unit. A second call with the same --output keeps what was measured on this
hardware and commit, and does what is missing; --again does all again.

Of a step, the time is that of the second one, with answers of half to all of
--workload's tokens. The first, which compiles, and the third, in which the
kernels of collectives are counted, have short answers. The log-probs of the
first one's first prompts are compared over all runs; all that the runs of one
mesh leave is compared as well. --gpu_gb=80 takes the settings with which a 7B
fits there. On CPU devices, to try it: JAX_PLATFORMS=cpu with --tiny
--devices=4.
"""

import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import numpy as np
from absl import app, flags

from benchmarks import common, launch
from jetrl_jax.config.model import SHAPES
from jetrl_jax.core.collectives import Axes
from jetrl_jax.fp8 import Recipe
from jetrl_jax.metrics import provenance
from jetrl_jax.metrics.console import show_own_sentences
from jetrl_jax.models import tensor_parallel
from jetrl_jax.rl.scoring import store

# Of one unit, at most.
_SECONDS = {
    'prepare': 240,
    'large_dry': 400,
    'step': 240,
    'decode': 150,
    'collectives': 60,
    'large': 300,
    'bits': 120,
    'kill': 180,
}
_DEVICES = flags.DEFINE_integer(
    'devices', 0, 'N; 0 for all GPUs that are seen.'
)
_PARTS = flags.DEFINE_list('parts', list(_SECONDS), 'See above; in this order.')
_CONFIG = flags.DEFINE_string('config', 'configs/qwen7b.py', 'Of the steps.')
_SHAPE = flags.DEFINE_string('shape', 'qwen2.5-7b', 'See model.shape.')
_VARIANT = flags.DEFINE_string(
    'variant', 'fp8_delayed+kv8+selective', 'See `common.overrides`.'
)
_WORKLOAD = flags.DEFINE_string(
    'workload',
    '32x8x2048x4',
    'Of a GPU: prompts x samples x response tokens x mini-batches.',
)
_LAYERS = flags.DEFINE_integer(
    'layers', 0, 'Of --shape in the steps; 0 for all.'
)
_AXES = flags.DEFINE_list(
    'axes', ['data', 'fsdp', 'tensor'], 'Meshes of N GPUs that the steps have.'
)
_ONE_GPU = flags.DEFINE_bool(
    'one_gpu', True, 'Whether the steps also run on one GPU, first.'
)
_PROCESSES = flags.DEFINE_list(
    'processes',
    ['one', 'each'],
    'Of the steps on N GPUs: one process of all, a process of each.',
)
_SHORT = flags.DEFINE_integer('short', 128, 'Response tokens of short answers.')
_SLOTS = flags.DEFINE_integer('slots', 32, 'Slots a GPU, of decode.')
_LARGE_CONFIG = flags.DEFINE_string(
    'large_config', 'configs/qwen14b.py', 'Of the large model.'
)
_LARGE_SHAPE = flags.DEFINE_string('large_shape', 'qwen2.5-32b', 'The same.')
_LARGE_AXIS = flags.DEFINE_enum(
    'large_axis', 'fsdp', ['fsdp', 'tensor'], 'Of N GPUs, of the large model.'
)
_LARGE_WORKLOAD = flags.DEFINE_string(
    'large_workload', '2x8x1024x1', 'The same, of a GPU.'
)
_GPU_GB = flags.DEFINE_enum('gpu_gb', '141', ['80', '141'], 'Of a GPU.')
_SET = flags.DEFINE_multi_string('set', [], 'SETTING=VALUE of the steps.')
_LIMIT = flags.DEFINE_float('limit_s', 570, 'Seconds of the whole call.')
_PATIENCE = flags.DEFINE_float(
    'patience', 1, 'Times what a unit may take; above 1 on a slow machine.'
)
_KEEP = flags.DEFINE_string('keep', '', 'Folder for workdirs, kept.')
_AGAIN = flags.DEFINE_bool('again', False, 'Whether to measure all again.')

# As in configs/qwen7b.py with its longest prompts and answers, on each GPU.
_MICRO_BATCH_TOKENS = 16384
# README.md: what lets a 7B train on 80 GB.
_SMALL_MEMORY = {
    'model.master_dtype': 'bfloat16',
    'optim.master_rounding': 'stochastic',
    'model.remat': 'full',
}
_ENDED_S = 60  # docs/scale.md: by then nobody waits for a dead process.

_TABLES = {
    'step': (
        ('unit', 'mesh, processes x GPUs of each', ''),
        ('step_s', 'step s', '.2f'),
        ('compiled_s', 'of it compiling', '.1f'),
        ('gen_s', 'gen', '.2f'),
        ('score_s', 'score', '.2f'),
        ('update_s', 'update', '.2f'),
        ('rest_s', 'rest', '.2f'),
        ('tok_s_gpu', 'tok/s a GPU', '.0f'),
        ('weak', 'of one GPU', '.1%'),
        ('gen_collectives', 'collectives in gen', '.1%'),
        ('update_collectives', 'in update', '.1%'),
        ('peaks', 'peak GiB of each GPU', ''),
        ('mismatch', 'mismatch', '.2g'),
        ('first', 'hash of the first prompts', ''),
        ('all', 'hash of all', ''),
        ('start_s', 'start to end s', '.0f'),
    ),
    'decode': (
        ('unit', 'mesh.tensor', ''),
        ('slots', 'slots', 'd'),
        ('ms_per_step', 'ms/step', '.2f'),
        ('tok_s_gpu', 'tok/s a GPU', '.0f'),
        ('weak', 'of one GPU', '.1%'),
        ('hash', 'hash of a rollout', ''),
    ),
    'collectives': (
        ('unit', 'mesh, processes x GPUs of each, what', ''),
        ('mib', 'MiB', '.0f'),
        ('ms', 'ms', '.3f'),
        ('gb_s', 'GB/s out of a GPU', '.1f'),
        ('hash', 'hash', ''),
    ),
    'prepare': (
        ('unit', 'run', ''),
        ('ledger', 'dry run, GiB a GPU', ''),
        ('phases', 'phases', ''),
        ('start_s', 's', '.0f'),
    ),
    'large_dry': (
        ('unit', 'run', ''),
        ('ledger', 'dry run, GiB a GPU', ''),
        ('phases', 'phases', ''),
        ('start_s', 's', '.0f'),
    ),
    'large': (
        ('unit', 'run', ''),
        ('peaks', 'peak GiB of each GPU', ''),
        ('steps_s', 'steps s', ''),
        ('mismatch', 'mismatch', '.2g'),
        ('start_s', 'start to end s', '.0f'),
    ),
    'bits': (
        ('unit', 'processes x GPUs of each', ''),
        ('entries', 'entries', 'd'),
        ('differ', 'differ from the first', 'd'),
        ('all', 'hash of all', ''),
        ('start_s', 'start to end s', '.0f'),
    ),
    'kill': (
        ('unit', 'run', ''),
        ('killed', 'rank killed', 'd'),
        ('ended_s', 'all ended after s', '.1f'),
        ('codes', 'exit codes', ''),
        ('step', 'checkpoint', 'd'),
        ('state', 'its hash', ''),
        ('restored', 'hash on half of the GPUs', ''),
        ('next_equal', 'next rollout has the same bits', ''),
        ('resumed_to', 'resumed to step', 'd'),
    ),
}

Layout = tuple[int, int]


def _count_gpus() -> int:
  if visible := os.environ.get('CUDA_VISIBLE_DEVICES'):
    return len(visible.split(','))
  found = subprocess.run(
      ['nvidia-smi', '-L'], capture_output=True, text=True, check=True
  )
  return found.stdout.count('\nGPU ') + found.stdout.startswith('GPU ')


def _meshes(devices: int) -> list[dict[str, int]]:
  """Returns the meshes of the steps, one device first."""
  meshes: list[dict[str, int]] = [{'data': 1}] if _ONE_GPU.value else []
  if devices > 1:
    split = {
        'data': {'data': devices},
        'fsdp': {'fsdp': devices},
        'tensor': {'data': devices // 2, 'tensor': 2},
    }
    meshes += [split[axis] for axis in _AXES.value]
  return meshes


def _layouts(mesh: dict[str, int]) -> list[Layout]:
  """Returns (processes, devices of each): one process, and one per device."""
  devices = int(np.prod(list(mesh.values())))
  if devices == 1:
    return [(1, 1)]
  found = {'one': (1, devices), 'each': (devices, 1)}
  return [found[name] for name in _PROCESSES.value]


def _name(mesh: dict[str, int], layout: Layout) -> str:
  axes = ' '.join(f'{k}={v}' for k, v in mesh.items() if v > 1) or 'one GPU'
  return f'{axes}, {layout[0]}x{layout[1]}'


def _settings(
    mesh: dict[str, int], workload: str, shape: str, steps: int
) -> dict[str, Any]:
  """Returns what a run sets in its config.

  Args:
    mesh: its axes.
    workload: of a GPU, see --workload.
    shape: of the model; the quickstart's with --tiny.
    steps: training steps.
  """
  devices = int(np.prod(list(mesh.values())))
  prompts, samples, tokens, batches = map(int, workload.split('x'))
  if prompts % batches:
    raise ValueError(
        f'{workload}: {prompts} prompts are not {batches} equal mini-batches'
    )
  example = f'{launch.EXAMPLE}/model_init'
  settings = common.overrides(_VARIANT.value) | {
      'model.path': '' if shape else example,
      'model.init': 'random',
      'model.shape': shape,
      'data.tokenizer': example,
      'data.template': '{prompt}',
      'data.train_files': (f'{launch.EXAMPLE}/train.jsonl',),
      'data.val_files': (),
      'data.max_prompt_length': 64 if shape else 16,
      'rollout.num_generations': samples,
      'rollout.max_response_length': tokens,
      'rollout.num_slots': devices * prompts * samples,
      'rollout.kv_cache_tokens': 0,
      'trainer.synthetic': True,
      'trainer.train_batch_size': devices * prompts,
      'trainer.mini_batch_size': devices * prompts // batches,
      'trainer.calibration_prompts': 4,
      'trainer.total_training_steps': steps,
      'trainer.test_freq': 0,
      'trainer.save_freq': 0,
  }
  if not common.TINY.value:
    # Answers are three quarters of the longest on average.
    cached = devices * prompts * samples * (tokens * 3 // 4 + 64)
    settings['rollout.kv_cache_tokens'] = cached
    if _GPU_GB.value == '80':
      settings |= _SMALL_MEMORY
      if 'kv8' not in _VARIANT.value.split('+'):
        settings['rollout.kv_cache_tokens'] = devices * 131072
  settings |= dict(one.split('=', 1) for one in _SET.value)
  return settings | {f'mesh.{axis}': size for axis, size in mesh.items()}


def _step_settings(
    mesh: dict[str, int], workload: str, shape: str
) -> dict[str, Any]:
  """Returns what a run of three steps sets, see `_settings`."""
  settings = _settings(mesh, workload, shape, 3)
  if common.TINY.value:
    return settings
  names = 'data.max_prompt_length', 'rollout.max_response_length'
  longest = sum(settings[name] for name in names)
  name = 'trainer.micro_batch_size'
  return {name: round(_MICRO_BATCH_TOKENS / longest)} | settings


class _Host:
  """The runs of this host, and what they have found so far.

  Args:
    home: for workdirs and compiled programs.
    rows: of an earlier call.
  """

  def __init__(self, home: pathlib.Path, rows: list[dict]):
    self.home, self.rows = home, rows
    self.end = time.monotonic() + _LIMIT.value
    self.devices = _DEVICES.value or _count_gpus()
    self.hardware = ''

  def command(
      self, what: str, config: str, workdir: pathlib.Path, settings: dict
  ) -> list[str]:
    """Returns the command of `scaling_run`."""
    settings = settings | {'compile_cache_dir': str(self.home / 'compiled')}
    return [
        'benchmarks.scaling_run',
        f'--what={what}',
        f'--config={config}',
        f'--workdir={workdir}',
        *(f'--config.{name}={value}' for name, value in settings.items()),
    ]

  def seconds(self, part: str) -> float:
    """Returns what is left for a unit of a part."""
    return min(_PATIENCE.value * _SECONDS[part], self.end - time.monotonic())

  def facts(self, workdir: pathlib.Path) -> list[dict]:
    """Returns the facts of each process."""
    files = sorted(workdir.glob('facts_*.json'))
    found = [json.loads(file.read_text()) for file in files]
    if found:
      self.hardware = f'{self.devices} x {found[0]["device"]}'
    return found

  def run(
      self,
      part: str,
      command: list[str],
      layout: Layout,
      name: str,
      only_compiles: bool = False,
  ) -> float:
    """Runs a command with its logs in a folder; returns the seconds."""
    logs, begin = self.home / name, time.monotonic()
    started = launch.start(command, layout, logs, only_compiles=only_compiles)
    launch.finish(started, logs, self.seconds(part))
    return time.monotonic() - begin

  def new(self, name: str) -> pathlib.Path:
    """Returns an empty folder."""
    shutil.rmtree(self.home / name, ignore_errors=True)
    (self.home / name).mkdir(parents=True)
    return self.home / name


Unit = tuple[str, Callable[[], list[dict]]]


# --- the parts --------------------------------------------------------------


def _runs(host: _Host) -> list[tuple[dict[str, int], Layout]]:
  return [
      (mesh, layout)
      for mesh in _meshes(host.devices)
      for layout in _layouts(mesh)
  ]


def _config() -> tuple[str, str, str]:
  """Returns (config, shape, workload) of the steps."""
  if common.TINY.value:
    return 'configs/quickstart.py', '', '4x4x16x2'
  return _CONFIG.value, _SHAPE.value, _WORKLOAD.value


def _large(mesh: dict[str, int]) -> tuple[str, dict[str, Any]]:
  """Returns (config, settings) of the large model."""
  tiny = common.TINY.value
  config = 'configs/quickstart.py' if tiny else _LARGE_CONFIG.value
  shape = '' if tiny else _LARGE_SHAPE.value
  workload = '4x4x16x2' if tiny else _LARGE_WORKLOAD.value
  settings = _settings(mesh, workload, shape, 2)
  # Of the config: 'selective' keeps more.
  return config, settings | ({} if tiny else {'model.remat': 'full'})


def _prepare(host: _Host) -> Iterator[Unit]:
  config, shape, workload = _config()
  end = time.monotonic() + host.seconds('prepare')

  def one(mesh: dict[str, int], layout: Layout) -> dict:
    name, begin = _name(mesh, layout), time.monotonic()
    workdir = host.new(f'prepare {name}')
    settings = _step_settings(mesh, workload, shape)
    command = host.command('prepare', config, workdir, settings)
    command.append(f'--layers={_LAYERS.value}')
    row: dict[str, Any] = {'part': 'prepare', 'unit': name}
    started = launch.start(command, layout, workdir, only_compiles=True)
    try:
      launch.finish(started, workdir, max(end - time.monotonic(), 1.0))
      row |= _memory(host.facts(workdir))
    except (RuntimeError, subprocess.TimeoutExpired) as error:
      row['error'] = _short(error)
    return row | {'start_s': time.monotonic() - begin}

  def unit() -> list[dict]:
    # XLA compiles with a few threads in every process.
    at_once = max(1, (os.cpu_count() or 1) // (4 * host.devices))
    with futures.ThreadPoolExecutor(at_once) as pool:
      return list(pool.map(lambda run: one(*run), _runs(host)))

  yield 'prepare', unit


def _memory(facts: list[dict]) -> dict[str, str]:
  """Returns the dry run's words."""

  def said(what: str) -> str:
    return ', '.join(f'{k} {v:.1f}' for k, v in facts[0][what].items())

  return {'ledger': said('ledger'), 'phases': said('phases')}


def _step(host: _Host) -> Iterator[Unit]:
  config, shape, workload = _config()
  short = 4 if common.TINY.value else _SHORT.value

  def unit(mesh: dict[str, int], layout: Layout) -> list[dict]:
    name = _name(mesh, layout)
    workdir = host.new(f'step {name}')
    settings = _step_settings(mesh, workload, shape)
    command = host.command('step', config, workdir, settings)
    command += [f'--short={short}', f'--layers={_LAYERS.value}']
    spent = host.run('step', command, layout, workdir.name)
    row = {'mesh': _name(mesh, (0, 0)), 'gpus': layout[0] * layout[1]}
    row |= _timed(workdir, host.facts(workdir)) | {'start_s': spent}
    return [row]

  for mesh, layout in _runs(host):
    yield (
        _name(mesh, layout),
        lambda mesh=mesh, layout=layout: unit(mesh, layout),
    )


def _timed(workdir: pathlib.Path, facts: list[dict]) -> dict[str, Any]:
  """Returns the measurements of a run of `scaling_run`."""
  lines = [line for line in launch.lines(workdir) if line['step'] > 0]
  (timed,) = [line for line in lines if line['step'] == 2]
  phases = {
      'gen_s': timed['timing_s/gen'],
      'score_s': timed.get('timing_s/old_log_prob', 0.0),
      'update_s': timed['timing_s/update_actor'],
  }
  whole = timed['timing_s/step']
  found: dict[str, Any] = phases | {
      'step_s': whole,
      'rest_s': whole - sum(phases.values()),
      'compiled_s': facts[0]['compiled_s'].get('2', 0.0),
      'cache': facts[0]['cache'],
      'tokens': timed['perf/total_num_tokens'],
      'mismatch': max(line['training/mismatch_token_frac'] for line in lines),
      'prompts': _prompt_hashes(sorted((workdir / 'rollouts').glob('*'))[0]),
  }
  left = launch.outcome(workdir)
  # Short, for the record: it has to say what differs.
  hashes = {name: launch.digest({'': x})[:8] for name, x in left.items()}
  found |= {'all': launch.digest(left), 'hashes': hashes}
  if peaks := [peak for one in facts for peak in one['peaks_gib']]:
    found['peaks'] = ' '.join(f'{peak:.1f}' for peak in peaks)
  for phase, name in (('gen', 'gen'), ('update_actor', 'update')):
    kernels = [k for one in facts for k in one['kernels'][phase].values()]
    if busy := sum(k['all'] for k in kernels):
      shared = sum(k['collectives'] for k in kernels)
      found[f'{name}_collectives'] = shared / busy
      found[f'{name}_collectives_s'] = shared / len(kernels)
      found[f'{name}_kernels'] = kernels[0]['longest']
  return found


def _prompt_hashes(file: pathlib.Path) -> dict[str, str]:
  """Returns a hash of tokens and log-probs of every prompt of a rollout."""
  answers: dict[int, list] = {}
  completions, _ = store.load_rollouts(file)
  for one in sorted(completions, key=lambda one: one.sample):
    answers.setdefault(one.prompt_id, []).append(one)
  return {
      str(prompt): launch.digest(
          {
              str(one.sample): launch.sha(one.tokens) + launch.sha(one.logprobs)
              for one in of
          }
      )[:12]
      for prompt, of in answers.items()
  }


def _decode(host: _Host) -> Iterator[Unit]:
  """With `benchmarks.tensor`, on as many devices as the heads allow."""
  if host.devices == 1:
    return
  tensor = host.devices
  while tensor > 1 and not common.TINY.value:
    try:
      tensor_parallel.check(SHAPES[_SHAPE.value], Recipe(), Axes(tensor=tensor))
      break
    except ValueError:
      tensor //= 2
  if common.TINY.value:
    tensor = 2

  def unit() -> list[dict]:
    slots = 16 if common.TINY.value else _SLOTS.value
    recipe, *options = _VARIANT.value.split('+')
    kept = [o for o in options if o != 'selective']
    folder = host.new('decode')
    command = [
        'benchmarks.tensor',
        f'--output={folder}/found',
        f'--shape={_SHAPE.value}',
        f'--variants={"+".join([recipe, *kept])}',
        f'--tensors=1,{tensor}',
        f'--slots={slots},{slots * tensor}',
        '--accumulate=false',
    ]
    if common.TINY.value:
      command += ['--tiny', '--prompts=4', '--tokens=8', '--steps=8']
      command += ['--prompt_length=16']
    file, rows = folder / 'found.json', []
    try:
      host.run('decode', command, (1, tensor), 'decode')
    except (RuntimeError, subprocess.TimeoutExpired) as error:
      if not file.exists():
        raise
      # What it had measured by then.
      rows = [{'error': _short(error)}]
    found = json.loads(file.read_text())
    kind = found['hardware'].partition(' x ')[2]
    host.hardware = host.hardware or f'{host.devices} x {kind}'
    for row in found['rows']:
      row = row | {'unit': f'tensor={row["tensor"]}, {row["check"]}'}
      if 'tokens_per_s' in row:
        row['tok_s_gpu'] = row['tokens_per_s'] / row['tensor']
        timed = [r['tok_s_gpu'] for r in rows if 'tok_s_gpu' in r]
        row['weak'] = row['tok_s_gpu'] / [*timed, row['tok_s_gpu']][0]
      rows.append(row)
    return rows

  yield f'tensor={tensor}', unit


def _collectives(host: _Host) -> Iterator[Unit]:
  config, shape, workload = _config()

  def unit(mesh: dict[str, int], layout: Layout) -> list[dict]:
    name = _name(mesh, layout)
    workdir = host.new(f'collectives {name}')
    settings = _settings(mesh, workload, shape, 1)
    command = host.command('collectives', config, workdir, settings)
    if common.TINY.value:
      command += ['--rows=512', '--columns=128']
    host.run('collectives', command, layout, workdir.name)
    facts, *_ = host.facts(workdir)
    return [
        {'unit': f'{name}: {what}'} | found
        for what, found in facts['collectives'].items()
    ]

  for mesh in _meshes(host.devices):
    if 'tensor' in mesh or set(mesh.values()) == {1}:
      continue
    for layout in _layouts(mesh):
      yield (
          _name(mesh, layout),
          lambda mesh=mesh, layout=layout: unit(mesh, layout),
      )


def _large_mesh(host: _Host) -> tuple[str, dict[str, int], Layout]:
  """Returns (name, mesh, layout) of the large model."""
  mesh, layout = {_LARGE_AXIS.value: host.devices}, (1, host.devices)
  return f'{_LARGE_SHAPE.value}, {_name(mesh, layout)}', mesh, layout


def _large_dry(host: _Host) -> Iterator[Unit]:
  name, mesh, layout = _large_mesh(host)

  def unit() -> list[dict]:
    workdir = host.new('large dry')
    command = host.command('prepare', _large(mesh)[0], workdir, _large(mesh)[1])
    spent = host.run(
        'large_dry', command, layout, workdir.name, only_compiles=True
    )
    return [_memory(host.facts(workdir)) | {'start_s': spent}]

  yield name, unit


def _large_runs(host: _Host) -> Iterator[Unit]:
  name, mesh, layout = _large_mesh(host)

  def unit() -> list[dict]:
    config, settings = _large(mesh)
    workdir = host.new('large')
    command = host.command('step', config, workdir, settings)
    spent = host.run('large', command, layout, workdir.name)
    facts = host.facts(workdir)
    lines = [x for x in launch.lines(workdir) if x['step'] > 0]
    peaks = [peak for one in facts for peak in one['peaks_gib']]
    times = ' '.join(f'{line["timing_s/step"]:.1f}' for line in lines)
    return [
        {
            'peaks': ' '.join(f'{peak:.1f}' for peak in peaks),
            'steps_s': times,
            'mismatch': max(x['training/mismatch_token_frac'] for x in lines),
            'start_s': spent,
        }
    ]

  yield name, unit


def _small_run(
    workdir: pathlib.Path, mesh: dict[str, int], steps: int, cache: str
) -> list[str]:
  """Returns the command of a learning run of 0.8 M parameters."""
  settings = {
      **{f'mesh.{axis}': size for axis, size in mesh.items()},
      'trainer.total_training_steps': steps,
      'trainer.test_freq': 0,
      'trainer.save_freq': 2,
      'trainer.keep_latest': steps,
      'optim.lr_warmup_steps': 0,
      'compile_cache_dir': cache,
  }
  if common.TINY.value:
    settings |= {
        'trainer.train_batch_size': 8,
        'trainer.mini_batch_size': 8,
        'rollout.num_generations': 4,
    }
  return [
      'jetrl_jax.main',
      '--config=configs/quickstart.py',
      f'--workdir={workdir}',
      *(f'--config.{name}={value}' for name, value in settings.items()),
  ]


def _bits(host: _Host) -> Iterator[Unit]:
  first: dict[str, str] = {}

  def unit(layout: Layout) -> list[dict]:
    workdir = host.new(f'bits {layout[0]}x{layout[1]}')
    mesh = {'data': host.devices}
    command = _small_run(workdir, mesh, 4, str(host.home / 'compiled'))
    spent = host.run('bits', command, layout, workdir.name)
    found = launch.outcome(workdir)
    first.update({} if first else found)
    differ = [k for k in first | found if first.get(k) != found.get(k)]
    return [
        {
            'all': launch.digest(found),
            'entries': len(found),
            'differ': len(differ),
            'names_that_differ': sorted(differ)[:20],
            'start_s': spent,
        }
    ]

  layouts = dict.fromkeys([(1, host.devices), (host.devices, 1)])
  for layout in layouts:
    name = f'data={host.devices}, {layout[0]}x{layout[1]}'
    yield name, lambda layout=layout: unit(layout)


def _kill(host: _Host) -> Iterator[Unit]:
  if host.devices == 1:
    return
  half, cache = host.devices // 2, str(host.home / 'compiled')

  def unit() -> list[dict]:
    workdir = host.new('kill')
    command = _small_run(workdir, {'fsdp': host.devices}, 8, cache)
    rank = random.Random(0).randrange(1, host.devices)
    started = launch.start(command, (host.devices, 1), workdir)
    row: dict[str, Any] = {'killed': rank}
    try:
      limit, begin = host.seconds('kill'), time.monotonic()
      # A step after a checkpoint has begun and not been saved.
      while len(launch.lines(workdir)) < 5 or not launch.checkpoints(workdir):
        if any(one.poll() for one in started):
          launch.finish(started, workdir, _ENDED_S)
        if time.monotonic() > begin + limit:
          raise subprocess.TimeoutExpired(command, limit)
        time.sleep(0.02)
      started[rank].send_signal(signal.SIGKILL)
      killed = time.monotonic()
      while any(p.poll() is None for p in started):
        if time.monotonic() > killed + 2 * _ENDED_S:
          break
        time.sleep(0.02)
      row['ended_s'] = time.monotonic() - killed
      row['codes'] = ' '.join(str(p.poll()) for p in started)
    finally:
      for one in started:
        one.kill()
        one.wait()
    step = max(launch.checkpoints(workdir))
    state = launch.state(workdir, step)
    row |= {'step': step, 'state': launch.digest(state)}
    # What the steps after it have sampled will be sampled again.
    after = workdir / 'rollouts' / f'{step + 1:06d}.npz'
    before = launch.rollout_hashes(after) if after.exists() else None
    command = _small_run(workdir, {'fsdp': half}, 8, cache)
    # The same flags, and with the same checkpoint.
    restoring = ['benchmarks.scaling_run', '--what=restore', *command[1:]]
    host.run('kill', restoring, (half, 1), 'kill')
    facts, *_ = host.facts(workdir)
    row['restored'] = launch.digest(facts['state'])
    host.run('kill', command, (half, 1), 'kill')
    row['resumed_to'] = launch.lines(workdir)[-1]['step']
    if before is not None:
      again = launch.rollout_hashes(after)
      names = 'tokens', 'logprob_bits'
      row['next_equal'] = str(all(again[n] == before[n] for n in names))
    return [row]

  yield f'fsdp={host.devices}, then fsdp={half}, a process each GPU', unit


_PART_UNITS = {
    'prepare': _prepare,
    'step': _step,
    'decode': _decode,
    'collectives': _collectives,
    'large_dry': _large_dry,
    'large': _large_runs,
    'bits': _bits,
    'kill': _kill,
}


# --- the record -------------------------------------------------------------


def _short(error: Exception) -> str:
  """Returns the last thing that a failed run has said."""
  if isinstance(error, subprocess.TimeoutExpired):
    return f'not done in {error.timeout:.0f} s'
  lines = [x for x in str(error).splitlines() if x.strip()]
  said = [x for x in lines if 'error' in x.lower() or 'EXHAUSTED' in x]
  return (said or lines)[-1][:300]


def _compared(rows: list[dict]) -> None:
  """Adds to the rows of steps what they are beside the first one."""
  steps = [r for r in rows if r['part'] == 'step' and 'step_s' in r]
  if not steps:
    return
  base, meshes = steps[0], {}
  for row in steps:
    spent = row['step_s'] - row['compiled_s']
    row['tok_s_gpu'] = row['tokens'] / spent / row['gpus']
    if base['gpus'] == 1:
      row['weak'] = row['tok_s_gpu'] / base['tok_s_gpu']
    mine = {k: row['prompts'].get(k, '') for k in base['prompts']}
    row['first'] = launch.digest(mine)[:12]
    same = meshes.setdefault(row['mesh'], row)
    first, mine = same['hashes'], row['hashes']
    differ = [k for k in first | mine if first.get(k) != mine.get(k)]
    row['differ'], row['names_that_differ'] = len(differ), sorted(differ)[:20]


def _summary(rows: list[dict]) -> dict[str, Any]:
  found: dict[str, Any] = {}
  steps = [r for r in rows if r['part'] == 'step' and 'first' in r]
  if steps:
    hashes = {r['first'] for r in steps}
    count = len(steps[0]['prompts'])
    found[f'log-probs of the first {count} prompts have one hash'] = (
        f'{len(hashes) == 1}, of {len(steps)} runs'
    )
    apart = [r['unit'] for r in steps if r['differ']]
    found['runs that left something else than the first of their mesh'] = (
        '; '.join(apart) or 'none'
    )
  for row in rows:
    name = f'{row["part"]} {row["unit"]}'
    if 'error' in row:
      found[f'{name}: failed'] = row['error']
    if row['part'] == 'kill' and 'restored' in row:
      found[f'{name}: the same state'] = row['restored'] == row['state']
      found[f'{name}: all ended within {_ENDED_S} s'] = (
          row['ended_s'] < _ENDED_S
      )
  return found


def _write(host: _Host, left: list[str]) -> None:
  _compared(host.rows)
  shown = []
  for part, columns in _TABLES.items():
    rows = [r for r in host.rows if r['part'] == part and 'error' not in r]
    if rows:
      shown.append(f'## {part}\n\n{common.table(rows, columns)}')
  summary = _summary(host.rows)
  if left:
    summary['not run: no time was left'] = '; '.join(left)
  common.write(host.rows, summary, '\n\n'.join(shown), host.hardware)


def _earlier(host_devices: int) -> tuple[list[dict], str]:
  """Returns (rows, hardware) of an earlier call with the same output."""
  path = pathlib.Path(f'{common.OUTPUT.value}.json')
  if _AGAIN.value or not path.exists():
    return [], ''
  found = json.loads(path.read_text())
  commit = common.COMMIT.value or provenance.commit() or 'unknown'
  if found['commit'] != commit:
    raise ValueError(
        f'{path} is of commit {found["commit"]}, this is {commit}: choose'
        ' another --output, or give --again'
    )
  if not found['hardware'].startswith(f'{host_devices} x '):
    raise ValueError(
        f'{path} is of {found["hardware"]}, these are {host_devices} devices:'
        ' choose another --output, or give --again'
    )
  return [r for r in found['rows'] if 'error' not in r], found['hardware']


def main(argv: list[str]) -> None:
  """Runs the parts, unit by unit."""
  if argv[1:]:
    raise app.UsageError(f'unexpected arguments {argv[1:]}')
  if unknown := set(_PARTS.value) - set(_SECONDS):
    raise app.UsageError(
        f'--parts: {sorted(unknown)} unknown; allowed: {list(_SECONDS)}'
    )
  if unknown := set(_AXES.value) - {'data', 'fsdp', 'tensor'}:
    raise app.UsageError(
        f'--axes: {sorted(unknown)} unknown; allowed: data, fsdp, tensor'
    )
  if unknown := set(_PROCESSES.value) - {'one', 'each'}:
    raise app.UsageError(
        f'--processes: {sorted(unknown)} unknown; allowed: one, each'
    )
  show_own_sentences()
  launch.leave_gpus()
  home = pathlib.Path(_KEEP.value or tempfile.mkdtemp(prefix='scaling_'))
  host = _Host(home.resolve(), [])
  host.rows, host.hardware = _earlier(host.devices)
  if not (host.home / 'compiled').exists():  # What that part is for.
    compiled = 'prepare', 'large_dry'
    host.rows = [row for row in host.rows if row['part'] not in compiled]
  done = {(row['part'], row['of']) for row in host.rows}
  left: list[str] = []
  try:
    for part in _PARTS.value:
      for name, unit in _PART_UNITS[part](host):
        if (part, name) in done:
          continue
        if host.seconds(part) < 20:
          left.append(f'{part} {name}')
          continue
        of = {'part': part, 'of': name}
        try:
          rows = [{'unit': name} | row | of for row in unit()]
        except (RuntimeError, subprocess.TimeoutExpired, OSError) as error:
          print(error, flush=True)
          rows = [{'unit': name, 'error': _short(error)} | of]
        host.rows += rows
        _write(host, left)
    _write(host, left)
  finally:
    if not _KEEP.value:
      shutil.rmtree(home, ignore_errors=True)


if __name__ == '__main__':
  common.run(main)
