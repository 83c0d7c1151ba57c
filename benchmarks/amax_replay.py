"""Sweeps history length and margin of delayed scaling over a recorded run.

python -m benchmarks.amax_replay runs/quickstart --name=quickstart_cpu

A run's metrics.jsonl holds the amax that each quantised dot saw at each step
(`fp8_health`). What another history length or margin would have made of the
same amaxes is arithmetic: this script does it, with the package's own rule for
scales, and writes benchmarks/results/amax_replay_<name>_<date>.{md,json}. It
leaves out what the other scales would have done to the run itself. Kernels are
not swept: their current amax takes part, so they never saturate.
"""

import argparse
import datetime
import json
import pathlib

import jax
import numpy as np

from benchmarks import common
from jetrl_jax import fp8, provenance

_RESULTS = pathlib.Path(__file__).parent / 'results'
_HISTORIES, _MARGINS = (2, 4, 8, 16), (0, 1, 2)
_COLUMNS = (
    ('history', 'history', ''),
    ('margin', 'margin', ''),
    ('saturated', 'dots that saturated', '.1%'),
    ('worst_bits_over', 'worst, bits over', '.2f'),
    ('mean_bits_unused', 'bits unused, mean', '.2f'),
    ('scale_changes', 'scales that changed', '.1%'),
)
_FORMAT_MAX = 448.0  # E4M3, for inputs and, by default, output gradients.


def read_health(path: pathlib.Path) -> tuple[list, dict, dict]:
  """Returns (steps, amaxes, scales); the latter by operand, [steps, dots]."""
  records = [json.loads(line) for line in path.read_text().splitlines()]
  records = [r for r in records if 'fp8_health' in r]
  amax, scale = {}, {}
  for operand in ('input', 'output_grad'):
    for name, values in (('amax', amax), ('scale', scale)):
      values[operand] = np.asarray(
          [
              [slot[operand][name] for slot in r['fp8_health'].values()]
              for r in records
          ],
          np.float32,
      )
  return [r['step'] for r in records], amax, scale


def scales_of(amax_TD: np.ndarray, history: int, margin: int) -> np.ndarray:
  """Returns the scales in use behind each step, from `max(_HISTORIES)` on."""
  first = max(_HISTORIES)
  steps = range(first, len(amax_TD) + 1)
  largest_TD = np.stack([amax_TD[t - history : t].max(axis=0) for t in steps])
  return np.asarray(
      fp8.scale_from_amax(
          jax.numpy.asarray(largest_TD),
          fp8.E4M3,
          margin=margin,
          power_of_two=True,
      )
  )


def sweep(amax_TD: np.ndarray) -> list[dict]:
  """Returns one row per history length and margin."""
  rows = []
  seen_TD = amax_TD[max(_HISTORIES) :]
  for history in _HISTORIES:
    for margin in _MARGINS:
      scale_TD = scales_of(amax_TD, history, margin)[:-1]
      bits_TD = np.log2(seen_TD / (_FORMAT_MAX * scale_TD))
      rows.append(
          {
              'history': history,
              'margin': margin,
              'saturated': float((bits_TD > 0).mean()),
              'worst_bits_over': float(max(bits_TD.max(), 0.0)),
              'mean_bits_unused': float(-bits_TD.mean()),
              'scale_changes': float((np.diff(scale_TD, axis=0) != 0).mean()),
          }
      )
  return rows


def main() -> None:
  """Writes the sweep of one workdir."""
  parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
  parser.add_argument('workdir', type=pathlib.Path)
  parser.add_argument('--name', required=True, help='<theme>_<hardware>')
  arguments = parser.parse_args()
  steps, amax, scale = read_health(arguments.workdir / 'metrics.jsonl')
  if len(steps) <= max(_HISTORIES):
    parser.error(f'{len(steps)} steps; more than {max(_HISTORIES)} are needed')
  settings = json.loads((arguments.workdir / 'config.json').read_text())
  used = settings['precision']
  replayed = scales_of(
      amax['input'], used['amax_history_length'], used['margin']
  )
  # The record is rounded in the sixth digit, a power of two is not.
  agree = float(np.mean(replayed == scale['input'][max(_HISTORIES) - 1 :]))
  commit = provenance.commit()
  today = datetime.date.today().isoformat()
  dots = amax['input'].shape[1]
  parts = [
      f'# History and margin replayed: {arguments.name}, {today}',
      f'`python -m benchmarks.amax_replay {arguments.workdir.name}'
      f' --name={arguments.name}` at commit {commit}, jax {jax.__version__}.'
      f' One run, seed {settings["seed"]}, {len(steps)} steps, {dots} dots,'
      f' recorded with history {used["amax_history_length"]} and margin'
      f' {used["margin"]}; counted from step {max(_HISTORIES) + 1} on. The'
      ' replay gives the scales that the run had used for'
      f' {agree:.1%} of the input slots.',
      'A dot saturates in a step when the amax it saw was above what its scale'
      ' could hold: then its largest elements were cut, not all of them. Bits'
      ' unused are those between the amax and the largest value held; E4M3 has'
      ' about 15 above its smallest normal number. Scales that changed: share'
      ' of slots per step.',
  ]
  results = {}
  for operand, series in amax.items():
    results[operand] = sweep(series)
    parts += [f'## {operand}', common.table(results[operand], _COLUMNS)]
  base = _RESULTS / f'amax_replay_{arguments.name}_{today}'
  base.with_suffix('.md').write_text('\n\n'.join(parts) + '\n')
  series = {
      k: [[float(f'{x:.4g}') for x in row] for row in v]
      for k, v in amax.items()
  }
  record = {'commit': commit, 'steps': steps, 'rows': results, 'amax': series}
  base.with_suffix('.json').write_text(json.dumps(record) + '\n')
  print('\n\n'.join(parts))


if __name__ == '__main__':
  main()
