"""Logits against transformers; tools/make_hf_goldens.py made the files."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.core.collectives import Axes
from jetrl_jax.fp8 import Recipe
from jetrl_jax.kernels.quantized_dot.weights import prepare_weights
from jetrl_jax.models.attention import PackedAttention
from jetrl_jax.models.decoder import Decoder, variables
from jetrl_jax.models.hf.config import load_config
from jetrl_jax.models.hf.layout import flatten_tree, layout
from jetrl_jax.models.hf.load import load_checkpoint
from jetrl_jax.models.hf.save import save_checkpoint
from jetrl_jax.models.types import FAMILIES
from tests.models import tiny

GOLDENS = pathlib.Path(__file__).parent / 'goldens'
TOLERANCE = 1e-4


def our_logits(folder, tokens_BT):
  config = load_config(folder)
  params = load_checkpoint(folder, config, dtype='float32')
  recipe = Recipe(name='bf16', compute_dtype='float32')
  decoder = Decoder(config=config, recipe=recipe, axes=Axes())
  rows, length = tokens_BT.shape
  position_BT = jnp.tile(jnp.arange(length, dtype=jnp.int32), (rows, 1))
  attend = PackedAttention(
      first_BT=jnp.zeros_like(position_BT), last_BT=position_BT, tile=16
  )
  tree = variables(prepare_weights(params, {}, recipe), {})
  mask_M = jnp.ones(rows * length)
  hidden_MD, *_ = decoder.apply(
      tree, tokens_BT.reshape(-1), position_BT.reshape(-1), mask_M, attend
  )
  logits = decoder.apply(tree, hidden_MD, mask_M, method=Decoder.head)
  return np.asarray(logits).reshape(rows, length, -1)


@pytest.mark.parametrize('family', FAMILIES)
def test_logits_are_those_of_transformers(family):
  golden = np.load(GOLDENS / family / 'logits.npz')
  assert golden['logits'].std() > 1
  ours = our_logits(GOLDENS / family, golden['tokens'])
  assert np.abs(ours - golden['logits']).max() < TOLERANCE


@pytest.mark.parametrize('family', FAMILIES)
def test_the_decoder_initialises_the_tree_that_the_layout_lists(family):
  config = tiny.config(family)
  recipe = Recipe(name='bf16', compute_dtype='float32')
  decoder = Decoder(config=config, recipe=recipe, axes=Axes())
  position_BT = jnp.zeros((1, 16), jnp.int32)
  attend = PackedAttention(first_BT=position_BT, last_BT=position_BT, tile=16)
  row = position_BT[0]
  init = functools.partial(decoder.init, attend=attend)
  tree = jax.eval_shape(init, jax.random.key(0), row, row, jnp.ones(16))
  found = {
      path: leaf.shape for path, leaf in flatten_tree(tree['params']).items()
  }
  assert found == {row.path: row.shape for row in layout(config)}


@pytest.mark.parametrize('with_source', [True, False])
@pytest.mark.parametrize('family', FAMILIES)
def test_an_export_has_the_same_logits_in_transformers(
    tmp_path, family, with_source
):
  torch = pytest.importorskip('torch')
  transformers = pytest.importorskip('transformers')
  source = GOLDENS / family
  config = load_config(source)
  save_checkpoint(
      tmp_path / 'export',
      load_checkpoint(source, config, dtype='float32'),
      config,
      source_folder=source if with_source else None,
      dtype='float32',
      max_shard_bytes=100_000,
  )
  model = transformers.AutoModelForCausalLM.from_pretrained(
      tmp_path / 'export', attn_implementation='eager'
  )
  assert model.dtype == torch.float32
  golden = np.load(source / 'logits.npz')
  with torch.no_grad():
    logits = model(torch.tensor(golden['tokens']).long()).logits.numpy()
  # The same library on the same numbers; only its threads may differ.
  assert np.abs(logits - golden['logits']).max() < 1e-5
