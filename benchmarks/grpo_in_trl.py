r"""Trains TRL's GRPO, with vLLM in its process, on the main cell of the study.

    python -m benchmarks.grpo_in_trl --checkpoint=FOLDER --train=train.jsonl \
        --test=test.jsonl --micro_batch=32 --liger --output=OUT.jsonl

What configs/qwen0_5b.py sets is set here too: 64 prompts x 8 answers of at most
512 tokens, one update a step, the mean over all tokens, AdamW, 2e-6, no KL
term. Masters are float32 and dots BF16, as TRL has them by default, and so is
its correction of what vLLM samples (`sequence_mask`). Rewards and held-out
answers are judged by our `math`. The test problems are answered greedily by the
same vLLM, after its weights are made the trained ones.

Each line of the output has `wall_s`, seconds since the start of the process.
Lines with `accuracy` are evaluations, the others steps. Run it on one GPU while
`study.run` runs arms of `gsm8k` on others of the same host.
"""

import json
import pathlib
import time

from absl import app, flags

from benchmarks import gsm8k

# Before TRL and vLLM are imported.
STARTED = time.monotonic()
# What is kept of TRL's log of a step.
KEPT = (
    'reward',
    'completions/mean_length',
    'completions/clipped_ratio',
    'step_time',
    'entropy',
    'grad_norm',
    'sampling/sampling_logp_difference/mean',
    'sampling/sampling_logp_difference/max',
)

_CHECKPOINT = flags.DEFINE_string('checkpoint', None, 'Folder.')
_TRAIN = flags.DEFINE_string('train', None, 'JSONL with question and answer.')
_TEST = flags.DEFINE_string('test', None, 'The same, held out.')
_STEPS = flags.DEFINE_integer('steps', 200, 'Updates.')
_EVERY = flags.DEFINE_integer('every', 20, 'Steps between evaluations.')
_LIMIT = flags.DEFINE_float('limit_s', 1e9, 'Ends after the step at this time.')
_MICRO = flags.DEFINE_integer('micro_batch', 16, 'Answers a micro-batch.')
_LIGER = flags.DEFINE_bool('liger', False, 'With Liger kernels.')
_MEMORY = flags.DEFINE_float('memory', 0.2, "vLLM's share of the GPU.")
_SEED = flags.DEFINE_integer('seed', 1, 'Order of prompts.')
_OUTPUT = flags.DEFINE_string('output', None, 'JSONL.')


def reward(completions, gold, **_):
  """Scores answers, with the signature that TRL asks for."""
  texts = (completion[0]['content'] for completion in completions)
  return [gsm8k.score(*pair) for pair in zip(texts, gold, strict=True)]


def held_out(trainer, test: list[dict]) -> float:
  """Returns the accuracy of greedy answers by vLLM with trained weights."""
  import vllm

  trainer.vllm_generation.sync_weights()
  tokenizer = trainer.processing_class
  prompts = [
      tokenizer.apply_chat_template(
          row['prompt'], add_generation_prompt=True, return_dict=True
      )['input_ids']
      for row in test
  ]
  outputs = trainer.vllm_generation.llm.generate(
      [{'prompt_token_ids': tokens} for tokens in prompts],
      vllm.SamplingParams(temperature=0.0, max_tokens=gsm8k.TOKENS),
      use_tqdm=False,
  )
  scores = [
      gsm8k.score(output.outputs[0].text, row['gold'])
      for output, row in zip(outputs, test, strict=True)
  ]
  return sum(scores) / len(scores)


def main(_):
  """Trains, and writes a line per step and evaluation."""
  import datasets
  import torch
  import transformers
  import trl

  def note(**fields) -> None:
    line = {'wall_s': round(time.monotonic() - STARTED, 2), **fields}
    with pathlib.Path(_OUTPUT.value).open('a') as file:
      file.write(json.dumps(line) + '\n')

  test = gsm8k.read(_TEST.value)

  class Watch(transformers.TrainerCallback):
    """Evaluates, and notes each step."""

    def evaluate(self, step: int) -> None:
      began = time.monotonic()
      accuracy = held_out(trainer, test)
      seconds = round(time.monotonic() - began, 2)
      note(step=step, accuracy=accuracy, seconds=seconds)

    def on_train_begin(self, args, state, control, **_):
      note(step=0, ready=True)
      self.evaluate(0)

    def on_log(self, args, state, control, logs=None, **_):
      found = {k: float(logs[k]) for k in KEPT if k in (logs or {})}
      if 'reward' in found:
        note(step=state.global_step, **found)

    def on_step_end(self, args, state, control, **_):
      late = time.monotonic() - STARTED > _LIMIT.value
      if state.global_step % _EVERY.value == 0:
        self.evaluate(state.global_step)
      control.should_training_stop |= late

  args = trl.GRPOConfig(
      output_dir=str(pathlib.Path(_OUTPUT.value).with_suffix('')),
      per_device_train_batch_size=_MICRO.value,
      gradient_accumulation_steps=gsm8k.PROMPTS * gsm8k.ANSWERS // _MICRO.value,
      num_generations=gsm8k.ANSWERS,
      max_completion_length=gsm8k.TOKENS,
      learning_rate=2e-6,
      lr_scheduler_type='constant',
      weight_decay=0.01,
      max_grad_norm=1.0,
      max_steps=_STEPS.value,
      seed=_SEED.value,
      gradient_checkpointing=False,
      use_liger_kernel=_LIGER.value,
      use_vllm=True,
      vllm_mode='colocate',
      vllm_gpu_memory_utilization=_MEMORY.value,
      vllm_max_model_length=2 * gsm8k.TOKENS,
      logging_steps=1,
      save_strategy='no',
      report_to=[],
      disable_tqdm=True,
  )
  trainer = trl.GRPOTrainer(
      model=_CHECKPOINT.value,
      reward_funcs=reward,
      args=args,
      train_dataset=datasets.Dataset.from_list(gsm8k.read(_TRAIN.value)),
      processing_class=transformers.AutoTokenizer.from_pretrained(
          _CHECKPOINT.value
      ),
      callbacks=[Watch()],
  )
  gpu = torch.cuda.is_available()
  note(
      versions={m.__name__: m.__version__ for m in (torch, transformers, trl)},
      device=torch.cuda.get_device_name() if gpu else 'cpu',
      micro_batch=_MICRO.value,
      liger=_LIGER.value,
      masters=str(next(trainer.model.parameters()).dtype),
      attention=trainer.model.config._attn_implementation,
  )
  trainer.train()
  peak = torch.cuda.max_memory_allocated() / 2**30 if gpu else 0
  note(ended=True, peak_gib=round(peak, 1))


if __name__ == '__main__':
  flags.mark_flags_as_required(['checkpoint', 'train', 'test', 'output'])
  app.run(main)
