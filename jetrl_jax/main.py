"""Trains a policy: jetrl_jax train --config=quickstart --workdir=runs/mine.

In a clone also python -m jetrl_jax.main --config=configs/quickstart.py. The
same command resumes a run that was interrupted; with --dry_run it says what the
run would need, and trains nothing.
"""

import itertools
import json
import pathlib
import sys
from typing import Any

import jax
from absl import flags, logging

from jetrl_jax import report
from jetrl_jax.checkpoint import restore
from jetrl_jax.config import build
from jetrl_jax.config import flags as config_flags
from jetrl_jax.core import compilation, processes
from jetrl_jax.core.files import user_path
from jetrl_jax.core.interrupt import StopRequested
from jetrl_jax.dry_run import checks as dry_run_checks
from jetrl_jax.dry_run import storage
from jetrl_jax.kernels import dispatch
from jetrl_jax.metrics import alarms, provenance
from jetrl_jax.metrics.console import before_and_after
from jetrl_jax.rl.run.spec import RunSpec
from jetrl_jax.rl.training import initialize
from jetrl_jax.rl.training.trainer import Trainer

config_flags.define()
_WORKDIR = flags.DEFINE_string(
    'workdir',
    None,
    'Metrics, checkpoints and rollouts go here; a run that was interrupted'
    ' there is resumed. By default runs/<name of the config file>.',
)
_DRY_RUN = flags.DEFINE_bool(
    'dry_run',
    False,
    'Check config, data, checkpoint, memory and precision; train nothing.',
)
_DRY_RUN_DEVICE = flags.DEFINE_string(
    'dry_run_device',
    '',
    "For --dry_run: the device that the run is meant for, e.g. 'NVIDIA H200';"
    ' by default the one at hand.',
)


def main() -> None:
  """Builds the run from its config and trains."""
  workdir = user_path(_WORKDIR.value or f'runs/{config_flags.file().stem}')
  if _DRY_RUN_DEVICE.value and not _DRY_RUN.value:
    raise ValueError('--dry_run_device trains nothing: give --dry_run with it')
  config: build.Config = config_flags.load()
  _check_purpose(config)
  compilation.keep_compiled(config.compile_cache_dir)
  spec = build.build(config)
  if _DRY_RUN.value:
    problems = dry_run_checks.dry_run(spec, workdir, _DRY_RUN_DEVICE.value)
    sys.exit(dry_run_checks.report(problems))
  config_flags.make_folder('workdir', workdir)
  trainer = Trainer(spec, workdir)
  needs = storage.of_run(spec, initialize.abstract(spec), workdir)
  if processes.is_first():
    needs.check()
    needs.warn()
  recipe = spec.policy.recipe.name
  if spec.is_mixed:
    recipe += f' training, {spec.rollout_policy.recipe.name} rollout'
  if not spec.policy.exact:
    recipe += f', {compilation.NOT_CLAIMED},'
  held_out = ''
  if spec.val_set is not None and (lost := spec.val_set.num_filtered):
    held_out = f', {len(spec.val_set)} held out ({lost} over-long left out)'
  print(
      f'{recipe} on {_devices(spec.mesh.size)}: {len(spec.train_set)}'
      f' prompts ({spec.train_set.num_filtered} over-long left out){held_out}'
      f' -> {workdir}'
  )
  print(f'kernels: {spec.policy.kernels}')
  dry_run_checks.say_memory(spec, needs.host_needed)
  if no_kernel := dispatch.why_none():
    print(no_kernel)
  try:
    trainer.train(started=lambda: _record_start(spec, workdir))
  except StopRequested as stop:
    _say_stopped(stop, workdir)
    return
  for tell in (_summary, _report) if processes.is_first() else ():
    try:
      with processes.slow('the report'):
        tell(workdir)
    # For example a full disk or a lost file. The run itself is safe by now.
    except (OSError, ValueError) as error:
      logging.warning('The run is done, but not all is told of it: %s', error)


def _check_purpose(config: build.Config) -> None:
  """Refuses a warm start's config, which would train from random weights."""
  if config.sft.output:
    raise ValueError(
        f'sft.output is {config.sft.output!r}: {config_flags.file()} is the'
        ' config of a warm start, python -m jetrl_jax.sft --config=...; for'
        " GRPO leave it ''"
    )


def _devices(used: int) -> str:
  """Names the devices, and says how many of them are idle."""
  found = jax.devices()
  kind = found[0].device_kind
  if processes.count() > 1:
    kind += f', {processes.count()} processes'
  if used == len(found):
    return f'{used} x {kind}'
  take_more = '--config.mesh.data and .fsdp take more'
  return f'{used} of {len(found)} x {kind} ({take_more})'


def _record_start(spec: RunSpec, workdir: pathlib.Path) -> None:
  """Notes versions, device, kernels and prompts of this start."""
  sets = {'train': spec.train_set, 'val': spec.val_set}
  counts: dict[str, Any] = {'kernels': dict(spec.policy.kernels.chosen)}
  for name, prompts in sets.items():
    if prompts is not None:
      counts[f'{name}_prompts'] = len(prompts)
      counts[f'{name}_left_out'] = prompts.num_filtered
  if processes.count() > 1:
    counts['processes'] = processes.count()
  provenance.record_start(workdir, spec.mesh.size, **counts)


def _say_stopped(stop: StopRequested, workdir: pathlib.Path) -> None:
  if restore.all_steps(workdir / 'checkpoints'):
    print(
        f'Stopped by {stop}; everything up to here is saved in {workdir}. The'
        ' same command resumes.'
    )
  else:
    print(
        f'Stopped by {stop} during start-up; there was nothing to save yet. The'
        ' same command starts again.'
    )


def _summary(workdir: pathlib.Path) -> None:
  """Prints held-out accuracy before and after, and two completions."""
  first, last, mismatch, ended = {}, {}, None, 0
  tally = alarms.Tally()
  name = 'training/mismatch_token_frac'
  # Lines are read one by one, because all lines of a long run would be
  # gigabytes as dicts.
  with open(workdir / 'metrics.jsonl', encoding='utf-8') as lines:
    for record in map(json.loads, lines):
      tally.add(record)
      ended = record['step']
      if name in record:
        mismatch = max(mismatch or 0.0, record[name])
      if any('/acc/mean@' in measure for measure in record):
        first, last = first or record, record
  for sentence in tally.sentences():
    print(sentence)
  if not last:
    print(f'Done. Metrics are in {workdir}/metrics.jsonl.')
    return
  for line in before_and_after(first, last, ended):
    print(line)
  if mismatch is not None:
    print(
        'Tokens whose rollout and training log-probs differ in any bit:'
        f' {mismatch:.4%} (largest step)'
    )
  # Not `splitlines`, because an answer may hold characters that only Unicode
  # counts as the end of a line.
  file = workdir / 'samples' / f'{last["step"]:06d}.jsonl'
  with open(file, encoding='utf-8') as samples:
    two = list(itertools.islice(samples, 2))
  for line in two:
    sample = json.loads(line)
    print(f'\n> {sample["prompt"]}\n{sample["response"]}')
    if sample['answer']:
      print(f'(expected {sample["answer"]})')
  print(f'\nMetrics, checkpoints and the exported policy are in {workdir}.')


def _report(workdir: pathlib.Path) -> None:
  print(f'Report: {report.write_report([workdir])}')


if __name__ == '__main__':
  config_flags.run(main, several=True)
