"""Learns to ask a calculator, on two CPU cores in minutes, in the FP8 flow.

python -m jetrl_jax.main --config=configs/calculator.py

Products and sums that a small decoder cannot do in its head, and a calculator
that answers inside the rollout (examples/calculator/environment.py). Starts
from examples/calculator/checkpoint (see calculator_sft.py), which trusts its
head too often.

Expected: held-out accuracy, sampled, from 17% to 45%, turns per episode from
2.5 to 3.3, mismatch 0 (benchmarks/results/calculator_cpu_2026-11-21.jsonl; 11
minutes of two cores that twenty other processes shared). What is left are
third numbers miscopied by so small a decoder. 1e-3 collapses.
"""

from configs import base
from jetrl_jax.config import examples


def get_config():
  """Returns the config."""
  config = base.get_config()
  folder = examples.folder('calculator')
  config.model.path = f'{folder}/checkpoint'
  # Short sequences: a 64-token tile would be mostly padding.
  config.model.attention_tile = 16
  config.model.remat = 'none'
  config.data.train_files = (f'{folder}/train.jsonl',)
  config.data.val_files = (f'{folder}/heldout.jsonl',)
  config.data.template = '{prompt}'
  config.data.max_prompt_length = 16
  environment = examples.module('calculator.environment')
  config.environment.name = f'{environment}:Calculator'
  config.environment.max_turns = 5
  config.rollout.num_generations = 8
  config.rollout.max_response_length = 48
  config.rollout.num_slots = 128
  # Turns are short, and what is decoded beyond one is thrown away.
  config.rollout.decode_block = 8
  config.optim.lr = 5e-4
  config.optim.lr_warmup_steps = 5
  config.optim.betas = (0.9, 0.98)
  config.trainer.train_batch_size = 16
  config.trainer.mini_batch_size = 16
  config.trainer.micro_batch_size = 64
  config.trainer.total_training_steps = 80
  # FP8 moments are for memory; here they would cost compile time only.
  config.optim.moments = 'float32'
  config.trainer.test_freq = 10
  # As it samples, which is what is trained.
  config.trainer.val_temperature = 1.0
  config.trainer.save_freq = 20
  return config
