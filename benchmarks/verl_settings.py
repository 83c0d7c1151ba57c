"""The main cell of the study in verl's words: its settings and its problems.

Used by `grpo_in_verl.py`; it has no flags, so that tests can import it.
"""

import pathlib

from benchmarks import gsm8k, varlen_in_verl
from benchmarks.gsm8k import ANSWERS, PROMPTS, TOKENS


def settings(
    checkpoint: str,
    train: str,
    test: str,
    *,
    steps: int,
    every: int,
    memory: float,
    micro_tokens: int,
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


def parquet(file: str, output: pathlib.Path) -> str:
  """Writes problems in the columns that verl reads; returns the file."""
  import pyarrow
  import pyarrow.parquet

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
  pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), output)
  return str(output)
