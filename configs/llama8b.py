r"""GRPO on GSM8K and MATH with Llama-3.1-8B-Instruct, on one GPU of 141 GB.

XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 python -m jetrl_jax.main \
    --config=configs/llama8b.py \
    --config.model.path=meta-llama/Llama-3.1-8B-Instruct \
    --workdir=runs/llama8b

As qwen7b.py but for what the larger caches ask for. The base model's tokenizer
has no chat template: with it, set data.template to a text with '{prompt}'.
Expected accuracy and cost: not run yet.

A speed run without a checkpoint replaces model.path by
--config.model.init=random --config.model.shape=llama-3.1-8b
--config.data.tokenizer=FOLDER --config.trainer.synthetic=True.
"""

from configs import qwen7b


def get_config():
  config = qwen7b.get_config()
  # 32 layers x 8 KV heads: 4096 tokens x 32 x 4 KiB = 512 MiB a slot, 32 GiB
  # for 64.
  config.rollout.num_slots = 64
  return config
