r"""GRPO on GSM8K with SmolLM2-135M-Instruct, on one small GPU.

python -m jetrl_jax.main --config=configs/smollm2_135m.py \
    --config.model.path=HuggingFaceTB/SmolLM2-135M-Instruct \
    --workdir=runs/smollm2_135m

A real model at the least cost: Llama's layout, tied embeddings, head size 64,
and about 6 GiB by --dry_run.
Expected accuracy and cost: not run as it stands. So small a model solves few
of these problems, so many groups will have no learning signal at first: the
reward takes the last number of an answer in any form, and each prompt has 16
answers. It shows a run with all its parts and no good model.

On a CPU, FP8 is emulated and about ten times slower than
--config.precision.recipe=bf16, and rows of full length take the memory of all
their attention scores: --config.trainer.packed_rows=0
--config.trainer.micro_batch_size=2, short responses and a handful of prompts.

The files below data/ are GSM8K's own, see docs/data.md.
"""

from configs import base


def get_config():
  config = base.get_config()
  config.data.train_files = ('data/gsm8k_train.jsonl',)
  config.data.val_files = ('data/gsm8k_test.jsonl',)
  config.data.instruction = (
      '\nLet\'s think step by step and put the final answer after "####".'
  )
  config.data.max_prompt_length = 512
  # 'gsm8k' and 'math' are strict, and this model seldom writes their form.
  config.reward.functions = ('last_number',)
  config.rollout.max_response_length = 256
  config.rollout.num_slots = 256
  config.rollout.num_generations = 16
  config.trainer.train_batch_size = 32
  config.trainer.mini_batch_size = 32
  # 16 x 768 tokens in one row, as sequences are far shorter than that.
  config.trainer.micro_batch_size = 16
  config.trainer.packed_rows = 1
  # 12 bytes for each of 135 million parameters: nothing to save.
  config.optim.moments = 'float32'
  config.optim.lr = 2e-6
  config.trainer.total_training_steps = 200
  config.trainer.test_freq = 20
  return config
