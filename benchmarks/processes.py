"""The same run as one process and as several: equal bits, and seconds a step.

    python -m benchmarks.processes --output=benchmarks/results/NAME

A layout is PROCESSES x DEVICES of each. All layouts of a case have the same
mesh. Each is a run of `jetrl_jax.main` in a workdir of its own, one after
another, on the GPUs at hand, or on CPU devices where JAX_PLATFORMS=cpu. All
that a run leaves is hashed and compared with that of the first layout: every
token, log-prob and score of every rollout, masters, moments and scales of
every checkpoint, held-out samples, metrics apart from clocks and memory.

A case is 'quickstart' (a learning run of 0.8 M parameters), 'sums' (that of
configs/smollm2_135m.py, with the weights of --checkpoint) or a model.shape with
random weights, seeded rewards and one checkpoint less. Its mesh is data=N; with
'+fsdp' fsdp=N, with '+tensor' tensor=N. Exits 1 if anything differs or a run
fails.

With --at_once all runs share the GPUs and the time to compile. Their seconds
then mean nothing; a second call with the same --keep finds all compiled.
"""

import json
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent import futures
from typing import Any

from absl import app, flags

from benchmarks import common, launch
from jetrl_jax.metrics.console import show_own_sentences

_LAYOUTS = flags.DEFINE_list(
    'layouts', ['1x2', '2x1'], 'Processes x devices of each process.'
)
_CASES = flags.DEFINE_list(
    'cases', ['quickstart', 'qwen2.5-0.5b+fsdp'], 'See above.'
)
_CHECKPOINT = flags.DEFINE_string(
    'checkpoint', '', "Hugging Face folder of the case 'sums'."
)
_STEPS = flags.DEFINE_integer(
    'steps', 4, 'Training steps of each run.', lower_bound=2
)
_KEEP = flags.DEFINE_string('keep', '', 'Folder for the workdirs, kept.')
_AT_ONCE = flags.DEFINE_bool(
    'at_once', False, 'All runs at the same time, on the same GPUs: bits only.'
)
_LIMIT = flags.DEFINE_float('limit_s', 600, 'Seconds of one run.')

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
  """Returns what a case sets in its config, see `config_of`."""
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
  if name == 'sums':
    settings |= {
        'model.path': _CHECKPOINT.value,
        # A checkpoint has 12 bytes for each parameter.
        'trainer.save_freq': _STEPS.value,
    }
    if common.TINY.value:
      settings |= {
          # Of so few answers all may be wrong, and then nothing is learnt.
          'trainer.synthetic': True,
          'trainer.train_batch_size': 4,
          'trainer.micro_batch_size': 16,
          'data.val_max_samples': 4,
      }
    return settings
  return settings | {
      'model.path': '',
      'model.init': 'random',
      'model.shape': name,
      'model.attention_tile': 64,
      'model.remat': 'full',
      'data.tokenizer': f'{launch.EXAMPLE}/model_init',
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


def config_of(case: str) -> str:
  """Returns the config file of a case."""
  name, *_ = case.partition('+')
  config = 'smollm2_135m' if name == 'sums' else 'quickstart'
  return f'configs/{config}.py'


def run(case: str, layout: str, workdir: pathlib.Path, cache: str) -> float:
  """Trains; returns seconds from the start of all processes to their end."""
  count, devices = map(int, layout.split('x'))
  settings = overrides(case, count * devices) | {'compile_cache_dir': cache}
  command = [
      'jetrl_jax.main',
      f'--config={config_of(case)}',
      f'--workdir={workdir}',
      *(f'--config.{name}={value}' for name, value in settings.items()),
  ]
  runs = len(_CASES.value) * len(_LAYOUTS.value)
  share = round(0.88 / runs, 2) if _AT_ONCE.value else 0
  begin = time.monotonic()
  started = launch.start(command, (count, devices), workdir, share)
  launch.finish(started, workdir, _LIMIT.value)
  return time.monotonic() - begin


def _row(case: str, layout: str, workdir: pathlib.Path, spent: float) -> dict:
  # The first step compiles.
  # The first step compiles.
  steps = [line for line in launch.lines(workdir) if line['step'] > 1]

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
  launch.leave_gpus()
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
    return launch.outcome(workdir), _row(case, layout, workdir, spent)

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
  return {
      'entries': len(found),
      'differ': len(differ),
      'names_that_differ': differ[:20],
      'digest': launch.digest(found),
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
