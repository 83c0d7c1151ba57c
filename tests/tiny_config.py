"""The quickstart's config at the smallest size, for tests of whole runs.

One layer of width 32, 4 prompts x 4 samples of at most 12 tokens. `files`
writes the model and the data that it names.
"""

import json
import pathlib
import shutil

from configs import quickstart

_ROOT = pathlib.Path(__file__).parent.parent
_EXAMPLE = _ROOT / 'examples' / 'quickstart'
# In every config: the folder `files` made.
FOLDER = 'tiny'
REWARDS = f'{FOLDER}/rewards.py:digits'


def get_config():
  config = quickstart.get_config()
  config.model.path = f'{FOLDER}/model'
  config.model.init = 'random'
  config.data.train_files = (f'{FOLDER}/train.jsonl',)
  config.data.val_files = (f'{FOLDER}/heldout.jsonl',)
  # Random weights never solve a sum, and without rewards nothing would move.
  config.reward.functions = (REWARDS,)
  config.reward.num_workers = 1
  config.rollout.num_generations = 4
  config.rollout.max_response_length = 12
  config.rollout.num_slots = 16
  config.rollout.decode_block = 4
  # FP8 weights move by whole steps: a small rate would change no byte.
  config.optim.lr = 1e-2
  config.optim.lr_warmup_steps = 0
  config.trainer.train_batch_size = 4
  config.trainer.mini_batch_size = 4
  config.trainer.micro_batch_size = 16
  config.trainer.total_training_steps = 6
  config.trainer.test_freq = 3
  config.trainer.save_freq = 2
  config.trainer.calibration_prompts = 4
  config.trainer.calibration_tokens = 6
  config.sft.batch_size = 10
  return config


def files(folder: pathlib.Path) -> None:
  """Writes what the config names to `folder / FOLDER`.

  10 training prompts: 6 steps of 4 cross two edges of an epoch.
  """
  folder = folder / FOLDER
  shutil.copytree(_EXAMPLE / 'model_init', folder / 'model')
  path = folder / 'model' / 'config.json'
  shape = json.loads(path.read_text()) | {
      'hidden_size': 32,
      'intermediate_size': 64,
      'num_hidden_layers': 1,
      'num_attention_heads': 2,
      'num_key_value_heads': 1,
      'head_dim': 16,
  }
  path.write_text(json.dumps(shape))
  for name, rows in (('train', 10), ('heldout', 6)):
    lines = (_EXAMPLE / f'{name}.jsonl').read_text().splitlines(keepends=True)
    (folder / f'{name}.jsonl').write_text(''.join(lines[:rows]))
  (folder / 'rewards.py').write_text(
      'def digits(data_source, solution_str, ground_truth, extra_info):\n'
      '  return sum(c.isdigit() for c in solution_str) / 12\n'
  )
