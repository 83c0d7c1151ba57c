"""Warm start of the study's checkpoint, from random weights, on one GPU.

python -m tools.study_task --output=runs/study/task
python -m jetrl_jax.sft --config=configs/study_sft.py

Trains a 17M-parameter Qwen2-shaped decoder on careless solutions of both
lengths (tools/study_task.py) and writes runs/study/checkpoint, 33 MiB in
bfloat16. Of what it is shown 36% is right; on one H200 it took 355 s beside
other small runs, and then answered 34% of the long problems rightly. The loss
waits at 0.012 for a step to 0.004, at update 1840 there: 1500 updates were
enough once and once not (docs/study_toy.md). In BF16, so that no arm of the
study starts in a precision that favours it.
"""

from configs import base


def get_config():
  """Returns the config."""
  config = base.get_config()
  config.model.path = 'runs/study/task/model_init'
  config.model.init = 'random'
  config.model.remat = 'none'
  config.precision.recipe = 'bf16'
  config.data.train_files = ('runs/study/task/sft.jsonl',)
  config.data.template = '{prompt}'
  config.data.max_prompt_length = 128
  # 128 + 1984 = 33 attention tiles; the long answers have up to 1950 tokens.
  config.rollout.max_response_length = 1984
  config.optim.lr = 1e-3
  config.optim.lr_warmup_steps = 100
  config.optim.lr_decay = 'cosine'
  config.optim.betas = (0.9, 0.98)
  config.optim.moments = 'float32'
  # Rows of 2112 tokens; five short sequences share one.
  config.trainer.micro_batch_size = 16
  config.sft.total_training_steps = 3000
  config.sft.batch_size = 128
  config.sft.output = 'runs/study/checkpoint'
  return config
