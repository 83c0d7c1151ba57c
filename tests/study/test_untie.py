"""A checkpoint that gets a head of its own stays what it was."""

import json

import numpy as np
import pytest

from jetrl_jax.models import load_checkpoint, load_config
from study.untie import untie
from tests.models import tiny


def test_the_head_is_the_embedding_and_all_else_stays(tmp_path):
  source, target = tmp_path / 'tied', tmp_path / 'untied'
  tiny.save(source, tiny.config('qwen2'))
  untie(source, target)
  before, after = load_config(source), load_config(target)
  assert before.tied_embeddings and not after.tied_embeddings
  tied, own = (
      load_checkpoint(folder, config, dtype='bfloat16')
      for folder, config in ((source, before), (target, after))
  )
  embedding = np.asarray(tied['embed']['embedding'])
  np.testing.assert_array_equal(own['lm_head']['kernel'], embedding)
  np.testing.assert_array_equal(own['embed']['embedding'], embedding)
  said, now = (
      json.loads((folder / 'config.json').read_text())
      for folder in (source, target)
  )
  differs = {key for key in said if said[key] != now[key]}
  assert differs <= {'tie_word_embeddings', 'torch_dtype', 'dtype'}
  with pytest.raises(ValueError, match='its embeddings are not tied'):
    untie(target, tmp_path / 'again')
