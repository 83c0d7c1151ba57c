"""Makes what the study starts from: the task's files and the warm start.

    python -m study.prepare --folder=runs/study

runs `tools.study_task` and `jetrl_jax.sft` (configs/study_sft.py); what is
there already is kept. With --tiny, a decoder of 0.2M parameters that learns
for a few steps on short answers: enough to run every command on a CPU, too
little to answer anything.
"""

import argparse
import pathlib
import re
import subprocess
import sys

from jetrl_jax.core.files import user_path
from tools import command

# Lengths of the tiny task, in checks: about 45 and 110 tokens.
TINY_CHECKS = (0, 2)
CHECKS = (1, 10)
TINY_TASK = ('--tiny', '--people=3', '--steps=2', '--others=1', '--checks=0,2')
TINY_TASK += ('--sft=256', '--train=64', '--heldout=16')
TINY_SFT = {
    'model.attention_tile': 16,
    'data.max_prompt_length': 64,
    'rollout.max_response_length': 128,
    'trainer.micro_batch_size': 8,
    'optim.lr_warmup_steps': 5,
    'sft.batch_size': 16,
    'sft.total_training_steps': 20,
    'precision.compute_dtype': 'float32',
}


def commands(
    folder: pathlib.Path, *, tiny: bool, more: dict[str, str]
) -> dict[str, list[str]]:
  """Returns the two commands, by the folder that each makes.

  Args:
    folder: of the study.
    tiny: sizes for a CPU.
    more: settings of the warm start, by config name.
  """
  task = [f'--output={folder / "task"}', *(TINY_TASK if tiny else ())]
  settings = {
      'model.path': folder / 'task' / 'model_init',
      'data.train_files': (str(folder / 'task' / 'sft.jsonl'),),
      'sft.output': folder / 'checkpoint',
      'compile_cache_dir': folder / 'compiled',
      **(TINY_SFT if tiny else {}),
      **more,
  }
  flags = [f'--config.{name}={value}' for name, value in settings.items()]
  return {
      'task': ['tools.study_task', *task],
      'checkpoint': [
          'jetrl_jax.sft',
          '--config=configs/study_sft.py',
          f'--workdir={folder / "sft"}',
          *flags,
      ],
  }


def parse_settings(pairs: list[str]) -> dict[str, str]:
  """Returns name -> value of --set.

  Raises:
    ValueError: one has no name or no value.
  """
  for pair in pairs:
    if not re.fullmatch(r'[^=]+=.*', pair):
      raise ValueError(
          f'--set={pair} must be NAME=VALUE, such as --set=optim.lr=1e-5'
      )
  return dict(pair.split('=', 1) for pair in pairs)


@command.in_one_sentence
def main() -> None:
  """Runs the command line."""
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  parser.add_argument('--folder', type=user_path, required=True)
  parser.add_argument('--tiny', action='store_true')
  parser.add_argument(
      '--set',
      action='append',
      default=[],
      metavar='NAME=VALUE',
      help='a config setting of the warm start',
  )
  flags = parser.parse_args()
  more = parse_settings(flags.set)
  todo = commands(flags.folder, tiny=flags.tiny, more=more)
  for made, (module, *arguments) in todo.items():
    if not (flags.folder / made).exists():
      done = subprocess.run([sys.executable, '-m', module, *arguments])
      if done.returncode:
        sys.exit(f'error: {module} did not make {flags.folder / made}')


if __name__ == '__main__':
  main()
