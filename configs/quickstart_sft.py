"""Warm start of the quickstart's checkpoint.

python -m jetrl_jax.sft --config=configs/quickstart_sft.py

Trains a 0.8M-parameter Qwen2-shaped decoder from scratch on the written sums of
examples/quickstart/sft.jsonl (never on held-out problems) and writes
runs/quickstart_warm/checkpoint. The committed one,
examples/quickstart/checkpoint, was made so on one H100 (45 s; 1500 steps, loss
0.07).
"""

from configs import base
from jetrl_jax.config import examples


def get_config():
  """Returns the config."""
  config = base.get_config()
  folder = examples.folder('quickstart')
  config.model.path = f'{folder}/model_init'
  config.model.init = 'random'
  config.model.attention_tile = 16
  config.model.remat = 'none'
  config.data.train_files = (f'{folder}/sft.jsonl',)
  config.data.template = '{prompt}'
  config.data.max_prompt_length = 16
  config.rollout.max_response_length = 32
  config.optim.lr = 2e-3
  config.optim.lr_warmup_steps = 50
  config.optim.lr_decay = 'cosine'
  config.optim.betas = (0.9, 0.98)
  config.optim.moments = 'float32'
  config.trainer.micro_batch_size = 64
  config.sft.total_training_steps = 1500
  config.sft.batch_size = 128
  config.sft.output = 'runs/quickstart_warm/checkpoint'
  return config
