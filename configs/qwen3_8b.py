r"""GRPO on GSM8K and MATH with Qwen3-8B, on one GPU of 141 GB.

python -m jetrl_jax.main --config=configs/qwen3_8b.py \
    --config.model.path=Qwen/Qwen3-8B-Base --workdir=runs/qwen3_8b

As qwen7b.py but for what the larger caches ask for.
Expected accuracy: not run yet. A step with random weights and 128 answers of
1538 to 3071 tokens took 55 s on an H200, exact, with 110.8 GiB at the peak
(benchmarks/results/grpo_step_peak_qwen3_8b_h200_2026-11-24.md).

A speed run without a checkpoint replaces model.path by
--config.model.init=random --config.model.shape=qwen3-8b
--config.data.tokenizer=FOLDER --config.trainer.synthetic=True.
"""

from configs import qwen7b


def get_config():
  config = qwen7b.get_config()
  # Queries and keys would be kept twice, before and after their norms: 21 GiB
  # more, in one piece.
  config.model.remat = 'full'
  # 36 layers x 8 KV heads x 4 KiB = 144 KiB a token, 2.6 times Qwen2.5-7B's:
  # 54 GiB for 256 answers of 1536 tokens on average; beyond that some wait.
  # With precision.kv_cache_dtype='float8_e4m3fn' it is half.
  config.rollout.num_slots = 256
  config.rollout.kv_cache_tokens = 256 * 1536
  return config
