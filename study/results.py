"""Raw metrics of runs in compact form: written from workdirs, read for figures.

    python -m study.results --folder=runs/study \
        --output=benchmarks/results/study/NAME

writes a file per run, `<arm>_seed<n>.jsonl.gz`: a line on the run (arm, seed,
settings, versions, device), then a line per step with the metrics of `KEPT`,
named as in docs/metrics.md. The same runs give the same bytes. A run to which
`study.run --set` gave more than where things are is exploratory.
"""

import argparse
import dataclasses
import gzip
import json
import pathlib
import re
from typing import Any

from jetrl_jax.core.files import user_path
from study import statistics
from study.arms import ARMS, Arm
from study.run import SET, has_failed, is_finished, read_metrics
from tools import command

KEPT = re.compile(
    r'step|val-[^/]+/[^/]+/acc/mean@\d+|critic/(acc|score)/mean'
    r'|response_length/(mean|clip_ratio)'
    r'|actor/(entropy|grad_norm|pg_clipfrac|pg_clipfrac_lower|ppo_kl|lr)'
    r'|(rollout_)?actor/update_k3'
    r'|training/(mismatch_token_frac|rollout_logprob_diff_(mean|max)|updates'
    r'|skipped_updates|logprob_diff_(positive|negative)_advantage)'
    r'|rollout_corr/(kl|k3_kl|rollout_is_mean|rollout_is_eff_sample_size)'
    r'|(rollout_)?fp8/changed_weight_bytes/(mean|min)'
    r'|timing_s/(step|gen|update_actor|testing|calibration)'
)
# Settings that say where things are, and change no run.
_WHERE = (
    'model.path',
    'data.tokenizer',
    'data.train_files',
    'data.val_files',
    'compile_cache_dir',
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
  """One run.

  Attributes:
    arm: what was run.
    seed: of everything random.
    about: the file's first line.
    rows: metrics by step, from step 0.
  """

  arm: Arm
  seed: int
  about: dict[str, Any]
  rows: list[dict[str, float]]

  def series(self, name: str) -> list[tuple[int, float]]:
    """Returns (step, value) where a metric was measured."""
    return [
        (int(row['step']), row[name])
        for row in self.rows
        if row.get(name) is not None
    ]

  def accuracy(self, precision: str = 'core') -> list[tuple[int, float]]:
    """Returns (step, held-out accuracy).

    Args:
      precision: 'core', the rollout's own, or a recipe of val_recipes.

    Raises:
      ValueError: it was not measured, or on several files.
    """
    first = next((row for row in self.rows if row['step'] == 0), {})
    names = [n for n in first if n.startswith(f'val-{precision}/')]
    if len(names) != 1:
      raise ValueError(
          f'{self.arm.name} seed {self.seed} has {len(names)} held-out'
          f' accuracies in {precision!r} at step 0, and needs one: give one'
          ' file as data.val_files, and a recipe in trainer.val_recipes'
      )
    return self.series(names[0])

  def judged(self, precision: str = 'core') -> list[tuple[int, float]]:
    """Returns `accuracy`; of a failed run as far as the design evaluates.

    Args:
      precision: see `accuracy`.

    Raises:
      ValueError: see `accuracy`.
    """
    points = self.accuracy(precision)
    if not self.about.get('failed'):
      return points
    return statistics.carried(points, self.about['evaluations'])

  @property
  def is_of_design(self) -> bool:
    """Whether the design asks for this run: others are exploratory."""
    of_seed = not self.arm.seeds or self.seed in self.arm.seeds
    return of_seed and not self.about.get('set')

  @property
  def is_over(self) -> bool:
    """Whether it has finished, or failed by itself."""
    return self.about['finished'] or bool(self.about.get('failed'))


def evaluations(config: dict[str, Any]) -> list[int]:
  """Returns the steps at which a run is evaluated, by its saved config."""
  trainer = config['trainer']
  last = trainer['total_training_steps']
  if not trainer['test_freq']:
    return []
  return [*range(0, last, trainer['test_freq']), last]


def compact(workdir: pathlib.Path, arm: Arm, seed: int) -> list[dict]:
  """Returns the lines of a run's file.

  Args:
    workdir: of the run.
    arm: what was run there.
    seed: the same.

  Raises:
    ValueError: it says nothing about its device and versions.
  """
  starts = workdir / 'starts.jsonl'
  if not starts.exists():
    raise ValueError(
        f'{workdir} has metrics.jsonl and no starts.jsonl, which names device'
        ' and versions; copy both from the workdir of the run'
    )
  start = json.loads(starts.read_text().splitlines()[-1])
  about = {
      'arm': arm.name,
      'seed': seed,
      'train': arm.train,
      'rollout': arm.rollout,
      'settings': {k: str(v) for k, v in arm.settings.items()},
      'set': _set(workdir),
      'finished': is_finished(workdir),
      'failed': has_failed(workdir),
      'evaluations': evaluations(
          json.loads((workdir / 'config.json').read_text())
      ),
      **{key: start[key] for key in ('device', 'versions', 'commit')},
  }
  rows = [
      {k: _short(v) for k, v in row.items() if KEPT.fullmatch(k)}
      for row in read_metrics(workdir)
  ]
  return [about, *rows]


def _set(workdir: pathlib.Path) -> dict[str, str]:
  """Returns what `study.run --set` gave a run, but for where things are."""
  file = workdir / SET
  given = json.loads(file.read_text()) if file.exists() else {}
  return {name: text for name, text in given.items() if name not in _WHERE}


def _short(value):
  return float(f'{value:.6g}') if isinstance(value, float) else value


def write(path: pathlib.Path, lines: list[dict]) -> None:
  """Writes JSON lines, compressed; the same lines give the same bytes."""
  text = ''.join(json.dumps(line) + '\n' for line in lines)
  path.write_bytes(gzip.compress(text.encode(), mtime=0))


def read(*folders: pathlib.Path) -> list[Run]:
  """Reads all runs of some folders, by arm and seed.

  Raises:
    ValueError: a folder has none, or two have the same arm and seed.
  """
  found: dict[tuple[int, int], Run] = {}
  order = list(ARMS)
  for folder in folders:
    paths = sorted(folder.glob('*.jsonl.gz'))
    if not paths:
      raise ValueError(
          f'{folder} holds no *.jsonl.gz of study.results; run python -m'
          f' study.results --folder=... --output={folder} first'
      )
    for path in paths:
      text = gzip.decompress(path.read_bytes()).decode()
      about, *rows = [json.loads(line) for line in text.splitlines()]
      arm, seed = ARMS[about['arm']], about['seed']
      key = order.index(arm.name), seed
      if key in found:
        raise ValueError(
            f'{path} is a second run of {arm.name}, seed {seed}; give folders'
            ' without the same runs'
        )
      found[key] = Run(arm=arm, seed=seed, about=about, rows=rows)
  return [found[key] for key in sorted(found)]


@command.in_one_sentence
def main() -> None:
  """Runs the command line."""
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  parser.add_argument('--folder', type=user_path, required=True)
  parser.add_argument('--output', type=user_path, required=True)
  flags = parser.parse_args()
  paths = sorted((flags.folder / 'runs').glob('*/seed*/metrics.jsonl'))
  if not paths:
    raise ValueError(
        f'{flags.folder} holds no runs/*/seed*/metrics.jsonl of'
        f' study.run; run python -m study.run --folder={flags.folder} first'
    )
  flags.output.mkdir(parents=True, exist_ok=True)
  left_out = []
  for path in paths:
    name, seed = path.parts[-3], path.parts[-2].removeprefix('seed')
    if name not in ARMS or not seed.isdecimal():
      raise ValueError(
          f'{path.parent} is no run of study.run, whose folders are'
          ' runs/ARM/seedN; move it away'
      )
    try:
      lines = compact(path.parent, ARMS[name], int(seed))
    except ValueError as error:
      # The other runs are worth keeping.
      left_out.append(str(error))
      continue
    write(flags.output / f'{name}_seed{seed}.jsonl.gz', lines)
    print(f'{name} seed {seed}: {len(lines) - 1} lines')
  if left_out:
    raise ValueError(
        f'{len(left_out)} of {len(paths)} runs are left out:'
        f' {"; ".join(left_out)}'
    )


if __name__ == '__main__':
  main()
