"""Writes a Hugging Face checkpoint: python -m jetrl_jax.export --workdir=RUN.

In bfloat16, from the masters; or in FP8, the very weights that the run sampled
and trained with, beside their scales and those of their inputs. See
docs/export.md.
"""

import pathlib
import sys

from absl import app, flags, logging

from jetrl_jax import config_flag, models, saved_policy
from jetrl_jax.fp8 import slots
from jetrl_jax.models import invariant_scaling
from jetrl_jax.rl.console import show_own_sentences
from jetrl_jax.rl.train_step import merge
from jetrl_jax.typing import PyTree


def export(
    workdir: str, out: pathlib.Path, *, step: int | None, fp8: bool
) -> str:
  """Exports one step of a run.

  Args:
    workdir: of the run.
    out: the new folder.
    step: by default the newest good one.
    fp8: the compute weights and their scales instead of the masters.

  Returns:
    What was exported, in words.

  Raises:
    ValueError: no run or no such step; FP8 asked of a run without FP8; the
      folder exists.
  """
  if not saved_policy.is_run(workdir):
    raise ValueError(
        f'--workdir={workdir} is no workdir of a run (it has no folder'
        ' checkpoints/)'
    )
  if out.exists() and not (out.is_dir() and not any(out.iterdir())):
    raise ValueError(f'--out={out} exists already; name a new folder')
  found = saved_policy.restore(workdir, step=step)
  state, policy = found.state, found.policy
  paths = slots.slot_paths(state.fp8_state)
  if fp8 and policy.recipe.name != 'fp8_delayed':
    raise ValueError(
        f'{found.origin} has no static FP8 scales (precision.recipe is'
        f" {policy.recipe.name!r}, needed is 'fp8_delayed'); use --format=bf16"
    )
  if fp8:
    # Scaled as the run had it: the same function, on the grid it was trained.
    tree = state.weights
  else:
    assert found.config is not None  # It is the workdir of a run.
    tree = invariant_scaling.unfold(
        merge(state.trainable, state.frozen),
        found.config.precision.invariant_scale,
    )
  models.save_checkpoint(
      out,
      tree,
      policy.model,
      source_folder=found.folder,
      # What the FP8 dots leave has to come back to the bit.
      dtype=policy.recipe.compute_dtype if fp8 else 'bfloat16',
      input_scales=_input_scales(state.fp8_state) if fp8 else None,
  )
  if not fp8:
    return f'{found.origin} in bfloat16'
  return f'{found.origin}: {len(paths)} dots in FP8, each with its two scales'


def _input_scales(fp8_state: PyTree) -> dict[str, float]:
  return {
      path: float(_at(fp8_state, path)['input']['scale'])
      for path in slots.slot_paths(fp8_state)
  }


def _at(tree: PyTree, path: str) -> PyTree:
  for key in path.split('/'):
    tree = tree[key]
  return tree


def main(argv: list[str], values: flags.FlagValues) -> None:
  """Exports what the flags say."""
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments {argv[1:]}')
  show_own_sentences()
  out = pathlib.Path(str(values['out'].value))
  try:
    said = export(
        str(values['workdir'].value),
        out,
        step=values['step'].value,
        fp8=values['format'].value == 'fp8',
    )
  except (ValueError, OSError) as error:
    logging.debug('Traceback:', exc_info=True)
    sys.exit(f'error: {error}')
  size = sum(file.stat().st_size for file in out.iterdir())
  print(f'Exported {said} -> {out} ({size / 1e6:,.1f} MB)')


def define_flags() -> None:
  """Defines the flags; only where the command is run: they are global."""
  flags.DEFINE_string('workdir', None, 'Workdir of a run.', required=True)
  flags.DEFINE_string('out', None, 'New folder.', required=True)
  flags.DEFINE_integer('step', None, 'Which checkpoint; default: the newest.')
  flags.DEFINE_enum(
      'format',
      'bf16',
      ['bf16', 'fp8'],
      'bf16: the masters, rounded. fp8: the FP8 weights of the run with their'
      ' scales, in the layout of compressed-tensors.',
  )


if __name__ == '__main__':
  define_flags()
  config_flag.run_plain(lambda argv: main(argv, flags.FLAGS))
