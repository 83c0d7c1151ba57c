"""Learns to invest by turns, on two CPU cores in minutes, in the FP8 flow.

python -m jetrl_jax.main --config=configs/portfolio.py

A sequential decision with a real-valued reward, the log growth of an account
over four periods (examples/portfolio/environment.py). Starts from
examples/portfolio/checkpoint (see portfolio_sft.py), which orders at random.

Expected: the held-out log growth of an episode from 0.00 to 0.08 (ordering by
what is known of the market's drift gives 0.10), mismatch 0
(benchmarks/results/portfolio_cpu_2026-11-21.jsonl; 11 minutes of two cores
that twenty other processes shared).
"""

from configs import base


def get_config():
  """Returns the config."""
  config = base.get_config()
  folder = 'examples/portfolio'
  config.model.path = f'{folder}/checkpoint'
  # Short sequences: a 64-token tile would be mostly padding.
  config.model.attention_tile = 16
  config.model.remat = 'none'
  config.data.train_files = (f'{folder}/train.jsonl',)
  config.data.val_files = (f'{folder}/heldout.jsonl',)
  config.data.template = '{prompt}'
  config.data.max_prompt_length = 16
  config.environment.name = 'examples.portfolio.environment:Portfolio'
  config.environment.max_turns = 4
  config.rollout.num_generations = 8
  config.rollout.max_response_length = 48
  config.rollout.num_slots = 128
  # Turns are short, and what is decoded beyond one is thrown away.
  config.rollout.decode_block = 8
  config.optim.lr = 1e-3
  config.optim.lr_warmup_steps = 5
  config.optim.betas = (0.9, 0.98)
  config.trainer.train_batch_size = 16
  config.trainer.mini_batch_size = 16
  config.trainer.micro_batch_size = 64
  config.trainer.total_training_steps = 60
  # FP8 moments are for memory; here they would cost compile time only.
  config.optim.moments = 'float32'
  config.trainer.test_freq = 10
  # As it samples: a greedy investor whose best order is 'nothing' would hide
  # what the others have become.
  config.trainer.val_temperature = 1.0
  config.trainer.save_freq = 20
  return config
