r"""GRPO on GSM8K and MATH with Qwen2.5-14B, on one GPU of 141 GB.

python -m jetrl_jax.main --config=configs/qwen14b.py \
    --config.model.path=Qwen/Qwen2.5-14B --workdir=runs/qwen14b

As qwen7b.py but for what twice the parameters ask for: masters in bfloat16,
rounded at random, and a bound on the KV cache.
Expected accuracy: not run yet. A step with random weights and 128 answers of
1538 to 3071 tokens took 93 s on an H200, exact, with 113.4 GiB at the peak
(benchmarks/results/grpo_step_peak_qwen14b_h200_2026-11-24.md).

A speed run without a checkpoint replaces model.path by
--config.model.init=random --config.model.shape=qwen2.5-14b
--config.data.tokenizer=FOLDER --config.trainer.synthetic=True.
"""

from configs import qwen7b


def get_config():
  config = qwen7b.get_config()
  # Bytes per parameter: masters 2, gradients 2, moments 2.2, FP8 weights 1; in
  # float32 the first two would take 55 GiB more, which is not there.
  config.model.master_dtype = 'bfloat16'
  # To the nearest, an update of 1e-6 is lost on every master above 5e-4.
  config.optim.master_rounding = 'stochastic'
  config.model.remat = 'full'  # The rest is taken, see below.
  # 48 layers x 8 KV heads x 4 KiB = 192 KiB a token: 30 GiB for 128 answers of
  # 1280 tokens on average; what does not fit waits. A rollout has no gradients
  # beside it, so it stays below what an update takes.
  config.rollout.num_slots = 128
  config.rollout.kv_cache_tokens = 128 * 1280
  return config
