"""Checks a run without training: main --dry_run.

Builds config, data and checkpoint, traces and compiles what a step runs, and
says what that needs in memory, time and disk, and how every dot computes.
Arrays are shapes throughout: no weight is made. See docs/dry_run.md.
"""

import os
import pathlib

import jax
from absl import logging

from jetrl_jax.checkpoint import restore
from jetrl_jax.core import device_memory
from jetrl_jax.core.compilation import NOT_CLAIMED
from jetrl_jax.core.files import size
from jetrl_jax.dry_run import estimate as dry_run_estimate
from jetrl_jax.dry_run import memory as dry_run_memory
from jetrl_jax.dry_run import needs as dry_run_needs
from jetrl_jax.dry_run import precision as dry_run_precision
from jetrl_jax.dry_run import storage
from jetrl_jax.dry_run.estimate import DEVICES
from jetrl_jax.dry_run.memory import Phase, Shapes
from jetrl_jax.dry_run.precision import Row
from jetrl_jax.dry_run.storage import StorageNeeds
from jetrl_jax.kernels import dispatch
from jetrl_jax.models.hf import load as hf_load
from jetrl_jax.models.hf import safetensors_index
from jetrl_jax.rl.run import flops, fp8_support
from jetrl_jax.rl.run import precision as run_precision
from jetrl_jax.rl.run.spec import RunSpec
from jetrl_jax.rl.training import initialize


def dry_run(
    spec: RunSpec, workdir: pathlib.Path, device: str = ''
) -> list[str]:
  """Prints what a run would do.

  Args:
    spec: the specification of the run; its config and data are checked by now.
    workdir: the workdir of the run; only looked at.
    device: name of a device the run is meant for, by default the one at hand.
      For another one nothing is compiled: memory is estimated from shapes.

  Returns:
    Why the run cannot work, a sentence each; empty if it can.

  Raises:
    ValueError: an unknown device; a checkpoint that does not fit its
      config.json; a rollout that rounds where training does not; another
      precision than the run in `workdir` began with.
  """
  if device and device not in DEVICES:
    raise ValueError(
        f'--dry_run_device={device!r}; known are {", ".join(DEVICES)}'
    )
  kind = device or jax.devices()[0].device_kind
  # A run that has already started keeps the dots that it settled on.
  policy = run_precision.resolve(workdir, spec.policy, spec.invariant_scale)
  spec = spec.with_policy(policy)
  problems = _inputs(spec, workdir)
  if missing := fp8_support.of_run(spec, device):
    problems.append(missing)
  found = dry_run_memory.shapes(spec)
  rows = dry_run_precision.table(spec)
  _print_precision(rows)
  print(run_precision.describe(workdir, policy.recipe), end='')
  problems += _memory(spec, found, rows, kind, bool(device))
  _print_cost(spec, found, kind)
  problems += _print_storage(
      storage.of_run(spec, found.state, workdir), bool(device)
  )
  return problems


def say_memory(spec: RunSpec, host_needed: int) -> None:
  """Prints what a run needs of its device, by shapes, in a line.

  A warning says what helps where that is more than there is. Nothing is
  compiled.

  Args:
    spec: the specification of the run.
    host_needed: see `StorageNeeds`.
  """
  found = dry_run_memory.shapes(spec)
  sizes = dry_run_memory.ledger(spec, found)
  phases = dry_run_memory.estimated_phases(
      spec, found, sizes, attention=_attention(spec)
  )
  limit, what = _limit(
      jax.devices()[0].device_kind, spec.policy.axes.size, other=False
  )
  worst = max(phases, key=lambda phase: phase.total)
  line = f'memory: about {size(worst.total)} of {size(limit)} ({what})'
  if jax.default_backend() != 'cpu':
    line += f', and {size(host_needed)} of {size(storage.physical_bytes())}'
    line += ' of the host'
  print(f'{line}; --dry_run says more')
  for problem in _too_large(phases, limit, what):
    logging.warning(
        'This run may run out of memory, by an estimate (--dry_run compiles'
        ' and shows more): %s',
        problem,
    )


def _attention(spec: RunSpec, *, other: bool = False) -> str:
  """Returns the arguments of `accumulate_needs` for the device at hand."""
  kernel = spec.policy.kernels.of('attention') != dispatch.REFERENCE
  if other or kernel:
    return 'kernel'
  return 'cpu' if jax.default_backend() == 'cpu' else 'reference'


def _inputs(spec: RunSpec, workdir: pathlib.Path) -> list[str]:
  """Prints what the run reads; returns why a checkpoint does not fit."""
  data, policy, rollout = spec.train_set, spec.policy, spec.rollout_policy
  _title('Inputs')
  print(
      f'model       {policy.model.family}, {policy.model.num_params:,} numbers,'
      f' {policy.model.num_layers} layers; {policy.recipe.name}'
      + (f', rollout {rollout.recipe.name}' if spec.is_mixed else '')
  )
  if not policy.exact:
    print(f"compiled    with XLA's default options; {NOT_CLAIMED}")
  steps = restore.all_steps(workdir / 'checkpoints')
  if spec.initial_checkpoint is None:
    print('checkpoint  none read: random weights')
  elif steps:
    print("checkpoint  none read: the run's own is")
  else:
    folder = spec.initial_checkpoint
    tensors = safetensors_index.read_index(folder)
    hf_load.check_tensors(tensors, policy.model, folder)
    print(f'checkpoint  {folder}: {len(tensors)} tensors, all as config.json')
  print(f'training    {len(data)} prompts ({data.num_filtered} over-long)')
  if spec.val_set is not None:
    val = spec.val_set
    print(f'held out    {len(val)} prompts ({val.num_filtered} over-long)')
  with spec.make_rewards():
    print('rewards     the worker processes start')
  if steps:
    print(f'workdir     {workdir}: would resume from step {steps[-1]}')
    try:
      initialize.check_resume(spec, workdir)
    except ValueError as error:
      return [f'the run in {workdir} cannot be resumed: {error}']
  else:
    print(f'workdir     {workdir}: would start at step 0')
  there = storage.nearest(workdir)
  if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
    what = 'is a file' if there.is_file() else 'may not be written'
    return [f'--workdir={workdir} cannot be written: {there} {what}']
  return []


def _print_precision(rows: list[Row]) -> None:
  _title('Precision of every dot')
  print(
      'x [M, in] times W [out, in], both contraction-minor; operands -> result.'
      ' Read out of the traced functions.\n'
  )
  head = ('dot', 'W out x in', 'layers', 'scales', 'rollout', 'training')
  cells = [
      (
          row.name,
          row.shape or 'Q K^T, P V',
          str(row.layers),
          row.granularity,
          row.rollout,
          'the same' if row.training == row.rollout else row.training,
      )
      for row in rows
  ]
  _columns([head, *cells])
  print('\nBackward (dX, dW; of lm_head also its logits, again):')
  _columns([(row.name, row.backward) for row in rows if row.backward != '-'])


def _memory(
    spec: RunSpec, found: Shapes, rows: list[Row], kind: str, other: bool
) -> list[str]:
  """Prints ledger and phases; returns why they do not fit."""
  sizes = dry_run_memory.ledger(spec, found)
  limit, what = _limit(kind, spec.policy.axes.size, other=other)
  _title(f'Memory per device ({what}: {size(limit)})')
  _columns([(name, size(count)) for name, count in sizes.items() if count])
  print()
  kept = sum(sizes.values()) - sizes['a micro-batch']
  programs = {}
  if other or (jax.default_backend() == 'cpu' and kept > limit):
    phases = dry_run_memory.estimated_phases(
        spec, found, sizes, attention=_attention(spec, other=other)
    )
    print(
        'Not compiled, because this machine is not the one to train on. The'
        ' additional memory of a phase is estimated from shapes.'
    )
  else:
    phases, programs = dry_run_memory.compiled_phases(spec, found, sizes)
    print('The additional memory of a phase is what XLA reports.')
    if jax.default_backend() == 'cpu':
      print('This is the CPU program; a GPU allocates otherwise.')
  _columns(
      [('phase', 'alive', 'results', 'temporary', 'in all')]
      + [
          (
              phase.name,
              size(phase.resident + phase.arguments),
              size(phase.results),
              size(phase.temporary),
              size(phase.total),
          )
          for phase in phases
      ]
  )
  print(
      "\nOf accumulate's temporary memory, from shapes"
      + (':' if not programs else ' (XLA may have them in the same place):')
  )
  needs = dry_run_needs.accumulate_needs(
      spec,
      found.state.trainable,
      attention=_attention(spec, other=other),
  )
  _columns([(name, size(count)) for name, count in needs.items()])
  print()
  _say_which_run_in_fp8(rows, programs, kind)
  return _too_large(phases, limit, what)


def _too_large(phases: list[Phase], limit: int, what: str) -> list[str]:
  worst = max(phases, key=lambda phase: phase.total)
  if worst.total <= limit:
    return []
  return [
      f'{worst.name} needs {size(worst.total)} on each device, and {what} has'
      f' {size(limit)}. What helps: {device_memory.REMEDIES}'
  ]


def _limit(kind: str, devices: int, *, other: bool) -> tuple[int, str]:
  """Returns (bytes that a device has for the run, the source of the number)."""
  if other:
    total = int(DEVICES[kind][0] * 1e9 * device_memory.USABLE)
    return total, f'{kind}, {device_memory.USABLE:.0%} of its memory'
  stats = jax.local_devices()[0].memory_stats()
  if stats and 'bytes_limit' in stats:
    return stats['bytes_limit'], f'{kind}, what XLA may take of it'
  total = storage.physical_bytes()
  if devices > 1:
    return total // devices, f'memory of this machine for 1 of {devices} parts'
  return total, 'memory of this machine'


def _say_which_run_in_fp8(rows: list[Row], programs: dict, kind: str) -> None:
  """Prints the GEMMs that do not run on FP8 tensor cores."""
  wanted = {
      'decode': dry_run_precision.fp8_dots(rows),
      'accumulate': dry_run_precision.fp8_dots(rows, side='training'),
  }
  if not any(wanted.values()):
    return
  names = dict.fromkeys(row.name for dots in wanted.values() for row in dots)
  if 'NVIDIA' not in kind:
    print(f'FP8 dots are emulated on {kind}: the same numbers, not the speed.')
  elif flops.peak_flops(kind, 'float8') is None:
    print(
        f'{kind} is not known to have FP8 tensor cores. These GEMMs will'
        f' not run in FP8: {", ".join(names)}'
    )
  elif not programs:
    print('Which GEMMs run in FP8 is read from programs compiled on the GPU.')
  else:
    for name, dots in wanted.items():
      if not dots:
        continue
      missing = dry_run_precision.not_in_fp8(programs[name].as_text(), dots)
      said = ', '.join(missing) or 'none: all dots run on FP8 tensor cores'
      print(f'GEMMs of {name} not in FP8 on this GPU: {said}')


def _print_cost(spec: RunSpec, found: Shapes, kind: str) -> None:
  cost = dry_run_estimate.cost(spec, found, kind)
  _title('A training step, if every response has full length')
  print(
      f'{cost.sequences} sequences of {cost.prompt_tokens:.0f} prompt tokens'
      f' (mean of the data) and {spec.engine.max_response_length} response'
      f' tokens: {cost.tokens:,} tokens'
  )
  print(
      f'FLOPs: {cost.rollout_flops:.3g} sampling, {cost.update_flops:.3g}'
      ' training'
  )
  if cost.rollout_s is None or cost.update_s is None:
    print(f'Seconds: unknown on this device ({kind})')
    return
  print(
      f'Seconds at the roofline of {spec.policy.axes.devices} x {kind}:'
      f' {cost.rollout_s:.1f} sampling, {cost.update_s:.1f} training. No run is'
      ' faster; launches, rewards and the host come on top.'
  )


def _print_storage(found: StorageNeeds, other: bool) -> list[str]:
  """Prints what is written and copied to the host; returns what is missing."""
  _title(f'Written to {found.workdir}')
  _columns([(name, size(count), how) for name, count, how in found.rows])
  print(f'free there: {found.free_there}')
  if jax.default_backend() == 'cpu' and not other:
    return found.lacking_disk()
  # The machine at hand says nothing about that of another device.
  there = '' if other else f'; this machine has {size(found.host)}'
  print(
      f'host memory: about {size(found.host_needed)} while a checkpoint of'
      f' {size(found.checkpoint)} is copied or read{there}'
  )
  return found.lacking_disk() + ([] if other else found.lacking_host())


def _title(text: str) -> None:
  print(f'\n{text}\n{"-" * len(text)}')


def _columns(rows: list[tuple[str, ...]]) -> None:
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  for row in rows:
    cells = [cell.ljust(w) for cell, w in zip(row, widths, strict=True)]
    print('  '.join(cells).rstrip())


def report(problems: list[str]) -> int:
  """Prints whether the run can work; returns the exit code."""
  logging.flush()
  if not problems:
    print('\nThe run can start. Nothing was trained or written.')
    return 0
  print('\nThe run cannot work as it is:')
  for problem in problems:
    print(f'* {problem}')
  return 1
