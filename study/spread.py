"""Copies a 16-bit checkpoint in float32, its weights spread in their cells.

    python -m study.spread CHECKPOINT runs/spread
    python -m study.run --folder=runs/sums_spread --arms=sums_bf16 \
        --seeds=1,2,3 --set=model.path=runs/spread

A run in 8 bits spreads its masters when it starts; one in BF16 does not. From
this copy BF16 starts with the masters of an 8-bit run, so what spread masters
do can be told from what 8 bits do. Rounded to 16 bits it is the checkpoint.
"""

import argparse
import pathlib

from jetrl_jax import models
from jetrl_jax.core.files import user_path
from jetrl_jax.fp8 import Recipe
from tools import command


def spread(source: str | pathlib.Path, target: pathlib.Path) -> None:
  """Writes the copy.

  Args:
    source: a Hugging Face checkpoint in bfloat16 or float16, a folder or an id.
    target: absent or empty so far.

  Raises:
    ValueError: as `models.resolve_checkpoint`, `models.load_checkpoint` and
      `models.save_checkpoint`.
  """
  folder, recipe = models.resolve_checkpoint(str(source)), Recipe()
  config = models.load_config(folder)

  def spreads(path: str) -> bool:
    dot = path.removesuffix('/kernel')
    return dot != path and recipe.quantizes(dot)

  params = models.load_checkpoint(
      folder, config, dtype='float32', spreads=spreads
  )
  models.save_checkpoint(
      target, params, config, source_folder=folder, dtype='float32'
  )


@command.in_one_sentence
def main() -> None:
  """Runs the command line."""
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  parser.add_argument('source')
  parser.add_argument('target', type=user_path)
  flags = parser.parse_args()
  spread(flags.source, flags.target)


if __name__ == '__main__':
  main()
