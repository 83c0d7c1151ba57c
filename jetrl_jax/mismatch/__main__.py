"""Splits a run's mismatch by cause: jetrl_jax mismatch --config=... .

It takes one step of the run, in memory: from a cold start, or with --workdir
from the newest checkpoint of a run, which is only read. With --bisect it names
the first layer and op in which rollout and training differ. See
docs/mismatch.md.
"""

import dataclasses
import datetime
import json
import pathlib
import re
import sys
from typing import Any

import jax
from absl import flags

from jetrl_jax.config import build as configs
from jetrl_jax.config import flags as config_flags
from jetrl_jax.core import compilation
from jetrl_jax.core.files import replace_text, user_path
from jetrl_jax.metrics import provenance
from jetrl_jax.mismatch import bisect as mismatch_bisect
from jetrl_jax.mismatch import split as mismatch_split
from jetrl_jax.mismatch import start as mismatch_start
from jetrl_jax.mismatch.compare import Found, made_by, name_of
from jetrl_jax.mismatch.split import Row, Split
from jetrl_jax.mismatch.start import Start

# Heading, metric and format; every metric is one of `rl/mismatch.py`.
_COLUMNS = (
    ('unequal', 'training/mismatch_token_frac', '.3%'),
    ('size, mean', 'training/rollout_logprob_diff_mean', '.2e'),
    ('size, max', 'training/rollout_logprob_diff_max', '.2e'),
    ('mean', 'rollout_corr/kl', '+.2e'),
    ('k3', 'rollout_corr/k3_kl', '.2e'),
    ('ESS', 'rollout_corr/rollout_is_eff_sample_size', '.5f'),
    ('exp size', 'training/token_mult_prob_error', '.5f'),
)


def table(rows: list[Row]) -> str:
  """Returns rows as Markdown whose columns are aligned."""
  cells = [['cause', *(head for head, *_ in _COLUMNS), 'compared']]
  for row in rows:
    values = [format(row.metrics[name], form) for _, name, form in _COLUMNS]
    cells.append([row.name, *values, row.compared])
  widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
  lines = [
      '| ' + ' | '.join(map(str.ljust, line, widths)) + ' |' for line in cells
  ]
  lines.insert(1, '|' + '|'.join('-' * (width + 2) for width in widths) + '|')
  return '\n'.join(lines)


def describe(start: Start, found: Split) -> str:
  """Returns a split's result as Markdown."""
  infos = found.learnt.infos
  applied = sum(bool(info.applied) for info in infos)
  changed = jax.tree.leaves([info.changed_bytes for info in infos])
  moved = (
      f', {min(map(float, changed)):.2%} to {max(map(float, changed)):.2%} of a'
      " kernel's 8-bit bytes changed"
      if changed
      else ''
  )
  return '\n'.join(
      [
          f'{found.tokens} sampled tokens of {found.sequences} responses, from'
          f' {_what(start)}.',
          '',
          'Differences of two log-probs of the same token, in nats. size is the'
          ' absolute difference, mean the signed one, exp size the mean of its'
          ' exponential, ESS the effective sample size of the ratios.',
          '',
          table([*found.causes, *found.totals]),
          '',
          'Token by token, the first four causes add up to "this step" and all'
          f' five to "one step late"; largest rest {found.rest:.1e} nats. So do'
          ' their means; the other columns do not add up.',
          f'The step: {applied} of {len(infos)} updates applied, learning rate'
          f' {float(infos[-1].lr):.1e}, gradient norm'
          f' {float(infos[-1].grad_norm):.1e}{moved}.',
          '',
          'The same tokens in other shapes (not part of the sums):',
          '',
          table(found.shapes),
      ]
  )


def _what(start: Start) -> str:
  spec = start.spec
  claim = '' if spec.policy.exact else f'; {compilation.NOT_CLAIMED}'
  return (
      f'{start.origin}, {spec.policy.recipe.name} training and'
      f' {spec.rollout_policy.recipe.name} rollout{claim}'
  )


def describe_bisection(start: Start, found: Found) -> str:
  """Returns a bisection's result as text, op by op."""
  width = max(len(row.op) for row in found.rows)
  lines = [
      f'{found.tokens} response tokens of {found.sequences} responses, from'
      f' {_what(start)}.',
      '',
      f'{"op":{width}}     unequal of elements    largest difference',
  ]
  for row in found.rows:
    lines.append(
        f'{row.op:{width}}  {row.unequal:10} of {row.elements:<10}'
        + (f'  {row.largest:.3g}, first at {row.where}' if row.unequal else '')
    )
  if found.unseen:
    unseen = dict.fromkeys(
        re.sub(r'layers_\d+', 'layers_*', name_of(op)) for op in found.unseen
    )
    lines += ['', f'Within a kernel, so not seen: {", ".join(unseen)}.']
  rollout, training = found.disturbed
  if rollout or training:
    lines += [
        '',
        'The taps changed the programs: with them, one op at a time, up to'
        f" {rollout} of the tokens have other log-probs than the rollout's and"
        f" {training} others than the training forward's. What is named here"
        ' may be a difference of the tapped programs alone.',
    ]
  else:
    how = ', one op at a time' if found.one_by_one else ''
    lines += [
        '',
        f'With the taps{how} both sides have the log-probs that they have'
        ' without, on all of these tokens.',
    ]
  first = found.first
  if first is None:
    lines.append('No op differs in any bit.')
  else:
    lines.append(
        f'First difference: {first.op}, {first.unequal} of {first.elements}'
        f' elements, at most {first.largest:.3g}; {first.where}.'
    )
    spec = start.spec
    kernels = spec.rollout_policy.kernels, spec.policy.kernels
    if by := made_by(first.op, *kernels):
      lines.append(f'It is made by {by}.')
  return '\n'.join(lines)


def as_json(start: Start, rows: list[dict], **facts: Any) -> str:
  """Returns the content of the --output file."""
  record = {
      'date': datetime.date.today().isoformat(),
      'hardware': f'{jax.device_count()} x {jax.devices()[0].device_kind}',
      'commit': provenance.commit(),
      'versions': provenance.versions(),
      'command': ' '.join(['python -m jetrl_jax.mismatch', *sys.argv[1:]]),
      'origin': start.origin,
      'training': start.spec.policy.recipe.name,
      'rollout': start.spec.rollout_policy.recipe.name,
      'exact': start.spec.policy.exact,
      **facts,
      'rows': rows,
  }
  return json.dumps(record, indent=1) + '\n'


def run(
    config: configs.Config,
    workdir: pathlib.Path | None,
    output: pathlib.Path | None,
    bisect: bool = False,
) -> str:
  """Takes the step and returns the text to print.

  Args:
    config: the run's config.
    workdir: see `mismatch_start.start`.
    output: JSON file for the rows; None for none.
    bisect: whether to name the first op that differs instead of the causes.

  Raises:
    ValueError: a flag or setting cannot work; the message says how to fix it.
  """
  if output is not None:
    _check_output(output)
  compilation.keep_compiled(config.compile_cache_dir)
  with mismatch_start.start(configs.build(config), workdir) as start:
    if bisect:
      found = mismatch_bisect.bisect(start)
      said = describe_bisection(start, found)
      rows = [dataclasses.asdict(row) for row in found.rows]
      facts: dict[str, Any] = {'disturbed': found.disturbed}
    else:
      found = mismatch_split.split(start)
      said = describe(start, found)
      rows = [
          {'name': row.name, 'compared': row.compared} | row.metrics
          for row in (*found.causes, *found.totals, *found.shapes)
      ]
      facts = {'rest': found.rest}
  if output is not None:
    text = as_json(start, rows, tokens=found.tokens, **facts)
    replace_text(output, text)
  return said


def _check_output(output: pathlib.Path) -> None:
  """Raises an error if the file could not be written after the compute."""
  if not output.parent.is_dir():
    raise ValueError(f'--output={output}: there is no folder {output.parent}')
  if output.is_dir():
    raise ValueError(f'--output={output} is a folder; choose a file')
  config_flags.make_folder('output', output.parent)


def main() -> None:
  """Runs the command with its flags."""
  values = flags.FLAGS
  workdir, output = (
      user_path(path) if path else None
      for path in (values.workdir, values.output)
  )
  print(run(config_flags.load(), workdir, output, values.bisect))


def define_flags() -> None:
  """Defines the flags; only the command does this, because they are global."""
  flags.DEFINE_string(
      'workdir', None, 'Workdir of a run to start from; it is only read.'
  )
  flags.DEFINE_string('output', None, 'JSON file for the rows.')
  flags.DEFINE_bool(
      'bisect', False, 'Name the first layer and op that differ instead.'
  )
  config_flags.define()


if __name__ == '__main__':
  define_flags()
  config_flags.run(main)
