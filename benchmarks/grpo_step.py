r"""Whole GRPO steps of the trainer, FP8 beside BF16, with a table by phase.

python -m benchmarks.grpo_step --config=configs/qwen7b.py \
  --config.model.init=random --config.model.shape=qwen2.5-7b \
  --config.data.tokenizer=FOLDER --config.trainer.synthetic=True \
  --workload=32x8x2048x4 --output=benchmarks/results/NAME

A workload is PROMPTS x SAMPLES x RESPONSE_TOKENS x MINI_BATCHES of a step; ''
leaves all four to the config. Every variant is a run of the trainer itself,
with all its checks, in a process and a temporary workdir of its own. Of the
phases the table shows medians without the first step, which compiles (with
--config.compile_cache_dir=FOLDER only once); a later one may too, when its
prompts are longer. With --side_by_side all run at the same time, each on the
GPU of its number; after --limit_s seconds what is done by then is written, of
first steps without medians. On a CPU, to try it: --tiny instead of --config.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import ml_collections
import numpy as np
from absl import app, flags
from ml_collections import config_flags

from benchmarks import common
from configs import quickstart
from jetrl_jax.config import build as configs
from jetrl_jax.core import compilation
from jetrl_jax.metrics.console import show_own_sentences
from jetrl_jax.rl.training.trainer import Trainer

_CONFIG = config_flags.DEFINE_config_file('config', None, 'Config file.')
_WORKLOAD = flags.DEFINE_string('workload', '', 'See above.')
_STEPS = flags.DEFINE_integer('steps', 3, 'Training steps of each variant.')
_VARIANTS = flags.DEFINE_list(
    'variants',
    ['fp8_delayed', 'bf16'],
    'Recipes, see precision.recipe; options: see `common.overrides`.',
)
_LIMIT = flags.DEFINE_float(
    'limit_s', float('inf'), 'Seconds after which what is done is written.'
)
_WORKDIR = flags.DEFINE_string(
    'workdir', None, 'Only train the one variant there.'
)
_SIDE_BY_SIDE = flags.DEFINE_bool(
    'side_by_side', False, 'Each variant on the GPU of its number.'
)
_COLUMNS = (
    ('variant', 'variant', ''),
    ('step', 'step', '.0f'),
    ('timing_s/gen', 'gen s', '.2f'),
    ('timing_s/old_log_prob', 'score s', '.2f'),
    ('timing_s/update_actor', 'update s', '.2f'),
    ('timing_s/step', 'step s', '.2f'),
    ('perf/rollout_throughput', 'rollout tok/s', '.0f'),
    ('perf/throughput', 'tok/s', '.0f'),
    ('perf/max_memory_allocated_gb', 'peak GiB', '.1f'),
    ('rollout/num_preempted', 'parked', '.0f'),
    ('perf/total_num_tokens', 'tokens', '.0f'),
    ('training/mismatch_token_frac', 'mismatch', '.2g'),
    ('training/rollout_logprob_diff_max', 'max diff', '.2g'),
    ('fp8/changed_weight_bytes/min', 'changed bytes (min)', '.2%'),
    ('critic/advantages/std', 'adv std', '.3f'),
    ('actor/grad_norm', 'grad norm', '.3g'),
)
_TIMING = 'timing_s/'
# Once in several steps, or not a part of one.
_NOT_PHASES = ('step', 'testing', 'calibration', 'save_checkpoint', 'export')


def configured(variant: str) -> ml_collections.ConfigDict:
  """Returns the config of one variant."""
  workload = _WORKLOAD.value
  if common.TINY.value:
    config = quickstart.get_config()
    workload = workload or '4x4x16x2'
  else:
    config = ml_collections.ConfigDict(_CONFIG.value)
  settings = common.overrides(variant) | {
      'trainer.total_training_steps': _STEPS.value,
      'trainer.test_freq': 0,
      'trainer.save_freq': 0,
      'data.val_files': (),
  }
  if workload:
    prompts, samples, tokens, batches = map(int, workload.split('x'))
    if prompts % batches:
      raise ValueError(
          f'--workload={workload}: {prompts} prompts are not {batches} equal'
          ' mini-batches'
      )
    settings |= {
        'trainer.train_batch_size': prompts,
        'trainer.mini_batch_size': prompts // batches,
        'rollout.num_generations': samples,
        'rollout.max_response_length': tokens,
    }
  config.update_from_flattened_dict(settings)
  return config


def start(variant: str, workdir: pathlib.Path, gpu: int | None):
  """Starts the process that trains one variant."""
  own = [f'--variants={variant}', f'--workdir={workdir}']
  device = {} if gpu is None else {'CUDA_VISIBLE_DEVICES': str(gpu)}
  return subprocess.Popen(
      # The later of two flags of one name holds.
      [sys.executable, '-m', 'benchmarks.grpo_step', *sys.argv[1:], *own],
      env=os.environ | device,
  )


def lines_of(variant: str, workdir: pathlib.Path) -> list[dict]:
  """Returns the steps that a variant has written, with its name."""
  path = workdir / 'metrics.jsonl'
  text = path.read_text() if path.exists() else ''
  rows = [json.loads(x) for x in text.splitlines() if x.endswith('}')]
  return [
      {'variant': variant}
      # Not the maps by dot: nearly all of a line, and no measurement of a step.
      | {k: v for k, v in row.items() if not isinstance(v, dict)}
      for row in rows
      if row['step'] > 0
  ]


def trained() -> tuple[list[dict], list[str]]:
  """Trains every variant in a process of its own, up to the time limit.

  Returns:
    the lines of all variants' steps, and the variants that failed
  """
  end, rows, failed = time.monotonic() + _LIMIT.value, [], []
  everyone = list(enumerate(_VARIANTS.value))
  one_by_one = [[pair] for pair in everyone]
  with tempfile.TemporaryDirectory() as folder:
    for together in [everyone] if _SIDE_BY_SIDE.value else one_by_one:
      running = []
      for i, variant in together:
        workdir = pathlib.Path(folder) / str(i)
        gpu = i if _SIDE_BY_SIDE.value else None
        running.append((variant, workdir, start(variant, workdir, gpu)))
      for variant, workdir, process in running:
        try:
          code = process.wait(max(end - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
          code = 0
          process.kill()
          process.wait()
        if code:
          failed.append(f'{variant} ended with {code}')
        rows += lines_of(variant, workdir)
  return rows, failed


def phases(rows: list[dict]) -> list[dict]:
  """Returns a row per phase: median seconds of every variant, and the ratio.

  Args:
    rows: lines of metrics with their variant, first steps left out.
  """
  variants = list(dict.fromkeys(row['variant'] for row in rows))

  def median(variant: str, name: str) -> float:
    mine = [r.get(name, 0.0) for r in rows if r['variant'] == variant]
    return float(np.median(mine))

  found = {
      name.removeprefix(_TIMING): [median(v, name) for v in variants]
      for row in rows
      for name in row
      if name.startswith(_TIMING)
  }
  whole = found.pop('step')
  shown = {k: v for k, v in found.items() if k not in _NOT_PHASES}
  rest = [t - sum(v[i] for v in shown.values()) for i, t in enumerate(whole)]
  table = []
  for name, spent in (shown | {'the rest': rest, 'step': whole}).items():
    row = {'phase': name} | dict(zip(variants, spent, strict=True))
    row['share'] = spent[0] / whole[0]
    if len(spent) > 1 and spent[0] > 0:
      row['ratio'] = spent[-1] / spent[0]
    table.append(row)
  return table


def compared(rows: list[dict]) -> tuple[str, dict[str, float]]:
  """Returns the table by phase, and the ratios of the first and last variant.

  Args:
    rows: as for `phases`.
  """
  by_phase = phases(rows)
  variants = list(dict.fromkeys(row['variant'] for row in rows))
  first, last = variants[0], variants[-1]
  columns = [('phase', 'phase', '')]
  columns += [(v, f'{v} s', '.2f') for v in variants]
  columns += [
      ('share', f'share of {first}', '.0%'),
      ('ratio', f'{last} / {first}', '.2f'),
  ]
  ratios = {
      f'{row["phase"]}: {first} speedup over {last}': round(row['ratio'], 3)
      for row in by_phase
      if 'ratio' in row and len(variants) > 1
  }
  return common.table(by_phase, columns), ratios


def main(argv: list[str]) -> None:
  """Trains every variant and writes the record."""
  del argv
  if not common.TINY.value and _CONFIG.value is None:
    raise app.UsageError('give --config=FILE, or --tiny to try the script')
  if _STEPS.value < 2:
    raise app.UsageError('--steps must be 2 or more: the first one compiles')
  workdir = _WORKDIR.value
  if workdir:
    show_own_sentences()
    (variant,) = _VARIANTS.value
    config = configured(variant)
    compilation.keep_compiled(config.compile_cache_dir)
    Trainer(configs.build(config), workdir).train()
    return
  rows, failed = trained()
  if not rows:
    raise SystemExit(f'no variant was done with its first step {failed}')
  shown, summary = common.table(rows, _COLUMNS), {}
  if later := [row for row in rows if row['step'] > 1]:
    by_phase, summary = compared(later)
    shown = f'{by_phase}\n\n{shown}'
  for variant in dict.fromkeys(row['variant'] for row in rows):
    steps = sum(row['variant'] == variant for row in rows)
    summary[f'{variant}: steps'] = steps
  common.write(rows, summary, shown)
  if failed:
    raise SystemExit('; '.join(failed))


if __name__ == '__main__':
  common.run(main)
