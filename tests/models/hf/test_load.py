import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from jetrl_jax.models.hf.config import load_config
from jetrl_jax.models.hf.files import resolve_checkpoint
from jetrl_jax.models.hf.layout import flatten_tree
from jetrl_jax.models.hf.load import load_checkpoint, load_scales
from jetrl_jax.models.hf.safetensors_index import read_index, read_rows
from jetrl_jax.models.hf.save import save_checkpoint
from jetrl_jax.models.types import FAMILIES
from tests.models import tiny

GOLDENS = pathlib.Path(__file__).parent / 'goldens'
SINGLE = 'model.safetensors'
INDEX = 'model.safetensors.index.json'
Q = 'model.layers.0.self_attn.q_proj.weight'


@pytest.fixture
def folder(tmp_path):
  return tiny.save(tmp_path / 'checkpoint', tiny.config())


@pytest.fixture
def sharded(tmp_path):
  return tiny.save(
      tmp_path / 'checkpoint', tiny.config(), max_shard_bytes=1_000
  )


def load(folder, dtype='float32', **kwargs):
  return load_checkpoint(folder, load_config(folder), dtype=dtype, **kwargs)


def refuses(folder, *messages):
  with pytest.raises(ValueError) as error:
    load(folder)
  for message in messages:
    assert re.search(message, str(error.value)), error.value
  return str(error.value)


def change_tensors(folder, change):
  tensors = tiny.tensors_of(folder / SINGLE)
  change(tensors)
  tiny.write_tensors(folder / SINGLE, tensors)


def equal_trees(left, right):
  left, right = flatten_tree(left), flatten_tree(right)
  assert left.keys() == right.keys()
  for path in left:
    np.testing.assert_array_equal(left[path], right[path], err_msg=path)


@pytest.mark.parametrize('family', FAMILIES)
def test_leaves_are_their_tensors_stacked_in_order(family):
  folder = GOLDENS / family
  theirs = safetensors.numpy.load_file(folder / SINGLE)
  ours = flatten_tree(load(folder))
  for i in range(2):
    attn, mlp = f'model.layers.{i}.self_attn.', f'model.layers.{i}.mlp.'
    np.testing.assert_array_equal(
        ours[f'layers_{i}/attn/qkv/kernel'],
        np.concatenate([theirs[f'{attn}{x}_proj.weight'] for x in 'qkv']),
    )
    np.testing.assert_array_equal(
        ours[f'layers_{i}/mlp/gate_up/kernel'],
        np.concatenate(
            [theirs[f'{mlp}{x}_proj.weight'] for x in ('gate', 'up')]
        ),
    )
    np.testing.assert_array_equal(
        ours[f'layers_{i}/mlp/down/kernel'], theirs[f'{mlp}down_proj.weight']
    )
    np.testing.assert_array_equal(
        ours[f'layers_{i}/mlp_norm/scale'],
        theirs[f'model.layers.{i}.post_attention_layernorm.weight'],
    )
    if family == 'qwen2':
      np.testing.assert_array_equal(
          ours[f'layers_{i}/attn/qkv/bias'],
          np.concatenate([theirs[f'{attn}{x}_proj.bias'] for x in 'qkv']),
      )
    if family == 'qwen3':
      np.testing.assert_array_equal(
          ours[f'layers_{i}/attn/k_norm/scale'], theirs[f'{attn}k_norm.weight']
      )
  np.testing.assert_array_equal(
      ours['embed/embedding'], theirs['model.embed_tokens.weight']
  )
  assert ('lm_head/kernel' in ours) == (family != 'qwen2')
  assert sum(leaf.size for leaf in ours.values()) == sum(
      tensor.size for tensor in theirs.values()
  )


@pytest.mark.parametrize('family', FAMILIES)
def test_what_was_saved_is_what_is_loaded(tmp_path, family):
  config = tiny.config(family)
  for name, limit in (('one', 10**9), ('many', 300)):
    folder = tiny.save(tmp_path / name, config, max_shard_bytes=limit)
    assert load_config(folder) == config
    equal_trees(load(folder), tiny.params(config))
  assert len(list((tmp_path / 'many').glob('*.safetensors'))) > 3


def test_a_folder_may_be_named_by_a_text(tmp_path):
  config = tiny.config('qwen2')
  folder = str(tiny.save(tmp_path / 'model', config))
  assert load_config(folder) == config
  tree = load_checkpoint(folder, config, dtype='float32')
  equal_trees(tree, tiny.params(config))
  assert load_scales(folder, config) == {}
  again = str(tmp_path / 'again')
  save_checkpoint(again, tree, config, source_folder=folder)
  assert load_config(again) == config


def test_every_source_dtype_is_cast_to_the_target(folder):
  # 1 + 2^-8 lies halfway between two bfloat16 values: it goes to the even one,
  # 1, and 1 + 3 * 2^-8 to 1 + 2^-6. float16 holds both.
  values = np.array([1 + 2**-8, 1 + 3 * 2**-8] * 4, np.float32)
  for name, dtype in (
      ('F32', np.float32),
      ('F16', np.float16),
      ('BF16', ml_dtypes.bfloat16),
  ):

    def change(tensors, name=name, dtype=dtype):
      data = values.astype(dtype).tobytes()
      tensors['model.norm.weight'] = (name, [8], data)

    change_tensors(folder, change)
    wide = load(folder)['final_norm']['scale']
    assert wide.dtype == np.float32
    np.testing.assert_array_equal(wide, values.astype(dtype))
    narrow = load(folder, 'bfloat16')['final_norm']['scale']
    assert narrow.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(
        np.asarray(narrow, np.float32), np.array([1, 1 + 2**-6] * 4, np.float32)
    )


def test_leaves_land_where_their_sharding_says(folder):
  mesh = jax.make_mesh((4,), ('fsdp',), devices=jax.devices()[:4])
  rows = jax.NamedSharding(mesh, jax.P('fsdp'))
  asked = []

  def sharding_of(path):
    asked.append(path)
    return rows if path.endswith('kernel') else None

  tree = load(folder, sharding_of=sharding_of)
  assert sorted(asked) == sorted(flatten_tree(tree))
  kernel = tree['layers_1']['mlp']['down']['kernel']
  assert kernel.sharding == rows
  assert kernel.addressable_shards[3].data.shape == (2, 12)
  assert len(tree['embed']['embedding'].devices()) == 1
  equal_trees(tree, tiny.params(tiny.config()))


def test_loading_holds_the_model_once(tmp_path):
  # 23 million parameters are 88 MB of float32; the largest leaf is 8 MB.
  script = """
import resource, sys, pathlib
import jax
from jetrl_jax.models.hf.config import load_config
from jetrl_jax.models.hf.load import load_checkpoint
folder = pathlib.Path(sys.argv[1])
jax.device_put(0.0).block_until_ready()
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = peak()
tree = load_checkpoint(folder, load_config(folder), dtype='float32')
print((peak() - before) / 1024)
"""
  config = tiny.config(
      'llama',
      num_layers=8,
      model_dim=512,
      head_dim=128,
      ffn_dim=1_024,
      vocab_size=4_096,
  )
  model_mb = config.num_params * 4 / 2**20
  assert 80 < model_mb < 100
  folder = tiny.save(tmp_path / 'large', config)
  result = subprocess.run(
      [sys.executable, '-c', script, folder],
      env=os.environ | {'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': os.getcwd()},
      capture_output=True,
      text=True,
      check=True,
  )
  assert float(result.stdout) < 1.5 * model_mb


def test_the_dtype_of_masters_is_float32_or_bfloat16(folder):
  with pytest.raises(ValueError, match="'float16': allowed are float32, bf"):
    load(folder, 'float16')


def test_missing_and_unexpected_tensors_are_listed_together(folder):
  def change(tensors):
    tensors['model.layers.0.self_attn.r_proj.weight'] = tensors.pop(Q)
    del tensors['model.norm.weight']

  change_tensors(folder, change)
  refuses(
      folder,
      rf"2 missing: '{Q}', 'model.norm.weight'",
      "1 unexpected: 'model.layers.0.self_attn.r_proj.weight'",
  )


def test_a_long_list_of_names_is_capped(folder):
  def change(tensors):
    for i in range(25):
      tensors[f'extra.{i}'] = ('F32', [1], bytes(4))

  change_tensors(folder, change)
  text = refuses(folder, '25 unexpected: ', 'and 15 more')
  assert "'extra.9'" in text
  assert "'extra.10'" not in text


def test_a_wrong_shape_is_shown_beside_the_right_one(folder):
  def change(tensors):
    dtype, _, data = tensors[Q]
    tensors[Q] = (dtype, [4, 16], data)

  change_tensors(folder, change)
  refuses(folder, r'1 of the wrong shape', rf'{Q} is \[4, 16\], not \[8, 8\]')


@pytest.mark.parametrize(
    ('dtype', 'width'), [('I32', 4), ('F64', 8), ('F8_E5M2', 1), ('BOOL', 1)]
)
def test_a_dtype_that_is_no_supported_float_is_named(folder, dtype, width):
  def change(tensors):
    tensors[Q] = (dtype, [8, 8], bytes(64 * width))

  change_tensors(folder, change)
  refuses(
      folder,
      'of a dtype other than BF16/F16/F32',
      f'{Q} is {dtype}',
      'take the BF16 checkpoint',
  )


@pytest.mark.parametrize('dtype', ['F64', 'F8_E4M3', 'BF16', 'nonsense'])
def test_a_dtype_that_does_not_fit_the_bytes_is_refused(folder, dtype):
  def change(tensors):
    tensors[Q] = (dtype, *tensors[Q][1:])

  change_tensors(folder, change)
  refuses(folder, f'{SINGLE} is truncated or malformed')


def test_a_size_that_does_not_fit_the_shape_is_refused(folder):
  def change(tensors):
    dtype, shape, data = tensors[Q]
    tensors[Q] = (dtype, shape, data[:-4])

  change_tensors(folder, change)
  refuses(folder, f'{SINGLE} is truncated or malformed')


def test_a_tied_output_projection_may_be_stored_when_it_is_equal(folder):
  def equal(tensors):
    tensors['lm_head.weight'] = tensors['model.embed_tokens.weight']

  change_tensors(folder, equal)
  equal_trees(load(folder), tiny.params(tiny.config()))

  def differ(tensors):
    dtype, shape, data = tensors['lm_head.weight']
    tensors['lm_head.weight'] = (dtype, shape, data[4:] + data[:4])

  change_tensors(folder, differ)
  refuses(folder, 'lm_head.weight differs from model.embed_tokens.weight')


def test_an_untied_output_projection_must_be_stored(tmp_path):
  folder = tiny.save(tmp_path / 'llama', tiny.config('llama'))
  change_tensors(folder, lambda tensors: tensors.pop('lm_head.weight'))
  refuses(folder, "1 missing: 'lm_head.weight'")


def test_saved_rotary_buffers_are_ignored(folder):
  def change(tensors):
    for i in range(2):
      name = f'model.layers.{i}.self_attn.rotary_emb.inv_freq'
      tensors[name] = ('F32', [1], bytes(4))
    tensors['model.rotary_emb.inv_freq'] = ('F64', [1], bytes(8))

  change_tensors(folder, change)
  equal_trees(load(folder), tiny.params(tiny.config()))


def test_values_that_are_not_finite_are_counted_by_name(folder):
  def change(tensors):
    dtype, shape, data = tensors[Q]
    bad = np.frombuffer(data, np.float32).copy()
    bad[:3] = np.nan, np.inf, -np.inf
    tensors[Q] = (dtype, shape, bad.tobytes())
    norm = np.array([3e38] + [3.4e38] * 7, np.float32).tobytes()
    tensors['model.norm.weight'] = (dtype, [8], norm)

  change_tensors(folder, change)
  text = refuses(
      folder, rf'1 tensors hold .* not finite .*{re.escape(Q)} \(3\)'
  )
  assert 'model.norm.weight' not in text
  # 3.4e38 rounds to infinity in bfloat16, whose largest number is 3.39e38.
  with pytest.raises(ValueError, match=r'model.norm.weight \(7\)'):
    load(folder, 'bfloat16')


def test_a_header_that_names_a_tensor_twice_is_refused(folder):
  header, payload = tiny.read_raw(folder / SINGLE)
  text = (folder / SINGLE).read_bytes()[8:].split(b'}}')[0].decode() + '}'
  entry = str(header[Q]).replace("'", '"')
  tiny.write_raw(folder / SINGLE, f'{text}, "{Q}": {entry}}}', payload)
  # The library reads it without a word.
  assert Q in safetensors.numpy.load_file(folder / SINGLE)
  refuses(folder, f"duplicate keys '{Q}'")


@pytest.mark.parametrize('cut', [0, 4, 8, 100, -1])
def test_a_truncated_file_is_refused(folder, cut):
  data = (folder / SINGLE).read_bytes()
  (folder / SINGLE).write_bytes(data[:cut])
  refuses(folder, 'truncated')


def test_a_file_that_is_cut_short_after_the_check_is_refused(folder):
  tensor = read_index(folder)['model.embed_tokens.weight']
  path = folder / SINGLE
  path.write_bytes(path.read_bytes()[: tensor.start + 500])
  with pytest.raises(ValueError, match="ends within 'model.embed_tokens.wei"):
    list(read_rows(tensor))


def test_a_tensor_is_read_in_pieces_of_whole_rows(folder):
  tensor = read_index(folder)['model.embed_tokens.weight']
  # Rows of 8 float32.
  for max_bytes, rows in ((10**9, [16]), (5 * 32 + 31, [5, 5, 5, 1])):
    pieces = list(read_rows(tensor, max_bytes))
    assert [len(piece) for piece in pieces] == rows
    np.testing.assert_array_equal(
        np.concatenate(pieces),
        tiny.params(tiny.config())['embed']['embedding'],
    )
  assert len(list(read_rows(tensor, max_bytes=1))) == 16


def test_a_header_longer_than_memory_is_refused(folder):
  (folder / SINGLE).write_bytes((2**63).to_bytes(8, 'little') + b'{}')
  refuses(folder, 'truncated')


@pytest.mark.parametrize(
    ('offsets', 'message'),
    [
        ([0, 256], 'malformed: .*invalid offset'),
        ([10**9, 10**9 + 256], 'malformed: .*invalid offset'),
        ([-256, 0], 'malformed'),
        ([256, 0], 'malformed'),
        ([0], 'malformed'),
        ([0.0, 256.0], 'malformed'),
        ([True, 256], 'malformed'),
        ('0,256', 'malformed'),
    ],
)
def test_impossible_offsets_are_refused(folder, offsets, message):
  header, payload = tiny.read_raw(folder / SINGLE)
  header[Q]['data_offsets'] = offsets
  tiny.write_raw(folder / SINGLE, header, payload)
  refuses(folder, message)


def test_a_mistyped_number_of_layers_does_not_run_for_ever(folder):
  config = folder / 'config.json'
  text = config.read_text()
  config.write_text(
      text.replace('"num_hidden_layers": 2', '"num_hidden_layers": 2000000000')
  )
  refuses(folder, 'config.json says 2000000000 layers.*only 26 tensors')


def test_a_folder_without_safetensors_says_what_it_lacks(folder):
  (folder / SINGLE).rename(folder / 'weights.h5')
  refuses(
      folder,
      f"has neither {SINGLE} nor {INDEX}; it holds 'config.json', 'weights.h5'",
      'Download or copy the weights there',
  )


def test_an_empty_folder_is_called_empty(tmp_path):
  with pytest.raises(ValueError, match=f'{INDEX}; it is empty. Allowed is a'):
    read_index(tmp_path)


@pytest.mark.parametrize('name', [INDEX, 'config.json', None])
def test_a_pointer_of_git_lfs_in_place_of_a_file_says_how_to_get_it(
    sharded, name
):
  shard = sorted(sharded.glob('*-of-*.safetensors'))[1].name
  name = name or shard
  oid = 'oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d'
  text = f'version https://git-lfs.github.com/spec/v1\n{oid}\nsize 9000000\n'
  (sharded / name).write_text(text)
  said = refuses(sharded, f'{name} is a Git LFS pointer, not the content')
  assert f'run git lfs pull in {sharded}' in said


def test_pickled_weights_alone_are_refused_with_what_writes_others(folder):
  (folder / SINGLE).rename(folder / 'pytorch_model.bin')
  refuses(folder, r"pickled weights alone \('pytorch_model.bin'\)", 'safetens')


@pytest.mark.parametrize(
    'name',
    ['adapter_config.json', 'adapter_model.safetensors', 'adapter_model.bin'],
)
def test_an_adapter_beside_a_model_is_refused_by_name(folder, name):
  (folder / name).write_text('{}')
  refuses(
      folder,
      rf'holds an adapter \({name}\) beside the weights',
      'merge_and_unload.*or move its files elsewhere',
  )


@pytest.mark.parametrize(
    ('said', 'named'),
    [
        ('{"base_model_name_or_path": "Qwen/Qwen2.5-7B"}', "'Qwen/Qwen2.5-7B'"),
        ('{"base_model_name_or_path": null}', 'a model that it does not name'),
        ('[]', 'a model that it does not name'),
        (None, 'a model that it does not name'),
    ],
)
def test_an_adapter_alone_is_refused_with_its_model(tmp_path, said, named):
  (tmp_path / 'adapter_model.safetensors').write_bytes(b'')
  if said is not None:
    (tmp_path / 'adapter_config.json').write_text(said)
  refuses(tmp_path, f'is an adapter .* of {named}, not a whole model')


def test_a_gguf_file_is_refused_with_what_to_name_instead(folder):
  (folder / SINGLE).rename(folder / 'model-q4.gguf')
  message = r"model-q4.gguf is a GGUF file.*gguf_file='model-q4.gguf'"
  refuses(folder, message)
  (folder / 'config.json').unlink()
  refuses(folder, message)
  with pytest.raises(ValueError, match=message):
    resolve_checkpoint(str(folder / 'model-q4.gguf'))


def test_a_folder_without_a_config_says_so(folder):
  (folder / 'config.json').unlink()
  refuses(folder, 'has no config.json; allowed is a folder as save_pretrained')


def test_a_stale_single_file_beside_an_index_is_refused(sharded):
  (sharded / SINGLE).write_bytes(b'')
  refuses(sharded, 'holds both')


def edit_index(folder, change):
  index = json.loads((folder / INDEX).read_text())
  change(index['weight_map'])
  (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    'target',
    [
        '../outside.safetensors',
        '{outside}',
        'sub/../../outside.safetensors',
        './model.safetensors',
        '.safetensors',
        'a\0.safetensors',
        '',
        3,
        None,
        '/dev/zero',
        'config.json',
    ],
)
def test_an_index_can_name_files_of_its_folder_only(sharded, target):
  outside = sharded.parent / 'outside.safetensors'
  tensors = tiny.tensors_of(next(sharded.glob('*.safetensors')))
  tiny.write_tensors(outside, tensors)
  if isinstance(target, str):
    target = target.replace('{outside}', str(outside))
  edit_index(sharded, lambda weight_map: weight_map.update({Q: target}))
  refuses(sharded, 'allowed are')


def test_a_link_cannot_lead_outside_of_the_folder(sharded):
  shard = next(sharded.glob('*.safetensors'))
  shard.rename(sharded.parent / shard.name)
  shard.symlink_to(f'../{shard.name}')
  refuses(sharded, 'the link leads outside of the folder')
  shard.unlink()
  shard.symlink_to('nowhere')
  refuses(sharded, 'cannot be read')
  shard.unlink()
  shard.symlink_to(shard.name)
  refuses(sharded, 'cannot be read')


def test_a_link_within_the_folder_is_followed(sharded):
  shard = next(sharded.glob('*.safetensors'))
  shard.rename(sharded / 'blob')
  shard.symlink_to('blob')
  equal_trees(load(sharded), tiny.params(tiny.config()))


def test_a_pipe_does_not_stall_the_reader(folder):
  (folder / SINGLE).unlink()
  os.mkfifo(folder / SINGLE)
  refuses(folder, 'not a regular file')


def test_a_shard_that_is_not_there_is_named(sharded):
  shard = sorted(sharded.glob('*.safetensors'))[1]
  shard.unlink()
  refuses(sharded, f'{shard.name}: cannot be read')


def test_a_tensor_in_two_shards_is_named(sharded):
  first, second = sorted(sharded.glob('*.safetensors'))[:2]
  tensors = tiny.tensors_of(first)
  name = next(iter(tensors))
  both = tiny.tensors_of(second) | {name: tensors[name]}
  tiny.write_tensors(second, both)
  refuses(
      sharded, f'duplicated tensors.*{name}.*{first.name} and {second.name}'
  )


def test_an_index_that_disagrees_with_its_files_is_refused(sharded):
  files = sorted(path.name for path in sharded.glob('*.safetensors'))

  def change(weight_map):
    weight_map['model.ghost'] = files[0]
    del weight_map[Q]
    weight_map['model.embed_tokens.weight'] = files[-1]

  edit_index(sharded, change)
  refuses(
      sharded,
      "1 missing from the files: 'model.ghost'",
      f"1 in the files and not in the index: '{Q}'",
      "1 in another file than the index says: 'model.embed_tokens.weight",
  )


def test_a_local_folder_is_its_own_checkpoint(folder, monkeypatch):
  assert resolve_checkpoint(str(folder)) == folder
  monkeypatch.setenv('HOME', str(folder.parent))
  assert resolve_checkpoint('~/checkpoint') == folder


@pytest.mark.parametrize('name', ['./nowhere', '/no/where', 'a/b/c', 'gpt2'])
def test_a_folder_that_is_not_there_is_no_repo_id(name, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(ValueError, match=f"'{name}': no such folder"):
    resolve_checkpoint(name)


def test_a_file_is_answered_with_its_folder(folder):
  file = folder / 'model.safetensors'
  with pytest.raises(ValueError, match='is a file; name the folder') as refused:
    resolve_checkpoint(str(file))
  assert str(refused.value).endswith(f'holds it, {str(folder)!r}')


@pytest.fixture
def offline(monkeypatch, tmp_path):
  import huggingface_hub.constants

  cache = tmp_path / 'cache'
  monkeypatch.setattr(huggingface_hub.constants, 'HF_HUB_OFFLINE', True)
  monkeypatch.setattr(huggingface_hub.constants, 'HF_HUB_CACHE', str(cache))
  return cache


def test_a_repo_id_that_cannot_be_had_is_a_value_error(offline):
  with pytest.raises(ValueError, match="'org/model': .* give a local folder"):
    resolve_checkpoint('org/model')


def test_a_repo_id_in_the_cache_loads_without_a_network(offline, folder):
  # The cache keeps contents in blobs/ and links to them from snapshots/.
  repo = offline / 'models--org--model'
  commit = '0' * 40
  snapshot = repo / 'snapshots' / commit
  snapshot.mkdir(parents=True)
  (repo / 'blobs').mkdir()
  (repo / 'refs').mkdir()
  (repo / 'refs' / 'main').write_text(commit)
  for number, path in enumerate(folder.iterdir()):
    path.rename(repo / 'blobs' / str(number))
    (snapshot / path.name).symlink_to(f'../../blobs/{number}')
  found = resolve_checkpoint('org/model')
  assert found == snapshot
  equal_trees(load(found), tiny.params(tiny.config()))


def test_a_snapshot_cannot_link_past_its_blobs(tmp_path, folder):
  snapshot = tmp_path / 'repo' / 'snapshots' / 'commit'
  snapshot.parent.mkdir(parents=True)
  folder.rename(snapshot)
  (tmp_path / 'repo' / 'blobs').symlink_to(tmp_path / 'elsewhere')
  (tmp_path / 'elsewhere').mkdir()
  (snapshot / SINGLE).rename(tmp_path / 'elsewhere' / '0')
  (snapshot / SINGLE).symlink_to('../../blobs/0')
  refuses(snapshot, 'the link leads outside of the folder')
