"""Learns to invest by turns, on two CPU cores in minutes, in the FP8 flow.

python -m jetrl_jax.main --config=configs/portfolio.py

A sequential decision with a real-valued reward, the log growth of an account
over four periods (examples/portfolio/environment.py). Starts from
examples/portfolio/checkpoint (see portfolio_sft.py), which orders at random.

Expected: the held-out log growth of an episode from 0.00 to 0.08 (ordering by
what is known of the market's drift gives 0.10), mismatch 0
(benchmarks/results/portfolio_cpu_2026-11-21.jsonl; 11 minutes of two cores
that twenty other processes shared).

As calculator.py, an environment with turns as short, but for what follows.
"""

from configs import calculator
from jetrl_jax.config import examples


def get_config():
  """Returns the config."""
  config = calculator.get_config()
  folder = examples.folder('portfolio')
  config.model.path = f'{folder}/checkpoint'
  config.data.train_files = (f'{folder}/train.jsonl',)
  config.data.val_files = (f'{folder}/heldout.jsonl',)
  environment = examples.module('portfolio.environment')
  config.environment.name = f'{environment}:Portfolio'
  config.environment.max_turns = 4
  config.optim.lr = 1e-3
  config.trainer.total_training_steps = 60
  # Evaluated as it samples, as there: a greedy investor whose best order is
  # 'nothing' would hide what the others have become.
  return config
