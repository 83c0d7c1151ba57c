"""FP8 checkpoints: what is written, what comes back, what is refused."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.config import saved_policy
from jetrl_jax.core.compilation import exact_jit
from jetrl_jax.fp8 import QTensor, Recipe, init_state, scaling_state
from jetrl_jax.kernels.quantized_dot.weights import prepare_weights
from jetrl_jax.models import load_checkpoint, load_config, load_scales
from jetrl_jax.models.hf.layout import flatten_tree
from jetrl_jax.models.hf.save import save_checkpoint
from jetrl_jax.models.types import FAMILIES
from tests.models import build, tiny

_Q = 'model.layers.0.self_attn.q_proj'


def _imported(folder, recipe: Recipe, dtype: str) -> tuple[dict, dict]:
  """(weights, slots) of an export, as a policy is made of them."""
  config = load_config(folder)
  masters = load_checkpoint(folder, config, dtype=dtype)
  scales = load_scales(folder, config)
  state = scaling_state.with_scales(init_state(masters, recipe), scales)
  make = exact_jit(lambda m, s: prepare_weights(m, s, recipe))
  return make(masters, state), state


def _scales(trees) -> dict:
  """(kernel scale, input scale) of every dot of `build.trees`."""
  found = {}
  for path, leaf in flatten_tree(trees.weights).items():
    if isinstance(leaf, QTensor):
      found[path.removesuffix('/kernel')] = (float(leaf.scale), 2.0**-4)
  return found


def _save(folder, family: str, recipe: Recipe):
  """Writes the weights that `build.trees` computes with."""
  trees = build.trees(family, recipe)
  scales = _scales(trees)
  save_checkpoint(
      folder,
      trees.weights,
      build.decoder(family, recipe).config,
      dtype=recipe.compute_dtype,
      input_scales={path: pair[1] for path, pair in scales.items()},
  )
  return trees, scales


@pytest.mark.parametrize('family', FAMILIES)
def test_transformers_computes_an_export_on_the_same_grid(tmp_path, family):
  torch = pytest.importorskip('torch')
  transformers = pytest.importorskip('transformers')
  pytest.importorskip('compressed_tensors')
  recipe = Recipe(compute_dtype='float32')
  trees, _ = _save(tmp_path / 'x', family, recipe)
  tokens_BT = build.tokens(2, 32)
  ours = build.compiled_forward(family, recipe)(
      trees.weights, trees.state, tokens_BT, build.unpacked(tokens_BT), 1.0
  )
  model, loading = transformers.AutoModelForCausalLM.from_pretrained(
      tmp_path / 'x',
      dtype='float32',
      attn_implementation='eager',
      output_loading_info=True,
  )
  assert not any(loading.values())
  tokens = torch.tensor(tokens_BT).long()
  with torch.no_grad():
    logprobs = model(tokens).logits.log_softmax(-1)
  theirs = logprobs[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0].numpy()
  # A value rounded to another point of the grid would show at 1e-3.
  assert np.abs(np.asarray(ours)[:, :-1] - theirs).max() < 1e-5


@pytest.fixture(scope='module')
def exported(tmp_path_factory):
  """(folder, trees, scales) of an FP8 export; only read it."""
  folder = tmp_path_factory.mktemp('fp8') / 'export'
  return folder, *_save(folder, 'qwen2', Recipe())


@pytest.mark.parametrize(
    ('family', 'recipe'),
    [
        ('qwen2', Recipe()),
        ('qwen3', Recipe(power_of_two_scales=False)),
        ('llama', Recipe(high_precision_layers=('layers_0/.*', '.*/mlp/down'))),
        ('llama', Recipe(quantize_lm_head=True)),
    ],
)
def test_what_comes_back_is_the_same_bytes_and_scales(tmp_path, family, recipe):
  trees, scales = _save(tmp_path / 'x', family, recipe)
  config = load_config(tmp_path / 'x')
  assert config == build.decoder(family, recipe).config
  assert load_scales(tmp_path / 'x', config) == scales
  weights = flatten_tree(_imported(tmp_path / 'x', recipe, 'float32')[0])
  for path, leaf in flatten_tree(trees.weights).items():
    for a, b in zip(
        jax.tree.leaves(weights[path]), jax.tree.leaves(leaf), strict=True
    ):
      assert a.dtype == b.dtype, path
      assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), path


def test_log_probs_of_an_import_are_those_of_the_export_to_the_bit(exported):
  folder, trees, _ = exported
  recipe = Recipe()
  weights, state = _imported(folder, recipe, 'bfloat16')
  forward = build.compiled_forward('qwen2', recipe)
  tokens = build.tokens(1, 32)
  rows = build.unpacked(tokens)
  before, after = (
      np.asarray(forward(w, s, tokens, rows, jnp.float32(0.8)))
      for w, s in ((trees.weights, trees.state), (weights, state))
  )
  assert np.isfinite(before).all() and before.std() > 0
  assert before.tobytes() == after.tobytes()


def test_parts_of_a_fused_dot_carry_the_same_two_scales(exported):
  folder, trees, scales = exported
  stored = tiny.tensors_of(folder / 'model.safetensors')
  kernel, of_input = scales['layers_0/attn/qkv']
  for part in 'qkv':
    name = f'model.layers.0.self_attn.{part}_proj'
    assert stored[f'{name}.weight'][0] == 'F8_E4M3'
    assert stored[f'{name}.weight_scale'] == _scale(kernel)
    assert stored[f'{name}.input_scale'] == _scale(of_input)
  values = trees.weights['layers_0']['attn']['qkv']['kernel'].values
  _, (rows, _), data = stored[f'{_Q}.weight']
  assert data == np.asarray(values)[:rows].tobytes()
  # Tied: the embedding is the head, and stays in the compute dtype.
  assert stored['model.embed_tokens.weight'][0] == 'BF16'
  assert 'lm_head.weight' not in stored


def test_the_config_names_what_is_not_fp8(tmp_path):
  recipe = Recipe(high_precision_layers=('layers_0/mlp/.*',))
  _save(tmp_path / 'x', 'llama', recipe)
  section = json.loads((tmp_path / 'x/config.json').read_text())[
      'quantization_config'
  ]
  assert section['quant_method'] == 'compressed-tensors'
  assert section['ignore'] == [
      *(f'model.layers.0.mlp.{p}_proj' for p in ('gate', 'up', 'down')),
      'lm_head',
  ]


def test_a_head_in_fp8_is_a_module_like_others(tmp_path):
  recipe = Recipe(quantize_lm_head=True)
  _, scales = _save(tmp_path / 'x', 'llama', recipe)
  hf = json.loads((tmp_path / 'x/config.json').read_text())
  section = hf['quantization_config']
  (group,) = section['config_groups'].values()
  assert (section['ignore'], group['targets']) == (
      [],
      ['Linear', 're:.*lm_head$'],
  )
  stored = tiny.tensors_of(tmp_path / 'x/model.safetensors')
  assert stored['lm_head.weight'][0] == 'F8_E4M3'
  assert stored['lm_head.weight_scale'] == _scale(scales['lm_head'][0])
  restored = saved_policy.restore(str(tmp_path / 'x'))
  assert restored.policy.recipe == recipe


def test_a_bfloat16_export_of_an_fp8_checkpoint_is_no_fp8_checkpoint(
    tmp_path, exported
):
  folder = exported[0]
  config = load_config(folder)
  masters = load_checkpoint(folder, config, dtype='float32')
  save_checkpoint(tmp_path / 'x', masters, config, source_folder=folder)
  found = json.loads((tmp_path / 'x/config.json').read_text())
  assert 'quantization_config' not in found
  assert load_scales(tmp_path / 'x', config) == {}


@pytest.fixture
def folder(tmp_path, exported):
  """A copy of the export, to be broken."""
  return shutil.copytree(exported[0], tmp_path / 'copy')


def _change_section(folder, change) -> None:
  path = folder / 'config.json'
  hf = json.loads(path.read_text())
  change(hf['quantization_config'])
  path.write_text(json.dumps(hf))


def test_a_head_that_is_not_fp8_need_not_be_named(tmp_path):
  _, scales = _save(tmp_path / 'x', 'llama', Recipe())
  _change_section(tmp_path / 'x', lambda s: s['ignore'].remove('lm_head'))
  assert load_scales(tmp_path / 'x', load_config(tmp_path / 'x')) == scales


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (lambda s: s.update(quant_method='awq'), "quant_method 'awq'"),
        (
            lambda s: s.update(format='pack-quantized'),
            "format 'pack-quantized'",
        ),
        (lambda s: s.update(kv_cache_scheme={}), 'kv_cache_scheme is set'),
        (lambda s: s.update(config_groups=[]), 'not exactly one group'),
        (
            lambda s: s['config_groups']['group_0']['weights'].update(
                strategy='channel'
            ),
            "weights.strategy is 'channel', not 'tensor'",
        ),
        (
            lambda s: s['config_groups']['group_0'].update(
                input_activations=None
            ),
            'input_activations.num_bits is None, not 8',
        ),
    ],
)
def test_another_quantisation_is_refused_by_name(folder, change, message):
  _change_section(folder, change)
  with pytest.raises(
      ValueError, match=r'config\.json: quantization_config'
  ) as e:
    load_config(folder)
  assert message in str(e.value) and 'jetrl_jax.export' in str(e.value)


@pytest.mark.parametrize(
    'change',
    [
        lambda s: s['ignore'].append(_Q),
        lambda s: s['ignore'].append(r're:.*self_attn\.q_proj'),
    ],
)
def test_an_ignore_list_that_the_files_deny_is_refused(folder, change):
  config = load_config(folder)
  _change_section(folder, change)
  with pytest.raises(ValueError, match='ignore and the dtypes.*q_proj'):
    load_checkpoint(folder, config, dtype='float32')


@pytest.mark.parametrize(
    ('pattern', 'message'),
    [
        ('[', 'is no regular expression'),
        ('a{99999999999}', 'is no regular expression'),
        ('(' * 5000 + ')' * 5000, 'could take for ever'),
        ('(|)' * 30 + '!', 'could take for ever'),
        # Two ways for each of a name's characters, and none of them matches.
        (r'(.|\w)+!', 'could take for ever'),
    ],
)
def test_patterns_that_break_or_have_no_end_are_refused(
    folder, pattern, message
):
  _change_section(folder, lambda s: s['ignore'].append(f're:{pattern}'))
  with pytest.raises(ValueError, match=f'ignore: .*{message}'):
    load_checkpoint(folder, load_config(folder), dtype='float32')


def test_fp8_tensors_without_a_section_are_refused(folder):
  path = folder / 'config.json'
  hf = json.loads(path.read_text())
  del hf['quantization_config']
  path.write_text(json.dumps(hf))
  with pytest.raises(ValueError, match='quantization_config is missing'):
    load_checkpoint(folder, load_config(folder), dtype='float32')


def _change_tensors(folder, change) -> None:
  path = folder / 'model.safetensors'
  tensors = tiny.tensors_of(path)
  change(tensors)
  tiny.write_tensors(path, tensors)


def _scale(value: float):
  return ('F32', [1], np.float32(value).tobytes())


@pytest.mark.parametrize('value', [0.0, -1.0, np.inf, np.nan])
def test_a_scale_that_is_no_scale_is_refused(folder, value):
  _change_tensors(
      folder, lambda t: t.update({f'{_Q}.weight_scale': _scale(value)})
  )
  config = load_config(folder)
  with pytest.raises(ValueError, match='q_proj.weight_scale is'):
    load_scales(folder, config)
  with pytest.raises(ValueError, match='q_proj.weight_scale is'):
    load_checkpoint(folder, config, dtype='float32')


def test_parts_with_scales_of_their_own_load_as_masters_only(folder, exported):
  _, trees, scales = exported
  twice = 2 * scales['layers_0/attn/qkv'][0]
  _change_tensors(
      folder, lambda t: t.update({f'{_Q}.weight_scale': _scale(twice)})
  )
  config = load_config(folder)
  with pytest.raises(
      ValueError, match='different scales in .layers_0/attn/qkv'
  ):
    load_scales(folder, config)
  masters = load_checkpoint(folder, config, dtype='float32')
  q = trees.weights['layers_0']['attn']['qkv']['kernel'].values
  found = masters['layers_0']['attn']['qkv']['kernel']
  rows = config.num_heads * config.head_dim
  np.testing.assert_array_equal(
      found[:rows], np.asarray(q, np.float32)[:rows] * np.float32(twice)
  )


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (
            lambda t: t.pop(f'{_Q}.input_scale'),
            r"1 missing: 'model\.layers\.0\.self_attn\.q_proj\.input_scale'",
        ),
        (
            lambda t: t.update({'model.norm.weight_scale': _scale(1.0)}),
            r"1 unexpected: 'model\.norm\.weight_scale'",
        ),
        (
            lambda t: t.update(
                {
                    'model.embed_tokens.weight': (
                        'F8_E4M3',
                        *t[_Q + '.weight'][1:],
                    )
                }
            ),
            'of a dtype other than BF16/F16/F32',
        ),
    ],
)
def test_scales_and_fp8_tensors_come_together(folder, change, message):
  _change_tensors(folder, change)
  with pytest.raises(ValueError, match=message):
    load_checkpoint(folder, load_config(folder), dtype='float32')
