"""Reinforcement learning of the study: short answers, in the default flow.

python -m jetrl_jax.main --config=configs/study.py --workdir=runs/study/one

Word problems whose sums the warm start (configs/study_sft.py) gets wrong half
of the time where they cross a ten. study/run.py runs this config in all arms,
seeds and lengths (docs/study_toy.md). The long answers of the same problems are

    --config.data.train_files="('runs/study/task/train_10.jsonl',)"
    --config.data.val_files="('runs/study/task/heldout_10.jsonl',)"
    --config.rollout.max_response_length=1984

Measured on one H200: 79 s for 100 steps of short answers with start-up and
compilation, alone (`jetrl`, commit d79ae0f); in all six arms of
docs/study_toy.md the share of right answers goes from 0.31 to 0.88-0.93.
"""

from configs import base


def get_config():
  """Returns the config."""
  config = base.get_config()
  folder = 'runs/study'
  config.model.path = f'{folder}/checkpoint'
  config.model.remat = 'none'
  config.data.train_files = (f'{folder}/task/train_1.jsonl',)
  config.data.val_files = (f'{folder}/task/heldout_1.jsonl',)
  config.data.template = '{prompt}'
  config.data.max_prompt_length = 128
  config.reward.functions = ('gsm8k',)
  config.rollout.num_generations = 8
  # 128 + 320 = 7 attention tiles; right answers have up to 280 tokens.
  config.rollout.max_response_length = 320
  # A whole batch at once: a decode step costs the same for 16 and 256 slots.
  config.rollout.num_slots = 256
  config.optim.lr = 2e-5
  config.optim.lr_warmup_steps = 10
  config.optim.betas = (0.9, 0.98)
  # FP8 moments would be one more 8-bit effect in every arm.
  config.optim.moments = 'float32'
  config.trainer.train_batch_size = 32
  # Two updates per rollout: with one, pi_old is pi and no ratio is ever
  # clipped, in any arm.
  config.trainer.mini_batch_size = 16
  # 29k tokens, about 5 GB without recomputation.
  config.trainer.micro_batch_size = 64
  config.trainer.total_training_steps = 100
  config.trainer.test_freq = 10
  # As it samples, which is what is trained, and less coarse than greedy.
  config.trainer.val_temperature = 1.0
  config.trainer.val_num_generations = 2
  config.trainer.val_recipes = ('bf16',)
  # An arm that is stopped goes on from here.
  config.trainer.save_freq = 20
  config.trainer.keep_latest = 1
  config.trainer.keep_best = 0
  config.trainer.save_rollouts = False
  return config
