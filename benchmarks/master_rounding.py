"""What masters in bfloat16 lose, and what rounding them at random keeps.

python -m benchmarks.master_rounding \
    --output=benchmarks/results/master_rounding_quickstart_cpu_DATE

Trains the quickstart from the same checkpoint with the same seeds three times:
masters in float32, in bfloat16 rounded to the nearest, in bfloat16 rounded at
random. After every update it compares what the masters did with what AdamW
asked for, which follows from the moments (float32 here) in float64.
"""

import dataclasses
import pathlib
import tempfile

import jax
import numpy as np
from absl import flags

from benchmarks import common
from configs import quickstart
from jetrl_jax import config as configs
from jetrl_jax.rl.optimizer import OptimizerConfig
from jetrl_jax.rl.trainer import Trainer
from jetrl_jax.rl.types import TrainState

_STEPS = flags.DEFINE_integer('steps', 40, 'Of each run.')
_SEEDS = flags.DEFINE_integer('seeds', 1, 'Runs per kind: seeds 1, 2, ...')
_KINDS = {
    'float32': ('float32', 'nearest'),
    'bfloat16, nearest': ('bfloat16', 'nearest'),
    'bfloat16, stochastic': ('bfloat16', 'stochastic'),
}
_COLUMNS = (
    ('kind', 'masters', ''),
    ('seed', 'seed', ''),
    ('accuracy_before', 'accuracy before', '.1%'),
    ('accuracy', 'after', '.1%'),
    ('moved', 'masters that move per update', '.1%'),
    ('fp8_bytes', 'FP8 bytes that change', '.2%'),
    ('norm_ratio', 'norm, applied / asked', '.3f'),
    ('kept', 'of the update along itself', '.3f'),
    ('kept_in_sum', 'of all updates together', '.3f'),
    ('mismatch', 'mismatch', ''),
)


def asked(config: OptimizerConfig, before, state: TrainState) -> np.ndarray:
  """Returns the update that AdamW asked for, all masters in one float64 row.

  Args:
    config: of the optimiser, with float32 moments.
    before: the masters that were moved.
    state: behind the step.
  """
  adam = state.opt_state[0]
  count = int(state.opt_step)
  b1, b2 = config.betas
  rate = float(np.asarray(config.learning_rate(count - 1)))

  def leaf(p, mu, nu):
    p, mu, nu = (np.asarray(a, np.float64) for a in (p, mu, nu))
    root = np.sqrt(nu / (1 - b2**count))
    update = mu / (1 - b1**count) / (root + config.eps)
    return -rate * (update + config.weight_decay * (p.ndim > 1) * p)

  return _flat(jax.tree.map(leaf, before, adam.mu, adam.nu))


def _flat(tree) -> np.ndarray:
  return np.concatenate(
      [np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)]
  )


class Observed(Trainer):
  """A trainer with one update per step that is looked at."""

  def __init__(self, parts, workdir):
    super().__init__(parts, workdir)
    self.seen: list[dict] = []
    self.accuracies: list[float] = []
    self._asked, self._done = 0.0, 0.0

  def _train_step(self, step, state):
    before = jax.device_get(state.trainable)
    state, metrics = super()._train_step(step, state)
    wanted = asked(self.parts.optimizer, before, jax.device_get(state))
    done = _flat(state.trainable) - _flat(before)
    self._asked, self._done = self._asked + wanted, self._done + done
    self.seen.append(
        {
            'step': step + 1,
            'moved': float(np.mean(done != 0)),
            'fp8_bytes': metrics['fp8/changed_weight_bytes/mean'],
            'norm_ratio': float(np.linalg.norm(done) / np.linalg.norm(wanted)),
            'kept': _along(done, wanted),
            'kept_in_sum': _along(self._done, self._asked),
            'mismatch': metrics['training/mismatch_token_frac'],
        }
    )
    return state, metrics

  def _evaluate(self, step, state):
    metrics = super()._evaluate(step, state)
    self.accuracies.append(self.accuracy or 0.0)
    return metrics


def _along(done: np.ndarray, wanted: np.ndarray) -> float:
  """Returns how much of `wanted` was done: 1 is all of it, on average."""
  return float(done @ wanted / (wanted @ wanted))


def run(kind: str, seed: int, steps: int) -> tuple[dict, list[dict]]:
  """Trains once; returns (row, one record per update)."""
  config = quickstart.get_config()
  dtype, rounding = _KINDS[kind]
  config.update_from_flattened_dict(
      {
          'seed': seed,
          'model.master_dtype': dtype,
          'optim.master_rounding': rounding,
          'trainer.total_training_steps': steps,
          'trainer.test_freq': steps,
          'trainer.save_freq': 0,
          'trainer.save_rollouts': False,
      }
  )
  with tempfile.TemporaryDirectory() as folder:
    parts = configs.build(config)
    trainer = Observed(
        dataclasses.replace(parts, export_source=None), pathlib.Path(folder)
    )
    trainer.train()
  seen = trainer.seen
  row = {
      name: float(np.mean([one[name] for one in seen]))
      for name in ('moved', 'fp8_bytes', 'norm_ratio', 'kept')
  }
  return {
      'kind': kind,
      'seed': seed,
      'accuracy_before': trainer.accuracies[0],
      'accuracy': trainer.accuracies[-1],
      **row,
      'kept_in_sum': seen[-1]['kept_in_sum'],
      'mismatch': max(one['mismatch'] for one in seen),
  }, seen


def main(argv: list[str]) -> None:
  """Trains, compares and writes."""
  del argv
  rows, summary = [], {}
  for seed in range(1, _SEEDS.value + 1):
    for kind in _KINDS:
      row, seen = run(kind, seed, _STEPS.value)
      print(row, flush=True)
      rows.append(row | {'updates': seen})
  for kind in _KINDS:
    found = [row['accuracy'] for row in rows if row['kind'] == kind]
    summary[f'accuracy, {kind}'] = round(float(np.mean(found)), 4)
  common.write(rows, summary, common.table(rows, _COLUMNS))


if __name__ == '__main__':
  common.run(main)
