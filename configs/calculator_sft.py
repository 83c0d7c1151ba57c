"""Warm start of the calculator example's checkpoint.

nice python -m jetrl_jax.sft --config=configs/calculator_sft.py

Trains a 0.14M-parameter Qwen2-shaped decoder from scratch on the careless
solutions of examples/calculator/sft.jsonl (never on held-out problems) and
writes runs/calculator_warm/checkpoint. The committed one,
examples/calculator/checkpoint, was made so.
"""

from configs import base
from jetrl_jax.config import examples


def get_config():
  """Returns the config."""
  config = base.get_config()
  folder = examples.folder('calculator')
  config.model.path = f'{folder}/model_init'
  config.model.init = 'random'
  config.model.attention_tile = 16
  config.model.remat = 'none'
  # Float32 throughout: on a CPU the fastest, and the policy is quantised anyway
  # when reinforcement learning starts.
  config.precision.recipe = 'bf16'
  config.precision.compute_dtype = 'float32'
  config.data.train_files = (f'{folder}/sft.jsonl',)
  config.data.template = '{prompt}'
  config.data.max_prompt_length = 16
  config.rollout.max_response_length = 48
  config.optim.lr = 3e-3
  config.optim.lr_warmup_steps = 50
  config.optim.lr_decay = 'cosine'
  config.optim.betas = (0.9, 0.98)
  config.optim.moments = 'float32'
  config.trainer.micro_batch_size = 64
  config.sft.total_training_steps = 800
  config.sft.batch_size = 64
  config.sft.output = 'runs/calculator_warm/checkpoint'
  return config
