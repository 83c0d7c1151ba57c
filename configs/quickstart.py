"""Learns to add up, on two CPU cores in minutes, in the unified FP8 flow.

python -m jetrl_jax.main --config=configs/quickstart.py

Chains of small additions and subtractions with every running total written
out. Starts from examples/quickstart/checkpoint (see quickstart_sft.py).

Expected: held-out accuracy from 43.4% to 87.5% with jax 0.10.2, to 85.2% with
0.12.0.1 (benchmarks/results/unified_quickstart_seed0_cpu_jax*_2026-11-25),
mismatch 0, two to three minutes on two idle cores of a server. An earlier
version reached 85 to 89% with seeds 1 to 3
(benchmarks/results/quickstart_seed*_cpu_2026-11-21.jsonl). Another version of
jax or another processor rounds otherwise, so that learning takes another path.
At lr 1e-4 the curve is noisier; 3e-4 collapses.
"""

from configs import base
from jetrl_jax.config import examples


def get_config():
  """Returns the config."""
  config = base.get_config()
  folder = examples.folder('quickstart')
  config.model.path = f'{folder}/checkpoint'
  # Short sequences: a 64-token tile would be mostly padding.
  config.model.attention_tile = 16
  config.model.remat = 'none'
  config.data.train_files = (f'{folder}/train.jsonl',)
  config.data.val_files = (f'{folder}/heldout.jsonl',)
  config.data.template = '{prompt}'
  config.data.max_prompt_length = 16
  config.reward.functions = ('gsm8k',)
  config.rollout.num_generations = 8
  config.rollout.max_response_length = 32
  config.rollout.num_slots = 128
  config.optim.lr = 5e-5
  config.optim.lr_warmup_steps = 10
  config.optim.betas = (0.9, 0.98)
  config.trainer.train_batch_size = 16
  config.trainer.mini_batch_size = 16
  config.trainer.micro_batch_size = 128
  config.trainer.total_training_steps = 60
  # FP8 moments are for memory; here they would cost compile time only.
  config.optim.moments = 'float32'
  config.trainer.test_freq = 10
  config.trainer.save_freq = 20
  return config
