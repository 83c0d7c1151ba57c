"""Memory a GPU by model and mesh, by the dry run's estimate; no GPU needed.

    python -m benchmarks.mesh_memory --output=benchmarks/results/NAME

For each model and each fsdp x tensor it adds up what a run keeps and estimates
what each phase needs besides, as `--dry_run --dry_run_device` does; nothing is
compiled. `data` copies all of it, and changes no number. Each GPU that has rows
of its own (data x fsdp) has --slots sequences and a micro-batch of its own. On
a mesh that a model cannot be shared by there is no row.

The settings are those of configs/qwen14b.py: masters in bfloat16, gradients in
bfloat16, moments in 8 bits, 'full' remat, keys in bfloat16.
"""

import itertools
from typing import Any

import jax
from absl import flags

from benchmarks import common, launch
from configs import qwen14b
from jetrl_jax.config import build as configs
from jetrl_jax.core import device_memory
from jetrl_jax.dry_run import memory
from jetrl_jax.dry_run.estimate import DEVICES

_MODELS = flags.DEFINE_list(
    'models',
    ['qwen2.5-7b', 'qwen2.5-14b', 'qwen2.5-32b', 'llama-3.1-70b'],
    'See model.shape.',
)
_FSDP = flags.DEFINE_list('fsdp', ['1', '2', '4', '8', '16', '64'], 'Of mesh.')
_TENSOR = flags.DEFINE_list('tensor', ['1', '2', '4', '8'], 'The same.')
_DEVICES = flags.DEFINE_integer('devices', 64, 'Most GPUs of a mesh.')
_SLOTS = flags.DEFINE_integer('slots', 64, 'Sequences of a GPU with rows.')
_CACHED = flags.DEFINE_integer('cached', 2048, 'Tokens of each, on average.')
_GPUS = 'NVIDIA H100 80GB HBM3', 'NVIDIA H200'
_COLUMNS = (
    ('model', 'model', ''),
    ('fsdp', 'fsdp', 'd'),
    ('tensor', 'tensor', 'd'),
    ('kept', 'masters, moments, weights, scales', '.1f'),
    ('whole', 'weights of a rollout', '.1f'),
    ('caches', 'KV caches', '.1f'),
    ('gradients', 'gradients', '.1f'),
    ('prefill', 'prefill', '.1f'),
    ('decode', 'decode', '.1f'),
    ('accumulate', 'accumulate', '.1f'),
    ('apply', 'apply', '.1f'),
    ('most', 'most', '.1f'),
    *((gpu, f'fits {gpu}', '') for gpu in _GPUS),
)


def _row(model: str, fsdp: int, tensor: int) -> dict[str, Any]:
  """Returns GiB a GPU.

  Raises:
    ValueError: these devices cannot share the model.
  """
  config = qwen14b.get_config()
  example = launch.EXAMPLE
  config.update_from_flattened_dict(
      {
          'model.path': '',
          'model.init': 'random',
          'model.shape': model,
          'data.tokenizer': f'{example}/model_init',
          'data.template': '{prompt}',
          'data.train_files': (f'{example}/train.jsonl',),
          'data.val_files': (),
          'mesh.fsdp': fsdp,
          'mesh.tensor': tensor,
          'rollout.num_slots': _SLOTS.value * fsdp,
          'rollout.kv_cache_tokens': _SLOTS.value * _CACHED.value * fsdp,
          'trainer.synthetic': True,
      }
  )
  spec = configs.build(config)
  found = memory.shapes(spec)
  sizes = memory.ledger(spec, found)
  phases = memory.estimated_phases(spec, found, sizes)
  gib = {name: count / 2**30 for name, count in sizes.items()}
  most = max(phase.total for phase in phases)
  row = {
      'model': model,
      'fsdp': fsdp,
      'tensor': tensor,
      'ledger': gib,
      'kept': sum(
          gib[name]
          for name in (
              'master weights',
              'Adam moments',
              'compute weights',
              'scales and histories',
          )
      ),
      'whole': gib['weights of a rollout, whole'],
      'caches': gib['KV caches and slots'] + gib['prefilled prompts'],
      'gradients': gib['gradients'],
      'most': most / 2**30,
  }
  row |= {phase.name: phase.total / 2**30 for phase in phases}
  for gpu in _GPUS:
    usable = DEVICES[gpu][0] * 1e9 * device_memory.USABLE
    row[gpu] = 'yes' if most <= usable else 'no'
  return row


def _summary(rows: list[dict]) -> dict[str, str]:
  """Returns the smallest meshes that fit, by model and GPU."""
  found = {}
  for model, gpu in itertools.product(_MODELS.value, _GPUS):
    fit = [r for r in rows if r['model'] == model and r[gpu] == 'yes']
    for tensor in map(int, _TENSOR.value):
      mine = [r for r in fit if r['tensor'] == tensor]
      if mine:
        least = min(mine, key=lambda row: row['fsdp'])
        found[f'{model}, {gpu}, tensor={tensor}'] = (
            f'fsdp={least["fsdp"]} or more ({least["most"]:.1f} GiB)'
        )
  return found


def main(argv: list[str]) -> None:
  """Adds up every model on every mesh."""
  del argv
  rows = []
  for model in _MODELS.value:
    for fsdp, tensor in itertools.product(
        map(int, _FSDP.value), map(int, _TENSOR.value)
    ):
      if fsdp * tensor > _DEVICES.value:
        continue
      try:
        rows.append(_row(model, fsdp, tensor))
      except ValueError as error:
        print(f'{model}, fsdp={fsdp}, tensor={tensor}: {error}', flush=True)
        continue
      # After each: many take minutes.
      shown = common.table(rows, _COLUMNS)
      hardware = 'none: nothing is compiled or run'
      common.write(rows, _summary(rows), shown, hardware)


if __name__ == '__main__':
  launch.leave_gpus()
  jax.config.update('jax_num_cpu_devices', 64)
  common.run(main)
