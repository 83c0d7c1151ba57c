r"""Trains verl's GRPO, with vLLM, on the main cell of the study.

    CUDA_VISIBLE_DEVICES=0 RAY_AUTH_MODE=disabled NCCL_NVLS_ENABLE=0 \
        VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_USE_DEEP_GEMM=0 \
        VERL_FILE_LOGGER_PATH=OUT.jsonl python -m benchmarks.grpo_in_verl \
        --checkpoint=HF --train=train.jsonl --test=test.jsonl \
        --folder=FOLDER --steps=5 -- ray_kwargs.ray_init.num_cpus=16

Those are the variables, and the number of CPUs for Ray, of the run in
benchmarks/results/verl_five_steps_qwen0_5b_h100_2026-11-27.md. This script was
made of the one that ran there; as it is here it has not run on a GPU.

What configs/qwen0_5b.py sets is set here too: 64 prompts x 8 answers of at most
512 tokens, one update a step, AdamW, 2e-6, no KL term. Rewards and held-out
answers are judged by our `math`. For speed: packed rows, log-probs fused with
the head (`use_fused_kernels`), micro-batches by tokens, and vLLM that keeps its
weights and cache. FlashAttention comes from torch (`varlen_in_verl.py`), since
the package flash_attn has to be compiled.

verl's own logger writes each step to VERL_FILE_LOGGER_PATH. What stands after
`--` is passed on to verl, after ours. Run it on one GPU while `study.run` runs
arms of `gsm8k` on others of the same host.
"""

import os
import pathlib
import sys

from absl import app, flags

from benchmarks import verl_settings

_CHECKPOINT = flags.DEFINE_string('checkpoint', None, 'Folder.')
_TRAIN = flags.DEFINE_string('train', None, 'JSONL with question and answer.')
_TEST = flags.DEFINE_string('test', None, 'The same, held out.')
_FOLDER = flags.DEFINE_string('folder', None, 'For files that verl reads.')
_STEPS = flags.DEFINE_integer('steps', 200, 'Updates.')
_EVERY = flags.DEFINE_integer('every', 20, 'Steps between evaluations.')
_MEMORY = flags.DEFINE_float('memory', 0.25, "vLLM's share of the GPU.")
_TOKENS = flags.DEFINE_integer('micro_tokens', 16384, 'Of a micro-batch.')


def main(argv):
  """Writes verl's files, and becomes verl."""
  folder = pathlib.Path(_FOLDER.value).absolute()
  folder.mkdir(parents=True, exist_ok=True)
  # verl imports this module in each worker.
  (folder / 'jetrl_external.py').write_text(
      'from benchmarks import varlen_in_verl\n\nvarlen_in_verl.register()\n'
  )
  found = verl_settings.settings(
      _CHECKPOINT.value,
      verl_settings.parquet(_TRAIN.value, folder / 'train.parquet'),
      verl_settings.parquet(_TEST.value, folder / 'test.parquet'),
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
  command += [
      f'trainer.default_local_dir={folder}/checkpoints',
      # By default Hydra writes into the working directory.
      f'hydra.run.dir={folder}/hydra',
      *argv[1:],
  ]
  os.execvpe(sys.executable, command, env)


if __name__ == '__main__':
  flags.mark_flags_as_required(['checkpoint', 'train', 'test', 'folder'])
  app.run(main)
