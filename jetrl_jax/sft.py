"""Supervised warm start: jetrl_jax sft --config=... .

The same model, precision flow, optimiser and train step as reinforcement
learning, with the likelihood of written answers as the objective. Writes a
Hugging Face checkpoint to config.sft.output.
"""

import contextlib
import dataclasses
import pathlib
import shutil
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags, logging

from jetrl_jax import models
from jetrl_jax.checkpoint import folder as checkpoint_folder
from jetrl_jax.config import build as configs
from jetrl_jax.config import compatibility, sections
from jetrl_jax.config import flags as config_flags
from jetrl_jax.config import model as config_model
from jetrl_jax.config.sections import take
from jetrl_jax.core import compilation, processes, sharding
from jetrl_jax.core.files import user_path
from jetrl_jax.core.typing import PyTree
from jetrl_jax.data import Prompt, PromptSampler, Tokenizer
from jetrl_jax.data.rows import column
from jetrl_jax.data.settings import DataConfig
from jetrl_jax.metrics.timer import Timer
from jetrl_jax.metrics.writer import MetricWriter
from jetrl_jax.models import invariant_scaling
from jetrl_jax.models.hf.save import check_carried, check_target
from jetrl_jax.models.policy import Policy
from jetrl_jax.optim.types import TrainState
from jetrl_jax.rl import packing
from jetrl_jax.rl.objective import supervised_loss
from jetrl_jax.rl.run import fp8_support, train_state
from jetrl_jax.rl.run.calibration import Calibration, likelihood_sequences
from jetrl_jax.rl.run.gradients import UpdatePrograms
from jetrl_jax.rl.settings import RunConfig, SftConfig, check_packed_rows
from jetrl_jax.rl.training.step_metrics import not_finite, update_metrics
from jetrl_jax.rl.types import TrainBatch

config_flags.define()
# Settings of GRPO, and the settings of a warm start that replace them.
_OWN_NAMES = {
    'trainer.total_training_steps': 'sft.total_training_steps',
    'trainer.train_batch_size': 'sft.batch_size',
}
_WORKDIR = flags.DEFINE_string(
    'workdir',
    None,
    'metrics.jsonl goes here; that of an earlier warm start is replaced. By'
    ' default runs/<name of the config file>.',
)


def target_tokens(
    prompt: Prompt, answer_key: str, tokenizer: Tokenizer
) -> tuple[np.ndarray, int]:
  """Returns (prompt and written answer and end token, the answer's start)."""
  written = column(prompt.extra, answer_key, f'prompt {prompt.id}')
  if not isinstance(prompt.answer, str):
    raise ValueError(
        f'prompt {prompt.id}: {answer_key!r} is {prompt.answer!r}; a warm start'
        ' trains on written answers: name a column of texts'
    )
  answer = tokenizer.encode(str(written), add_special_tokens=False)
  end = [tokenizer.eos_id]
  tokens = np.concatenate([prompt.tokens, answer, end]).astype(np.int32)
  return tokens, len(prompt.tokens)


def _check(config) -> None:
  """Refuses at the start what would only fail after the last step."""
  sft = take(SftConfig, config)
  if not sft.output:
    raise ValueError('sft.output is empty; name the folder to export to')
  check_target(user_path(sft.output))
  if not config.data.answer_key:
    raise ValueError(
        "data.answer_key is ''; a warm start trains on written answers: name"
        ' their column'
    )
  for name in ('max_skipped_updates', 'micro_batch_size'):
    value = config.trainer[name]
    if value < 1:
      raise ValueError(f'trainer.{name} is {value}; it must be >= 1')
  with sections.naming_settings(RunConfig):
    run = config.trainer
    check_packed_rows(run.packed_rows, run.micro_batch_size)
  for name, meant in _OWN_NAMES.items():
    section, _, key = name.partition('.')
    if config[section][key] != sections.default(name):
      logging.warning(
          '%s is %s, which is for GRPO; a warm start reads %s, which is %s',
          name,
          config[section][key],
          meant,
          config.sft[meant.partition('.')[2]],
      )
  if config.precision.min_sqnr_db:
    logging.warning(
        'precision.min_sqnr_db is %g; a warm start measures no dot, so it keeps'
        ' none in high precision for that. Name dots in'
        ' precision.high_precision_layers',
        config.precision.min_sqnr_db,
    )


def _check_room(output: pathlib.Path, shapes: PyTree) -> None:
  """Refuses a disk without room for the export, which is all that is kept."""
  # Exported in bfloat16.
  needed = sum(2 * leaf.size for leaf in jax.tree.leaves(shapes))
  # `check_target` has made the parent.
  free = shutil.disk_usage(output.absolute().parent).free
  if lacking := checkpoint_folder.lacking(free, needed):
    raise ValueError(
        f'sft.output is {output}: {lacking}; name a folder on another disk, or'
        ' free the space'
    )


def _check_workdir(workdir: pathlib.Path) -> None:
  """Refuses the workdir of a run, whose metrics would be lost."""
  if (workdir / 'checkpoints').exists():
    raise ValueError(
        f'--workdir={workdir} holds checkpoints/, of a run of jetrl_jax.main,'
        ' whose metrics.jsonl a warm start would replace; name another folder'
    )
  config_flags.make_folder('workdir', workdir)
  file = workdir / 'metrics.jsonl'
  if file.exists() and file.stat().st_size:
    logging.warning('%s, of an earlier warm start, is replaced', file)


def _batches(
    config, policy: Policy, tokenizer: Tokenizer
) -> Callable[[], list[TrainBatch]]:
  """Returns a function that draws the next optimiser step's micro-batches."""
  settings = take(DataConfig, config)
  compatibility.warn_of_template(settings)
  data = configs.build_dataset(settings, settings.train_files, tokenizer)
  configs.check_enough('sft.batch_size', config.sft.batch_size, data)
  logging.info(
      '%d prompts (%d over-long left out)', len(data), data.num_filtered
  )
  targets = [
      target_tokens(prompt, config.data.answer_key, tokenizer)
      for prompt in data
  ]
  all_tokens = (tokens for tokens, _ in targets)
  configs.check_ids(tokenizer, all_tokens, policy.model.vocab_size)
  longest = config.data.max_prompt_length + config.rollout.max_response_length
  sizes = {'tile': policy.tile, 'devices': policy.axes.size}
  shape = rows, row_length = packing.batch_shape(
      longest,
      micro_batch_size=config.trainer.micro_batch_size,
      packed_rows=config.trainer.packed_rows,
      **sizes,
  )
  smaller = packing.halved_shapes(
      shape, longest, count=config.trainer.smaller_micro_batches, **sizes
  )
  _check_lengths(config, list(data), targets, row_length)
  sampler = PromptSampler(
      num_prompts=len(data),
      seed=config.seed,
      shuffle=True,
      fingerprint=data.fingerprint,
  )

  def next_batch() -> list[TrainBatch]:
    pairs = [targets[i] for i in sampler.next_batch(config.sft.batch_size)]
    return packing.pack(
        likelihood_sequences(*(list(x) for x in zip(*pairs, strict=True))),
        row_length=row_length,
        rows_per_micro_batch=rows,
        tile=policy.tile,
        last=smaller,
    ).batches

  return next_batch


def _check_lengths(
    config,
    prompts: list[Prompt],
    targets: list[tuple[np.ndarray, int]],
    row_length: int,
) -> None:
  """Refuses now the written answer that would end a later step."""
  lengths = [len(tokens) for tokens, _ in targets]
  longest = int(np.argmax(lengths))
  if lengths[longest] <= row_length:
    return
  prompt, (tokens, start) = prompts[longest], targets[longest]
  enough = len(tokens) - config.data.max_prompt_length
  raise ValueError(
      f'{sum(n > row_length for n in lengths)} of {len(prompts)} prompts are'
      f' too long with their written answers; the longest is prompt {prompt.id}'
      f' ({prompt.source}), with {start} + {len(tokens) - start} tokens (the'
      f' end token among them), but a row holds {row_length}. Raise'
      f' rollout.max_response_length from {config.rollout.max_response_length}'
      f' to {enough} or more, or leave those prompts out of data.train_files'
  )


def train(config, workdir: pathlib.Path) -> None:
  """Runs the warm start.

  Args:
    config: ConfigDict, see `config.sections`.
    workdir: metrics.jsonl goes here, in place of an earlier warm start's.

  Raises:
    ValueError: see `config.build`; a written answer too long for a row; the
      workdir is that of a run of main.
    RuntimeError: every update was skipped as not finite, or
      trainer.max_skipped_updates of them in a row; nothing was exported.
  """
  _check(config)
  compilation.keep_compiled(config.compile_cache_dir)
  policy, mesh, folder = config_model.build_policy(config)
  fp8_support.check({'precision.recipe': policy}, config.optim.moments)
  tokenizer = configs.build_tokenizer(config, folder)
  check_carried(tokenizer.folder)
  # This comes before weights are loaded, so that errors in the data show at
  # once.
  next_batch = _batches(config, policy, tokenizer)
  _check_workdir(workdir)
  steps = config.sft.total_training_steps
  settings = configs.optimizer_config(config, steps)
  compatibility.check_rate(settings.lr)
  make_params, shapes = config_model.parameters(config, policy, mesh, folder)
  output = user_path(config.sft.output)
  if processes.is_first():
    _check_room(output, shapes)
  optimizer = settings.build()
  state = train_state.create(
      policy, make_params(), optimizer, mesh, tuple(config.model.freeze)
  )
  step = UpdatePrograms(
      policy, supervised_loss, optimizer, settings, mesh, state
  )
  if policy.recipe.is_delayed:
    calibration = Calibration(policy, mesh, state)
    state = calibration.fill(state, next_batch(), 1.0)
  with contextlib.ExitStack() as at_end:
    writer = None
    if processes.is_first():
      writer = at_end.enter_context(
          contextlib.closing(MetricWriter(workdir, tensorboard=False))
      )
      writer.truncate_after(-1)
    most_skipped = min(config.trainer.max_skipped_updates, steps)
    state = _update(state, step, next_batch, steps, most_skipped, writer)
  masters = invariant_scaling.unfold(
      state.masters, config.precision.invariant_scale
  )
  # With several processes each has a part of the arrays, and the first one
  # writes the files.
  masters = sharding.whole_in_first(masters)
  if not processes.is_first():
    return
  models.save_checkpoint(
      output,
      masters,
      policy.model,
      source_folder=folder,
      tokenizer_folder=tokenizer.folder,
  )
  print(f'Wrote {output}')


def _update(
    state: TrainState,
    programs: UpdatePrograms,
    next_batch: Callable[[], list[TrainBatch]],
    steps: int,
    most_skipped: int,
    writer: MetricWriter | None,
) -> TrainState:
  """Takes all optimiser steps; writes their metrics every ten steps.

  What an update says is read at once, as in a run of main, so that the step
  whose update is one skipped too many is the last one.

  Args:
    state: the masters to start from; donated.
    programs: the compiled update.
    next_batch: returns the micro-batches of the next optimiser step.
    steps: optimiser steps to take.
    most_skipped: skipped updates in a row that end the run.
    writer: takes the metrics; None in all processes but the first.

  Raises:
    RuntimeError: `most_skipped` updates in a row were not finite.
  """
  infos, skipped, timer = [], 0, Timer()
  batches = next_batch()
  for i in range(steps):
    gradients = programs.zero_gradients(state)
    for batch in batches:
      gradients, _, _ = programs.accumulate(
          state, gradients, batch, jnp.float32(1.0)
      )
    state, info = programs.apply(state, gradients)
    state = dataclasses.replace(
        state, fp8_state=programs.roll_inputs(state.fp8_state)
    )
    is_last = i + 1 == steps
    if not is_last:  # Packed while the devices compute.
      batches = next_batch()
    info = jax.device_get(info)
    infos.append(info)
    skipped = 0 if info.applied else skipped + 1
    is_over = skipped >= most_skipped
    if (i + 1) % 10 == 0 or is_last or is_over:
      metrics = update_metrics(infos) | timer.take()
      if writer is not None:
        writer.write(i + 1, metrics)
      logging.info('step %d/%d loss %.4f', i + 1, steps, metrics['sft/loss'])
      infos = []
    if is_over:
      raise RuntimeError(f'{not_finite(skipped, info)} Nothing was exported.')
  return state


def main() -> None:
  """Runs the warm start of the config."""
  workdir = user_path(_WORKDIR.value or f'runs/{config_flags.file().stem}')
  train(config_flags.load(), workdir)


if __name__ == '__main__':
  config_flags.run(main, several=True)
