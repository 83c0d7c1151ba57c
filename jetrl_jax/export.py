"""Writes a Hugging Face checkpoint: jetrl_jax export --workdir=RUN.

It writes bfloat16 weights from the masters, or FP8 weights: the same weights
that the run sampled and trained with, their scales and the scales of their
inputs. A policy that was not trained in FP8 (a checkpoint, or a run in
bfloat16) is first calibrated on the prompts of a file. See docs/export.md.
"""

import dataclasses
from typing import Any

from absl import flags, logging

from jetrl_jax import models
from jetrl_jax.config import build as configs
from jetrl_jax.config import flags as config_flags
from jetrl_jax.config import saved_policy
from jetrl_jax.config.saved_policy import Restored
from jetrl_jax.core import processes, sharding
from jetrl_jax.core.files import user_path
from jetrl_jax.core.typing import PyTree
from jetrl_jax.data import Prompt
from jetrl_jax.fp8 import scaling_state
from jetrl_jax.fp8.recipes import LM_HEAD
from jetrl_jax.models import invariant_scaling
from jetrl_jax.models.hf.save import check_target
from jetrl_jax.rl.rollout.engine import Engine, EngineConfig
from jetrl_jax.rl.run import calibration

_FP8 = 'fp8_delayed'
# Sequences of the calibration; all are decoded at once.
_SLOTS = 16

FLAGS: config_flags.Table = (
    ('workdir', flags.DEFINE_string, None, 'Workdir of a run'),
    ('checkpoint', flags.DEFINE_string, None, 'Or a checkpoint, or its id'),
    ('out', flags.DEFINE_string, None, 'New folder'),
    ('step', flags.DEFINE_integer, None, "Which of a run's; or the newest"),
    ('data', flags.DEFINE_string, None, 'Prompts to calibrate FP8 on'),
    ('prompt_key', flags.DEFINE_string, None, 'Its column with the question'),
    ('answer_key', flags.DEFINE_string, None, 'Its column with the answer'),
    ('template', flags.DEFINE_string, None, "'chat', or text with {prompt}"),
    ('max_prompt_length', flags.DEFINE_integer, None, 'Tokens'),
    (
        'format',
        lambda name, default, text: flags.DEFINE_enum(
            name, default, ['bf16', 'fp8'], text
        ),
        'bf16',
        'bf16: the masters, rounded. fp8: the FP8 weights of the run with their'
        ' scales, in the layout of compressed-tensors.',
    ),
)


def export(values: dict[str, Any]) -> str:
  """Exports one step of a run, or a checkpoint in another format.

  Args:
    values: the values of every flag.

  Returns:
    What was exported, in words.

  Raises:
    ValueError: no run or no such step; FP8 asked of what has no FP8 scales,
      without prompts to calibrate on; the folder exists.
  """
  path, out = _source(values), user_path(values['out'])
  check_target(out)
  found = saved_policy.restore(path, step=values['step'])
  calibrated = ''
  if values['format'] == 'fp8':
    found, calibrated = _in_fp8(found, path, values)
    # The weights keep the run's scales, so the export is the same function, on
    # the grid on which it was trained.
    tree = found.state.weights
    scales = _input_scales(found.state.fp8_state)
  else:
    tree, scales = _masters(found), None
  # With several processes each has a part of the arrays, and the first one
  # writes the files.
  tree = sharding.whole_in_first(tree)
  if processes.is_first():
    models.save_checkpoint(
        out,
        tree,
        found.policy.model,
        source_folder=found.folder,
        tokenizer_folder=saved_policy.tokenizer_folder(found),
        # Leaves that no FP8 dot reads must come back with the same bits.
        dtype=found.policy.recipe.compute_dtype if scales else 'bfloat16',
        input_scales=scales,
    )
  if scales is None:
    return f'{found.origin} in bfloat16'
  if found.policy.has_fp8_keys:
    logging.warning(
        'The run kept keys and values in %s, which a checkpoint does not say;'
        ' a reader that should do so needs its own setting',
        found.policy.kv_cache_dtype,
    )
  if LM_HEAD in scales:
    logging.warning(
        'The head is in FP8 too; old versions of vLLM and SGLang do not read'
        ' its scales (docs/export.md)'
    )
  dots = f'{len(scales)} dots in FP8, each with its two scales'
  return f'{found.origin}: {dots}{calibrated}'


def _source(values: dict[str, Any]) -> str:
  workdir, folder = values['workdir'], values['checkpoint']
  if (workdir is None) == (folder is None):
    raise ValueError(
        'name what to export, by one of --workdir (of a run) and --checkpoint'
        ' (a Hugging Face folder or id)'
    )
  if workdir is not None and not saved_policy.is_run(workdir):
    raise ValueError(
        f'--workdir={workdir} is no workdir of a run (it has no folder'
        ' checkpoints/)'
    )
  if folder is not None and saved_policy.is_run(folder):
    raise ValueError(
        f'--checkpoint={folder} is the workdir of a run; give it as --workdir'
    )
  return str(workdir if folder is None else folder)


def _masters(found: Restored) -> PyTree:
  masters = found.state.masters
  if found.config is None:
    return masters
  return invariant_scaling.unfold(
      masters, found.config.precision.invariant_scale
  )


def _in_fp8(
    found: Restored, path: str, values: dict[str, Any]
) -> tuple[Restored, str]:
  """Returns a policy with static scales, and how it came to them."""
  trained = found.config and found.config.precision.recipe
  # A mixed flow samples with these weights.
  if trained == _FP8 != found.policy.recipe.name:
    found = saved_policy.restore(path, step=values['step'], recipe=_FP8)
  if found.calibrated and found.policy.recipe.name == _FP8:
    if values['data'] is not None:
      raise ValueError(
          f'{found.origin} has the scales it was trained with; leave --data out'
      )
    return found, ''
  if values['data'] is None:
    raise ValueError(
        f'{found.origin} has no static FP8 scales (its recipe is'
        f' {found.policy.recipe.name!r}, needed is {_FP8!r}); name prompts to'
        ' calibrate on, --data=FILE.jsonl, or use --format=bf16'
    )
  found = saved_policy.restore(path, step=values['step'], recipe=_FP8)
  prompts = _prompts(found, values)
  engine = Engine(
      found.policy,
      EngineConfig(
          num_slots=_SLOTS,
          max_prompt_length=max(len(prompt.tokens) for prompt in prompts),
          max_response_length=calibration.CHECKPOINT_TOKENS,
          stop_ids=tuple(saved_policy.tokenizer_of(found).eos_ids),
      ),
      found.mesh,
  )
  state = calibration.calibrate_checkpoint(
      engine, found.state, prompts, origin=found.origin
  )
  found = dataclasses.replace(found, state=state, calibrated=True)
  return found, f'; calibrated on {len(prompts)} prompts of {values["data"]}'


def _prompts(found: Restored, values: dict[str, Any]) -> list[Prompt]:
  """Returns the prompts to calibrate on, as the policy knows them."""
  tokenizer = saved_policy.tokenizer_of(found)
  longest = found.policy.model.max_position - calibration.CHECKPOINT_TOKENS
  most = min(configs.PROMPT_TOKENS, longest)
  data = configs.data_config(found.config, tokenizer, most)
  names = {field.name for field in dataclasses.fields(data)}
  given = {k: v for k, v in values.items() if k in names and v is not None}
  data = dataclasses.replace(data, **given)
  if not 1 <= data.max_prompt_length <= longest:
    raise ValueError(
        f'--max_prompt_length is {data.max_prompt_length}; allowed: 1 to'
        f' {longest}, the positions of the model less those of an answer'
    )
  prompts = list(
      configs.build_dataset(
          data,
          (values['data'],),
          tokenizer,
          calibration.CHECKPOINT_PROMPTS,
      )
  )
  configs.check_ids(
      tokenizer, (p.tokens for p in prompts), found.policy.model.vocab_size
  )
  return prompts


def _input_scales(fp8_state: PyTree) -> dict[str, float]:
  return {
      path: float(_at(fp8_state, path)['input']['scale'])
      for path in scaling_state.dot_paths(fp8_state)
  }


def _at(tree: PyTree, path: str) -> PyTree:
  for key in path.split('/'):
    tree = tree[key]
  return tree


def main(values: dict[str, Any]) -> None:
  """Exports as the flags say."""
  said = export(values)
  if not processes.is_first():
    return
  out = user_path(values['out'])
  size = sum(file.stat().st_size for file in out.iterdir())
  print(f'Exported {said} -> {out} ({size / 1e6:,.1f} MB)')


if __name__ == '__main__':
  config_flags.run_plain(main, FLAGS, ['out'], several=True)
