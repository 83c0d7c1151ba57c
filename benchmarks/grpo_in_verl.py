r"""Trains verl's GRPO, with vLLM, on the main cell of the study.

    VERL_FILE_LOGGER_PATH=OUT.jsonl python -m benchmarks.grpo_in_verl \
        --checkpoint=FOLDER --train=train.jsonl --test=test.jsonl \
        --folder=FOLDER

What configs/qwen0_5b.py sets is set here too: 64 prompts x 8 answers of at most
512 tokens, one update a step, AdamW, 2e-6, no KL term. Rewards and held-out
answers are judged by our `math`. For speed: packed rows, log-probs fused with
the head (`use_fused_kernels`), micro-batches by tokens, and vLLM that keeps its
weights and cache. FlashAttention comes from torch (`varlen_in_verl.py`), since
the package flash_attn has to be compiled.

verl's own logger writes each step to VERL_FILE_LOGGER_PATH. What stands behind
`--` is passed on to verl, after ours. Run it on one GPU while `study.run` runs
arms of `gsm8k` on others of the same host.
"""

import os
import pathlib
import sys

from absl import app, flags

from benchmarks import gsm8k, varlen_in_verl
from benchmarks.gsm8k import ANSWERS, PROMPTS, TOKENS

_CHECKPOINT = flags.DEFINE_string('checkpoint', None, 'Folder.')
_TRAIN = flags.DEFINE_string('train', None, 'JSONL with question and answer.')
_TEST = flags.DEFINE_string('test', None, 'The same, held out.')
_FOLDER = flags.DEFINE_string('folder', None, 'For files that verl reads.')
_STEPS = flags.DEFINE_integer('steps', 200, 'Updates.')
_EVERY = flags.DEFINE_integer('every', 20, 'Steps between evaluations.')
_MEMORY = flags.DEFINE_float('memory', 0.25, "vLLM's share of the GPU.")
_TOKENS = flags.DEFINE_integer('micro_tokens', 16384, 'Of a micro-batch.')


def settings(
    checkpoint: str,
    train: str,
    test: str,
    *,
    steps: int = 200,
    every: int = 20,
    memory: float = 0.25,
    micro_tokens: int = 16384,
) -> dict[str, object]:
  """Returns verl's settings, by its names.

  Args:
    checkpoint: folder in Hugging Face's format.
    train: Parquet.
    test: Parquet.
    steps: updates.
    every: steps between evaluations.
    memory: vLLM's share of the GPU.
    micro_tokens: of a micro-batch of the update; log-probs take twice as many.
  """
  actor, rollout, model = (
      f'actor_rollout_ref.{part}' for part in ('actor', 'rollout', 'model')
  )
  return {
      'algorithm.adv_estimator': 'grpo',
      'algorithm.use_kl_in_reward': False,
      'data.train_files': train,
      'data.val_files': test,
      'data.train_batch_size': PROMPTS,
      'data.max_prompt_length': TOKENS,
      'data.max_response_length': TOKENS,
      'data.filter_overlong_prompts': False,
      'data.truncation': 'error',
      'data.dataloader_num_workers': 2,
      f'{model}.path': checkpoint,
      f'{model}.enable_gradient_checkpointing': False,
      f'{model}.use_remove_padding': True,
      f'+{model}.override_config.attn_implementation': varlen_in_verl.NAME,
      f'{model}.external_lib': 'jetrl_external',
      f'{model}.use_fused_kernels': True,
      f'{model}.fused_kernel_options.impl_backend': 'torch',
      f'{actor}.optim.lr': 2e-6,
      f'{actor}.optim.weight_decay': 0.01,
      f'{actor}.ppo_mini_batch_size': PROMPTS,
      f'{actor}.use_dynamic_bsz': True,
      f'{actor}.ppo_max_token_len_per_gpu': micro_tokens,
      f'{actor}.use_kl_loss': False,
      f'{actor}.entropy_coeff': 0,
      f'{actor}.grad_clip': 1.0,
      f'{rollout}.name': 'vllm',
      f'{rollout}.n': ANSWERS,
      f'{rollout}.tensor_model_parallel_size': 1,
      f'{rollout}.gpu_memory_utilization': memory,
      f'{rollout}.log_prob_max_token_len_per_gpu': 2 * micro_tokens,
      f'{rollout}.max_model_len': 2 * TOKENS,
      f'{rollout}.max_num_seqs': PROMPTS * ANSWERS,
      f'{rollout}.max_num_batched_tokens': 16384,
      f'{rollout}.free_cache_engine': False,
      f'{rollout}.calculate_log_probs': True,
      f'{rollout}.val_kwargs.do_sample': False,
      f'{rollout}.val_kwargs.temperature': 0,
      f'{rollout}.agent.num_workers': 4,
      'transfer_queue.backend.SimpleStorage.num_data_storage_units': 2,
      'reward.num_workers': 8,
      'reward.custom_reward_function.path': gsm8k.__file__,
      'reward.custom_reward_function.name': gsm8k.score_in_verl.__name__,
      'trainer.critic_warmup': 0,
      'trainer.logger': '["console","file"]',
      'trainer.project_name': 'race',
      'trainer.experiment_name': 'verl',
      'trainer.n_gpus_per_node': 1,
      'trainer.nnodes': 1,
      'trainer.save_freq': -1,
      'trainer.test_freq': every,
      'trainer.total_training_steps': steps,
      'trainer.total_epochs': 10,
      'trainer.val_before_train': False,
  }


def _parquet(file: str, output: pathlib.Path) -> str:
  """Writes problems in the columns that verl reads; returns the file."""
  import pandas as pd

  rows = [
      {
          'data_source': 'gsm8k',
          'prompt': row['prompt'],
          'ability': 'math',
          'reward_model': {'style': 'rule', 'ground_truth': row['gold']},
          'extra_info': {'index': i},
      }
      for i, row in enumerate(gsm8k.read(file))
  ]
  pd.DataFrame(rows).to_parquet(output)
  return str(output)


def main(argv):
  """Writes verl's files, and becomes verl."""
  folder = pathlib.Path(_FOLDER.value).absolute()
  folder.mkdir(parents=True, exist_ok=True)
  # verl imports this module in each worker.
  (folder / 'jetrl_external.py').write_text(
      'from benchmarks import varlen_in_verl\n\nvarlen_in_verl.register()\n'
  )
  found = settings(
      _CHECKPOINT.value,
      _parquet(_TRAIN.value, folder / 'train.parquet'),
      _parquet(_TEST.value, folder / 'test.parquet'),
      steps=_STEPS.value,
      every=_EVERY.value,
      memory=_MEMORY.value,
      micro_tokens=_TOKENS.value,
  )
  paths = [str(folder), os.getcwd(), os.environ.get('PYTHONPATH', '')]
  # verl's workers import JAX with our reward; the GPU is vLLM's and torch's.
  env = os.environ | {
      'PYTHONPATH': os.pathsep.join(path for path in paths if path),
      'JAX_PLATFORMS': 'cpu',
  }
  command = [sys.executable, '-m', 'verl.trainer.main_ppo']
  command += [f'{name}={value}' for name, value in found.items()]
  command += [f'trainer.default_local_dir={folder}/checkpoints', *argv[1:]]
  os.execvpe(sys.executable, command, env)


if __name__ == '__main__':
  flags.mark_flags_as_required(['checkpoint', 'train', 'test', 'folder'])
  app.run(main)
