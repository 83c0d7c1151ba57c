"""Trains a policy: python -m jetrl_jax.main --config=configs/quickstart.py."""

import json
import pathlib
import sys

import jax
from absl import flags, logging

from jetrl_jax import (
    checkpoint,
    compilation,
    config_flag,
    dry_run,
    provenance,
    report,
)
from jetrl_jax import config as configs
from jetrl_jax.files import user_path
from jetrl_jax.rl.console import before_and_after
from jetrl_jax.rl.interrupt import StopRequested
from jetrl_jax.rl.trainer import Parts, Trainer

config_flag.define()
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
  workdir = user_path(_WORKDIR.value or f'runs/{config_flag.file().stem}')
  if _DRY_RUN_DEVICE.value and not _DRY_RUN.value:
    raise ValueError('--dry_run_device trains nothing: give --dry_run with it')
  config: configs.Config = config_flag.load()
  _check_purpose(config)
  compilation.keep_compiled(config.compile_cache_dir)
  parts = configs.build(config)
  if _DRY_RUN.value:
    problems = dry_run.dry_run(parts, workdir, _DRY_RUN_DEVICE.value)
    sys.exit(dry_run.report(problems))
  config_flag.make_folder('workdir', workdir)
  trainer = Trainer(parts, workdir)
  recipe = parts.policy.recipe.name
  if parts.is_mixed:
    recipe += f' training, {parts.rollout_policy.recipe.name} rollout'
  if not parts.policy.exact:
    recipe += f', {compilation.NOT_CLAIMED},'
  print(
      f'{recipe} on {_devices(parts.mesh.size)}: {len(parts.train_set)}'
      f' prompts ({parts.train_set.num_filtered} over-long left out)'
      f' -> {workdir}'
  )
  try:
    trainer.train(started=lambda: _record_start(parts, workdir))
  except StopRequested as stop:
    _say_stopped(stop, workdir)
    return
  _summary(workdir)
  try:
    print(f'Report: {report.write_report([workdir])}')
  except ValueError as error:  # A full disk; the run itself is safe by now.
    logging.warning('No report: %s', error)


def _check_purpose(config: configs.Config) -> None:
  """Refuses a warm start's config, which would train from random weights."""
  if config.sft.output:
    raise ValueError(
        f'sft.output is {config.sft.output!r}: {config_flag.file()} is the'
        ' config of a warm start, python -m jetrl_jax.sft --config=...; for'
        " GRPO leave it ''"
    )


def _devices(used: int) -> str:
  """Names the devices, and those left idle, which nothing else would tell."""
  found = jax.devices()
  kind = found[0].device_kind
  if used == len(found):
    return f'{used} x {kind}'
  take_more = '--config.mesh.data and .fsdp take more'
  return f'{used} of {len(found)} x {kind} ({take_more})'


def _record_start(parts: Parts, workdir: pathlib.Path) -> None:
  """Notes versions, device and prompts of this start in the workdir."""
  sets = {'train': parts.train_set, 'val': parts.val_set}
  counts = {}
  for name, prompts in sets.items():
    if prompts is not None:
      counts[f'{name}_prompts'] = len(prompts)
      counts[f'{name}_left_out'] = prompts.num_filtered
  provenance.record_start(workdir, parts.mesh.size, **counts)


def _say_stopped(stop: StopRequested, workdir: pathlib.Path) -> None:
  if checkpoint.all_steps(workdir / 'checkpoints'):
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
  lines = (workdir / 'metrics.jsonl').read_text().splitlines()
  records = [json.loads(line) for line in lines]
  evaluated = [r for r in records if any('/acc/mean@' in name for name in r)]
  if not evaluated:
    print(f'Done. Metrics are in {workdir}/metrics.jsonl.')
    return
  first, last = evaluated[0], evaluated[-1]
  for line in before_and_after(first, last):
    print(line)
  name = 'training/mismatch_token_frac'
  mismatch = [r[name] for r in records if name in r]
  print(
      'Tokens whose rollout and training log-probs differ in any bit:'
      f' {max(mismatch, default=0.0):.4%} (largest step)'
  )
  file = workdir / 'samples' / f'{last["step"]:06d}.jsonl'
  # Not `splitlines`, which takes characters of an answer for line ends, too.
  for line in file.read_text(encoding='utf-8').rstrip('\n').split('\n')[:2]:
    sample = json.loads(line)
    print(f'\n> {sample["prompt"]}\n{sample["response"]}')
    print(f'(expected {sample["answer"]})')
  print(f'\nMetrics, checkpoints and the exported policy are in {workdir}.')


if __name__ == '__main__':
  config_flag.run(main)
