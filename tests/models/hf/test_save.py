import hashlib
import json
import os
import pathlib

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from jetrl_jax.models.hf.config import load_config
from jetrl_jax.models.hf.load import load_checkpoint
from jetrl_jax.models.hf.save import CARRIED_FILES, save_checkpoint
from jetrl_jax.models.types import FAMILIES
from tests.models import tiny

GOLDENS = pathlib.Path(__file__).parent / 'goldens'


def hashes(folder):
  return {
      path.name: hashlib.sha256(path.read_bytes()).hexdigest()
      for path in folder.iterdir()
  }


@pytest.mark.parametrize('limit', [10**9, 1_000])
@pytest.mark.parametrize('dtype', ['bfloat16', 'float32'])
@pytest.mark.parametrize('family', FAMILIES)
def test_export_import_export_gives_the_same_bytes(
    tmp_path, family, dtype, limit
):
  source = GOLDENS / family
  config = load_config(source)
  params = load_checkpoint(source, config, dtype='float32')
  first, second = tmp_path / 'first', tmp_path / 'second'
  kwargs = {'dtype': dtype, 'max_shard_bytes': limit}
  save_checkpoint(first, params, config, source_folder=source, **kwargs)
  again = load_checkpoint(first, load_config(first), dtype='float32')
  save_checkpoint(second, again, config, source_folder=first, **kwargs)
  assert hashes(first) == hashes(second)
  assert {p.name for p in tmp_path.iterdir()} == {'first', 'second'}


def test_the_safetensors_library_reads_the_export(tmp_path):
  config = tiny.config('qwen3')
  params = tiny.params(config)
  save_checkpoint(tmp_path / 'x', params, config)
  path = tmp_path / 'x' / 'model.safetensors'
  found = safetensors.numpy.load_file(path)
  qkv = params['layers_1']['attn']['qkv']['kernel']
  key = found['model.layers.1.self_attn.k_proj.weight']
  assert key.dtype == ml_dtypes.bfloat16
  # q has 4 heads of 6 rows, then come the 2 key heads.
  np.testing.assert_array_equal(key.astype(np.float32), qkv[24:36])
  with safetensors.safe_open(path, 'numpy') as file:
    # transformers 4 refuses a file without it.
    assert file.metadata() == {'format': 'pt'}


def test_shards_hold_no_more_than_the_limit(tmp_path):
  config = tiny.config()
  folder = tiny.save(tmp_path / 'x', config, max_shard_bytes=600)
  index = json.loads((folder / 'model.safetensors.index.json').read_text())
  assert index['metadata'] == {
      'total_parameters': config.num_params,
      'total_size': config.num_params * 4,
  }
  files = sorted(folder.glob('*.safetensors'))
  assert files[0].name == f'model-00001-of-{len(files):05d}.safetensors'
  assert set(index['weight_map'].values()) == {path.name for path in files}
  for path in files:
    sizes = [len(data) for _, _, data in tiny.tensors_of(path).values()]
    assert sum(sizes) <= 600 or len(sizes) == 1


def test_tokenizer_and_generation_files_are_carried_byte_for_byte(tmp_path):
  config = tiny.config()
  source = tiny.save(tmp_path / 'source', config)
  for name in CARRIED_FILES:
    (source / name).write_bytes(b'\x00\xff' + name.encode())
  (source / 'README.md').write_text('not carried')
  save_checkpoint(
      tmp_path / 'x', tiny.params(config), config, source_folder=source
  )
  copied = {p.name for p in (tmp_path / 'x').iterdir()}
  assert copied == {*CARRIED_FILES, 'config.json', 'model.safetensors'}
  for name in CARRIED_FILES:
    assert (tmp_path / 'x' / name).read_bytes() == (source / name).read_bytes()


def test_the_sources_config_is_kept_but_for_the_dtype(tmp_path):
  source = GOLDENS / 'llama'
  config = load_config(source)
  params = load_checkpoint(source, config, dtype='bfloat16')
  save_checkpoint(tmp_path / 'x', params, config, source_folder=source)
  before = json.loads((source / 'config.json').read_text())
  after = json.loads((tmp_path / 'x' / 'config.json').read_text())
  assert before['dtype'] == 'float32'
  assert after == before | {'dtype': 'bfloat16'}


def test_another_tokenizer_brings_its_own_ids_of_special_tokens(tmp_path):
  config = tiny.config()
  source = tiny.save(tmp_path / 'source', config)
  said = json.loads((source / 'config.json').read_text())
  said |= {'bos_token_id': 1, 'eos_token_id': 2, 'pad_token_id': 3}
  (source / 'config.json').write_text(json.dumps(said))
  tokenizer = tmp_path / 'tokenizer'
  tokenizer.mkdir()
  (tokenizer / 'config.json').write_text('{"eos_token_id": 7}')
  save_checkpoint(
      tmp_path / 'x',
      tiny.params(config),
      config,
      source_folder=source,
      tokenizer_folder=tokenizer,
  )
  found = json.loads((tmp_path / 'x' / 'config.json').read_text())
  # Of the source none is left: each may be any token of this vocabulary.
  ids = {key: value for key, value in found.items() if 'token_id' in key}
  assert ids == {'eos_token_id': 7}


def test_sharded_leaves_are_written_whole(tmp_path):
  config = tiny.config()
  plain = tiny.save(tmp_path / 'plain', config)
  mesh = jax.make_mesh((8,), ('fsdp',))
  split = load_checkpoint(
      plain,
      config,
      dtype='float32',
      sharding_of=lambda _: jax.NamedSharding(mesh, jax.P('fsdp')),
  )
  save_checkpoint(tmp_path / 'split', split, config, dtype='float32')
  assert hashes(plain) == hashes(tmp_path / 'split')


def test_exporting_keeps_no_host_copy_of_a_leaf(tmp_path):
  config = tiny.config()
  params = jax.tree.map(jax.numpy.asarray, tiny.params(config))
  save_checkpoint(tmp_path / 'x', params, config)
  # jax.Array keeps what np.asarray fetched in this attribute.
  leaves = jax.tree.leaves(params)
  assert all(leaf._npy_value is None for leaf in leaves)


def test_a_tree_that_does_not_fit_is_refused_by_path(tmp_path):
  config = tiny.config()
  params = tiny.params(config)
  params['lm_head'] = {'kernel': np.zeros((16, 8), np.float32)}
  del params['layers_0']['mlp']['down']
  params['final_norm']['scale'] = np.zeros(9, np.float32)
  with pytest.raises(ValueError) as error:
    save_checkpoint(tmp_path / 'x', params, config)
  for message in (
      "1 missing: 'layers_0/mlp/down/kernel'",
      "1 unexpected: 'lm_head/kernel'",
      "1 of the wrong shape: 'final_norm/scale is [9], not [8]'",
  ):
    assert message in str(error.value)
  assert not list(tmp_path.iterdir())


def test_values_that_no_loader_takes_are_not_exported(tmp_path):
  config = tiny.config()
  params = tiny.params(config)
  params['layers_1']['attn']['qkv']['kernel'][9, 0] = np.nan
  with pytest.raises(ValueError, match='layers.1.self_attn.k_proj.weight'):
    save_checkpoint(tmp_path / 'x', params, config)
  assert not list(tmp_path.iterdir())


def test_an_export_never_overwrites(tmp_path):
  config = tiny.config()
  tiny.save(tmp_path / 'x', config)
  before = hashes(tmp_path / 'x')
  with pytest.raises(ValueError, match='exists already'):
    tiny.save(tmp_path / 'x', config)
  assert hashes(tmp_path / 'x') == before


def test_a_source_of_another_shape_is_refused(tmp_path):
  source = tiny.save(tmp_path / 'source', tiny.config())
  config = tiny.config(rope_theta=5e5)
  with pytest.raises(ValueError, match='rope_theta=10000.0.*rope_theta=5000'):
    tiny.save(tmp_path / 'x', config, source_folder=source)


@pytest.mark.parametrize(
    ('kwargs', 'message'),
    [
        ({'dtype': 'float16'}, "dtype 'float16': allowed are bfloat16, float"),
        ({'max_shard_bytes': 0}, 'max_shard_bytes 0: allowed are >= 1'),
    ],
)
def test_settings_out_of_range_are_refused(tmp_path, kwargs, message):
  with pytest.raises(ValueError, match=message):
    tiny.save(tmp_path / 'x', tiny.config(), **kwargs)


@pytest.mark.parametrize('fail_at', range(4))
def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch, fail_at):
  # Shard, shard, ..., index, config.json and the folder are flushed in turn.
  calls, fsync = [], os.fsync

  def full(fd):
    calls.append(fd)
    if len(calls) > fail_at:
      raise OSError(28, 'No space left on device')
    fsync(fd)

  monkeypatch.setattr(os, 'fsync', full)
  said = f'{tmp_path}/x cannot be written: No space left on device; nothing'
  with pytest.raises(OSError, match=said):
    tiny.save(tmp_path / 'x', tiny.config(), max_shard_bytes=3_000)
  assert len(calls) == fail_at + 1
  assert not list(tmp_path.iterdir())


def test_what_a_killed_export_left_is_replaced(tmp_path):
  left = tmp_path / '.x.partial'
  left.mkdir()
  (left / 'model.safetensors').write_bytes(b'half')
  (left / 'stray').write_bytes(b'')
  folder = tiny.save(tmp_path / 'x', tiny.config())
  assert not left.exists()
  assert not (folder / 'stray').exists()
  load_checkpoint(folder, load_config(folder), dtype='float32')
