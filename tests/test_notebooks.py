"""The notebooks: they run, they use public names, their outputs are theirs."""

import ast
import importlib
import json
import pathlib
import shutil

import jax
import matplotlib
import numpy as np
import pytest

from jetrl_jax import models, rl
from jetrl_jax.fp8 import Recipe
from tools import notebooks

_PATHS = notebooks.paths()
_EXAMPLE = pathlib.Path(__file__).parent.parent / 'examples' / 'quickstart'
_ROOMS = ('data', 'fp8', 'models', 'rewards', 'rl')
# Sizes of a tiny run of the command.
_SMALL = (
    '--config.data.val_max_samples=8',
    '--config.rollout.num_generations=4',
    '--config.rollout.num_slots=16',
    '--config.trainer.train_batch_size=4',
    '--config.trainer.mini_batch_size=4',
    '--config.trainer.micro_batch_size=16',
)
# What a tiny run sets instead, in the cell tagged 'parameters'.
_TINY = {
    '01_fp8_by_hand': {'ROWS': 16, 'FEATURES': 32},
    '02_mismatch': {'CHECKPOINT': 'tiny', 'PROMPTS': 4, 'SAMPLES': 4},
    '03_grpo_from_parts': {
        'CHECKPOINT': 'tiny',
        'STEPS': 2,
        'PROMPTS': 4,
        'SAMPLES': 4,
        'HELD_OUT': 4,
    },
    '04_bring_your_own': {
        'CHECKPOINT': 'tiny',
        'STEPS': 1,
        'EXTRA': [
            # As in the notebook before: the same programs.
            '--config.algorithm.clip_ratio_high=0.28',
            *_SMALL,
            '--config.trainer.calibration_prompts=4',
            '--config.trainer.calibration_tokens=6',
        ],
    },
    '05_small_real_run': {
        'CHECKPOINT': 'tiny',
        'STEPS': 1,
        'EXTRA': [
            # The stand-in has no chat template and 32 tokens.
            '--config.data.template={prompt}',
            *_SMALL,
        ],
    },
}


def _id(path: pathlib.Path) -> str:
  return path.stem


@pytest.fixture(scope='module')
def tiny_checkpoint(tmp_path_factory):
  """The quickstart's model with one layer of width 32, and its tokenizer."""
  folder = tmp_path_factory.mktemp('tiny')
  shutil.copytree(_EXAMPLE / 'model_init', folder, dirs_exist_ok=True)
  path = folder / 'config.json'
  shape = json.loads(path.read_text()) | {
      'hidden_size': 32,
      'intermediate_size': 64,
      'num_hidden_layers': 1,
      'num_attention_heads': 2,
      'num_key_value_heads': 1,
      'head_dim': 16,
  }
  path.write_text(json.dumps(shape))
  model = models.load_config(folder)
  shapes = jax.eval_shape(
      rl.Policy(model=model, recipe=Recipe()).init, jax.random.key(0)
  )
  rng = np.random.default_rng(0)
  weights = jax.tree.map(
      lambda leaf: rng.normal(0.0, 0.1, leaf.shape).astype(np.float32), shapes
  )
  out = tmp_path_factory.mktemp('export') / 'tiny'
  models.save_checkpoint(out, weights, model, source_folder=folder)
  return out


@pytest.fixture(scope='module')
def in_a_hurry():
  """Compiles with few optimisations: compiling is all that notebooks cost.

  This changes speed and perhaps the last bits, which other tests look at with
  the compiler as it is.
  """
  unoptimised = 'jax_disable_most_optimizations'
  jax.config.update(unoptimised, True)
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv(unoptimised.upper(), '1')
    yield
  jax.config.update(unoptimised, False)


@pytest.mark.slow
@pytest.mark.parametrize('path', _PATHS, ids=_id)
def test_a_notebook_runs_from_its_first_to_its_last_cell(
    path, tiny_checkpoint, in_a_hurry, monkeypatch
):
  matplotlib.use('Agg')
  monkeypatch.chdir(notebooks.FOLDER)
  import matplotlib.pyplot as plt

  names, tiny = {}, dict(_TINY[path.stem])
  if 'CHECKPOINT' in tiny:
    tiny['CHECKPOINT'] = str(tiny_checkpoint)
  with matplotlib.rc_context():
    for number, cell in enumerate(notebooks.code_cells(notebooks.read(path))):
      code = compile(notebooks.source(cell), f'{path.name}, {number}', 'exec')
      exec(code, names)
      if 'parameters' in cell['metadata'].get('tags', []):
        assert set(tiny) <= set(names)
        names |= tiny
    assert plt.get_fignums(), 'nothing to look at'
    for number in plt.get_fignums():
      plt.figure(number).canvas.draw()  # As a notebook does after a cell.
  plt.close('all')


@pytest.mark.parametrize('path', _PATHS, ids=_id)
def test_the_outputs_of_a_notebook_are_those_of_its_code(path):
  notebook = notebooks.read(path)
  outputs = [o for c in notebooks.code_cells(notebook) for o in c['outputs']]
  made_of = notebook['metadata'].get('source_sha256')
  if path.stem in notebooks.WITHOUT_OUTPUTS:
    assert not outputs and made_of is None
    return
  stale = made_of != notebooks.source_hash(notebook)
  assert not stale, f'run: python -m tools.notebooks notebooks/{path.name}'
  assert any('image/png' in output.get('data', {}) for output in outputs)
  assert not [o for o in outputs if o['output_type'] == 'error']
  assert path.stat().st_size < 300_000
  assert set(notebook['metadata']) == {
      'kernelspec',
      'language_info',
      'source_sha256',
  }


@pytest.mark.parametrize('path', _PATHS, ids=_id)
def test_a_notebook_is_composed_from_public_names(path):
  cells = notebooks.code_cells(notebooks.read(path))
  tree = ast.parse('\n'.join(notebooks.source(cell) for cell in cells))
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      assert not [a for a in node.names if a.name.startswith('jetrl_jax')]
    elif isinstance(node, ast.ImportFrom):
      # From the package a room or a module at its top; nothing deeper.
      top, *rest = node.module.split('.')
      assert top != 'jetrl_jax' or not rest or rest[0] == 'core'
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
      if node.value.id in _ROOMS:
        public = importlib.import_module(f'jetrl_jax.{node.value.id}').__all__
        assert node.attr in public, f'{node.value.id}.{node.attr}'
