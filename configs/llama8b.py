r"""GRPO on GSM8K and MATH with Llama-3.1-8B-Instruct, on one GPU of 141 GB.

python -m jetrl_jax.main --config=configs/llama8b.py \
    --config.model.path=meta-llama/Llama-3.1-8B-Instruct \
    --workdir=runs/llama8b

As qwen7b.py but for what the larger caches ask for. The base model's tokenizer
has no chat template: with it, set data.template to a text with '{prompt}'.
Expected accuracy: not run yet. A step with random weights and 128 answers of
1538 to 3071 tokens took 53 s on an H200, exact, with 108.5 GiB at the peak
(benchmarks/results/grpo_step_peak_llama8b_h200_2026-11-24.md).

A speed run without a checkpoint replaces model.path by
--config.model.init=random --config.model.shape=llama-3.1-8b
--config.data.tokenizer=FOLDER --config.trainer.synthetic=True.
"""

from configs import qwen7b


def get_config():
  config = qwen7b.get_config()
  # 32 layers x 8 KV heads x 4 KiB = 128 KiB a token: 40 GiB for 256 answers of
  # 1280 tokens on average; beyond that some wait. With
  # precision.kv_cache_dtype='float8_e4m3fn' it is half.
  config.rollout.num_slots = 256
  config.rollout.kv_cache_tokens = 256 * 1280
  return config
