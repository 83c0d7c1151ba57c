r"""Runs arms x seeds of the study, several at a time on one device.

    python -m study.run --folder=runs/study --arms=gsm8k --seeds=1,2,3,4,5 \\
        --set=model.path=Qwen/Qwen2.5-Coder-0.5B-Instruct

    python -m study.prepare --folder=runs/toy
    python -m study.run --folder=runs/toy --arms=2x2,exactness --seeds=1,2,3

Every run is `python -m jetrl_jax.main` in a folder of its own, with a share of
the device's memory; --gpus=0,1 spreads them over several devices. Runs of one
seed are paired: the same checkpoint, order of prompts and random keys. After
--limit_s seconds each running one gets SIGTERM, saves and ends; the same
command goes on where they stood, and leaves alone what is finished, or has
failed by itself, whatever its settings were: other settings want another
folder. The order is that of --seeds, and of --arms within a seed.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

from jetrl_jax.core.files import user_path
from study import prepare
from study.arms import TOY, Arm, named, runs_of
from tools import command

# What a run needs for its last update, evaluation and checkpoint.
GRACE_S = 60
# In a run's folder: what `--set` gave it, by config name, as text.
SET = 'set.json'
# The long answers, in a config of short ones.
LONG = {
    'rollout.max_response_length': 1984,
    'trainer.total_training_steps': 60,
    # As many tokens per micro-batch as with short ones.
    'trainer.micro_batch_size': 16,
}
TINY = {
    'model.attention_tile': 16,
    'data.max_prompt_length': 64,
    'rollout.max_response_length': 48,
    'rollout.num_generations': 4,
    'rollout.num_slots': 16,
    'trainer.train_batch_size': 4,
    'trainer.mini_batch_size': 2,
    'trainer.micro_batch_size': 4,
    'trainer.total_training_steps': 4,
    'trainer.test_freq': 2,
    'trainer.save_freq': 2,
    'reward.num_workers': 1,
}
TINY_LONG = {'rollout.max_response_length': 128}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """What is run, and where.

  Attributes:
    folder: holds task, checkpoint, compiled programs and runs.
    config: a config file in the place of the cells' own; '' for theirs.
    more: settings of every arm, by config name, as text.
    is_tiny: sizes for a CPU.
  """

  folder: pathlib.Path
  config: str = ''
  more: dict[str, str] = dataclasses.field(default_factory=dict)
  is_tiny: bool = False

  def run_folder(self, arm: Arm, seed: int) -> pathlib.Path:
    """Returns the workdir of a run."""
    return self.folder / 'runs' / arm.name / f'seed{seed}'

  def settings(self, arm: Arm, seed: int) -> dict[str, object]:
    """Returns what differs from the config file, by config name."""
    found: dict[str, object] = {
        'seed': seed,
        'compile_cache_dir': self.folder / 'compiled',
        'trainer.val_recipes': ('bf16',),
    }
    if self.config_of(arm) == TOY.config:
      checks = prepare.TINY_CHECKS if self.is_tiny else prepare.CHECKS
      for key, split in (('train_files', 'train'), ('val_files', 'heldout')):
        file = self.folder / 'task' / f'{split}_{checks[arm.is_long]}.jsonl'
        found[f'data.{key}'] = (str(file),)
      found['model.path'] = self.folder / 'checkpoint'
      found |= TINY if self.is_tiny else {}
      if arm.is_long:
        found |= TINY_LONG if self.is_tiny else LONG
    elif arm.is_long:
      raise ValueError(
          f'arm {arm.name!r} has the long answers of {TOY.config}, which'
          f' --config={self.config} has not'
      )
    return {**found, **arm.cell.settings, **self.more, **arm.settings}

  def config_of(self, arm: Arm) -> str:
    """Returns the config file of an arm."""
    return self.config or arm.cell.config

  def check(self, arms: list[Arm]) -> None:
    """Refuses what every run would fail of.

    Args:
      arms: what is to be run.

    Raises:
      ValueError: a config file, the toy's task or checkpoint is missing, or
        an arm is made of a setting of `more`.
    """
    if 'seed' in self.more:
      raise ValueError(
          f'--set=seed={self.more["seed"]}: a run has the seed of --seeds, by'
          ' which its folder is named; give it there'
      )
    for arm in arms:
      if fixed := sorted(set(self.more) & set(arm.settings)):
        raise ValueError(
            f'--set={fixed[0]}={self.more[fixed[0]]} would do nothing: arm'
            f' {arm.name!r} is made of {arm.settings[fixed[0]]!r}; leave it out'
        )
    configs = {self.config_of(arm) for arm in arms}
    for config in configs:
      if not pathlib.Path(config).is_file():
        raise ValueError(
            f'--config={config}: there is no such file in'
            f' {pathlib.Path.cwd()}; name one that is there, such as'
            f' {TOY.config} of the clone'
        )
    real = [arm.name for arm in arms if arm.cell is not TOY]
    if real and not self.config and 'model.path' not in self.more:
      raise ValueError(
          f'arm {real[0]!r} starts from a real checkpoint; name it, such as'
          ' --set=model.path=Qwen/Qwen2.5-Coder-0.5B-Instruct'
      )
    if TOY.config not in configs:
      return
    for made, setting in (
        ('task', 'data.train_files'),
        ('checkpoint', 'model.path'),
    ):
      if setting not in self.more and not (self.folder / made).exists():
        raise ValueError(
            f'{self.folder} holds no {made}; run python -m study.prepare'
            f' --folder={self.folder}{" --tiny" * self.is_tiny} first'
        )

  def command(self, arm: Arm, seed: int) -> list[str]:
    """Returns the command line of a run."""
    return [
        sys.executable,
        '-m',
        'jetrl_jax.main',
        f'--config={self.config_of(arm)}',
        f'--workdir={self.run_folder(arm, seed)}',
        *(f'--config.{k}={v}' for k, v in self.settings(arm, seed).items()),
    ]


def read_metrics(folder: pathlib.Path) -> list[dict]:
  """Returns the lines of a workdir; one that is not whole yet is left out."""
  file = folder / 'metrics.jsonl'
  text = file.read_text(encoding='utf-8') if file.exists() else ''
  return [json.loads(line) for line in text.split('\n')[:-1]]


def steps_done(folder: pathlib.Path) -> int:
  """Returns the last step with a line in a workdir, -1 before the first."""
  return max((row['step'] for row in read_metrics(folder)), default=-1)


def is_finished(folder: pathlib.Path) -> bool:
  """Whether the run in a workdir has done all its steps and its export."""
  if not (folder / 'export').exists():
    return False
  config = json.loads((folder / 'config.json').read_text())
  return steps_done(folder) >= config['trainer']['total_training_steps']


def has_failed(folder: pathlib.Path) -> bool:
  """Whether the run in a workdir ended because its updates were not finite.

  That is the one way in which a run of the study can fail by itself. Whatever
  else ends a run (memory, a disk, a device) is no result.
  """
  rows = read_metrics(folder)
  if not rows or is_finished(folder):
    return False
  config = json.loads((folder / 'config.json').read_text())
  in_row = 0
  for row in reversed(rows):
    in_row += row.get('training/skipped_updates', 0)
    if row.get('training/updates', 0):
      break
  return in_row >= config['trainer']['max_skipped_updates']


def last_line(log: pathlib.Path) -> str:
  """Returns what a run said last, and where the rest is."""
  lines = log.read_text(encoding='utf-8', errors='replace').split('\n')
  said = next((line for line in reversed(lines) if line.strip()), 'nothing')
  return f'{said.strip()[:200]} (see {log})'


def is_over(folder: pathlib.Path) -> bool:
  """Whether the run in a workdir has finished or failed by itself."""
  return is_finished(folder) or has_failed(folder)


class Runner:
  """Keeps up to `parallel` runs going.

  Args:
    plan: what is run.
    queue: arms and seeds, in order.
    parallel: runs at a time, on each device.
    deadline: `time.monotonic()` after which all are stopped.
    gpus: numbers of the devices to use; none for the one that a run finds.
    memory: share of a device that its runs have together.
  """

  def __init__(
      self,
      plan: Plan,
      queue: list[tuple[Arm, int]],
      *,
      parallel: int,
      deadline: float,
      gpus: tuple[str, ...] = (),
      memory: float = 0.9,
  ):
    self.plan, self.parallel, self.deadline = plan, parallel, deadline
    self.gpus, self.memory = gpus, memory
    self.queue = [
        (arm, seed)
        for arm, seed in queue
        if not is_over(plan.run_folder(arm, seed))
    ]
    self.running: dict[pathlib.Path, subprocess.Popen] = {}
    self.gpu_of: dict[pathlib.Path, str] = {}
    self.failed: list[pathlib.Path] = []
    self.asked_to_stop = False

  def run(self) -> None:
    """Runs until the queue is empty, the deadline or a signal."""
    for number in (signal.SIGTERM, signal.SIGINT):
      signal.signal(number, self._ask_to_stop)
    try:
      while (self.queue or self.running) and not self._is_over():
        while self.queue and len(self.running) < self._most_at_a_time():
          self._start(*self.queue.pop(0))
        self._collect()
        time.sleep(0.2)
    finally:
      self._stop()

  def _ask_to_stop(self, *_) -> None:
    self.asked_to_stop = True

  def _is_over(self) -> bool:
    return self.asked_to_stop or time.monotonic() > self.deadline

  def _most_at_a_time(self) -> int:
    return self.parallel * max(len(self.gpus), 1)

  def free_gpu(self) -> str:
    """Returns the device with the fewest runs, of equal ones the first."""
    used = [self.gpu_of[folder] for folder in self.running]
    return min(self.gpus, key=used.count)

  def _start(self, arm: Arm, seed: int) -> None:
    folder = self.plan.run_folder(arm, seed)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SET).write_text(json.dumps(self.plan.more))
    env = dict(os.environ)
    # The old name of the same; jax refuses both.
    env.pop('XLA_PYTHON_CLIENT_MEM_FRACTION', None)
    env['XLA_CLIENT_MEM_FRACTION'] = f'{self.memory / self.parallel:.3f}'
    if self.gpus:
      self.gpu_of[folder] = self.free_gpu()
      env['CUDA_VISIBLE_DEVICES'] = self.gpu_of[folder]
    with open(folder / 'log.txt', 'ab') as log:
      self.running[folder] = subprocess.Popen(
          self.plan.command(arm, seed),
          stdout=log,
          stderr=subprocess.STDOUT,
          env=env,
          # A signal to this command is not one to its runs: it passes it on.
          start_new_session=True,
      )
    print(f'started  {self._name(folder)}', flush=True)

  def _collect(self) -> None:
    for folder, process in list(self.running.items()):
      if process.poll() is None:
        continue
      del self.running[folder]
      if process.returncode:
        self.failed.append(folder)
      step = steps_done(folder)
      at = 'before step 0' if step < 0 else f'at step {step}'
      word, why = 'ended   ', ''
      if process.returncode:
        word, why = 'FAILED  ', f': {last_line(folder / "log.txt")}'
      print(f'{word} {self._name(folder)} {at}{why}', flush=True)

  def _stop(self) -> None:
    """Lets what is running save and end; kills it after the grace."""
    for process in self.running.values():
      process.send_signal(signal.SIGTERM)
    end = time.monotonic() + GRACE_S
    while self.running and time.monotonic() < end:
      self._collect()
      time.sleep(0.2)
    for process in self.running.values():
      process.kill()
      process.wait()
    self._collect()

  def _name(self, folder: pathlib.Path) -> str:
    return folder.relative_to(self.plan.folder / 'runs').as_posix()


@command.in_one_sentence
def main() -> None:
  """Runs the command line."""
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  parser.add_argument('--folder', type=user_path, required=True)
  parser.add_argument(
      '--arms', default='gsm8k', help='arms and groups, by comma'
  )
  parser.add_argument(
      '--seeds',
      default='1,2,3',
      help='by comma; of a group an arm runs those of the design only',
  )
  parser.add_argument('--config', default='', help="default: the cell's own")
  parser.add_argument(
      '--parallel', type=int, default=4, help='runs at a time on a device'
  )
  parser.add_argument(
      '--gpus', default='', help='numbers of several devices, by comma'
  )
  parser.add_argument(
      '--memory',
      type=float,
      default=0.9,
      help='share of a device that its runs have together; default 0.9',
  )
  parser.add_argument(
      '--limit_s',
      type=float,
      default=float('inf'),
      help=f'seconds after which runs are stopped; the end takes up to'
      f' {GRACE_S} s more',
  )
  parser.add_argument(
      '--set',
      action='append',
      default=[],
      metavar='NAME=VALUE',
      help='a config setting of every arm',
  )
  parser.add_argument('--tiny', action='store_true', help='sizes for a CPU')
  flags = parser.parse_args()
  deadline = time.monotonic() + flags.limit_s
  if flags.parallel < 1:
    raise ValueError(f'--parallel={flags.parallel}; it must be >= 1')
  if not 0 < flags.memory <= 1:
    raise ValueError(
        f'--memory={flags.memory:g}; it is a share of a device: above 0, at'
        ' most 1'
    )
  names = flags.arms.split(',')
  arms = named(names)
  plan = Plan(
      folder=flags.folder,
      config=flags.config,
      more=prepare.parse_settings(flags.set),
      is_tiny=flags.tiny,
  )
  queue = runs_of(names, command.whole_numbers('seeds', flags.seeds))
  for arm, seed in queue:
    plan.settings(arm, seed)
  plan.check(arms)
  runner = Runner(
      plan,
      queue,
      parallel=flags.parallel,
      deadline=deadline,
      gpus=tuple(flags.gpus.split(',')) if flags.gpus else (),
      memory=flags.memory,
  )
  print(f'{len(runner.queue)} of {len(queue)} runs to do', flush=True)
  runner.run()
  left = [
      f'{arm.name}/seed{seed}'
      for arm, seed in queue
      if not is_over(plan.run_folder(arm, seed))
  ]
  print(f'{len(left)} of {len(queue)} runs are not finished: {left}')
  sys.exit(1 if runner.failed else 0)


if __name__ == '__main__':
  main()
