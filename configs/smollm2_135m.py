r"""GRPO on sums with SmolLM2-135M-Instruct: a real model, small.

python -m jetrl_jax.main --config=configs/smollm2_135m.py \
    --config.model.path=HuggingFaceTB/SmolLM2-135M-Instruct \
    --workdir=runs/smollm2_135m

A real checkpoint with its own tokenizer and chat template, at the least cost:
Llama's layout, tied embeddings, head size 64. The problems are examples/sums:
"What is 12 + 7?". The model knows some of the sums and talks around most. (Of
GSM8K it solves hardly any, so it would learn nothing there:
configs/qwen0_5b.py is for that.)

Expected: a third of the held-out sums right at the start. Means over ten seeds
at steps 0, 10, ... 60: 38, 86, 86, 89, 90, 88 and 91 percent as it is shipped,
in FP8, and 33, 54, 83, 89, 89, 93 and 94 in bf16. FP8 learns sooner and ends 2
points lower (95%: 0.1 to 3.8), and so does bf16 from spread masters
(docs/study.md, benchmarks/results/study/sums_h100_2026-11-26). Seeds differ by
2.4 points (standard deviation). No token was unequal. A step takes 0.47 s in
FP8 and 0.19 in bf16 on an H100, after a start of one to two minutes in FP8. The
peak is 2.9 and 3.0 GiB
(benchmarks/results/smollm2_135m_sums_mosaic_h100_2026-11-26.md). By --dry_run
it takes 10 GiB with jax 0.10.2 and 3.4 with 0.12.0.1, as a CPU compiles it.

On two busy CPU cores four steps ran, in bf16, with 8 prompts of 8 answers and
no warm-up: 117 to 194 s each, no unequal token, 5 to 19% of the samples right.
That is too few to see learning
(benchmarks/results/smollm2_135m_sums_bf16_cpu_2026-11-25.jsonl, jax 0.10.2,
from a checkpoint made dense again from 4 bits). FP8, which a CPU emulates, is
about ten times slower.
"""

from configs import base
from jetrl_jax.config import examples


def get_config():
  config = base.get_config()
  folder = examples.folder('sums')
  config.data.train_files = (f'{folder}/train.jsonl',)
  config.data.val_files = (f'{folder}/heldout.jsonl',)
  config.data.instruction = ' Answer with the number alone.'
  # With the model's own system message a prompt has about 50 tokens.
  config.data.max_prompt_length = 64
  config.precision.kv_cache_dtype = 'float8_e4m3fn'
  # 'gsm8k' and 'math' are strict, and this model does not write their form.
  config.reward.functions = ('last_number',)
  config.rollout.max_response_length = 16
  config.rollout.num_slots = 256
  config.rollout.num_generations = 16
  config.trainer.train_batch_size = 16
  config.trainer.mini_batch_size = 16
  config.trainer.micro_batch_size = 64
  # 12 bytes for each of 135 million parameters: nothing to save.
  config.optim.moments = 'float32'
  config.optim.lr = 1e-5
  config.optim.lr_warmup_steps = 5
  config.trainer.total_training_steps = 60
  config.trainer.test_freq = 10
  return config
