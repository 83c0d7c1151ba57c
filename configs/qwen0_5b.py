r"""GRPO on GSM8K with Qwen2.5-0.5B-Instruct, on one GPU.

python -m jetrl_jax.main --config=configs/qwen0_5b.py \
    --config.model.path=Qwen/Qwen2.5-0.5B-Instruct --workdir=runs/qwen0_5b

The smallest real run: tied embeddings, head size 64. It is the main cell of
docs/study.md. Expected: with Qwen2.5-Coder-0.5B-Instruct, made dense again
from a 4-bit file, its 200 steps took GSM8K's test accuracy from 24.2 to 44.9
percent, greedily in FP8 (seed 1; 34.8 after 40 steps, 39.0 after 100), in a
quarter of an hour on an H100: 144 s to the end of step 0, then 3.5 s a step,
and no unequal token
(benchmarks/results/study/gsm8k_h100_2026-11-25/start.md). Seeds 2 to 5 went
from 24.9 to 39.9, from 24.6 to 38.7, from 25.2 to 43.1 and from 25.6 to 43.5,
in 13 to 14 minutes, 2.8 to 2.9 s a step on an H200 and 3.1 on an H100 (beside
it in gsm8k_h200_2026-11-27, gsm8k_seed3_h200_2026-11-27 and
gsm8k_seeds45_h100_2026-11-27). From step 60 on that is 1.2 points below BF16,
95% from 3.1 below to 0.7 above (docs/study.md).

On a CPU, FP8 is emulated and about ten times slower than
--config.precision.recipe=bf16, and packed_rows=1 takes the memory of all
attention scores of its long row: set --config.trainer.packed_rows=0 there.

The files below data/ are GSM8K's own, see docs/data.md. A speed run without
a checkpoint replaces model.path by --config.model.init=random
--config.model.shape=qwen2.5-0.5b --config.data.tokenizer=FOLDER
--config.trainer.synthetic=True.
"""

from configs import base


def get_config():
  """Returns the config."""
  config = base.get_config()
  config.data.train_files = ('data/gsm8k_train.jsonl',)
  config.data.val_files = ('data/gsm8k_test.jsonl',)
  # The 'math' reward reads \boxed{18} and `#### 18`; GSM8K's solutions end in
  # the latter, and Qwen writes the former.
  config.data.instruction = (
      '\nPlease reason step by step, and put your final answer within'
      ' \\boxed{}.'
  )
  config.data.max_prompt_length = 512
  # FP8 keys cost this model more than its FP8 dots do, because Qwen2.5's keys
  # have large biases. `precision.smooth_k` takes most of that away; see
  # docs/numerics.md, 'Keys in 8 bits'.
  config.precision.kv_cache_dtype = 'float8_e4m3fn'
  config.rollout.max_response_length = 512
  # The whole batch at once.
  config.rollout.num_slots = 512
  config.rollout.num_generations = 8
  config.trainer.train_batch_size = 64
  config.trainer.mini_batch_size = 64
  # 32 answers in two long rows: 13 GB at most (measured with BF16 keys).
  config.trainer.micro_batch_size = 32
  config.trainer.packed_rows = 2
  # Masters, gradients and moments in float32 are 12 bytes for each of half a
  # billion parameters: nothing to save, so no codec between two steps.
  config.optim.moments = 'float32'
  config.optim.lr = 2e-6
  config.trainer.total_training_steps = 200
  config.trainer.test_freq = 20
  return config
