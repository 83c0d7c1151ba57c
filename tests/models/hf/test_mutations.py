"""Checkpoints damaged at random load equal or raise ValueError.

A ValueError and nothing else; and never is a file opened that lies outside of
the checkpoint's folder, though the damage points at one that would load.
"""

import json
import pathlib
import random
import shutil
import sys

import numpy as np
import pytest
import safetensors.numpy

from jetrl_jax.models.hf.config import load_config
from jetrl_jax.models.hf.layout import flatten_tree
from jetrl_jax.models.hf.load import load_checkpoint
from tests.models import tiny

SINGLE = 'model.safetensors'
INDEX = 'model.safetensors.index.json'

# Audit hooks cannot be removed; this one listens while the list is set.
_opened: list[list[str]] = []


def _listen(event, args):
  if _opened and event == 'open' and isinstance(args[0], str):
    _opened[-1].append(args[0])


sys.addaudithook(_listen)


def flip_bytes(data: bytes, rng: random.Random) -> bytes:
  """Changes, drops, doubles or inserts bytes in up to three places."""
  out = bytearray(data)
  for _ in range(rng.randint(1, 3)):
    i = rng.randrange(len(out))
    match rng.randrange(4):
      case 0:
        out[i] = rng.randrange(256)
      case 1:
        out[i] ^= 1 << rng.randrange(8)
      case 2:
        del out[i : i + rng.randint(1, 8)]
      case 3:
        out[i:i] = out[i : i + rng.randint(1, 8)]
  return bytes(out)


def damage_bytes(path: pathlib.Path, rng: random.Random) -> None:
  """Header bytes, with or without the length that goes with them."""
  data = path.read_bytes()
  length = int.from_bytes(data[:8], 'little')
  header, payload = data[8 : 8 + length], data[8 + length :]
  if rng.random() < 0.2:
    path.write_bytes(flip_bytes(data[: 8 + length], rng) + payload)
    return
  header = flip_bytes(header, rng)
  path.write_bytes(len(header).to_bytes(8, 'little') + header + payload)


def damage_length(path: pathlib.Path, rng: random.Random) -> None:
  """The header's length or the file's."""
  data = path.read_bytes()
  match rng.randrange(3):
    case 0:
      length = rng.choice([0, 1, 2**31, 2**63, 2**64 - 1, rng.randrange(4096)])
      data = length.to_bytes(8, 'little') + data[8:]
    case 1:
      data = data[: rng.randrange(len(data))]
    case 2:
      data += bytes(rng.randint(1, 16))
  path.write_bytes(data)


def damage_entries(path: pathlib.Path, rng: random.Random) -> None:
  """Names, dtypes, shapes and offsets, still valid JSON."""
  header, payload = tiny.read_raw(path)
  names = [name for name in header if name != '__metadata__']
  name, other = rng.choice(names), rng.choice(names)
  entry = header[name]
  number = rng.choice([-1, 0, 1, 4, 2**40, 2**64, 1.5, None, '4', True])
  match rng.randrange(8):
    case 0:
      entry['dtype'] = rng.choice(['I32', 'U32', 'F64', 'F8_E4M3', 'f32', 1])
    case 1:
      entry['shape'] = [rng.choice([*entry['shape'], number])] * rng.randint(
          0, 4
      )
    case 2:
      entry['data_offsets'][rng.randrange(2)] = number
    case 3:
      entry['data_offsets'] = list(header[other]['data_offsets'])
    case 4:
      header[rng.choice(['../x', '', '/etc/passwd', other])] = header.pop(name)
    case 5:
      header[f'{name}{rng.choice(["", "x", ".0"])}'] = dict(entry)
    case 6:
      del header[name][rng.choice(list(entry))]
    case 7:
      header['__metadata__'] = rng.choice([{'a': 1}, [], 'pt', {'a': 'b'}])
  text = json.dumps(header)
  if rng.random() < 0.3:
    # Twice the same key, which no dict can hold.
    text = f'{text[:-1]}, "{other}": {json.dumps(header.get(other))}}}'
  tiny.write_raw(path, text, payload)


def damage_index(folder: pathlib.Path, rng: random.Random) -> None:
  """Files the index names: elsewhere, absent, links, of another shard."""
  path = folder / INDEX
  if rng.random() < 0.3:
    path.write_bytes(flip_bytes(path.read_bytes(), rng))
    return
  index = json.loads(path.read_text())
  names = list(index['weight_map'])
  file = rng.choice(sorted(set(index['weight_map'].values())))
  outside = folder.parent / 'outside' / file
  target = rng.choice(
      [
          f'../outside/{file}',
          str(outside),
          f'./../{folder.name}/{file}',
          'link.safetensors',
          'up/outside.safetensors',
          'absent.safetensors',
          file,
          '..',
          '',
          None,
          7,
      ]
  )
  (folder / 'link.safetensors').symlink_to(outside)
  (folder / 'up').symlink_to('..')
  for name in rng.sample(names, rng.choice([1, 2, len(names)])):
    index['weight_map'][name] = target
  if rng.random() < 0.2:
    del index['weight_map'][rng.choice(names)]
  path.write_text(json.dumps(index))


def damage(folder: pathlib.Path, rng: random.Random) -> None:
  files = sorted(folder.glob('*.safetensors'))
  path = rng.choice(files)
  kinds = [damage_bytes, damage_length, damage_entries]
  kind = rng.choice(kinds + [damage_index] * (len(files) > 1))
  if kind is damage_index:
    damage_index(folder, rng)
    return
  kind(path, rng)
  if rng.random() < 0.1:
    # The file is fine and lies elsewhere.
    path.unlink()
    path.symlink_to(f'../outside/{path.name}')


def load(folder: pathlib.Path):
  return load_checkpoint(folder, load_config(folder), dtype='float32')


def run(tmp_path: pathlib.Path, count: int, seed: int) -> dict[str, int]:
  """Damages and loads `count` times; returns how often each outcome came."""
  config = tiny.config(num_layers=1)
  pristine = [
      tiny.save(tmp_path / 'single', config),
      tiny.save(tmp_path / 'sharded', config, max_shard_bytes=1_500),
  ]
  outside = tmp_path / 'outside'
  outside.mkdir()
  for source in pristine:
    for path in source.iterdir():
      shutil.copy(path, outside / path.name)
  # The first load also imports modules, which lie elsewhere.
  expected = flatten_tree(load(pristine[0]))
  folder = tmp_path / 'damaged'
  rng = random.Random(seed)
  outcomes = {'equal': 0, 'refused': 0}
  for number in range(count):
    source = rng.choice(pristine)
    shutil.copytree(source, folder)
    damage(folder, rng)
    _opened.append([])
    try:
      tree = load(folder)
    except ValueError as error:
      tree = None
      assert str(error), number
    opened = _opened.pop()
    strays = [p for p in opened if not p.startswith(f'{folder}/')]
    assert opened and not strays, (number, strays)
    if tree is None:
      outcomes['refused'] += 1
    else:
      for path, leaf in flatten_tree(tree).items():
        np.testing.assert_array_equal(leaf, expected[path], err_msg=path)
      # We are never more lenient than the library.
      for path in folder.glob('model*.safetensors'):
        safetensors.numpy.load_file(path)
      outcomes['equal'] += 1
    shutil.rmtree(folder)
  return outcomes


def test_a_damaged_checkpoint_loads_equal_or_is_refused(tmp_path):
  outcomes = run(tmp_path, count=2_000, seed=0)
  # Most damage matters, and some (a name in the metadata) does not.
  assert outcomes['refused'] > 1_500
  assert outcomes['equal'] > 20


@pytest.mark.soak
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize('seed', range(1, 5))
def test_a_damaged_checkpoint_loads_equal_or_is_refused_at_length(
    tmp_path, seed
):
  outcomes = run(tmp_path, count=25_000, seed=seed)
  assert outcomes['refused'] > 16_000
