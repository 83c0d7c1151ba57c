"""Runs a training config and records what it measured: time, memory, mismatch.

    python -m benchmarks.grpo_step --config=configs/qwen7b.py \
      --config.model.init=random --config.model.shape=qwen2.5-7b \
      --config.trainer.synthetic=True --output=benchmarks/results/NAME

The run is the trainer itself, with all its checks. Written are NAME.json (rows
straight from metrics.jsonl, versions, hardware, command) and NAME.md.
"""

import json
import pathlib
import tempfile

from absl import app, flags
from ml_collections import config_flags

from benchmarks import common
from jetrl_jax import config as configs
from jetrl_jax.rl.console import show_own_sentences
from jetrl_jax.rl.trainer import Trainer

_CONFIG = config_flags.DEFINE_config_file('config', None, 'Config file.')
_OUTPUT = flags.DEFINE_string('output', None, 'Result path without ending.')
_COMMIT = flags.DEFINE_string(
    'commit', '', 'Commit under test, where git is not at hand.'
)
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


def main(argv: list[str]) -> None:
  """Trains in a temporary workdir and writes the record."""
  del argv
  show_own_sentences()
  with tempfile.TemporaryDirectory() as workdir:
    try:
      Trainer(configs.build(_CONFIG.value), workdir).train()
    finally:
      path = pathlib.Path(workdir) / 'metrics.jsonl'
      text = path.read_text() if path.exists() else ''
      rows = [json.loads(line) for line in text.splitlines()]
      steps = [row for row in rows if row['step'] > 0]
      shown = common.table(steps, _COLUMNS)
      common.write(_OUTPUT.value, rows, {}, shown, _COMMIT.value)


if __name__ == '__main__':
  flags.mark_flags_as_required(['config', 'output'])
  app.run(main)
