"""Runs a training config and records what it measured: time, memory, mismatch.

    python benchmarks/grpo_step.py --config=configs/qwen7b.py \
      --config.model.init=random --config.model.shape=qwen2.5-7b \
      --config.trainer.synthetic=True --output=benchmarks/results/NAME

The run is the trainer itself, with all its checks. Written are NAME.json (rows
straight from metrics.jsonl, versions, hardware, command) and NAME.md.
"""

import datetime
import importlib.metadata
import json
import pathlib
import platform
import subprocess
import sys
import tempfile

import jax
from absl import app, flags
from ml_collections import config_flags

from jetrl_jax import config as configs
from jetrl_jax.rl.console import show_own_sentences
from jetrl_jax.rl.trainer import Trainer

_CONFIG = config_flags.DEFINE_config_file('config', None, 'Config file.')
_OUTPUT = flags.DEFINE_string('output', None, 'Result path without ending.')
_COMMIT = flags.DEFINE_string(
    'commit', '', 'Commit under test, where git is not at hand.'
)
_PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'numpy')
_COLUMNS = (
    ('step', 'step', '.0f'),
    ('timing_s/gen', 'gen s', '.2f'),
    ('timing_s/old_log_prob', 'score s', '.2f'),
    ('timing_s/update_actor', 'update s', '.2f'),
    ('timing_s/step', 'step s', '.2f'),
    ('perf/rollout_throughput', 'rollout tok/s', '.0f'),
    ('perf/throughput', 'tok/s', '.0f'),
    ('perf/max_memory_allocated_gb', 'peak GiB', '.1f'),
    ('perf/total_num_tokens', 'tokens', '.0f'),
    ('training/mismatch_token_frac', 'mismatch', '.2g'),
    ('training/rollout_logprob_diff_max', 'max diff', '.2g'),
    ('fp8/changed_weight_bytes/min', 'changed bytes (min)', '.2%'),
    ('critic/advantages/std', 'adv std', '.3f'),
    ('actor/grad_norm', 'grad norm', '.3g'),
)


def _head() -> str:
  head = ['git', 'rev-parse', 'HEAD']
  found = subprocess.run(head, capture_output=True, text=True, check=False)
  return found.stdout.strip()


def environment() -> dict:
  """Returns date, commit, versions, hardware and command."""
  commit = _COMMIT.value or _head()
  device = jax.devices()[0]
  return {
      'date': datetime.date.today().isoformat(),
      'commit': commit or 'unknown',
      'hardware': f'{jax.device_count()} x {device.device_kind}',
      'versions': {
          'python': platform.python_version(),
          **{name: importlib.metadata.version(name) for name in _PACKAGES},
      },
      'command': ' '.join(['python', *sys.argv]),
  }


def table(rows: list[dict]) -> str:
  """Returns a Markdown table of the columns above."""
  shown = [c for c in _COLUMNS if any(c[0] in row for row in rows)]
  lines = [
      '| ' + ' | '.join(label for _, label, _ in shown) + ' |',
      '|' + '---|' * len(shown),
  ]
  for row in rows:
    cells = [
        format(row[name], form) if name in row else ''
        for name, _, form in shown
    ]
    lines.append('| ' + ' | '.join(cells) + ' |')
  return '\n'.join(lines)


def main(argv: list[str]) -> None:
  """Trains in a temporary workdir and writes the record."""
  del argv
  show_own_sentences()
  output = pathlib.Path(_OUTPUT.value)
  with tempfile.TemporaryDirectory() as workdir:
    try:
      Trainer(configs.build(_CONFIG.value), workdir).train()
    finally:
      path = pathlib.Path(workdir) / 'metrics.jsonl'
      text = path.read_text() if path.exists() else ''
      rows = [json.loads(line) for line in text.splitlines()]
      record = environment() | {'name': output.name, 'rows': rows}
      output.parent.mkdir(parents=True, exist_ok=True)
      output.with_suffix('.json').write_text(json.dumps(record, indent=1))
      shown = table([row for row in rows if row['step'] > 0])
      head = '\n'.join(
          f'* {key}: {record[key]}'
          for key in ('date', 'hardware', 'commit', 'versions', 'command')
      )
      output.with_suffix('.md').write_text(
          f'# {output.name}\n\n{head}\n\n{shown}\n'
      )
      print(shown)


if __name__ == '__main__':
  flags.mark_flags_as_required(['config', 'output'])
  app.run(main)
