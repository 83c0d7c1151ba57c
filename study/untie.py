"""Copies a checkpoint and gives it a head of its own, equal to the embedding.

    python -m study.untie runs/study/checkpoint runs/study/untied

The same function, to the bit, until it is trained. For the arms that quantise
the head, which tied embeddings do not allow:

    python -m study.run --folder=runs/head --arms=head --seeds=1,2,3,4 \
        --set=model.path=runs/study/untied
"""

import argparse
import dataclasses
import pathlib
import shutil

from jetrl_jax import models
from jetrl_jax.models.hf_export import CARRIED_FILES


def untie(source: pathlib.Path, target: pathlib.Path) -> None:
  """Writes the copy.

  Args:
    source: a Hugging Face checkpoint with tied embeddings.
    target: absent or empty so far.

  Raises:
    ValueError: the source has a head already; or as `models.save_checkpoint`.
  """
  config = models.load_config(source)
  if not config.tied_embeddings:
    raise ValueError(f'{source}: its embeddings are not tied; use it as it is')
  params = models.load_checkpoint(source, config, dtype='bfloat16')
  params |= {'lm_head': {'kernel': params['embed']['embedding']}}
  untied = dataclasses.replace(config, tied_embeddings=False)
  models.save_checkpoint(target, params, untied)
  for name in CARRIED_FILES:
    if (source / name).exists():
      shutil.copy(source / name, target)


def main() -> None:
  """Runs the command line."""
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  parser.add_argument('source', type=pathlib.Path)
  parser.add_argument('target', type=pathlib.Path)
  flags = parser.parse_args()
  untie(flags.source, flags.target)


if __name__ == '__main__':
  main()
