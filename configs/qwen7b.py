r"""GRPO on GSM8K and MATH with Qwen2.5-7B, on one GPU of 141 GB.

python -m jetrl_jax.main --config=configs/qwen7b.py \
    --config.model.path=Qwen/Qwen2.5-7B --workdir=runs/qwen7b

Follows Jet-RL (arXiv:2601.14243): GSM8K + MATH in one FP8 flow, with 3072
response tokens where the paper has 8192.
Expected accuracy: not run yet. A step with random weights and 256 answers of
1025 to 2048 tokens took 39.4 s on an H200, exact, 37.4 s with
--config.precision.kv_cache_dtype=float8_e4m3fn, and 58.9 s with
--config.precision.recipe=bf16. Its peak was 94 GiB
(benchmarks/results/grpo_step_one_update_qwen7b_h200_2026-11-29.md). For answers
of 3072 tokens `--dry_run --dry_run_device='NVIDIA H200'` adds up 98.

The files below data/: see docs/data.md. A speed run without a checkpoint
replaces model.path by --config.model.init=random
--config.model.shape=qwen2.5-7b --config.data.tokenizer=FOLDER
--config.trainer.synthetic=True.
"""

from configs import base


def get_config():
  config = base.get_config()
  # Columns question and answer in all files: one pair of keys serves them all.
  config.data.train_files = (
      'data/gsm8k_train.jsonl',
      'data/math_train.jsonl',
  )
  config.data.val_files = ('data/gsm8k_test.jsonl', 'data/math500.jsonl')
  # The reward looks for the last \boxed{}; it reads `#### 18` too.
  config.data.instruction = (
      "\nLet's think step by step and put the final answer within \\boxed{}."
  )
  # The backward pass keeps what attention made, in the room of the KV cache,
  # which is free while it runs.
  config.model.remat = 'selective'
  # 2048 x 152064 float32 logits are 1.2 GB.
  config.model.logit_chunk_rows = 2048
  config.data.max_prompt_length = 1024
  config.rollout.max_response_length = 3072
  # A slot for every answer of a step, so that no second wave waits for the
  # longest of the first. BF16 caches of 2048 tokens each on average: 28 layers
  # x 2 KiB = 56 KiB a token, 28 GiB in all; where answers are longer, those
  # that started last wait. The other large tenants are, in bytes per
  # parameter, masters 4, moments 2.2, FP8 weights 1, and while it updates
  # gradients 4.
  config.rollout.num_slots = 256
  config.rollout.kv_cache_tokens = 256 * 2048
  config.rollout.num_generations = 8
  config.trainer.train_batch_size = 32
  # One optimiser step per rollout: with several a smaller model learned worse
  # in FP8 than in BF16 (docs/numerics.md).
  config.trainer.mini_batch_size = 32
  # 4 x 4096 tokens in one row: one of 4096 holds a single sequence of more than
  # 2048, and padding.
  config.trainer.micro_batch_size = 4
  config.trainer.packed_rows = 1
  config.optim.lr = 1e-6
  config.optim.moments = 'fp8'
  config.trainer.total_training_steps = 200
  config.trainer.test_freq = 20
  return config
