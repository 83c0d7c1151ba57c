"""Copies a checkpoint and gives it a head of its own, equal to the embedding.

    python -m study.prepare --folder=runs/head
    python -m study.untie runs/head/checkpoint runs/head/untied
    python -m study.run --folder=runs/head --arms=head --seeds=1,2,3,4 \
        --set=model.path=runs/head/untied

For the arms that quantise the head, which tied embeddings do not allow. Until
it is trained it is the same function.
"""

import argparse
import dataclasses
import json
import pathlib
import shutil
import tempfile

from jetrl_jax import models
from jetrl_jax.core.files import user_path
from tools import command


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
  with tempfile.TemporaryDirectory() as folder:
    # What config.json says besides, and the tokenizer, come along.
    like = pathlib.Path(folder) / 'like'
    shutil.copytree(
        source, like, ignore=shutil.ignore_patterns('*.safetensors*')
    )
    hf = json.loads((like / 'config.json').read_text())
    hf['tie_word_embeddings'] = False
    (like / 'config.json').write_text(json.dumps(hf))
    models.save_checkpoint(target, params, untied, source_folder=like)


@command.in_one_sentence
def main() -> None:
  """Runs the command line."""
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  parser.add_argument('source', type=user_path)
  parser.add_argument('target', type=user_path)
  flags = parser.parse_args()
  untie(flags.source, flags.target)


if __name__ == '__main__':
  main()
