"""Warm start of the portfolio example's checkpoint.

nice python -m jetrl_jax.sft --config=configs/portfolio_sft.py

Trains a 0.14M-parameter Qwen2-shaped decoder from scratch on the random orders
of examples/portfolio/sft.jsonl (never on held-out markets) and writes
runs/portfolio_warm/checkpoint. The committed one,
examples/portfolio/checkpoint, was made so.
"""

from configs import calculator_sft
from jetrl_jax.config import examples


def get_config():
  """Returns the config: that of the calculator's, on other files."""
  config = calculator_sft.get_config()
  folder = examples.folder('portfolio')
  config.model.path = f'{folder}/model_init'
  config.data.train_files = (f'{folder}/sft.jsonl',)
  config.sft.total_training_steps = 300
  config.sft.output = 'runs/portfolio_warm/checkpoint'
  return config
